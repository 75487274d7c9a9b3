"""The fleet's Macs: who is there, in which incarnation and state, and what they report of themselves.

With a Mac: `join`; if the answer is RESYNC, `check_digests`, and for groups that differ `load_snapshot` or a difference
by buckets; then `apply_events` in order, and the same again whenever an answer is RESYNC. Until then it is STARTING and
takes requests by load alone.
"""

from collections.abc import Callable, Mapping, Sequence

from cluster.kv.events import BlockEvent
from cluster.routing.compatibility import fits, refuse_incompatible
from cluster.routing.config import RoutingConfig
from cluster.routing.errors import UnknownMac
from cluster.routing.index import Applied
from cluster.routing.load import Booking
from cluster.routing.mac import MacInfo
from cluster.routing.member import Member
from cluster.routing.model_fleet import ModelFleet
from cluster.routing.policy import Policy
from cluster.routing.speed import StepSample

# How long a lost Mac's blocks are kept, so that one that flaps need not send them again.
_KEEP_LOST_S = 60.0


class MacTable:
    """All Macs, by name, in the fleet of their model. `forget` is told of bookings that end with an incarnation."""

    def __init__(self, config: RoutingConfig, policy: Policy, forget: Callable[[Sequence[Booking]], None]) -> None:
        self._config = config
        self._policy = policy
        self._forget = forget
        self._fleets: dict[str, ModelFleet] = {}
        self._model_of_mac: dict[str, str] = {}
        # Operators' marks stay when a Mac leaves: they are about the host.
        self._cordons: dict[str, str] = {}

    @property
    def fleets(self) -> Mapping[str, ModelFleet]:
        """By model; none is empty."""
        return self._fleets

    def join(self, info: MacInfo) -> Applied:
        """Add a Mac, or take a lost one back. RESYNC: compare digests next.

        A new epoch ends the old incarnation with its blocks and bookings; the same epoch keeps both. A drain outlives
        either. Raises IncompatibleMac.
        """
        known = self._find(info.name)
        if known is not None and known[1].info.epoch != info.epoch:
            self._lose(*known)
            self._forget(known[0].end_incarnation(known[1]))
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

    def observe_adapters(self, name: str, epoch: int, digests: frozenset[str]) -> None:
        """Which adapters requests may use there. No effect unless this incarnation is the present one."""
        known = self._current(name, epoch)
        if known is not None:
            known[1].adapters = digests

    def expire(self, now_s: float) -> None:
        """Give up the blocks of Macs that have been lost for too long; to be called every second. O(Macs)."""
        for fleet in self._fleets.values():
            fleet.tick(now_s)
            for member in fleet.members.values():
                if member.is_lost and member.lost_since_s is None:
                    member.lost_since_s = now_s
                if member.lost_since_s is not None and now_s - member.lost_since_s >= _KEEP_LOST_S:
                    fleet.index.open(member.slot)
                    member.lost_since_s = float("inf")

    def check(self) -> None:
        """Raises AssertionError unless fleets and names agree, and each fleet is sound."""
        assert {name: fleet.model for fleet in self._fleets.values() for name in fleet.members} == self._model_of_mac
        for model, fleet in self._fleets.items():
            assert fleet.model == model
            assert fleet.members, "a model without Macs"
            fleet.check()

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

    def _lose(self, fleet: ModelFleet, member: Member) -> None:
        member.is_lost = True
        fleet.refresh()

    def _remove(self, fleet: ModelFleet, member: Member) -> None:
        self._forget(fleet.remove(member.info.name))
        del self._model_of_mac[member.info.name]
        if not fleet.members:
            del self._fleets[fleet.model]

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
            member.update_costs()
            self._model_of_mac[info.name] = info.model
        return fleet
