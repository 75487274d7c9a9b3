"""A long prefix that requests share is read once where layers can, and by each row where they can't."""

import numpy as np
import pytest

from tests.golden import scenario
from tests.golden.cases import config_of, make_model
from tests.golden.in_process import InProcessMac
from tests.worker.families import VOCAB_SIZE
from worker import batch

pytestmark = pytest.mark.usefixtures("no_compile")

_MORE = ("llama tied", "gemma3_text", "gemma2", "mimo_v2_flash", "qwen3_next", "llama4", "kimi_linear")


@pytest.mark.parametrize(
    "case", ["gpt_oss", "deepseek_v3", *(pytest.param(case, marks=pytest.mark.matrix) for case in _MORE)]
)
def test_requests_that_share_a_long_prefix_get_the_answers_of_mlx_lm(case, monkeypatch):
    """Plain layers merge what is shared; sinks, soft caps, latents and uneven heads see every key in one piece."""
    rng = np.random.RandomState(2)
    common = rng.randint(1, VOCAB_SIZE, 1100).tolist()
    prompts = [common + rng.randint(1, VOCAB_SIZE, size).tolist() for size in (5, 21, 40)]
    model = make_model(case)
    expected = [scenario.reference(model, prompt, 4) for prompt in prompts]
    mac = InProcessMac(
        model,
        config_of(case),
        kv_budget_bytes=1 << 26,
        max_num_batched_tokens=512,
        max_chunk_tokens=256,
        max_model_len=2048,
    )
    num_shared = 0
    find = batch.find_shared_prefix

    def counted(*args):
        nonlocal num_shared
        found = find(*args)
        num_shared += found is not None
        return found

    monkeypatch.setattr(batch, "find_shared_prefix", counted)
    answers = [mac.add("first", prompts[0], 4)]
    mac.run()
    answers += [mac.add(f"{i}", prompt, 4) for i, prompt in enumerate(prompts[1:])]
    answers += [mac.add("again", prompts[0], 4)]
    mac.run()
    # A state is where two prompts part only once they have: these were computed apart.
    assert num_shared > 0 or mac.kv.has_states
    found = [
        problem
        for answer, reference in zip(answers, [*expected, expected[0]], strict=True)
        for problem in scenario.problems(answer, reference, scenario.LOGPROB_TOLERANCE)
    ]
    assert not found


def test_they_get_them_in_lanes_too(monkeypatch, two_lanes):
    test_requests_that_share_a_long_prefix_get_the_answers_of_mlx_lm("llama tied", monkeypatch)
    assert max(two_lanes) > 1
