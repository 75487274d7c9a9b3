"""Every family against mlx-lm itself, one request at a time, by whatever path the engine takes it."""

import pkgutil
from dataclasses import replace

import mlx_lm.models
import pytest

from tests.golden import scenario
from tests.golden.cases import CASES, NOT_RUN, REPRESENTATIVES, config_of, make_model, module_of
from worker.metal.dispatch import twin_kernels

# Parts that models are made of.
_NO_MODELS = {
    *("activations", "base", "bitlinear_layers", "cache", "gated_delta", "mla", "pipeline", "rope_utils", "ssm"),
    "switch_layers",
}


pytestmark = pytest.mark.usefixtures("no_compile")


@pytest.mark.parametrize(
    "case", [case if case in REPRESENTATIVES else pytest.param(case, marks=pytest.mark.matrix) for case in CASES]
)
def test_family_gives_the_tokens_and_logprobs_of_mlx_lm(case):
    """Alone, in ragged batches, by chunks, from cached prefixes and states, after a preemption, beside a cancelled one.

    Tokens are compared up to the first place where mlx-lm's two likeliest are closer than the error allowed.
    """
    checked = scenario.check(make_model(case), config_of(case))
    assert not checked.problems
    assert checked.max_logprob_error <= scenario.LOGPROB_TOLERANCE
    mac, run = checked.mac, checked.run
    assert run.num_preempted == 2
    # Prefixes were found wherever the model's kinds can be resumed: states only where one was kept.
    hits = [answer.num_cached_tokens for path in ("prefix hit", "turn hit") for answer in run.answers[path]]
    # The first prompt comes again: a state is kept before its last token, at a block end.
    assert hits == [48 if mac.kv.has_states else 63, 48, 48, 48, 64]
    # With several tokens a step no less was kept.
    paths = ("speculative prefix hit", "speculative turn hit")
    assert hits == [answer.num_cached_tokens for path in paths for answer in run.answers[path]]


@pytest.mark.parametrize("case", ["gemma3_text", "gpt_oss", "kimi_linear", "qwen3_next"])
def test_rows_for_ragged_kernels_give_them_too(case):
    """As on a GPU: all decode rows of a step in one group, whatever their contexts."""
    kernels = replace(twin_kernels(), takes_ragged_rows=True)
    assert not scenario.check(make_model(case), config_of(case), kernels=kernels).problems


def test_every_family_of_mlx_lm_is_in_the_sweep_or_has_a_reason_not_to_be():
    modules = {module.name for module in pkgutil.iter_modules(mlx_lm.models.__path__)} - _NO_MODELS
    swept = {module_of(case) for case in CASES}
    assert modules - swept == set(NOT_RUN)
    assert set(REPRESENTATIVES) <= set(CASES)
