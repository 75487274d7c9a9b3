"""What was booked where of late: work that fades, whose turn it is, and where sessions were."""

# Recent work fades by half in this time.
WORK_HALF_LIFE_S = 60.0
MAX_SESSIONS = 16_384


class BookingHistory:
    """By slot, in lists that a decision reads as they are. `last_booking` numbers the fleet's bookings, 0: none yet."""

    def __init__(self) -> None:
        self.last_booking: list[int] = []
        # Seconds as of the slot's last booking.
        self.work_s: list[float] = []
        self._worked_at_s: list[float] = []
        self._num_bookings = 0
        # The newest last, so that the oldest can be forgotten.
        self._sessions: dict[str, int] = {}

    def add_slot(self) -> None:
        """One more Mac."""
        for values in (self.work_s, self._worked_at_s):
            values.append(0.0)
        self.last_booking.append(0)

    def clear(self, slot: int) -> None:
        """Another Mac has come into the slot, or nobody."""
        self.work_s[slot] = self._worked_at_s[slot] = 0.0
        self.last_booking[slot] = 0
        self._sessions = {session: at for session, at in self._sessions.items() if at != slot}

    def recent_work_s(self, slot: int, now_s: float) -> float:
        """Predicted seconds booked there, faded up to now."""
        faded: float = 0.5 ** ((now_s - self._worked_at_s[slot]) / WORK_HALF_LIFE_S)
        return self.work_s[slot] * faded

    def slot_of(self, session: str) -> int:
        """Where the session was last; -1: nowhere, or long ago, or there is none."""
        return self._sessions.get(session, -1) if session else -1

    def book(self, slot: int, session: str, work_s: float, now_s: float) -> None:
        """A request of so many predicted seconds goes there. O(1)."""
        self._num_bookings += 1
        self.last_booking[slot] = self._num_bookings
        self.work_s[slot] = self.recent_work_s(slot, now_s) + work_s
        self._worked_at_s[slot] = now_s
        if session:
            self._sessions.pop(session, None)
            self._sessions[session] = slot
            if len(self._sessions) > MAX_SESSIONS:
                del self._sessions[next(iter(self._sessions))]

    def check(self) -> None:
        """Raises AssertionError unless lists and bounds fit."""
        num_slots = len(self.last_booking)
        assert len(self.work_s) == len(self._worked_at_s) == num_slots
        assert len(self._sessions) <= MAX_SESSIONS
        assert all(slot < num_slots for slot in self._sessions.values())
