"""The router: prefix index, bookings, learnt speeds and policy behind one object that does no input or output.

One owner calls it, one call at a time, so that choosing a Mac and booking it can't be torn apart.

With a Mac: `join`; if the answer is RESYNC, `check_digests`, and for groups that differ `load_snapshot` or a difference
by buckets; then `apply_events` in order, and the same again whenever an answer is RESYNC. Until then it is STARTING and
takes requests by load alone. With a request: `route`, `first_token`, `release`; the last two may be repeated or late.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from cluster.kv.events import BlockEvent
from cluster.routing.compatibility import fits, refuse_incompatible
from cluster.routing.config import RoutingConfig
from cluster.routing.decision import Decision, Explanation, RouteQuery, Trace
from cluster.routing.errors import (
    DeadlineUnmet,
    NoMacAvailable,
    RoutingError,
    UnknownMac,
    UnknownModel,
    UnknownRequest,
)
from cluster.routing.index import Applied, IndexStats, MacIndexStats
from cluster.routing.load import Booking
from cluster.routing.mac import MacInfo, MacState, MacStatus
from cluster.routing.model_fleet import Member, ModelFleet
from cluster.routing.rivals import make_policy
from cluster.routing.speed import StepSample

NUM_DECISIONS_KEPT = 1_000
# How long a lost Mac's blocks are kept, so that one that flaps need not send them again.
_KEEP_LOST_S = 60.0


class Router:
    """All Macs of the fleet, of any number of models."""

    def __init__(self, config: RoutingConfig | None = None) -> None:
        self._config = config or RoutingConfig()
        self._policy = make_policy(self._config.policy)
        self._fleets: dict[str, ModelFleet] = {}
        self._model_of_mac: dict[str, str] = {}
        self._model_of_request: dict[str, str] = {}
        # Operators' marks stay when a Mac leaves: they are about the host.
        self._cordons: dict[str, str] = {}
        self._traces: OrderedDict[str, Trace] = OrderedDict()

    # Macs.

    def join(self, info: MacInfo) -> Applied:
        """Add a Mac, or take a lost one back. RESYNC: compare digests next.

        A new epoch ends the old incarnation with its blocks and bookings; the same epoch keeps both. A drain outlives
        either. Raises IncompatibleMac.
        """
        known = self._find(info.name)
        if known is not None and known[1].info.epoch != info.epoch:
            self._lose(*known)
            self._forget_requests(known[0].end_incarnation(known[1]))
        fleet = self._fleets.get(info.model)
        if fleet is not None:
            refuse_incompatible(fleet, info)
        if fleet is None or not fits(fleet, info):
            fleet = self._begin_anew(info, fleet)
        member = fleet.members.get(info.name)
        if member is None:
            is_draining = known is not None and known[1].is_draining
            if known is not None:
                self._remove(*known)
            member = fleet.add(info)
            member.is_draining = is_draining
            self._model_of_mac[info.name] = info.model
        if member.is_lost:
            fleet.index.desync(member.slot)
        member.info = info
        member.is_lost, member.lost_since_s = False, None
        member.is_cordoned = info.name in self._cordons
        member.note = self._cordons.get(info.name, "")
        fleet.refresh()
        return Applied.OK if fleet.index.is_synced(member.slot) else Applied.RESYNC

    def knows(self, name: str, epoch: int) -> bool:
        """Whether this incarnation is the present one and reachable; if not, it has to join."""
        known = self._find(name)
        return known is not None and known[1].info.epoch == epoch and not known[1].is_lost

    def leave(self, name: str, epoch: int) -> None:
        """Forget the Mac; no effect unless this incarnation is the present one."""
        known = self._find(name)
        if known is not None and known[1].info.epoch == epoch:
            self._remove(*known)

    def lost(self, name: str) -> None:
        """The Mac can't be reached: nothing new goes there, its bookings keep their leases, its blocks for a minute.

        No effect on a Mac that is not known.
        """
        known = self._find(name)
        if known is not None:
            self._lose(*known)

    def drain(self, name: str) -> None:
        """Nothing new goes there until `resume`. Raises UnknownMac."""
        self._mark(name, is_draining=True)

    def resume(self, name: str) -> None:
        """Undo `drain` and `cordon`. Raises UnknownMac."""
        self._cordons.pop(name, None)
        self._mark(name, is_draining=False)

    def cordon(self, name: str, note: str = "") -> None:
        """Nothing new goes to this host until `resume`, even if it leaves and comes back. Raises UnknownMac."""
        fleet, member = self._require(name)
        self._cordons[name] = note
        member.is_cordoned, member.note = True, note
        fleet.refresh()

    # What Macs report.

    def apply_events(self, name: str, epoch: int, seq: int, events: Sequence[BlockEvent]) -> Applied:
        """One batch of presence changes on a Mac, as `KVCacheManager.take_events` gives them.

        RESYNC: compare digests (join first unless `knows`). Raises ValueError for a group that the model doesn't have.
        """
        known = self._find(name)
        if known is None or known[1].info.epoch != epoch or known[1].is_lost:
            return Applied.RESYNC
        fleet, member = known
        applied = fleet.index.apply(member.slot, seq, events)
        self._count_progress(fleet, member)
        return applied

    def check_digests(self, name: str, epoch: int, next_seq: int, digests: Sequence[int]) -> tuple[int, ...] | None:
        """Groups that differ from what the Mac holds before batch `next_seq`; none: it is synced, and READY.

        `digests` as `KVCacheManager.digests` gives them. None: this incarnation has to join first.
        """
        known = self._current(name, epoch)
        if known is None:
            return None
        fleet, member = known
        if len(digests) != len(fleet.groups):
            raise ValueError(f"{name}: {len(digests)} digests for {len(fleet.groups)} groups")
        differing = fleet.index.check_digests(member.slot, next_seq, digests)
        self._count_progress(fleet, member)
        fleet.refresh()
        return differing

    def differing_buckets(
        self, name: str, epoch: int, digests: Mapping[int, Sequence[int]]
    ) -> dict[int, tuple[int, ...]] | None:
        """By group, the buckets to send with `load_difference`. Every bucket of a group of which nothing is known.

        `digests` are the Mac's `bucket_digests` by group. None: this incarnation has to join first.
        """
        known = self._current(name, epoch)
        if known is None:
            return None
        fleet, member = known
        return {group: fleet.index.differing_buckets(member.slot, group, each) for group, each in digests.items()}

    def load_difference(
        self,
        name: str,
        epoch: int,
        next_seq: int,
        buckets: Mapping[int, tuple[Sequence[int], bytes]],
        digests: Sequence[int],
    ) -> Applied:
        """By group, buckets and all hashes that the Mac holds in them, joined. RESYNC: digests still differ."""
        known = self._current(name, epoch)
        if known is None:
            return Applied.RESYNC
        fleet, member = known
        fleet.index.load_buckets(member.slot, buckets)
        return Applied.RESYNC if self.check_digests(name, epoch, next_seq, digests) else Applied.OK

    def load_snapshot(self, name: str, epoch: int, next_seq: int, content: Sequence[bytes]) -> Applied:
        """All that a Mac holds before batch `next_seq`: joined hashes by group. RESYNC: join first."""
        known = self._current(name, epoch)
        if known is None:
            return Applied.RESYNC
        fleet, member = known
        if len(content) != len(fleet.groups):
            raise ValueError(f"{name}: a snapshot of {len(content)} groups, the model has {len(fleet.groups)}")
        fleet.index.load(member.slot, next_seq, content)
        self._count_progress(fleet, member)
        fleet.refresh()
        return Applied.OK

    def observe_steps(self, name: str, samples: Sequence[StepSample]) -> None:
        """Steps that a Mac has run, to learn its speed. No effect on a Mac that is not known."""
        known = self._find(name)
        if known is not None:
            known[0].observe(known[1], samples)

    def observe_load(self, name: str, epoch: int, num_requests: int) -> None:
        """How many requests a Mac has by its own count: those not booked here load it too.

        A router that was restarted doesn't know them. No effect unless this incarnation is the present one.
        """
        known = self._current(name, epoch)
        if known is not None:
            fleet, member = known
            member.num_foreign = max(0, num_requests - fleet.loads.load(member.slot).num_requests)
            fleet.touch(member.slot)

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

    def first_token(self, request_id: str, num_cached_tokens: int | None = None) -> bool:
        """The request's prefill is done, and so many of its tokens were in its Mac's cache.

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
        drift = fleet.at(booking.slot).drift
        return drift.observe(booking.num_tokens, booking.num_predicted_tokens, num_cached_tokens)

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
        for fleet in self._fleets.values():
            over = fleet.loads.expire(now_s)
            self._forget_requests(over)
            expired += [booking.request_id for booking in over]
            for member in fleet.members.values():
                fleet.hot.expire(member.slot, now_s)
                fleet.touch(member.slot)
                if member.is_lost and member.lost_since_s is None:
                    member.lost_since_s = now_s
                if member.lost_since_s is not None and now_s - member.lost_since_s >= _KEEP_LOST_S:
                    fleet.index.open(member.slot)
                    member.lost_since_s = float("inf")
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
        return tuple(fleet.status(member) for fleet in self._fleets.values() for member in fleet.members.values())

    def models(self) -> dict[str, dict[str, MacState]]:
        """Which Macs serve which model, and their states."""
        return {
            model: {name: member.state(fleet.index) for name, member in fleet.members.items()}
            for model, fleet in self._fleets.items()
        }

    def index_stats(self) -> IndexStats:
        """The prefix index. O(Macs)."""
        return IndexStats(
            num_keys=sum(fleet.index.num_keys for fleet in self._fleets.values()),
            macs=tuple(
                MacIndexStats(name, member.info.epoch, fleet.index.stats(member.slot))
                for fleet in self._fleets.values()
                for name, member in fleet.members.items()
            ),
        )

    def check(self) -> None:
        """Raises AssertionError unless index, bookings and Mac table agree."""
        assert {name: fleet.model for fleet in self._fleets.values() for name in fleet.members} == self._model_of_mac
        for model, fleet in self._fleets.items():
            assert fleet.model == model
            assert fleet.members, "a model without Macs"
            fleet.check()
        booked = {request_id: self._fleets[model] for request_id, model in self._model_of_request.items()}
        assert all(fleet.loads.get(request_id) is not None for request_id, fleet in booked.items())
        assert len(booked) == sum(len(fleet.loads) for fleet in self._fleets.values())
        assert len(self._traces) <= NUM_DECISIONS_KEPT

    def _find(self, name: str) -> tuple[ModelFleet, Member] | None:
        model = self._model_of_mac.get(name)
        if model is None:
            return None
        fleet = self._fleets[model]
        return fleet, fleet.members[name]

    def _current(self, name: str, epoch: int) -> tuple[ModelFleet, Member] | None:
        """Only if this incarnation is the present one and reachable."""
        return self._find(name) if self.knows(name, epoch) else None

    def _require(self, name: str) -> tuple[ModelFleet, Member]:
        known = self._find(name)
        if known is None:
            raise UnknownMac(name, self._model_of_mac)
        return known

    def _mark(self, name: str, *, is_draining: bool) -> None:
        fleet, member = self._require(name)
        member.is_draining = is_draining
        member.is_cordoned = name in self._cordons
        member.note = self._cordons.get(name, "")
        fleet.refresh()

    def _fleet(self, model: str) -> ModelFleet:
        fleet = self._fleets.get(model)
        if fleet is None:
            raise UnknownModel(model, self._fleets)
        return fleet

    def _fleet_of(self, request_id: str) -> ModelFleet | None:
        model = self._model_of_request.get(request_id)
        return None if model is None else self._fleets[model]

    def _lose(self, fleet: ModelFleet, member: Member) -> None:
        member.is_lost = True
        fleet.refresh()

    def _remove(self, fleet: ModelFleet, member: Member) -> None:
        self._forget_requests(fleet.remove(member.info.name))
        del self._model_of_mac[member.info.name]
        if not fleet.members:
            del self._fleets[fleet.model]

    def _forget_requests(self, bookings: Sequence[Booking]) -> None:
        for booking in bookings:
            del self._model_of_request[booking.request_id]

    def _count_progress(self, fleet: ModelFleet, member: Member) -> None:
        """Blocks that a Mac announces are progress of the prefills booked there."""
        fleet.loads.progress(member.slot, fleet.block_size, fleet.index.holds)
        fleet.touch(member.slot)

    def _begin_anew(self, info: MacInfo, old: ModelFleet | None) -> ModelFleet:
        """A model's first Mac, or the first of one that comes back with another KV format: none of the old is left."""
        before = None
        if old is not None:
            before = old.members.get(info.name)
            for member in tuple(old.members.values()):
                self._remove(old, member)
        fleet = self._fleets[info.model] = ModelFleet(info, self._config, self._policy)
        if before is not None:
            member = fleet.add(info)
            member.speed, member.is_draining = before.speed, before.is_draining
            self._model_of_mac[info.name] = info.model
        return fleet


def _refusal(fleet: ModelFleet, query: RouteQuery, trace: Trace) -> RoutingError:
    if trace.soonest_s is not None and query.deadline_s is not None:
        return DeadlineUnmet(query.model, trace.soonest_s, query.deadline_s)
    reasons = {trace.names[slot]: reason for slot, reason in trace.closed.items()}
    is_permanent = all(query.num_least_tokens > each.info.max_model_len for each in fleet.members.values())
    return NoMacAvailable(query.model, reasons, is_permanent=is_permanent)
