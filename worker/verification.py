"""Rows of a step that are drawn: one of each sequence, and one for each of its drafts; and how far drafts come true."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from worker.batch import Span
from worker.row_rules import RowRules
from worker.sampler import RowSampling
from worker.sequences import SequenceState


@dataclass(frozen=True, slots=True)
class DrawnRow:
    """One row that is drawn: of the token at `position`, under rules that have seen everything before it."""

    sampling: RowSampling
    position: int
    rules: RowRules | None

    @property
    def has_failed(self) -> bool:
        """No token can be drawn."""
        return self.rules is not None and bool(self.rules.failure)


@dataclass(slots=True)
class Verified:
    """A sequence that samples in this step, with its rows; and how many of its drafts came true, once that is known."""

    sequence: SequenceState
    span: Span
    rows: list[DrawnRow]
    num_accepted: int = 0

    @property
    def drafts(self) -> Sequence[int]:
        """The span's last tokens, which are guesses."""
        return self.span.drafts

    def true_rows(self, drawn: Sequence[int]) -> Iterator[int]:
        """Rows whose tokens count, given the tokens drawn: up to and with the first that is no draft's.

        To be asked for one by one: a token may end the sequence.
        """
        for place, token in enumerate(drawn):
            if place and self.rows[place].has_failed:
                # Under the sequence's own rules it will fail in the next step.
                return
            yield place
            if place == len(self.drafts) or token != self.drafts[place]:
                return


def rows_of(sequence: SequenceState, span: Span) -> Verified:
    """The rows of a span that samples."""
    first = span.end - len(span.drafts)
    rules: list[RowRules | None] = [None] * (1 + len(span.drafts))
    if sequence.rules is not None:
        rules = list(sequence.rules.along(span.drafts))
    rows = [DrawnRow(sequence.sampling, first + place, of_row) for place, of_row in enumerate(rules)]
    return Verified(sequence, span, rows)
