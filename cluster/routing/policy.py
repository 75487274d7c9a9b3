"""Which Mac: the one where the request costs the least predicted seconds. The seam for other policies is `Policy`."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cluster.routing.predict import Standing, shared_s

# A difference below this share of the best total, or below what a person notices, is noise of the learnt speeds and no
# reason to pile up work on one Mac.
TIE = 0.05
TIE_S = 0.02
# Recent work fades by half in this time.
WORK_HALF_LIFE_S = 60.0


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
        totals = []
        for st, matched in zip(view.standings, view.num_matched, strict=True):
            own_s = (num_tokens - matched) * (st.token_s + st.context_s * (matched + num_tokens) / 2)
            totals.append(st.start_s + own_s * (1 + st.factor) + min(own_s, st.beside_s) * 2 + num_output * (st.decode_s + st.decode_context_s * num_tokens))
        if view.num_held is not view.num_matched:
            for slot in view.open_slots:
                held, matched = view.num_held[slot], view.num_matched[slot]
                if matched > held:
                    totals[slot] -= shared_s(view.standings[slot], held, matched)
        least_s = min([totals[slot] for slot in view.open_slots])
        limit_s = max(least_s * (1 + TIE), least_s + TIE_S)
        equal = [slot for slot in view.open_slots if totals[slot] <= limit_s]
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
