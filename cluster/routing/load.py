"""Work given out to one model's Macs and not yet got back, booked as leases.

Every path to a Mac books here and nowhere else. A booking ends by `release`, by its lease, or with the incarnation of
its Mac. While its prompt is being prefilled, its chain counts as present on its Mac (`pending`).
"""

from collections.abc import Callable, Sequence

from cluster.kv.hashing import BlockHash
from cluster.routing.mac import MacLoad
from cluster.routing.pending import PendingChains, PendingNode, num_common
from cluster.routing.predict import Prompt


class Booking:
    """One request on one Mac. `num_done_tokens` of its prompt were cached there or have been announced since."""

    __slots__ = (
        "block_hashes",
        "booked_at_s",
        "expires_at_s",
        "factor",
        "has_first_token",
        "is_prediction",
        "num_ahead_tokens",
        "num_done_tokens",
        "num_held_tokens",
        "num_predicted_tokens",
        "num_tokens",
        "pending",
        "predicted_s",
        "request_id",
        "serial",
        "slot",
        "stop_depth",
        "turn",
    )

    def __init__(
        self,
        request_id: str,
        slot: int,
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
        num_predicted_tokens: int,
        expires_at_s: float,
        *,
        is_prediction: bool = True,
        booked_at_s: float = 0.0,
        predicted_s: float = 0.0,
        factor: float = 1.0,
        num_held_tokens: int | None = None,
        num_ahead_tokens: int = 0,
        stop_depth: int = 0,
    ) -> None:
        self.request_id = request_id
        self.slot = slot
        self.block_hashes = block_hashes
        self.num_tokens = num_tokens
        # What is there already; prompts under way may compute more of it first.
        self.num_held_tokens = num_predicted_tokens if num_held_tokens is None else num_held_tokens
        self.num_predicted_tokens = num_predicted_tokens
        self.num_done_tokens = num_predicted_tokens
        self.expires_at_s = expires_at_s
        # Whether what it would find was known when it was booked.
        self.is_prediction = is_prediction
        # When it was booked, how long its first token would take from then on, and by which correction of the speeds.
        self.booked_at_s = booked_at_s
        self.predicted_s = predicted_s
        self.factor = factor
        # It may be so much further than its Mac has announced, and stops at a block to keep a state; 0: nowhere.
        self.num_ahead_tokens = num_ahead_tokens
        self.stop_depth = stop_depth
        # Its number among those of its slot.
        self.serial = 0
        # What its Mac has computed when it comes, and its own tokens: the least goes first.
        self.turn = 0
        self.has_first_token = False
        self.pending: PendingNode | None = None


