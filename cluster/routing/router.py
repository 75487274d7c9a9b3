"""The router: prefix index, booked load and policy behind one object that does no input or output.

One owner calls it, one call at a time, so that choosing a Mac and booking it can't be torn apart.

With a Mac: `join`, then `load_snapshot` (STARTING until then), then `apply_events` in order, and another snapshot
whenever an answer is RESYNC. With a request: `route`, `first_token`, `release`; the last two may be repeated or late.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from cluster.kv.hashing import BlockHash
from cluster.routing.errors import IncompatibleMac, NoMacAvailable, UnknownMac, UnknownModel, UnknownRequest
from cluster.routing.index import Applied, Block, IndexStats, PrefixIndex
from cluster.routing.load import Booking, LoadBook, MacLoad
from cluster.routing.mac import MacInfo, MacState, MacStatus
from cluster.routing.policy import Candidate, Choice, RoutingConfig, Standing, choose
from cluster.routing.speed import PrefillSpeeds

NUM_DECISIONS_KEPT = 1_000

_CLOSED = {
    MacState.STARTING: "starting: what it holds is not known yet",
    MacState.DRAINING: "draining",
    MacState.LOST: "lost",
}


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """A request to be placed; `block_hashes` are those of the prompt's full blocks, `exclude` names of Macs."""

    request_id: str
    model: str
    root_hash: BlockHash
    block_hashes: Sequence[BlockHash]
    num_tokens: int
    max_tokens: int
    exclude: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request goes, and every Mac's numbers at that moment."""

    request_id: str
    mac: str
    epoch: int
    address: str
    num_tokens: int
    num_matched_tokens: int
    reason: str
    candidates: tuple[Candidate, ...]
    decided_at_s: float


@dataclass(slots=True)
class _Mac:
    info: MacInfo
    is_lost: bool = False
    is_draining: bool = False
    is_started: bool = False
    last_booking: int = 0

    @property
    def state(self) -> MacState:
        if self.is_lost:
            return MacState.LOST
        if self.is_draining:
            return MacState.DRAINING
        return MacState.READY if self.is_started else MacState.STARTING


