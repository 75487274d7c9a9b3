"""The router through random lives of a fleet, against a naive twin.

Macs store, evict, restart (silently too) and flap; their batches arrive late, twice, out of order or never; requests
are routed, cancelled and forgotten. The twin keeps plain sets and recounts everything on every question.
"""

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.kv.events import BlockEvent, BlocksRemoved, BlocksStored, xor_of
from cluster.kv.hashing import BlockHash, hash_block, root_hash
from cluster.kv.layout import KVGroup
from cluster.kv.spec import FullAttentionSpec
from cluster.routing.config import RoutingConfig
from cluster.routing.decision import RouteQuery
from cluster.routing.digests import bucket_digests, in_buckets
from cluster.routing.errors import NoMacAvailable, UnknownModel
from cluster.routing.index import Applied
from cluster.routing.mac import MacInfo, MacState
from cluster.routing.router import Router

ROOT = root_hash(model="m", tokenizer="t", kv_format="f16", block_size=16)
FULL = (KVGroup(0, 0, FullAttentionSpec(1, 8), (0,), 4096),)
NAMES = ("a", "b", "c")
CONFIG = RoutingConfig(default_prefill_tokens_per_s=100.0, lease_s=5.0)


def chain(*tokens: int) -> list[BlockHash]:
    hashes, parent = [], ROOT
    for token in tokens:
        parent = hash_block(parent, [token])
        hashes.append(parent)
    return hashes


# A chain, a branch of it, and another chain.
PROMPTS = [chain(0, 1, 2, 3, 4), chain(0, 1, 5, 6), chain(7, 8, 9)]
PARENTS: dict[BlockHash, BlockHash | None] = {}
for _prompt in PROMPTS:
    PARENTS |= dict(zip(_prompt, [None, *_prompt], strict=False))
Batch = tuple[int, int, list[BlockEvent]]


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
    is_known: bool = False
    is_lost: bool = False
    lost_since_s: float | None = None
    held: set[BlockHash] = field(default_factory=set)


