"""Work that the router has given out and not yet got back, booked as leases.

Every path to a Mac books here and nowhere else. A booking ends by `release`, by its lease, or with the incarnation of
its Mac.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Booking:
    """One request on one incarnation of a Mac; `num_prefill_tokens` of its prompt are still to be computed."""

    request_id: str
    mac: str
    epoch: int
    num_prefill_tokens: int
    expires_at_s: float
    has_first_token: bool = False


@dataclass(frozen=True, slots=True)
class MacLoad:
    """Totals of one Mac: prompt tokens still to be prefilled, and requests past their first token."""

    num_requests: int = 0
    num_prefill_tokens: int = 0
    num_decoding: int = 0


_IDLE = MacLoad()


class LoadBook:
    """Bookings by request, totals by incarnation (mac, epoch)."""

    def __init__(self) -> None:
        self._bookings: dict[str, Booking] = {}
        self._loads: dict[tuple[str, int], MacLoad] = {}

    def book(self, booking: Booking) -> None:
        """Replaces the request's earlier booking, if any."""
        self._swap(booking)

    def prefilled(self, request_id: str, num_tokens: int) -> None:
        """So much more of its prompt is done. No effect without a booking."""
        booking = self._bookings.get(request_id)
        if booking is not None:
            left = max(0, booking.num_prefill_tokens - num_tokens)
            self._swap(replace(booking, num_prefill_tokens=left))

    def first_token(self, request_id: str) -> None:
        """Its prefill is done. No effect a second time, or without a booking."""
        booking = self._bookings.get(request_id)
        if booking is not None:
            self._swap(replace(booking, num_prefill_tokens=0, has_first_token=True))

    def release(self, request_id: str) -> None:
        """The request has ended, however it did. No effect a second time."""
        booking = self._bookings.pop(request_id, None)
        if booking is not None:
            self._add(booking, -1)

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Releases what has outlived its lease and returns the request ids. O(bookings)."""
        expired = tuple(each.request_id for each in self._bookings.values() if each.expires_at_s <= now_s)
        for request_id in expired:
            self.release(request_id)
        return expired

    def drop(self, mac: str, epoch: int) -> tuple[str, ...]:
        """Releases all bookings of an incarnation and returns the request ids. O(bookings)."""
        dropped = tuple(each.request_id for each in self._bookings.values() if (each.mac, each.epoch) == (mac, epoch))
        for request_id in dropped:
            self.release(request_id)
        return dropped

    def load(self, mac: str, epoch: int) -> MacLoad:
        """Zero if nothing is booked there."""
        return self._loads.get((mac, epoch), _IDLE)

    def incarnations(self) -> set[tuple[str, int]]:
        """Those with at least one booking."""
        return set(self._loads)

    def check(self) -> None:
        """Raises AssertionError unless the totals are the sums of the bookings."""
        recount = LoadBook()
        for booking in self._bookings.values():
            recount._add(booking, 1)
        assert recount._loads == self._loads

    def _swap(self, booking: Booking) -> None:
        self.release(booking.request_id)
        self._bookings[booking.request_id] = booking
        self._add(booking, 1)

    def _add(self, booking: Booking, sign: int) -> None:
        key = (booking.mac, booking.epoch)
        load = self._loads.get(key, _IDLE)
        total = MacLoad(
            num_requests=load.num_requests + sign,
            num_prefill_tokens=load.num_prefill_tokens + sign * booking.num_prefill_tokens,
            num_decoding=load.num_decoding + (sign * booking.has_first_token),
        )
        if total == _IDLE:
            del self._loads[key]
        else:
            self._loads[key] = total
