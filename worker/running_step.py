"""A step between its plan and its result: the graph is built, then launched, then waited for and reported.

The graph of a step may be built while the step before it runs. What that one will draw is not known then: such rows
have a place for their token, which is filled in before the launch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from protos.cidery.v1 import sampling_pb2
from protos.cidery.worker.v1 import worker_pb2 as pb
from worker import reading
from worker.batch import Batch, Span
from worker.cores import Cores
from worker.evaluation import Evaluator
from worker.grammar import GrammarTable
from worker.row_rules import shape
from worker.sampler import Draw, RowLogprobs
from worker.sequences import SequenceState
from worker.verification import Verified, rows_of


@dataclass(slots=True)
class RunningStep:
    """One step. Raises nothing of its own: a plan's mistakes are found while its graph is built.

    `slices` are in the order of the plan, `packed` in that of the rows, `batch` None where sequences ran one by one;
    `logits [num_logits, vocab]` are of the packed spans, None if no row needs them; `pooled` is evaluated with them.
    """

    result: pb.StepResult
    started_s: float
    slices: list[tuple[SequenceState, Span]] = field(default_factory=list)
    packed: list[tuple[SequenceState, Span]] = field(default_factory=list)
    batch: Batch | None = None
    logits: mx.array | None = None
    pooled: list[mx.array] = field(default_factory=list)
    verified: list[Verified] = field(default_factory=list)
    draw: Draw | None = None
    cores: Cores = field(default_factory=Cores)

    @property
    def num_rows(self) -> int:
        """Tokens that run."""
        return sum(len(span.token_ids) for _, span in self.slices)

    @property
    def is_decoding(self) -> bool:
        """Every sequence runs its newest token, and drafts behind it or what was right of them before."""
        return all(span.samples and span.is_verified for _, span in self.slices)

    @property
    def has_drafts(self) -> bool:
        """Some of its rows are guesses."""
        return any(span.num_drafts for _, span in self.slices)

    @property
    def may_draft(self) -> bool:
        """What the next step runs of a sequence depends on how many of its drafts come true in this one."""
        return any(sequence.drafting is not None for sequence, span in self.slices if span.samples)

    def await_tokens(self) -> None:
        """The next step's spans may go on behind the tokens that this one will draw."""
        for sequence, span in self.slices:
            sequence.awaits_token = span.samples

    def fill_in(self) -> None:
        """The step before has ended: its tokens go to the rows that were built without them."""
        # One that has ended runs a row whose token counts for nothing.
        late = {place: sequence.token_ids[-1] for place, (sequence, span) in enumerate(self.packed) if span.is_late}
        if late:
            assert self.batch is not None, "a step of one sequence after the other is built after the one before"
            self.batch.set_last_tokens(late)

    def make_draw(self, grammars: GrammarTable | None, evaluator: Evaluator, *, is_early: bool = False) -> None:
        """The graph of the next tokens. `is_early`: not if rules have to see the tokens of the step before first."""
        sampling = [(sequence, span) for sequence, span in self.packed if span.samples]
        if self.draw is not None or self.logits is None or not sampling:
            return
        if is_early and any(sequence.rules is not None for sequence, _ in sampling):
            return
        of_drawing = reading.drawing_rows([span for _, span in self.packed])
        is_all = len(of_drawing) == len(self.logits)
        drawing = self.logits if is_all else self.logits[mx.array(of_drawing, mx.int32)]
        self.verified = [rows_of(sequence, span) for sequence, span in sampling]
        rows = [row for each in self.verified for row in each.rows]
        shaped = shape(drawing, [row.rules for row in rows], grammars, evaluator.start)
        self.draw = Draw(drawing, [row.sampling for row in rows], [row.position for row in rows], shaped)

    def outputs(self) -> Iterator[mx.array]:
        """What is to be evaluated beside the pools."""
        yield from self.pooled
        if self.draw is not None:
            yield from self.draw.outputs
        if self.logits is not None and (self.draw is None or self._reads_logits):
            yield self.logits

    @property
    def _reads_logits(self) -> bool:
        return any(span.num_read for _, span in self.packed)

    def report(self) -> list[Verified]:
        """Take in what was evaluated: tokens go to their sequences and all that is to be told into `result`.

        Returns the sequences whose states have seen drafts that were not right.
        """
        wrong = self._report_sampled() if self.draw is not None else []
        if self.logits is not None and self._reads_logits:
            reading.report_scores(self.packed, self.logits, self.result)
        for sequence, span in self.slices:
            if not span.samples:
                sequence.ran(span)
            for index, block_hash in sequence.filled_blocks(span.start, sequence.num_certain):
                self.result.filled_blocks.add(seq_id=sequence.seq_id, block_index=index, block_hash=block_hash)
            if span.reading is not None and span.reading.is_complete(span):
                sequence.has_ended = True
                reading.report_complete(sequence.seq_id, span.reading, self.result)
        return wrong

    def _report_sampled(self) -> list[Verified]:
        assert self.draw is not None
        drawn, logprobs = self.draw.token_ids(), self.draw.logprobs()
        first, wrong = 0, []
        for each in self.verified:
            last = first + len(each.rows)
            each.sequence.awaits_token = False
            if each.sequence.has_ended:
                # The token before ended it, when the graph of this step was there already.
                self.result.skipped_seq_ids.append(each.sequence.seq_id)
            elif each.sequence.failure:
                each.sequence.has_ended = True
                self.result.sampled.add(seq_id=each.sequence.seq_id, failure=each.sequence.failure)
            elif not self._accept(each, drawn[first:last], logprobs, first):
                wrong.append(each)
            first = last
        return wrong

    def _accept(self, each: Verified, drawn: Sequence[int], logprobs: dict[int, RowLogprobs], first: int) -> bool:
        """Append the tokens that count; False if states have seen a draft that was not right.

        `logprobs` are by row of the step, of which `first` is the sequence's first.
        """
        sequence, num_taken = each.sequence, 0
        for row in each.true_rows(drawn):
            stopped = sequence.append_token(drawn[row])
            sampled = self.result.sampled.add(seq_id=sequence.seq_id, token_id=drawn[row], stopped=stopped)
            if first + row in logprobs:
                sampled.logprobs.CopyFrom(_logprobs_message(drawn[row], logprobs[first + row]))
            num_taken += 1
        each.num_accepted = num_taken - 1
        return sequence.ran(each.span, each.num_accepted)


def _logprobs_message(token_id: int, logprobs: RowLogprobs) -> sampling_pb2.TokenLogprobs:
    top = [sampling_pb2.TopLogprob(token_id=token, logprob=value) for token, value in logprobs.top]
    return sampling_pb2.TokenLogprobs(token_id=token_id, logprob=logprobs.logprob, top=top)