@dataclass
class TwinRequest:
    mac: str
    hashes: list[BlockHash]
    num_tokens: int
    num_done_tokens: int
    expires_at_s: float
    has_first_token: bool = False
    is_pending: bool = True


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(CONFIG)
        self.now_s = 0.0
        self.num_requests = 0
        self.real = {name: RealMac() for name in NAMES}
        self.joined: dict[str, TwinMac] = {}
        self.draining: set[str] = set()
        self.cordoned: set[str] = set()
        self.requests: dict[str, TwinRequest] = {}

    # The Macs.

    @initialize()
    def start(self) -> None:
        for name in NAMES:
            self.recover(name)

    @rule(name=st.sampled_from(NAMES))
    def recover(self, name: str) -> None:
        self.join(name)
        self.handshake(name)

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        epoch = self.real[name].epoch
        twin = self.joined.get(name)
        if twin is None or twin.epoch != epoch:
            self._end_incarnation(name)
            twin = self.joined[name] = TwinMac(epoch)
        if twin.is_lost:
            twin.is_synced = False
        twin.is_lost, twin.lost_since_s = False, None
        info = MacInfo(name, epoch, "m", ROOT, 16, f"{name}:1", 1_000, 100, FULL, 1_600)
        assert self.router.macs.join(info) is (Applied.OK if twin.is_synced else Applied.RESYNC)

    @rule(name=st.sampled_from(NAMES), kind=st.sampled_from(["restart", "silent", "leave", "leave late", "lost"]))
    def mishap(self, name: str, kind: str) -> None:
        real, twin = self.real[name], self.joined.get(name)
        if kind == "restart":
            self.real[name] = RealMac(epoch=real.epoch + 1, wire=real.wire)
        elif kind == "silent":
            # Old batches can't be told from new ones now: only those that come from here on do.
            self.real[name] = RealMac(epoch=real.epoch)
        elif kind == "lost":
            self.router.macs.lost(name)
            if twin is not None:
                twin.is_lost = True
        elif kind == "leave late":
            self.router.macs.leave(name, (twin.epoch if twin else 0) - 1)
        else:
            self.router.macs.leave(name, twin.epoch if twin else 0)
            self._end_incarnation(name)
            self.joined.pop(name, None)
            self.draining.discard(name)

    @precondition(lambda self: self.joined)
    @rule(data=st.data(), happens=st.sampled_from(["drain", "cordon", "resume", "resume"]))
    def operate(self, data: st.DataObject, happens: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.joined)))
        getattr(self.router.macs, happens)(name)
        if happens == "drain":
            self.draining.add(name)
        elif happens == "cordon":
            self.cordoned.add(name)
        else:
            self.draining.discard(name)
            self.cordoned.discard(name)

    @rule(name=st.sampled_from(NAMES), prompt=st.sampled_from(PROMPTS), depth=st.integers(1, 5), arrives=st.booleans())
    def store(self, name: str, prompt: list[BlockHash], depth: int, arrives: bool) -> None:
        held = self.real[name].held
        new = [each for each in prompt[:depth] if each not in held]
        held.update(new)
        self._send(name, [BlocksStored(0, each, PARENTS[each], 0) for each in new], arrives)

    @rule(name=st.sampled_from(NAMES), prompt=st.sampled_from(PROMPTS), depth=st.integers(0, 4), arrives=st.booleans())
    def evict(self, name: str, prompt: list[BlockHash], depth: int, arrives: bool) -> None:
        """Tail first, and nothing that another chain still needs."""
        held, gone = self.real[name].held, []
        for each in reversed(prompt[depth:]):
            if each in held and not any(PARENTS[other] == each for other in held):
                held.discard(each)
                gone.append(each)
        self._send(name, [BlocksRemoved(0, b"".join(gone))] if gone else [], arrives)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), num_blocks=st.integers(1, 5))
    def compute(self, data: st.DataObject, num_blocks: int) -> None:
        """The Mac fills blocks that a request there is to compute."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        held = self.real[request.mac].held
        missing = [each for each in request.hashes if each not in held]
        self.store(request.mac, request.hashes, len(request.hashes) - len(missing) + num_blocks, True)

    # The wire.

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def deliver(self, name: str, data: st.DataObject) -> None:
        """Any batch of any incarnation, mostly the next; it stays on the wire and may come again."""
        wire = self.real[name].wire
        twin = self.joined.get(name)
        following = [each for each in wire if twin and each[:2] == (twin.epoch, twin.next_seq)]
        if wire:
            self._deliver(name, data.draw(st.sampled_from(following * 3 + wire)))

    @rule(name=st.sampled_from(NAMES))
    def handshake(self, name: str) -> None:
        """Digests, then buckets, as a Mac does it when it is told to."""
        real, twin = self.real[name], self.joined.get(name)
        digests = [xor_of(b"".join(real.held))]
        answer = self.router.macs.check_digests(name, real.epoch, real.next_seq, digests)
        if twin is None or twin.epoch != real.epoch or twin.is_lost:
            assert answer is None
            return
        assert answer == (() if twin.held == real.held else (0,))
        if answer:
            wanted = self.router.macs.differing_buckets(name, real.epoch, {0: bucket_digests(real.held)})
            assert wanted is not None
            sent = {0: (wanted[0], in_buckets(real.held, wanted[0]))}
            loaded = self.router.macs.load_difference(name, real.epoch, real.next_seq, sent, digests)
            assert loaded is Applied.OK
        twin.held, twin.next_seq = set(real.held), real.next_seq
        twin.is_synced = twin.is_known = True
        self._progress(name)

    # The requests.

    @rule(prompt=st.sampled_from(PROMPTS), num_tail_tokens=st.integers(0, 15), exclude=st.sets(st.sampled_from(NAMES)))
    def route(self, prompt: list[BlockHash], num_tail_tokens: int, exclude: set[str]) -> None:
        self.num_requests += 1
        self._route(f"r{self.num_requests}", prompt, num_tail_tokens, exclude)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), prompt=st.sampled_from(PROMPTS))
    def route_again(self, data: st.DataObject, prompt: list[BlockHash]) -> None:
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

    @rule(seconds=st.sampled_from([0.5, 3.0, 40.0]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        expired = {key for key, each in self.requests.items() if each.expires_at_s <= self.now_s}
        assert set(self.router.expire(self.now_s)) == expired
        for request_id in expired:
            del self.requests[request_id]
        for twin in self.joined.values():
            if not twin.is_lost:
                continue
            if twin.lost_since_s is None:
                twin.lost_since_s = self.now_s
            elif self.now_s - twin.lost_since_s >= 60.0:
                twin.held, twin.is_synced, twin.is_known, twin.next_seq = set(), False, False, 0

    # What holds at all times.

    @invariant()
    def consistent(self) -> None:
        self.router.check()

    @invariant()
    def fleet_is_as_the_twin_says(self) -> None:
        rows = {each.info.name: each for each in self.router.fleet()}
        assert {name: row.info.epoch for name, row in rows.items()} == {n: t.epoch for n, t in self.joined.items()}
        for name, row in rows.items():
            assert row.state is self._state(name)
            booked = [each for each in self.requests.values() if each.mac == name]
            assert row.load.num_requests == len(booked)
            assert row.load.num_decoding == sum(each.has_first_token for each in booked)
            left = [each.num_tokens - each.num_done_tokens for each in booked if not each.has_first_token]
            assert row.load.num_prefill_tokens == sum(left)

    @invariant()
    def index_is_as_the_twin_says(self) -> None:
        stats = self.router.index_stats()
        assert {
            each.mac: (each.epoch, each.content.next_seq, each.content.is_synced, each.content.num_blocks_by_group)
            for each in stats.macs
        } == {name: (t.epoch, t.next_seq, t.is_synced, (len(t.held),)) for name, t in self.joined.items()}
        assert stats.num_keys == len(set().union(*(twin.held for twin in self.joined.values())))

    def teardown(self) -> None:
        """After a resync the index is what the Macs really hold; when all requests are over nothing is booked."""
        for name in NAMES:
            self.recover(name)
            assert self.joined[name].held == self.real[name].held
        self.index_is_as_the_twin_says()
        self.pass_time(100.0)
        assert all(row.load.num_requests == 0 for row in self.router.fleet())
        for prompt in PROMPTS:
            query = RouteQuery("x", "m", ROOT, prompt, len(prompt) * 16 + 1, 10)
            for each in self.router.what_if(query, self.now_s).candidates:
                assert each.num_matched_tokens == each.num_held_tokens, "nothing is under way"
        self.consistent()

    # The twin.

    def _route(self, request_id: str, hashes: list[BlockHash], num_tail_tokens: int, exclude: set[str]) -> None:
        self.requests.pop(request_id, None)
        num_tokens = len(hashes) * 16 + num_tail_tokens
        query = RouteQuery(request_id, "m", ROOT, hashes, num_tokens, 10, frozenset(exclude))
        open_states = (MacState.READY, MacState.STARTING)
        eligible = {name for name in self.joined if self._state(name) in open_states} - exclude
        try:
            decision = self.router.route(query, self.now_s)
        except UnknownModel:
            assert not self.joined
            return
        except NoMacAvailable:
            assert self.joined
            assert not eligible
            return
        explained = self.router.explain(request_id)
        assert explained.decision == decision
        assert {each.mac for each in explained.candidates} == set(self.joined)
        assert {each.mac for each in explained.candidates if not each.excluded} == eligible
        for each in explained.candidates:
            held = self._depth(each.mac, hashes)
            assert each.num_held_tokens == min(held * 16, num_tokens - 1)
            pending = min(self._pending_depth(each.mac, hashes), (num_tokens - 1) // 16)
            assert each.num_matched_tokens == max(each.num_held_tokens, pending * 16)
        totals = {each.mac: each.total_s for each in explained.candidates if not each.excluded}
        least_s = min(totals.values())
        assert totals[decision.mac] <= max(least_s * 1.05, least_s + 0.02) + 1e-9, "the least, or a tie with it"
        matched = decision.num_matched_tokens
        self.requests[request_id] = TwinRequest(decision.mac, hashes, num_tokens, matched, self.now_s + 5.0)

    def _depth(self, name: str, hashes: list[BlockHash]) -> int:
        held = self.joined[name].held
        return next((depth for depth, each in enumerate(hashes) if each not in held), len(hashes))

    def _pending_depth(self, name: str, hashes: list[BlockHash]) -> int:
        depth = 0
        for each in self.requests.values():
            if each.mac == name and each.is_pending:
                common = [a == b for a, b in zip(each.hashes, hashes, strict=False)]
                depth = max(depth, (*common, False).index(False))
        return depth

    def _send(self, name: str, events: list[BlockEvent], arrives: bool) -> None:
        real = self.real[name]
        if events:
            real.wire.append((real.epoch, real.next_seq, events))
            real.next_seq += 1
            if arrives:
                self._deliver(name, real.wire[-1])

    def _deliver(self, name: str, batch: Batch) -> None:
        epoch, seq, events = batch
        twin = self.joined.get(name)
        answer = self.router.macs.apply_events(name, epoch, seq, events)
        if twin is None or twin.epoch != epoch or twin.is_lost:
            assert answer is Applied.RESYNC
            return
        if seq != twin.next_seq or not twin.is_synced:
            twin.is_synced &= seq < twin.next_seq
            assert answer is Applied.RESYNC
            self._progress(name)
            return
        twin.next_seq += 1
        for event in events:
            each = BlockHash(event.hashes)
            if isinstance(event, BlocksRemoved):
                gone = {BlockHash(event.hashes[at : at + 16]) for at in range(0, len(event.hashes), 16)}
                twin.held -= gone
            elif event.parent_hash is not None and event.parent_hash not in twin.held:
                twin.is_synced = False
                break
            else:
                twin.held.add(each)
        assert answer is (Applied.OK if twin.is_synced else Applied.RESYNC)
        self._progress(name)

    def _progress(self, name: str) -> None:
        """Prefills there have come as far as their blocks go on without a hole."""
        held = self.joined[name].held
        for each in self.requests.values():
            if each.mac != name or each.has_first_token:
                continue
            depth = each.num_done_tokens // 16
            first = depth
            while depth < len(each.hashes) and each.hashes[depth] in held:
                depth += 1
            if depth > first:
                each.num_done_tokens = min(depth * 16, each.num_tokens - 1)
            each.is_pending &= depth < len(each.hashes)

    def _end_incarnation(self, name: str) -> None:
        self.requests = {key: each for key, each in self.requests.items() if each.mac != name}

    def _state(self, name: str) -> MacState:
        twin = self.joined[name]
        if twin.is_lost:
            return MacState.LOST
        if name in self.draining:
            return MacState.DRAINING
        if name in self.cordoned:
            return MacState.CORDONED
        return MacState.READY if twin.is_known else MacState.STARTING


TestRouterMachine = RouterMachine.TestCase
TestRouterMachine.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