class Router:
    """All Macs of the fleet, of any number of models."""

    def __init__(self, config: RoutingConfig | None = None) -> None:
        self._config = config or RoutingConfig()
        self._macs: dict[str, _Mac] = {}
        self._index = PrefixIndex()
        self._loads = LoadBook()
        self._speeds = PrefillSpeeds(self._config.default_prefill_tokens_per_s)
        self._decisions: OrderedDict[str, Decision] = OrderedDict()
        self._num_bookings = 0

    def join(self, info: MacInfo) -> Applied:
        """Adds a Mac, or takes a lost one back. RESYNC: load its snapshot next.

        A new epoch ends the old incarnation with its blocks and bookings; the same epoch keeps its bookings. A drain
        outlives both. Raises IncompatibleMac.
        """
        known = self._macs.get(info.name)
        if known is not None and known.info.epoch != info.epoch:
            self._end_incarnation(known)
        self._refuse_incompatible(info)
        if known is None:
            known = self._macs[info.name] = _Mac(info)
        elif known.info.model != info.model:
            self._speeds.forget(info.name)
        known.info = info
        known.is_lost = False
        self._index.join(info.name, info.epoch)
        return Applied.OK if self._index.is_synced(info.name) else Applied.RESYNC

    def knows(self, name: str, epoch: int) -> bool:
        """Whether this incarnation is the present one and reachable; if not, it has to join."""
        known = self._macs.get(name)
        return known is not None and known.info.epoch == epoch and not known.is_lost

    def leave(self, name: str, epoch: int) -> None:
        """Forgets the Mac; no effect unless this incarnation is the present one."""
        known = self._macs.get(name)
        if known is not None and known.info.epoch == epoch:
            self._end_incarnation(known)
            self._speeds.forget(name)
            del self._macs[name]

    def lost(self, name: str) -> None:
        """The Mac can't be reached: nothing new goes there, its blocks are forgotten, its bookings keep their leases.

        No effect on a Mac that is not known.
        """
        known = self._macs.get(name)
        if known is not None:
            self._lose(known)

    def drain(self, name: str) -> None:
        """Nothing new goes there until `resume`. Raises UnknownMac."""
        self._mac(name).is_draining = True

    def resume(self, name: str) -> None:
        """Undoes `drain`. Raises UnknownMac."""
        self._mac(name).is_draining = False

    def route(self, query: RouteQuery, now_s: float) -> Decision:
        """Chooses a Mac and books it in one step, in place of an earlier booking of the same request.

        Raises UnknownModel, NoMacAvailable.
        """
        self.release(query.request_id)
        decision = self._decide(query, now_s)
        self._book(query, decision, now_s)
        self._decisions[query.request_id] = decision
        self._decisions.move_to_end(query.request_id)
        if len(self._decisions) > NUM_DECISIONS_KEPT:
            self._decisions.popitem(last=False)
        return decision

    def what_if(self, query: RouteQuery, now_s: float) -> Decision:
        """As `route`, but changes nothing."""
        return self._decide(query, now_s)

    def first_token(self, request_id: str) -> None:
        """The request's prefill is done."""
        self._loads.first_token(request_id)

    def release(self, request_id: str) -> None:
        """The request has ended: finished, cancelled, failed or given up by its Mac."""
        self._loads.release(request_id)
        self._index.unexpect(request_id)

    def expire(self, now_s: float) -> tuple[str, ...]:
        """Releases requests whose lease has ended and returns their ids; to be called every few seconds."""
        expired = self._loads.expire(now_s)
        for request_id in expired:
            self._index.unexpect(request_id)
        return expired

    def observe_prefill(self, name: str, num_tokens: int, seconds: float) -> None:
        """A Mac's report: prefilling `num_tokens` took `seconds` of its time. No effect on a Mac that is not known."""
        if name in self._macs:
            self._speeds.observe(name, num_tokens, seconds)

    def apply_events(
        self, name: str, epoch: int, seq: int, stored: Sequence[Block], removed: Sequence[Block]
    ) -> Applied:
        """One batch of (group, block_hash) whose presence on a Mac changed; see PrefixIndex.apply."""
        applied = self._index.apply(name, epoch, seq, stored, removed)
        self._count_prefill(name)
        return applied

    def load_snapshot(self, name: str, epoch: int, next_seq: int, blocks: Iterable[Block]) -> Applied:
        """All that a Mac holds before batch `next_seq`; a STARTING Mac is READY from here on."""
        applied = self._index.load_snapshot(name, epoch, next_seq, blocks)
        if applied is Applied.OK:
            self._macs[name].is_started = True
        self._count_prefill(name)
        return applied

    def explain(self, request_id: str) -> Decision:
        """The latest decision on one of the last 1,000 requests. Raises UnknownRequest."""
        decision = self._decisions.get(request_id)
        if decision is None:
            raise UnknownRequest(request_id, NUM_DECISIONS_KEPT)
        return decision

    def fleet(self) -> tuple[MacStatus, ...]:
        """Every Mac that has joined and not left, lost ones included."""
        return tuple(
            MacStatus(each.info, each.state, self._load(each), self._speeds.speed(each.info.name))
            for each in self._macs.values()
        )

    def index_stats(self) -> IndexStats:
        """The prefix index; lost Macs are not in it."""
        return self._index.stats()

    def check(self) -> None:
        """Raises AssertionError unless index, bookings and Mac table agree."""
        self._index.check()
        self._loads.check()
        indexed = {each.mac: each.epoch for each in self._index.stats().macs}
        assert indexed == {name: each.info.epoch for name, each in self._macs.items() if not each.is_lost}
        assert self._loads.incarnations() <= {(name, each.info.epoch) for name, each in self._macs.items()}
        assert len(self._decisions) <= NUM_DECISIONS_KEPT

    def _mac(self, name: str) -> _Mac:
        known = self._macs.get(name)
        if known is None:
            raise UnknownMac(name, self._macs)
        return known

    def _load(self, mac: _Mac) -> MacLoad:
        return self._loads.load(mac.info.name, mac.info.epoch)

    def _lose(self, mac: _Mac) -> None:
        mac.is_lost = True
        mac.is_started = False
        self._index.leave(mac.info.name, mac.info.epoch)

    def _end_incarnation(self, mac: _Mac) -> None:
        self._lose(mac)
        self._loads.drop(mac.info.name, mac.info.epoch)

    def _count_prefill(self, name: str) -> None:
        """Blocks that a Mac announces are progress of the prefills booked there."""
        for request_id, num_blocks in self._index.take_computed().items():
            self._loads.prefilled(request_id, num_blocks * self._macs[name].info.block_size)

    def _refuse_incompatible(self, info: MacInfo) -> None:
        """Lost Macs don't count: a fleet that comes back with another KV format must be able to."""
        for name, other in self._macs.items():
            if name == info.name or other.is_lost or other.info.model != info.model:
                continue
            if other.info.block_size != info.block_size:
                sizes = f"{info.block_size} tokens here, {other.info.block_size} on {name}"
                raise IncompatibleMac(info.name, f"model {info.model!r} runs with another block size: {sizes}")
            if other.info.root_hash != info.root_hash:
                roots = f"{info.root_hash.hex()} here, {other.info.root_hash.hex()} on {name}"
                differs = "weights, tokenizer or KV format differ"
                raise IncompatibleMac(info.name, f"model {info.model!r} has another root hash ({differs}): {roots}")

    def _decide(self, query: RouteQuery, now_s: float) -> Decision:
        macs = [each for each in self._macs.values() if each.info.model == query.model]
        if not macs:
            raise UnknownModel(query.model, {each.info.model for each in self._macs.values()})
        choice = self._choose(query, macs)
        if choice.mac is None:
            reasons = {each.mac: each.excluded for each in choice.candidates}
            is_permanent = all(query.num_tokens >= each.info.max_model_len for each in macs)
            raise NoMacAvailable(query.model, reasons, is_permanent=is_permanent)
        info = self._macs[choice.mac].info
        return Decision(
            request_id=query.request_id,
            mac=info.name,
            epoch=info.epoch,
            address=info.address,
            num_tokens=query.num_tokens,
            num_matched_tokens=next(each.num_matched_tokens for each in choice.candidates if each.mac == info.name),
            reason=choice.reason,
            candidates=choice.candidates,
            decided_at_s=now_s,
        )

    def _choose(self, query: RouteQuery, macs: Sequence[_Mac]) -> Choice:
        block_size = macs[0].info.block_size
        # The last token always runs: its logits are not cached.
        hashes = query.block_hashes[: (query.num_tokens - 1) // block_size]
        confirmed, expected = self._index.match_expected(hashes)
        standings = [
            Standing(
                mac=(name := mac.info.name),
                num_matched_tokens=(num_matched := expected.get(name, 0)) * block_size,
                num_expected_tokens=(num_matched - confirmed.get(name, 0)) * block_size,
                load=self._load(mac),
                prefill_tokens_per_s=self._speeds.speed(name),
                last_booking=mac.last_booking,
                excluded=_excluded(query, mac),
            )
            for mac in macs
        ]
        return choose(standings, query.num_tokens, query.max_tokens, self._config)

    def _book(self, query: RouteQuery, decision: Decision, now_s: float) -> None:
        self._num_bookings += 1
        self._macs[decision.mac].last_booking = self._num_bookings
        self._loads.book(
            Booking(
                request_id=query.request_id,
                mac=decision.mac,
                epoch=decision.epoch,
                num_prefill_tokens=query.num_tokens - decision.num_matched_tokens,
                expires_at_s=now_s + self._config.lease_s,
            )
        )
        num_matched = decision.num_matched_tokens // self._macs[decision.mac].info.block_size
        self._index.expect(query.request_id, decision.mac, query.block_hashes, num_matched)


def _excluded(query: RouteQuery, mac: _Mac) -> str:
    """Why the Mac can't take the request; empty if it can."""
    info = mac.info
    if mac.state is not MacState.READY:
        return _CLOSED[mac.state]
    if info.name in query.exclude:
        return "excluded by the request"
    if info.root_hash != query.root_hash:
        return f"its root hash is {info.root_hash.hex()}, the request's {query.root_hash.hex()}"
    if query.num_tokens >= info.max_model_len:
        return f"a prompt of {query.num_tokens} tokens leaves no room in its context of {info.max_model_len}"
    return ""
