"""What is known of guesses: of a sequence's, how often they come true; of steps, what a row more costs."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from worker.ngram import NgramProposer

# Of the moving averages: a guess's weight in what is known of a sequence, a step's in what is known of costs.
_GUESS_WEIGHT = 1 / 8
_STEP_WEIGHT = 1 / 64
# Before anything is known: a coin.
_FIRST_CHANCE = 0.5
# A draft model's confidence in a guess, in kinds: below each of these, or above; and the first chance of each kind.
_CONFIDENCES = (0.3, 0.6, 0.9)
_FIRST_CHANCES = (0.3, 0.5, 0.75, 0.95)
# What is not tried is forgotten with each token, so that it is tried again some hundred tokens later.
_FORGETTING = 1 / 256
# Before steps of different sizes have run: the share of a step of one row that a row more costs.
_FIRST_ROW_SHARE = 0.1
_ASSUMED_STEPS = 32
_LEAST_SHARE = 1e-3
_MAX_DEPTH = 64


class Source(Enum):
    """Where guesses come from."""

    NGRAM = auto()
    DRAFT = auto()
    GRAMMAR = auto()


class StepCost:
    """Seconds of a step of decode rows as a line over its rows, the newest steps counting most.

    A step that took much longer than the line says counts as one that took twice as long: something else ran.
    """

    def __init__(self) -> None:
        self._rows = self._seconds = self._spread = self._joint = 0.0
        self._num_steps = 0

    def ran(self, num_rows: int, seconds: float) -> None:
        """A step took so long."""
        self._num_steps += 1
        if self._num_steps == 1:
            self._rows, self._seconds = float(num_rows), seconds
            return
        seconds = min(seconds, 2 * max(self._whole(num_rows), self._seconds))
        weight = max(_STEP_WEIGHT, 1 / self._num_steps)
        by_rows, by_seconds = num_rows - self._rows, seconds - self._seconds
        self._rows += weight * by_rows
        self._seconds += weight * by_seconds
        # Exponentially weighted variance and covariance.
        self._spread = (1 - weight) * (self._spread + weight * by_rows * by_rows)
        self._joint = (1 - weight) * (self._joint + weight * by_rows * by_seconds)

    def row_share(self, num_rows: int, extra_s: float = 0.0) -> float:
        """What so many rows take of a step of them, in (0, 1], if each took `extra_s` more."""
        if not self._num_steps:
            return min(1.0, _FIRST_ROW_SHARE * num_rows)
        whole = self._whole(num_rows)
        return min(1.0, max((self._each + extra_s) * num_rows / whole, _LEAST_SHARE)) if whole > 0 else 1.0

    def _whole(self, num_rows: int) -> float:
        return self._seconds + self._each * (num_rows - self._rows)

    @property
    def _each(self) -> float:
        """Seconds of a row more."""
        at_one = self._seconds / (1 + _FIRST_ROW_SHARE * (self._rows - 1))
        # The assumption counts as a few steps, which is less and less of what is known.
        spread = max(1.0, _ASSUMED_STEPS / self._num_steps)
        return max(0.0, (self._joint + _FIRST_ROW_SHARE * at_one * spread) / (self._spread + spread))


@dataclass(frozen=True, slots=True)
class Outlook:
    """Whether a guess more of the draft model pays: as long as those before it come true with a chance of `least`.

    `chances`: that a guess comes true, by the confidence that the model has in it.
    """

    chances: Sequence[float]
    least: float

    def is_good(self, confidences: Sequence[float]) -> bool:
        """Behind guesses of these confidences."""
        return math.prod(self.chances[_kind(each)] for each in confidences) >= self.least


def _kind(confidence: float) -> int:
    return bisect_right(_CONFIDENCES, confidence)


@dataclass(slots=True)
class Drafting:
    """How one sequence guesses. `always`: by this, whether it pays or not; None: whatever pays."""

    token_ids: Sequence[int]
    ngram: NgramProposer
    always: Source | None
    stop_token_ids: frozenset[int]
    # That a guess by look-up comes true, and one of the draft model.
    chance: float = _FIRST_CHANCE
    draft_chance: float = _FIRST_CHANCE
    # The same by how sure the draft model was.
    chances: list[float] = field(default_factory=lambda: list(_FIRST_CHANCES))
    # Of the newest drafts; and the draft model's confidence in them.
    source: Source = Source.NGRAM
    confidences: Sequence[float] = ()
    # What the manager was told last.
    num_wanted: int = 0

    def follow(self, num_drafts: int, num_accepted: int) -> None:
        """The sequence has grown, by so many drafts among others: learn how well it is guessed."""
        # Look-up is judged by every token, whoever guessed it.
        num_guessed, num_right = self.ngram.follow()
        for is_right in [True] * num_right + [False] * (num_guessed - num_right):
            self.chance += _GUESS_WEIGHT * (is_right - self.chance)
        if self.source is Source.DRAFT and num_drafts:
            outcomes = [True] * num_accepted + [False] * (num_accepted < num_drafts)
            for is_right, confidence in zip(outcomes, self.confidences, strict=False):
                self.draft_chance += _GUESS_WEIGHT * (is_right - self.draft_chance)
                self.chances[_kind(confidence)] += _GUESS_WEIGHT * (is_right - self.chances[_kind(confidence)])
        else:
            self.draft_chance += _FORGETTING * (_FIRST_CHANCE - self.draft_chance)

    def before_stop(self, drafts: list[int]) -> list[int]:
        """Those before the first that would end the answer: the last token of a step is never a draft."""
        stop = next((place for place, token in enumerate(drafts) if token in self.stop_token_ids), len(drafts))
        return drafts[:stop]


def paying_depth(chance: float, row_share: float) -> int:
    """How many drafts in a row are each worth their cost: the largest j with chance^j > row_share."""
    if chance <= row_share:
        return 0
    if chance >= 1.0:
        return _MAX_DEPTH
    return min(_MAX_DEPTH, max(1, math.ceil(math.log(row_share) / math.log(chance)) - 1))


def net_gain(chance: float, row_share: float, depth: int) -> float:
    """Tokens that so many drafts bring more than the batch would make in their time."""
    return sum(chance**place - row_share for place in range(1, depth + 1))
