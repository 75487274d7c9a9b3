"""Which Mac: the one where the request costs the least predicted seconds. The seam for other policies is `Policy`."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

from cluster.routing.predict import Standing, base_s, beside_s

# A difference below this share of the best total, or below what a person notices, is noise of the learnt speeds and no
# reason to pile up work on one Mac.
TIE = 0.05
TIE_S = 0.02


class View(NamedTuple):
    """One request before the Macs of its model. Lists are by slot; only slots in `open_slots` may be chosen.

    `num_held` tokens can be resumed there now, `num_matched` once the prompts under way there have been computed.
    `recent_work_s` are predicted seconds booked there of late, `last_booking` numbers the fleet's bookings. `hint` is
    the slot where the session was last, -1 if there is none.
    """

    open_slots: Sequence[int]
    standings: Sequence[Standing]
    num_held: Sequence[int]
    num_matched: Sequence[int]
    num_tokens: int
    num_output: float
    block_size: int
    recent_work_s: Sequence[float]
    last_booking: Sequence[int]
    hint: int


class Policy(Protocol):
    """Chooses a slot."""

    # Whether prompts under way count as matched.
    counts_pending: bool

    def choose(self, view: View) -> int:
        """One of `view.open_slots`, which is not empty."""


class PredictedSeconds:
    """Least total_s. Among equals: the session's Mac, the most cached, least recent work, turns; names never decide."""

    counts_pending = True

    def choose(self, view: View) -> int:
        """See the class. O(slots)."""
        num_tokens, num_output = view.num_tokens, view.num_output
        standings, num_held, num_matched = view.standings, view.num_held, view.num_matched
        limit_s, totals = inf, []
        bases = base_s(standings, view.open_slots, num_held, num_matched, num_tokens, num_output)
        for base, slot, turn_s in sorted(bases):
            # Most Macs are out of the question by that already; for the others it is worked out what prompts under way
            # there add, or take off.
            if base > limit_s and num_matched[slot] <= num_held[slot]:
                continue
            total_s = base
            if standings[slot].turns:
                total_s += beside_s(standings[slot], turn_s, num_held[slot], num_matched[slot], num_output)
            totals.append((total_s, slot))
            limit_s = min(limit_s, max(total_s * (1 + TIE), total_s + TIE_S))
        equal = [slot for total_s, slot in totals if total_s <= limit_s]
        if len(equal) == 1:
            return equal[0]
        return min(
            equal,
            key=lambda slot: (
                slot != view.hint,
                num_tokens - view.num_matched[slot],
                # Whole seconds: below that, taking turns is fairer than any estimate.
                round(view.recent_work_s[slot]),
                view.last_booking[slot],
            ),
        )
