"""Which sequences guess tokens, how many, and whether that pays.

A step that verifies drafts runs them as rows behind the sequence's next one. Each row is drawn as if it were alone,
with the draw of its (seed, position): a draft is right if it is that very token. So speculation changes no answer,
greedy or not, and the answers' distribution is the model's.

What a row more costs is learned from the steps themselves, as seconds = fixed + rows * each. A sequence whose guesses
come true with probability p gains p^j tokens by its j-th draft. It pays as long as they come faster than those of the
step without it, rows / (fixed + rows * each) a second: so as long as p^j is more than the rows' share of the step. At
small batches, where the weights are read for a few rows, that share is small; where rows fill the machine it is 1, and
nothing is guessed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from protos.cidery.v1 import sampling_pb2
from worker.ngram import NgramProposer
from worker.row_rules import RowRules

# Of the moving averages: a guess's weight in what is known of a sequence, a step's in what is known of costs.
_GUESS_WEIGHT = 1 / 8
_STEP_WEIGHT = 1 / 64
# Before anything is known: a coin.
_FIRST_CHANCE = 0.5
# Before steps of different sizes have run: the share of a step of one row that a row more costs.
_FIRST_ROW_SHARE = 0.1
# How many rows of spread that assumption is worth.
_FIRST_SPREAD = 1.0
# A state that has seen a wrong draft is left as it was, and the next step runs what was right of it again.
_REPLAY_FACTOR = 2.0
_MAX_DEPTH = 64


class StepCost:
    """Seconds of a step of decode rows as a line over its rows, the newest steps counting most."""

    def __init__(self) -> None:
        self._rows = self._seconds = self._spread = self._joint = 0.0
        self._is_known = False

    def ran(self, num_rows: int, seconds: float) -> None:
        """A step took so long."""
        if not self._is_known:
            self._rows, self._seconds, self._is_known = float(num_rows), seconds, True
            return
        by_rows, by_seconds = num_rows - self._rows, seconds - self._seconds
        self._rows += _STEP_WEIGHT * by_rows
        self._seconds += _STEP_WEIGHT * by_seconds
        # Exponentially weighted variance and covariance.
        self._spread = (1 - _STEP_WEIGHT) * (self._spread + _STEP_WEIGHT * by_rows * by_rows)
        self._joint = (1 - _STEP_WEIGHT) * (self._joint + _STEP_WEIGHT * by_rows * by_seconds)

    def row_share(self, num_rows: int) -> float:
        """What rows take of a step of so many, in (0, 1]."""
        if not self._is_known:
            return min(1.0, _FIRST_ROW_SHARE * num_rows)
        at_one = self._seconds / (1 + _FIRST_ROW_SHARE * (self._rows - 1))
        assumed = _FIRST_ROW_SHARE * at_one * _FIRST_SPREAD
        each = max(0.0, (self._joint + assumed) / (self._spread + _FIRST_SPREAD))
        whole = self._seconds + each * (num_rows - self._rows)
        return min(1.0, max(each * num_rows / whole, 1e-3)) if whole > 0 else 1.0


@dataclass(slots=True)
class Drafting:
    """How one sequence guesses. `is_always`: as often as it can, whether it pays or not."""

    token_ids: Sequence[int]
    ngram: NgramProposer
    is_always: bool
    stop_token_ids: frozenset[int]
    chance: float = _FIRST_CHANCE
    # What the manager was told last.
    num_wanted: int = field(default=0)

    def follow(self) -> None:
        """The sequence has grown: learn how well it is guessed."""
        num_guessed, num_right = self.ngram.follow()
        for is_right in [True] * num_right + [False] * (num_guessed - num_right):
            self.chance += _GUESS_WEIGHT * (is_right - self.chance)

    def before_stop(self, drafts: list[int]) -> list[int]:
        """Those before the first that would end the answer: the last token of a step is never a draft."""
        stop = next((place for place, token in enumerate(drafts) if token in self.stop_token_ids), len(drafts))
        return drafts[:stop]


class Speculation:
    """Of one engine: which drafts run in a step, and what is learned of it."""

    def __init__(self, *, max_drafts: int = 0, has_states: bool = False) -> None:
        """`max_drafts` of one sequence in a step; 0: nobody guesses."""
        self.max_drafts = max_drafts
        self._has_states = has_states
        self.cost = StepCost()

    def begin(
        self, method: sampling_pb2.Speculation, token_ids: list[int], stop_token_ids: frozenset[int]
    ) -> Drafting | None:
        """For a new sequence; None if it doesn't guess. The list is followed as it grows."""
        if not self.max_drafts or method in (sampling_pb2.SPECULATION_UNSPECIFIED, sampling_pb2.SPECULATION_OFF):
            return None
        is_always = method == sampling_pb2.SPECULATION_NGRAM
        return Drafting(token_ids, NgramProposer(token_ids), is_always, stop_token_ids)

    def drafts(self, drafting: Drafting, rules: RowRules | None, max_drafts: int, num_rows: int) -> list[int]:
        """Guesses for the next row of a sequence, beside `num_rows` rows of all; what a grammar forces is certain."""
        forced = rules.forced() if rules is not None else []
        if forced:
            return drafting.before_stop(forced[:max_drafts])
        drafts = drafting.before_stop(drafting.ngram.propose(min(max_drafts, self._depth(drafting, num_rows))))
        return drafts if rules is None else rules.allowed(drafts)

    def num_wanted(self, drafting: Drafting, rules: RowRules | None, num_rows: int) -> int:
        """How many drafts the manager should allow next time."""
        if rules is not None and rules.grammar is not None and (not self._has_states or rules.forced()):
            # The next token may be one that forces those after it.
            return self.max_drafts
        depth = self._depth(drafting, num_rows)
        # With states, a plan without drafts can be made before its turn, which one with drafts can't.
        return 0 if self._has_states and not drafting.ngram.propose(1) else depth

    def _depth(self, drafting: Drafting, num_rows: int) -> int:
        if drafting.is_always:
            return self.max_drafts
        share = self.cost.row_share(num_rows) * (_REPLAY_FACTOR if self._has_states else 1.0)
        return min(self.max_drafts, paying_depth(drafting.chance, share))


def paying_depth(chance: float, row_share: float) -> int:
    """How many drafts in a row are each worth their cost: the largest j with chance^j > row_share."""
    if chance <= row_share:
        return 0
    if chance >= 1.0:
        return _MAX_DEPTH
    return min(_MAX_DEPTH, max(1, math.ceil(math.log(row_share) / math.log(chance)) - 1))
