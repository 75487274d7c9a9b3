"""What is wanted of prompts themselves: log-probabilities of their tokens, and one vector for all of them.

Both come out of the rows that a step runs anyway, so prompts that are read share steps with everything else. A prompt
may be read over many steps: what was pooled so far waits in `SequenceReading`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from protos.cidery.v1 import sampling_pb2
from protos.cidery.worker.v1 import worker_pb2 as pb
from worker.batch import Batch, Span
from worker.errors import ProtocolError
from worker.sampler import MAX_TOP_LOGPROBS

if TYPE_CHECKING:
    from worker.sequences import SequenceState

# Rows whose log-probabilities are taken at once: a vocabulary's worth of numbers for each, several times over.
_SCORED_AT_ONCE = 32
_NO_HIDDEN = "this model's last outputs can't be had: they don't pass through a projection that is known"


@dataclass(slots=True)
class SequenceReading:
    """Of one sequence. `total` is what was pooled so far, `[hidden]` float32; `failure` is why nothing can be."""

    num_prompt_tokens: int
    # None: no log-probabilities.
    num_top: int | None
    first_scored: int
    pooling: int
    reads_only: bool
    total: mx.array | None = None
    failure: str = ""

    def scored_positions(self, start: int, end: int) -> range:
        """Tokens of the prompt whose log-probabilities the rows `[start, end)` give; each row predicts the next."""
        if self.num_top is None:
            return range(0)
        return range(max(start + 1, self.first_scored), min(end + 1, self.num_prompt_tokens))

    def is_complete(self, span: Span) -> bool:
        """Whether nothing is left to do after a span."""
        return self.reads_only and span.end == self.num_prompt_tokens

    def pool(self, hidden: mx.array, start: int) -> None:
        """Take in the outputs `[num_tokens, hidden]` of the rows from position `start` on."""
        if self.pooling == sampling_pb2.POOLING_MEAN:
            added = hidden.astype(mx.float32).sum(axis=0)
            self.total = added if self.total is None else self.total + added
        elif self.pooling == sampling_pb2.POOLING_LAST:
            self.total = hidden[-1].astype(mx.float32)
        elif start == 0:
            self.total = hidden[0].astype(mx.float32)

    def embedding(self) -> list[float]:
        """What was pooled of the whole prompt; evaluated already."""
        if self.total is None:
            return []
        values = np.array(self.total)
        if self.pooling == sampling_pb2.POOLING_MEAN:
            values = values / self.num_prompt_tokens
        floats: list[float] = values.tolist()
        return floats


def make_reading(message: pb.NewSequence) -> SequenceReading | None:
    """None if nothing is wanted of the prompt. Raises ProtocolError for what worker.proto does not allow."""
    wants_logprobs = message.sampling.HasField("num_prompt_logprobs")
    if not (wants_logprobs or message.pooling or message.reads_only):
        return None
    if message.pooling and not message.reads_only:
        raise ProtocolError(f"sequence {message.seq_id} is pooled and draws tokens; one of both is allowed")
    num_top = message.sampling.num_prompt_logprobs if wants_logprobs else None
    if num_top is not None and not 0 <= num_top <= MAX_TOP_LOGPROBS:
        raise ProtocolError(f"sequence {message.seq_id}: num_prompt_logprobs is {num_top}; at most 20 are allowed")
    if num_top is not None and not 1 <= message.first_scored <= message.num_prompt_tokens:
        allowed = f"1 to {message.num_prompt_tokens}"
        raise ProtocolError(f"sequence {message.seq_id}: first_scored is {message.first_scored}; it must be {allowed}")
    return SequenceReading(
        num_prompt_tokens=message.num_prompt_tokens,
        num_top=num_top,
        first_scored=message.first_scored,
        pooling=message.pooling,
        reads_only=message.reads_only,
    )


def pool_rows(batch: Batch, hidden: mx.array | None) -> list[mx.array]:
    """Pool the rows of a forward; `hidden` ends in their outputs. Returns what is to be evaluated with it."""
    if not any(span.reading is not None and span.reading.pooling for span in batch.spans):
        return []
    rows = None if hidden is None else hidden.reshape(-1, hidden.shape[-1])
    first, outputs = 0, []
    for span in batch.spans:
        last = first + len(span.token_ids)
        if span.reading is not None and span.reading.pooling:
            # A family that multiplies with its embedding past the head shows nothing.
            if rows is None or rows.shape[0] != batch.num_tokens:
                span.reading.failure = _NO_HIDDEN
            else:
                span.reading.pool(rows[first:last], span.start)
                outputs += [] if span.reading.total is None else [span.reading.total]
        first = last
    return outputs


def drawing_rows(spans: Sequence[Span]) -> list[int]:
    """Of the logits of a step's packed spans, those after which a token is drawn."""
    rows: list[int] = []
    end = 0
    for span in spans:
        end += span.num_logits
        if span.samples:
            rows += range(end - 1 - span.num_drafts, end)
    return rows


def report_complete(seq_id: int, reading: SequenceReading, result: pb.StepResult) -> None:
    """A prompt that was only to be read has been."""
    if reading.failure:
        result.sampled.add(seq_id=seq_id, failure=reading.failure)
    else:
        result.sampled.add(seq_id=seq_id, is_read=True, embedding=reading.embedding())


def report_scores(packed: Sequence[tuple["SequenceState", Span]], logits: mx.array, result: pb.StepResult) -> None:
    """Log-probabilities of prompts; `logits [num_logits, vocab]` are evaluated and those of the packed spans."""
    end = 0
    for sequence, span in packed:
        first, end = end, end + span.num_logits
        if span.reading is None or not span.num_read:
            continue
        positions = span.reading.scored_positions(span.start, span.end)
        assert span.reading.num_top is not None
        message = result.prompt_logprobs.add(
            seq_id=sequence.seq_id, start=positions.start, num_top=min(span.reading.num_top, logits.shape[-1])
        )
        targets = sequence.token_ids[positions.start : positions.stop]
        for at in range(0, len(targets), _SCORED_AT_ONCE):
            some = logits[first + at : first + min(at + _SCORED_AT_ONCE, len(targets))]
            _add_scores(some, targets[at : at + _SCORED_AT_ONCE], message)


def _add_scores(logits: mx.array, targets: list[int], message: pb.PromptLogprobs) -> None:
    """Natural logarithms under the model's own distribution; top ones likeliest first, ties by token id."""
    logits = logits.astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    own = mx.take_along_axis(logprobs, mx.array(targets, mx.int32)[:, None], axis=-1)[:, 0]
    num_top = message.num_top
    if not num_top:
        message.logprobs.extend(np.array(own).tolist())
        return
    ids = mx.argpartition(-logprobs, kth=num_top - 1, axis=-1)[:, :num_top]
    top = mx.take_along_axis(logprobs, ids, axis=-1)
    mx.eval(own, ids, top)
    message.logprobs.extend(np.array(own).tolist())
    of_ids, of_top = np.array(ids), np.array(top)
    # By id first, so that the stable sort by value leaves equals in that order.
    by_id = np.argsort(of_ids, axis=-1)
    of_ids, of_top = (np.take_along_axis(each, by_id, axis=-1) for each in (of_ids, of_top))
    by_value = np.argsort(-of_top, axis=-1, kind="stable")
    message.top_token_ids.extend(np.take_along_axis(of_ids, by_value, axis=-1).ravel().tolist())
    message.top_logprobs.extend(np.take_along_axis(of_top, by_value, axis=-1).ravel().tolist())
