"""Steps whose rows and attention run in lanes give mlx-lm's tokens too, of every kind of model."""

import pytest

from tests.golden import scenario
from tests.golden.cases import CASES, config_of, make_model
from worker import blas, pool_attention, product_threads
from worker.lanes import Lanes

_ALWAYS = ("llama tied", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "mamba")

pytestmark = pytest.mark.usefixtures("no_compile")


@pytest.mark.parametrize(
    "case", [case if case in _ALWAYS else pytest.param(case, marks=pytest.mark.matrix) for case in CASES]
)
def test_lanes_give_the_tokens_and_logprobs_of_mlx_lm(case, monkeypatch):
    """With so few rows a lane that nearly all steps have some, as far as one core does not happen to be faster."""
    monkeypatch.setattr(blas, "most_threads", lambda: 2)
    monkeypatch.setattr(blas, "use_threads", lambda num: None)
    monkeypatch.setattr(product_threads, "ROWS_A_LANE", 2)
    monkeypatch.setattr(pool_attention, "_MIN_KEYS", 0)
    used: list[bool] = []
    each = Lanes.each

    def counting(self, runs, *others):
        used.append(len(runs) > 1)
        return each(self, runs, *others)

    monkeypatch.setattr(Lanes, "each", counting)
    checked = scenario.check(make_model(case), config_of(case))
    assert not checked.problems
    assert checked.max_logprob_error <= scenario.LOGPROB_TOLERANCE
    # A model that looks at numbers on the way, or that nobody has read, has none.
    assert any(used) or case not in _ALWAYS
