"""Steps whose rows and attention run in lanes give mlx-lm's tokens too, of every kind of model."""

import pytest

from tests.golden import scenario
from tests.golden.cases import CASES, config_of, make_model

_ALWAYS = ("llama tied", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba")

pytestmark = pytest.mark.usefixtures("no_compile")


@pytest.mark.parametrize(
    "case", [case if case in _ALWAYS else pytest.param(case, marks=pytest.mark.matrix) for case in CASES]
)
def test_lanes_give_the_tokens_and_logprobs_of_mlx_lm(case, two_lanes):
    checked = scenario.check(make_model(case), config_of(case))
    assert not checked.problems
    assert checked.max_logprob_error <= scenario.LOGPROB_TOLERANCE
    # A model that looks at numbers on the way, or that nobody has read, has none.
    assert max(two_lanes, default=0) > 1 or case not in _ALWAYS