class LoadBook:
    """Bookings by request; totals by slot, in lists that a decision reads as they are."""

    def __init__(self) -> None:
        self.pending = PendingChains()
        self.num_prefilling: list[int] = []
        self.num_prefill_tokens: list[int] = []
        self.num_decoding: list[int] = []
        self.decode_context_tokens: list[int] = []
        self._bookings: dict[str, Booking] = {}
        self._prefilling: list[dict[str, Booking]] = []
        self._num_booked: list[int] = []
        # Prompt tokens computed there: the clock of turns.
        self._num_prefilled: list[int] = []

    def add_slot(self) -> None:
        """One more Mac."""
        for totals in self._totals():
            totals.append(0)
        self._prefilling.append({})
        self._num_booked.append(0)
        self._num_prefilled.append(0)

    def book(self, booking: Booking) -> None:
        """In place of the request's earlier booking, if any."""
        self.release(booking.request_id)
        self._bookings[booking.request_id] = booking
        self._prefilling[booking.slot][booking.request_id] = booking
        self._num_booked[booking.slot] += 1
        booking.serial = self._num_booked[booking.slot]
        booking.turn = self._num_prefilled[booking.slot] + booking.num_tokens - booking.num_held_tokens
        if booking.block_hashes:
            booking.pending = self.pending.add(booking.slot, booking.block_hashes)
        self._count(booking, 1)

    def get(self, request_id: str) -> Booking | None:
        """The request's booking, if it has one."""
        return self._bookings.get(request_id)

    def is_latest(self, booking: Booking) -> bool:
        """Whether nothing has been booked on its Mac since."""
        return booking.serial == self._num_booked[booking.slot]

    def progress(self, slot: int, block_size: int, holds: Callable[[int, BlockHash], bool]) -> None:
        """The Mac has announced blocks: prefills booked there may have come further. O(those, and new blocks)."""
        for booking in self._prefilling[slot].values():
            hashes = booking.block_hashes
            # What was there already, but could not be gone on from, is computed again and not announced.
            first = depth = max(booking.num_done_tokens // block_size, booking.stop_depth)
            while depth < len(hashes) and holds(slot, hashes[depth]):
                depth += 1
            if depth > first:
                self._count(booking, -1)
                # One token is left until the first one of the answer is there.
                num_done = min(depth * block_size, booking.num_tokens - 1)
                self._num_prefilled[slot] += num_done - booking.num_done_tokens
                booking.num_done_tokens = num_done
                self._count(booking, 1)
            if depth == len(hashes) > booking.stop_depth:
                self._confirm(booking)

    def first_token(self, request_id: str) -> None:
        """Its prefill is done. No effect a second time, or without a booking."""
        booking = self._bookings.get(request_id)
        if booking is not None and not booking.has_first_token:
            self._count(booking, -1)
            self._num_prefilled[booking.slot] += booking.num_tokens - booking.num_done_tokens
            booking.has_first_token = True
            del self._prefilling[booking.slot][request_id]
            self._count(booking, 1)

    def release(self, request_id: str) -> Booking | None:
        """The request has ended, however it did. None a second time."""
        booking = self._bookings.pop(request_id, None)
        if booking is not None:
            self._count(booking, -1)
            self._prefilling[booking.slot].pop(request_id, None)
            self._confirm(booking)
        return booking

    def expire(self, now_s: float) -> tuple[Booking, ...]:
        """Release what has outlived its lease. O(bookings)."""
        return self._release_all(lambda booking: booking.expires_at_s <= now_s)

    def drop(self, slot: int) -> tuple[Booking, ...]:
        """Release all of a Mac: its incarnation has ended. O(bookings)."""
        return self._release_all(lambda booking: booking.slot == slot)

    def load(self, slot: int) -> MacLoad:
        """Totals of one Mac."""
        return MacLoad(
            num_requests=self.num_prefilling[slot] + self.num_decoding[slot],
            num_prefill_tokens=self.num_prefill_tokens[slot],
            num_decoding=self.num_decoding[slot],
        )

    def num_to_come(self, slot: int, hashes: Sequence[BlockHash], block_size: int) -> int:
        """How many blocks of a prompt others there share and have yet to compute. O(prompts under way there).

        Only where one has not passed the place at which they part will it keep there what only lives at places (a
        state, a window), or where it stops anyway, its own end above all; what it has kept before, its Mac has told.
        """
        most = 0
        for booking in self._prefilling[slot].values():
            if booking.pending is not None and booking.block_hashes[0] == hashes[0]:
                high = min(len(booking.block_hashes), len(hashes))
                depth = num_common(booking.block_hashes, hashes, 1, high)
                end = (booking.num_tokens - 1) // block_size
                if depth * block_size > booking.num_done_tokens + booking.num_ahead_tokens:
                    most = max(most, depth)
                elif depth >= end:
                    most = max(most, end)
                elif depth >= booking.stop_depth >= booking.num_done_tokens // block_size:
                    most = max(most, booking.stop_depth)
        return most

    def turns(self, slot: int) -> list[Prompt]:
        """The prompts under way there, in the order in which they will be computed. O(n log n) for n of them."""
        clock, prompts = self._num_prefilled[slot], []
        for booking in self._prefilling[slot].values():
            num_done, num_tokens = booking.num_done_tokens, booking.num_tokens
            prompts.append(
                (booking.turn - clock, num_tokens - num_done, (num_tokens - num_done) * (num_done + num_tokens))
            )
        prompts.sort()
        return prompts

    def __len__(self) -> int:
        return len(self._bookings)

    def check(self) -> None:
        """Raises AssertionError unless totals and chains are those of the bookings."""
        recount = LoadBook()
        for _ in self._prefilling:
            recount.add_slot()
        chains: dict[int, dict[PendingNode, int]] = {}
        for request_id, booking in self._bookings.items():
            assert booking.request_id == request_id
            assert booking.has_first_token != (request_id in self._prefilling[booking.slot])
            recount._count(booking, 1)
            if booking.pending is not None:
                ends = chains.setdefault(booking.slot, {})
                ends[booking.pending] = ends.get(booking.pending, 0) + 1
        assert sum(map(len, self._prefilling)) == sum(not each.has_first_token for each in self._bookings.values())
        assert recount._totals() == self._totals()
        self.pending.check(chains)

    def _release_all(self, is_over: Callable[[Booking], bool]) -> tuple[Booking, ...]:
        over = tuple(booking for booking in self._bookings.values() if is_over(booking))
        for booking in over:
            self.release(booking.request_id)
        return over

    def _confirm(self, booking: Booking) -> None:
        """From here on the Mac's events alone say what it holds of the prompt."""
        if booking.pending is not None:
            self.pending.discard(booking.slot, booking.pending)
            booking.pending = None

    def _count(self, booking: Booking, sign: int) -> None:
        slot = booking.slot
        if booking.has_first_token:
            self.num_decoding[slot] += sign
            self.decode_context_tokens[slot] += sign * booking.num_tokens
            return
        num_left = booking.num_tokens - booking.num_done_tokens
        self.num_prefilling[slot] += sign
        self.num_prefill_tokens[slot] += sign * num_left

    def _totals(self) -> tuple[list[int], ...]:
        return (
            self.num_prefilling,
            self.num_prefill_tokens,
            self.num_decoding,
            self.decode_context_tokens,
        )
