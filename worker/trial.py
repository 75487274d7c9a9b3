"""A trial of a model that nobody has reviewed: a few tokens by the engine and by mlx-lm, before it serves anybody."""

import math

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from protos.cidery.v1.sampling_pb2 import SamplingParams
from protos.cidery.worker.v1 import worker_pb2 as pb
from worker.engine import Engine
from worker.errors import UnsupportedModelError
from worker.models import LoadedModel
from worker.standalone import configure

_NUM_TOKENS = 40
_CHUNK_TOKENS = 24
_NUM_DECODED = 3
# Half precision rounds differently where prompts are cut differently; a lost key or state is off by whole units.
_TOLERANCE = 0.25


def verify(engine: Engine, loaded: LoadedModel) -> None:
    """Raises UnsupportedModelError if the engine can't run the model as mlx-lm does. Leaves it reset."""
    prompt = [(7 * place + 1) % loaded.vocab_size for place in range(_NUM_TOKENS)]
    try:
        ours = _answer(engine, prompt)
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        # Whatever code that nobody has read does with a cache that is not mlx-lm's own.
        raise UnsupportedModelError(f"{loaded.family}: it can't be run over paged KV: {error}") from error
    finally:
        engine.reset()
    for place, (token_id, logprob) in enumerate(ours):
        known = prompt + [token for token, _ in ours[:place]]
        expected = _logprob(loaded, known, token_id)
        # Not "differs by more", which a NaN would pass.
        if not math.fabs(logprob - expected) <= _TOLERANCE:
            raise UnsupportedModelError(
                f"{loaded.family}: token {place} after a prompt has a log-probability of {logprob:.3f}, with mlx-lm "
                f"{expected:.3f}: it can't be run exactly"
            )


def _answer(engine: Engine, prompt: list[int]) -> list[tuple[int, float]]:
    """Tokens and their log-probabilities, of a prompt in two chunks and a few tokens more."""
    tables = configure(engine, num_blocks=-(-(_NUM_TOKENS + _NUM_DECODED) // 16))
    sampling = SamplingParams(temperature=0.0, num_top_logprobs=0)
    plan = pb.StepPlan(new_sequences=[pb.NewSequence(seq_id=1, token_ids=prompt, sampling=sampling)])
    plan.slices.add(seq_id=1, num_tokens=_CHUNK_TOKENS, new_blocks=tables)
    engine.execute(plan)
    start, num_tokens, answer = _CHUNK_TOKENS, _NUM_TOKENS - _CHUNK_TOKENS, []
    for _ in range(_NUM_DECODED):
        piece = pb.Slice(seq_id=1, start=start, num_tokens=num_tokens, samples=True)
        (sampled,) = engine.execute(pb.StepPlan(slices=[piece])).sampled
        answer.append((sampled.token_id, sampled.logprobs.logprob))
        start, num_tokens = start + num_tokens, 1
    return answer


def _logprob(loaded: LoadedModel, known: list[int], token_id: int) -> float:
    """What mlx-lm gives a token after the known ones."""
    logits = loaded.model(mx.array([known]), cache=make_prompt_cache(loaded.model))[0, -1].astype(mx.float32)
    return float((logits - mx.logsumexp(logits))[token_id])
