"""The router through random lives of a fleet, against a naive twin.

Macs store, evict, restart and flap; their batches arrive late, twice, out of order or never; requests are routed,
cancelled and forgotten. The twin keeps plain sets and recounts everything on every question.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.kv.hashing import BlockHash, root_hash
from cluster.routing.errors import NoMacAvailable, UnknownModel
from cluster.routing.index import Applied
from cluster.routing.mac import MacInfo, MacState
from cluster.routing.policy import RoutingConfig
from cluster.routing.router import RouteQuery, Router

ROOT = root_hash(model="m", tokenizer="t", kv_format="f16", block_size=16)
NAMES = ("a", "b", "c")
HASHES = [BlockHash(bytes([number]) * 16) for number in range(10)]
# A chain, a branch of it, and another chain.
PROMPTS = [(0, 1, 2, 3, 4), (0, 1, 5, 6), (7, 8, 9)]
CONFIG = RoutingConfig(default_prefill_tokens_per_s=100.0, decode_slowdown_s=0.001, lease_s=5.0)
CHANGES = st.lists(st.sampled_from(HASHES), min_size=1, max_size=6)
Batch = tuple[int, int, list[BlockHash], list[BlockHash]]


@dataclass
class RealMac:
    """What the Mac itself knows; `wire` are batches that may still arrive."""

    epoch: int = 0
    next_seq: int = 0
    held: set[BlockHash] = field(default_factory=set)
    wire: list[Batch] = field(default_factory=list)


@dataclass
class TwinMac:
    """What the router may know of an incarnation."""

    epoch: int
    next_seq: int = 0
    is_synced: bool = False
    held: set[BlockHash] = field(default_factory=set)


@dataclass
class TwinRequest:
    mac: str
    epoch: int
    num_prefill_tokens: int
    own: set[BlockHash]
    shared: set[BlockHash]
    expires_at_s: float
    has_first_token: bool = False


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(CONFIG)
        self.now_s = 0.0
        self.num_requests = 0
        self.real = {name: RealMac() for name in NAMES}
        self.snapshots: dict[str, tuple[int, int, frozenset[BlockHash]]] = {}
        self.indexed: dict[str, TwinMac] = {}
        self.joined: dict[str, int] = {}
        self.started: set[str] = set()
        self.draining: set[str] = set()
        self.requests: dict[str, TwinRequest] = {}

    # The Macs.

    @initialize()
    def start(self) -> None:
        for name in NAMES:
            self.recover(name)

    @rule(name=st.sampled_from(NAMES))
    def recover(self, name: str) -> None:
        self.join(name)
        self.load_snapshot(name)

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        epoch = self.real[name].epoch
        if self.joined.get(name, epoch) != epoch:
            self._end_incarnation(name)
        self.joined[name] = epoch
        if name not in self.indexed:
            self.indexed[name] = TwinMac(epoch)
        info = MacInfo(name, epoch, "m", ROOT, 16, f"{name}:1", 1_000, 100)
        assert self.router.join(info) is self._answer(name)

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from(["restart", "leave", "leave late", "lost"]))
    def mishap(self, name: str, kind: str) -> None:
        real = self.real[name]
        if kind == "restart":
            self.real[name] = RealMac(epoch=real.epoch + 1, wire=real.wire)
        elif kind == "lost":
            self.router.lost(name)
            self._forget_blocks(name)
        elif kind == "leave late":
            self.router.leave(name, self.joined.get(name, 0) - 1)
        else:
            self.router.leave(name, self.joined.get(name, 0))
            self._end_incarnation(name)
            self.joined.pop(name, None)
            self.draining.discard(name)

    @precondition(lambda self: self.joined)
    @rule(data=st.data(), drain=st.booleans())
    def drain_or_resume(self, data: st.DataObject, drain: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.joined)))
        (self.router.drain if drain else self.router.resume)(name)
        (self.draining.add if drain else self.draining.discard)(name)

    @rule(name=st.sampled_from(NAMES), changes=CHANGES, arrives=st.booleans())
    def change_blocks(self, name: str, changes: list[BlockHash], arrives: bool) -> None:
        """Presence flips in this order; the batch only says how often each way."""
        real = self.real[name]
        stored: list[BlockHash] = []
        removed: list[BlockHash] = []
        for each in changes:
            (removed if each in real.held else stored).append(each)
            real.held ^= {each}
        real.wire.append((real.epoch, real.next_seq, stored, removed))
        real.next_seq += 1
        if arrives:
            self._deliver(name, real.wire[-1])

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_blocks=st.integers(1, 5))
    def compute(self, data: st.DataObject, num_blocks: int) -> None:
        """The Mac fills blocks that a request there is to compute."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        missing = sorted((request.own | request.shared) - self.real[request.mac].held)
        if missing:
            self.change_blocks(request.mac, missing[:num_blocks], True)

    # The wire.

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def deliver(self, name: str, data: st.DataObject) -> None:
        """Any batch of any incarnation, mostly the next; it stays on the wire and may come again."""
        wire = self.real[name].wire
        twin = self.indexed.get(name)
        following = [each for each in wire if twin and each[:2] == (twin.epoch, twin.next_seq)]
        if not wire:
            return
        self._deliver(name, data.draw(st.sampled_from(following * 3 + wire)))

    @rule(name=st.sampled_from(NAMES))
    def load_snapshot(self, name: str) -> None:
        real = self.real[name]
        self.snapshots[name] = (real.epoch, real.next_seq, frozenset(real.held))
        self.load_late_snapshot(name)

    @precondition(lambda self: self.snapshots)
    @rule(name=st.sampled_from(NAMES))
    def load_late_snapshot(self, name: str) -> None:
        """The last one again, whatever has happened since."""
        epoch, next_seq, held = self.snapshots[name]
        answer = self.router.load_snapshot(name, epoch, next_seq, [(0, each) for each in held])
        twin = self.indexed.get(name)
        if twin is None or twin.epoch != epoch:
            assert answer is Applied.RESYNC
            return
        if next_seq >= twin.next_seq:
            twin.held, twin.next_seq, twin.is_synced = set(held), next_seq, True
            self.started.add(name)
            self._confirm(name, set(held))
        assert answer is self._answer(name)

    # The requests.

    @rule(prompt=st.sampled_from(PROMPTS), num_tail_tokens=st.integers(0, 15), exclude=st.sets(st.sampled_from(NAMES)))
    def route(self, prompt: tuple[int, ...], num_tail_tokens: int, exclude: set[str]) -> None:
        self.num_requests += 1
        self._route(f"r{self.num_requests}", prompt, num_tail_tokens, exclude)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), prompt=st.sampled_from(PROMPTS))
    def route_again(self, data: st.DataObject, prompt: tuple[int, ...]) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        self._route(request_id, prompt, 1, {self.requests[request_id].mac})

    @rule(number=st.integers(1, 12), happens=st.sampled_from(["first token", "release"]))
    def advance(self, number: int, happens: str) -> None:
        """Known requests, ended ones and such as never were."""
        request_id = f"r{max(1, self.num_requests - number)}"
        if happens == "release":
            self.router.release(request_id)
            self.requests.pop(request_id, None)
            return
        self.router.first_token(request_id)
        if request_id in self.requests:
            self.requests[request_id].has_first_token = True
            self.requests[request_id].num_prefill_tokens = 0

    @rule(seconds=st.sampled_from([0.5, 3.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        expired = {key for key, each in self.requests.items() if each.expires_at_s <= self.now_s}
        assert set(self.router.expire(self.now_s)) == expired
        for request_id in expired:
            del self.requests[request_id]

    # What holds at all times.

    @invariant()
    def consistent(self) -> None:
        self.router.check()

    @invariant()
    def fleet_is_as_the_twin_says(self) -> None:
        rows = {each.info.name: each for each in self.router.fleet()}
        assert {name: row.info.epoch for name, row in rows.items()} == self.joined
        for name, row in rows.items():
            assert row.state is self._state(name)
            assert row.load.num_requests == sum(self._runs_on(each, name) for each in self.requests.values())
            assert row.load.num_prefill_tokens == sum(
                each.num_prefill_tokens for each in self.requests.values() if self._runs_on(each, name)
            )
            assert row.load.num_decoding == sum(
                each.has_first_token for each in self.requests.values() if self._runs_on(each, name)
            )

    @invariant()
    def index_is_as_the_twin_says(self) -> None:
        stats = self.router.index_stats()
        assert {each.mac: (each.epoch, each.next_seq, each.is_synced, each.num_blocks) for each in stats.macs} == {
            name: (twin.epoch, twin.next_seq, twin.is_synced, len(twin.held)) for name, twin in self.indexed.items()
        }
        assert stats.num_keys == len(set().union(*(twin.held for twin in self.indexed.values())))

    def teardown(self) -> None:
        """After a resync the index is what the Macs really hold; when all requests are over nothing is booked."""
        for name in NAMES:
            self.recover(name)
            assert self.indexed[name].held == self.real[name].held
        self.index_is_as_the_twin_says()
        self.pass_time(100.0)
        assert all(row.load.num_requests == 0 for row in self.router.fleet())
        assert self.router.index_stats().num_expected == 0
        self.consistent()

    # The twin.

    def _route(self, request_id: str, prompt: tuple[int, ...], num_tail_tokens: int, exclude: set[str]) -> None:
        self.requests.pop(request_id, None)
        hashes = [HASHES[number] for number in prompt]
        num_tokens = len(hashes) * 16 + num_tail_tokens
        query = RouteQuery(request_id, "m", ROOT, hashes, num_tokens, 10, exclude)
        eligible = {name for name in self.joined if self._state(name) is MacState.READY} - exclude
        try:
            decision = self.router.route(query, self.now_s)
        except UnknownModel:
            assert not self.joined
            return
        except NoMacAvailable:
            assert self.joined
            assert not eligible
            return
        assert {each.mac for each in decision.candidates} == set(self.joined)
        assert {each.mac for each in decision.candidates if not each.excluded} == eligible
        usable = hashes[: (num_tokens - 1) // 16]
        for each in decision.candidates:
            assert each.num_matched_tokens == 16 * self._depth(each.mac, usable)
        totals = {each.mac: each.total_s for each in decision.candidates if not each.excluded}
        least_s = min(totals.values())
        assert totals[decision.mac] <= max(least_s * 1.05, least_s + 0.02) + 1e-9, "the least, or a tie with it"
        num_matched = decision.num_matched_tokens // 16
        held = self.indexed[decision.mac].held
        self.requests[request_id] = TwinRequest(
            decision.mac,
            decision.epoch,
            num_tokens - 16 * num_matched,
            set(hashes[num_matched:]) - held,
            set(hashes[:num_matched]) - held,
            self.now_s + 5.0,
        )

    def _depth(self, name: str, hashes: list[BlockHash]) -> int:
        present = set(self.indexed[name].held) if name in self.indexed else set()
        for each in self.requests.values():
            if self._runs_on(each, name):
                present |= each.own | each.shared
        return next((depth for depth, each in enumerate(hashes) if each not in present), len(hashes))

    def _deliver(self, name: str, batch: Batch) -> None:
        epoch, seq, stored, removed = batch
        twin = self.indexed.get(name)
        answer = self.router.apply_events(name, epoch, seq, [(0, h) for h in stored], [(0, h) for h in removed])
        if twin is None or twin.epoch != epoch:
            assert answer is Applied.RESYNC
            return
        if twin.is_synced and seq > twin.next_seq:
            twin.is_synced = False
        elif twin.is_synced and seq == twin.next_seq:
            twin.next_seq += 1
            for each in {*stored, *removed}:
                if (stored.count(each) - removed.count(each)) % 2:
                    twin.held ^= {each}
            self._confirm(name, {each for each in stored if each in twin.held})
        assert answer is self._answer(name)

    def _answer(self, name: str) -> Applied:
        return Applied.OK if self.indexed[name].is_synced else Applied.RESYNC

    def _confirm(self, name: str, stored: set[BlockHash]) -> None:
        for each in self.requests.values():
            if self._runs_on(each, name):
                each.num_prefill_tokens = max(0, each.num_prefill_tokens - 16 * len(each.own & stored))
                each.own -= stored
                each.shared -= stored

    def _forget_blocks(self, name: str) -> None:
        self.indexed.pop(name, None)
        self.started.discard(name)
        for each in self.requests.values():
            if each.mac == name:
                each.own, each.shared = set(), set()

    def _end_incarnation(self, name: str) -> None:
        self._forget_blocks(name)
        self.requests = {key: each for key, each in self.requests.items() if each.mac != name}

    def _runs_on(self, request: TwinRequest, name: str) -> bool:
        return (request.mac, request.epoch) == (name, self.joined.get(name))

    def _state(self, name: str) -> MacState:
        if name not in self.indexed:
            return MacState.LOST
        if name in self.draining:
            return MacState.DRAINING
        return MacState.READY if name in self.started else MacState.STARTING


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
