"""Reading prompts at the engine's own door: what breaks the protocol, and prompts of the ugliest lengths."""

import mlx.core as mx
import numpy as np
import pytest

from cluster.scheduling.config import SchedulerConfig
from protos.cidery.v1 import sampling_pb2
from protos.cidery.v1.sampling_pb2 import SamplingParams
from protos.cidery.worker.v1 import worker_pb2 as pb
from tests.worker.driver import make_engine
from tests.worker.families import config_of, make_model
from worker import models
from worker.dry_run import MAX_SCORED_ROWS
from worker.errors import ProtocolError

CASE = "llama tied"


@pytest.fixture(scope="module")
def model():
    return make_model(CASE)


def new(tokens, **fields) -> pb.NewSequence:
    return pb.NewSequence(seq_id=1, token_ids=tokens, num_prompt_tokens=len(tokens), **fields)


def run(engine, sequence, *slices) -> list[pb.StepResult]:
    """One step for each (start, num_tokens, samples)."""
    results = []
    for number, (start, num_tokens, samples) in enumerate(slices):
        piece = pb.Slice(seq_id=1, start=start, num_tokens=num_tokens, samples=samples)
        blocks = range(-(-start // 16) + 1, -(-(start + num_tokens) // 16) + 1)
        if len(blocks):
            piece.new_blocks.add(group=0, block_ids=blocks)
        plan = pb.StepPlan(step_id=number + 1, new_sequences=[sequence] if number == 0 else [], slices=[piece])
        results.append(engine.execute(plan))
    return results


SCORED = SamplingParams(temperature=0.0, num_prompt_logprobs=2)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sampling": SCORED}, "first_scored is 0; it must be 1 to 3"),
        ({"sampling": SCORED, "first_scored": 4}, "first_scored is 4; it must be 1 to 3"),
        ({"sampling": SamplingParams(num_prompt_logprobs=21), "first_scored": 1}, "num_prompt_logprobs is 21"),
        ({"pooling": sampling_pb2.POOLING_MEAN}, "is pooled and draws tokens"),
    ],
)
def test_sequences_that_contradict_themselves_break_the_protocol(model, fields, words):
    with pytest.raises(ProtocolError, match=words):
        run(make_engine(model, config_of(CASE)), new([1, 2, 3], **fields), (0, 3, True))


def test_a_slice_that_passes_scored_tokens_by_breaks_the_protocol(model):
    """Generated tokens behind a prompt that has not been told: its rows would not lie at the end."""
    sequence = new([1, 2, 3, 4, 5], sampling=SCORED, first_scored=1)
    sequence.num_prompt_tokens = 3
    with pytest.raises(ProtocolError, match="is scored up to position 2, not to its end"):
        run(make_engine(model, config_of(CASE)), sequence, (0, 5, True))


@pytest.mark.parametrize("length", [1, 2, 16, 17])
@pytest.mark.parametrize("reads_only", [False, True])
def test_every_token_but_the_first_is_told_whatever_the_length(model, length, reads_only):
    tokens = list(range(5, 5 + length))
    logits = model(mx.array([tokens]))[0]
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    sequence = new(tokens, sampling=SCORED, first_scored=1, reads_only=reads_only)
    (result,) = run(make_engine(make_model(CASE), config_of(CASE)), sequence, (0, length, True))
    told = [value for scores in result.prompt_logprobs for value in scores.logprobs]
    assert told == pytest.approx([expected[at - 1, tokens[at]] for at in range(1, length)], abs=1e-4)
    (sampled,) = result.sampled
    assert sampled.is_read == reads_only
    assert reads_only or sampled.token_id == int(expected[-1].argmax())


def test_what_is_told_already_is_not_told_again(model):
    sequence = new(list(range(20)), sampling=SCORED, first_scored=18, reads_only=True)
    first, last = run(make_engine(make_model(CASE), config_of(CASE)), sequence, (0, 16, False), (16, 4, True))
    assert not first.prompt_logprobs
    (scores,) = last.prompt_logprobs
    assert (scores.start, len(scores.logprobs), scores.num_top, len(scores.top_logprobs)) == (18, 2, 2, 4)


def test_top_tokens_are_likeliest_first_and_equals_by_id():
    model = make_model(CASE)
    model.model.embed_tokens.weight = mx.zeros_like(model.model.embed_tokens.weight)
    sequence = new([4, 9], sampling=SCORED, first_scored=1, reads_only=True)
    (result,) = run(make_engine(model, config_of(CASE)), sequence, (0, 2, True))
    assert list(result.prompt_logprobs[0].top_logprobs) == pytest.approx([-np.log(320)] * 2, abs=1e-5)
    ids = list(result.prompt_logprobs[0].top_token_ids)
    assert ids == sorted(ids)


def test_a_model_whose_outputs_cannot_be_had_says_so_and_scores_all_the_same(monkeypatch):
    """A family that multiplies with a weight itself: nothing passes through a projection that is known."""
    monkeypatch.setattr(models, "_HEADS", ())
    monkeypatch.setattr(models, "_EMBEDDINGS", ())
    engine = make_engine(make_model(CASE), config_of(CASE))
    pooled = new([1, 2, 3], pooling=sampling_pb2.POOLING_MEAN, reads_only=True)
    (result,) = run(engine, pooled, (0, 3, True))
    assert "this model's last outputs can't be had" in result.sampled[0].failure
    assert not result.sampled[0].embedding
    engine.execute(pb.StepPlan(step_id=9, released_seq_ids=[1]))
    (result,) = run(engine, new([1, 2, 3], sampling=SCORED, first_scored=1), (0, 3, True))
    assert len(result.prompt_logprobs[0].logprobs) == 2


def test_the_dry_run_counts_as_many_scored_rows_as_a_step_may_have():
    assert SchedulerConfig(max_model_len=2).max_scored_tokens == MAX_SCORED_ROWS
