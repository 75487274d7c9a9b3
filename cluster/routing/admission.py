"""In front of the router: whether a request goes to a Mac at once, waits for its turn, or is refused.

It waits when every Mac of its model has more than `max_backlog_s` to do before it, or when others wait already. Macs
are given no more than that, so who comes next stays the router's to say; and a Mac that is worth waiting for (it has
the prefix) is still chosen while another has room, because then the policy weighs the wait itself.
"""

from dataclasses import dataclass, replace

from cluster.routing.config import RoutingConfig
from cluster.routing.decision import Decision, RouteQuery
from cluster.routing.errors import DeadlineUnmet, QueueFull, RoutingError
from cluster.routing.router import Router
from cluster.routing.waiting_room import Waiting, WaitingRoom

_LEAST_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request that waited: a decision, or the error with which it is refused."""

    request_id: str
    decision: Decision | None
    error: RoutingError | None


class Admission:
    """One room for each model. `submit`, then `dispatch` whenever something has ended, and every second."""

    def __init__(self, router: Router, config: RoutingConfig) -> None:
        self._router = router
        self._config = config
        self._rooms: dict[str, WaitingRoom] = {}
        self._outcomes: list[Outcome] = []

    def submit(self, query: RouteQuery, now_s: float) -> Decision | None:
        """Route now, or None: it waits, and `dispatch` tells what became of it.

        Raises QueueFull and DeadlineUnmet with a time after which to try again, and what `Router.route` raises.
        """
        self.withdraw(query.request_id)
        trace = self._router.plan(query, now_s)
        room = self._rooms.setdefault(query.model, WaitingRoom(self._config.max_waiting))
        if not room and trace.backlog_s <= self._config.max_backlog_s:
            room.charge(query, trace.cost_s, now_s)
            return self._router.book(query, trace, now_s)
        num_macs = max(1, len(trace.view.open_slots))
        wait_s = room.seconds_ahead_of(query) / num_macs + trace.backlog_s
        if query.deadline_s is not None and wait_s > query.deadline_s:
            raise DeadlineUnmet(query.model, wait_s, query.deadline_s)
        shed = room.push(query, trace.cost_s, now_s)
        if shed is not None:
            drain_s = room.cost_s / num_macs + max(0.0, trace.backlog_s - self._config.max_backlog_s)
            error = QueueFull(query.model, len(room), max(_LEAST_RETRY_S, drain_s))
            if shed.query.request_id == query.request_id:
                raise error
            self._outcomes.append(Outcome(shed.query.request_id, None, error))
        return None

    def dispatch(self, now_s: float) -> tuple[Outcome, ...]:
        """What became of requests that waited: those whose turn has come, and those that wait in vain."""
        for model, room in list(self._rooms.items()):
            for late in room.expired(now_s):
                assert late.query.deadline_s is not None
                error = DeadlineUnmet(model, now_s - late.arrived_s, late.query.deadline_s)
                self._outcomes.append(Outcome(late.query.request_id, None, error))
            while room and self._dispatch_one(room, now_s):
                pass
            if not room and model not in self._router.models():
                del self._rooms[model]
        outcomes, self._outcomes = tuple(self._outcomes), []
        return outcomes

    def withdraw(self, request_id: str, num_output_tokens: int | None = None) -> None:
        """The request has ended, however it did: it waits no longer, and its booking is given back; see `release`."""
        for room in self._rooms.values():
            room.remove(request_id)
        self._router.release(request_id, num_output_tokens)

    def num_waiting(self) -> dict[str, int]:
        """By model."""
        return {model: len(room) for model, room in self._rooms.items()}

    def check(self) -> None:
        """Raises AssertionError unless the rooms are in order and nothing that waits is booked."""
        for room in self._rooms.values():
            room.check()
            assert not any(self._router.is_booked(each.query.request_id) for each in room)

    def _dispatch_one(self, room: WaitingRoom, now_s: float) -> bool:
        """False if the Macs have enough to do."""
        entry = room.first(now_s)
        query = _as_of(entry, now_s)
        try:
            trace = self._router.plan(query, now_s)
        except RoutingError as error:
            room.remove(query.request_id)
            self._outcomes.append(Outcome(query.request_id, None, error))
            return True
        if trace.backlog_s > self._config.max_backlog_s:
            return False
        room.take(entry, now_s)
        self._outcomes.append(Outcome(query.request_id, self._router.book(query, trace, now_s), None))
        return True


def _as_of(entry: Waiting, now_s: float) -> RouteQuery:
    """With what is left of its deadline."""
    if entry.until_s is None:
        return entry.query
    return replace(entry.query, deadline_s=entry.until_s - now_s)
