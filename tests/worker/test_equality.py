"""Every supported family against mlx-lm itself, one request at a time, on tiny random float32 models."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from protos.cidery.v1.sampling_pb2 import SamplingParams
from tests.worker.driver import Driver, Request, make_engine
from tests.worker.families import CASES, VOCAB_SIZE, config_of, make_model

# One token, a part of a block, exactly one block, just over it, several chunks.
_PROMPT_LENGTHS = (1, 5, 16, 37, 64)
_NEW_TOKENS = 8
_LOGPROB_TOLERANCE = 1e-4


@pytest.fixture(autouse=True)
def _no_compile():
    """Fused CPU kernels cost seconds of compiler each."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def _prompts() -> list[list[int]]:
    rng = np.random.RandomState(0)
    return [rng.randint(0, VOCAB_SIZE, size).tolist() for size in _PROMPT_LENGTHS]


def _reference(model, prompt: list[int]) -> tuple[list[int], list[np.ndarray]]:
    steps = list(generate_step(mx.array(prompt), model, max_tokens=_NEW_TOKENS))
    return [int(token) for token, _ in steps], [np.array(logprobs) for _, logprobs in steps]


def _run(model, config) -> list[Request]:
    """Chunked prompts, two joining late, one preempted and recomputed, one resuming on another's cached blocks."""
    driver = Driver(make_engine(model, config))
    sampling = SamplingParams(temperature=0.0, num_top_logprobs=2)
    requests = [Request(prompt, _NEW_TOKENS, sampling) for prompt in _prompts()]
    for request in requests[:3]:
        driver.add(request)
    driver.step()
    driver.step()
    for request in requests[3:]:
        driver.add(request)
    for _ in range(4):
        driver.step()
    driver.preempt(requests[4])
    shared = requests[4].prompt
    driver.run()
    # Another request with the same prompt brings blocks to share: all but the last, which has to run.
    owner = driver.add(Request(shared, _NEW_TOKENS, sampling))
    while not owner.generated:
        driver.step()
    sharer = driver.add(Request(shared, _NEW_TOKENS, sampling), cached_blocks=owner.block_table[:3])
    driver.run()
    return [*requests, owner, sharer]


@pytest.mark.parametrize("case", CASES)
def test_family_gives_the_tokens_and_logprobs_of_mlx_lm(case):
    """Whatever the batch composition: same tokens, and log-probabilities within 1e-4.

    Tokens are compared up to the first place where mlx-lm's two likeliest are closer than the error allowed.
    """
    model = make_model(case)
    references = [_reference(model, prompt) for prompt in _prompts()]
    references += [references[-1]] * 2
    for request, (tokens, logprobs) in zip(_run(model, config_of(case)), references, strict=True):
        assert len(request.generated) == len(tokens)
        for ours, report, theirs, expected in zip(request.generated, request.logprobs, tokens, logprobs, strict=True):
            assert abs(report.logprob - expected[ours]) < _LOGPROB_TOLERANCE
            for top in report.top:
                assert abs(top.logprob - expected[top.token_id]) < _LOGPROB_TOLERANCE
            second, first = np.sort(expected)[-2:]
            if first - second < 10 * _LOGPROB_TOLERANCE:
                break
            assert ours == theirs
