"""The router: prefix index, bookings, learnt speeds and policy behind one object that does no input or output.

One owner calls it, one call at a time, so that choosing a Mac and booking it can't be torn apart.

Macs come, go and report through `macs`. With a request: `route`, `first_token`, `release`; the last two may be repeated
or late.
"""

from collections import OrderedDict
from collections.abc import Sequence

from cluster.routing.config import RoutingConfig
from cluster.routing.decision import Decision, Explanation, RouteQuery, Trace
from cluster.routing.errors import (
    DeadlineUnmet,
    NoMacAvailable,
    RoutingError,
    UnknownModel,
    UnknownRequest,
)
from cluster.routing.index import IndexStats, MacIndexStats
from cluster.routing.load import Booking
from cluster.routing.mac import MacState, MacStatus
from cluster.routing.mac_table import MacTable
from cluster.routing.model_fleet import ModelFleet
from cluster.routing.rivals import make_policy

NUM_DECISIONS_KEPT = 1_000


class Router:
    """All Macs of the fleet, of any number of models."""

    def __init__(self, config: RoutingConfig | None = None) -> None:
        self._config = config or RoutingConfig()
        self._policy = make_policy(self._config.policy)
        self.macs = MacTable(self._config, self._policy, self._forget_requests)
        self._model_of_request: dict[str, str] = {}
        self._traces: OrderedDict[str, Trace] = OrderedDict()

    # Requests.

    def route(self, query: RouteQuery, now_s: float) -> Decision:
        """Choose a Mac and book it in one step, in place of an earlier booking of the same request.

        Raises UnknownModel, NoMacAvailable, DeadlineUnmet.
        """
        self.release(query.request_id)
        return self.book(query, self.plan(query, now_s), now_s)

    def plan(self, query: RouteQuery, now_s: float) -> Trace:
        """Choose; to be booked before anything else happens, or not at all. Raises as `route` does."""
        fleet = self._fleet(query.model)
        trace = fleet.decide(query, now_s)
        if trace.decision is None:
            raise _refusal(fleet, query, trace)
        return trace

    def book(self, query: RouteQuery, trace: Trace, now_s: float) -> Decision:
        """Book what was just planned for a request that has no booking."""
        assert trace.decision is not None
        self._fleet(query.model).book(query, trace, now_s)
        self._model_of_request[query.request_id] = query.model
        self._traces[query.request_id] = trace
        self._traces.move_to_end(query.request_id)
        if len(self._traces) > NUM_DECISIONS_KEPT:
            self._traces.popitem(last=False)
        return trace.decision

    def what_if(self, query: RouteQuery, now_s: float) -> Explanation:
        """What `route` would do and why; changes nothing. Raises UnknownModel."""
        return self._fleet(query.model).decide(query, now_s).explain(query.request_id)

    def is_booked(self, request_id: str) -> bool:
        """Whether the request has a Mac."""
        return request_id in self._model_of_request

    def first_token(self, request_id: str, num_cached_tokens: int | None = None, now_s: float = 0.0) -> bool:
        """The request's prefill is done now, and so many of its tokens were in its Mac's cache.

        Returns whether its Mac's cache has just been found to differ too much from what is predicted.
        """
        fleet = self._fleet_of(request_id)
        booking = None if fleet is None else fleet.loads.get(request_id)
        if fleet is None or booking is None or booking.has_first_token:
            return False
        fleet.loads.first_token(request_id)
        fleet.touch(booking.slot)
        if num_cached_tokens is None or not booking.is_prediction:
            return False
        return fleet.first_token(booking, num_cached_tokens, now_s)

    def release(self, request_id: str, num_output_tokens: int | None = None) -> None:
        """The request has ended: finished (after so many tokens), cancelled, failed or given up by its Mac."""
        fleet = self._fleet_of(request_id)
        if fleet is None:
            return
        del self._model_of_request[request_id]
        booking = fleet.loads.release(request_id)
        assert booking is not None, "a request of a model is booked there"
        fleet.touch(booking.slot)
        if num_output_tokens is not None:
            fleet.observe_output(num_output_tokens)

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Release requests whose lease has ended and return their ids; to be called every second."""
        expired: list[str] = []
        for fleet in self.macs.fleets.values():
            over = fleet.loads.expire(now_s)
            self._forget_requests(over)
            expired += [booking.request_id for booking in over]
        self.macs.expire(now_s)
        return tuple(expired)

    # What people ask.

    def explain(self, request_id: str) -> Explanation:
        """The latest decision on one of the last 1,000 requests. Raises UnknownRequest."""
        trace = self._traces.get(request_id)
        if trace is None:
            raise UnknownRequest(request_id, NUM_DECISIONS_KEPT)
        return trace.explain(request_id)

    def fleet(self) -> tuple[MacStatus, ...]:
        """Every Mac that has joined and not left, lost ones included."""
        return tuple(fleet.status(member) for fleet in self.macs.fleets.values() for member in fleet.members.values())

    def models(self) -> dict[str, dict[str, MacState]]:
        """Which Macs serve which model, and their states."""
        return {
            model: {name: member.state(fleet.index) for name, member in fleet.members.items()}
            for model, fleet in self.macs.fleets.items()
        }

    def index_stats(self) -> IndexStats:
        """The prefix index. O(Macs)."""
        return IndexStats(
            num_keys=sum(fleet.index.num_keys for fleet in self.macs.fleets.values()),
            macs=tuple(
                MacIndexStats(name, member.info.epoch, fleet.index.stats(member.slot))
                for fleet in self.macs.fleets.values()
                for name, member in fleet.members.items()
            ),
        )

    def check(self) -> None:
        """Raises AssertionError unless index, bookings and Mac table agree."""
        self.macs.check()
        booked = {request_id: self.macs.fleets[model] for request_id, model in self._model_of_request.items()}
        assert all(fleet.loads.get(request_id) is not None for request_id, fleet in booked.items())
        assert len(booked) == sum(len(fleet.loads) for fleet in self.macs.fleets.values())
        assert len(self._traces) <= NUM_DECISIONS_KEPT

    def _fleet(self, model: str) -> ModelFleet:
        fleet = self.macs.fleets.get(model)
        if fleet is None:
            raise UnknownModel(model, self.macs.fleets)
        return fleet

    def _fleet_of(self, request_id: str) -> ModelFleet | None:
        model = self._model_of_request.get(request_id)
        return None if model is None else self.macs.fleets[model]

    def _forget_requests(self, bookings: Sequence[Booking]) -> None:
        for booking in bookings:
            del self._model_of_request[booking.request_id]


def _refusal(fleet: ModelFleet, query: RouteQuery, trace: Trace) -> RoutingError:
    if trace.soonest_s is not None and query.deadline_s is not None:
        return DeadlineUnmet(query.model, trace.soonest_s, query.deadline_s)
    reasons = {trace.names[slot]: reason for slot, reason in trace.closed.items()}
    is_permanent = all(query.num_least_tokens > each.info.max_model_len for each in fleet.members.values())
    return NoMacAvailable(query.model, reasons, is_permanent=is_permanent)
