"""A KV ledger under random use, against an oracle that remembers what every block really holds."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.kv.events import BlocksStored
from cluster.kv.hashing import hash_blocks, join_hashes, root_hash, split_hashes
from cluster.kv.layout import KVGroup, KVLayout, KVPool
from cluster.kv.manager import KVCacheManager
from cluster.kv.points import PointKind
from cluster.kv.spec import ChunkedLocalSpec, FullAttentionSpec, RecurrentStateSpec, SlidingWindowSpec, StateTensor
from tests.cluster.kv.mirror_index import MirrorIndex

SIZE = 4
ROOT = root_hash(model="m", tokenizer="t", kv_format="f", block_size=SIZE)

FULL = FullAttentionSpec(1, 1)
STATE = RecurrentStateSpec("s", (StateTensor((1,), 4),))


def window(tokens, sinks=0):
    return SlidingWindowSpec(1, 1, tokens, num_sink_tokens=sinks)


def chunked(tokens):
    return ChunkedLocalSpec(1, 1, tokens)


def joined(tokens):
    return join_hashes(hash_blocks(ROOT, tokens, SIZE))


def layout_of(specs, num_pages, *, pages=None, in_flight=0, max_model_len=64):
    """One group a spec; specs of equal page bytes share a pool. `num_pages`: budget in pages of 10 bytes."""
    pages = pages or [10] * len(specs)
    sizes = sorted(set(pages))
    groups = tuple(
        KVGroup(i, sizes.index(page), spec, (i,), page) for i, (spec, page) in enumerate(zip(specs, pages, strict=True))
    )
    budget = 10 * num_pages + sum(sizes)
    left, pools = budget, []
    for pool_id, page in enumerate(sizes):
        later = sum(2 * other for other in sizes[pool_id + 1 :])
        share = (left - later) // (len(sizes) - pool_id)
        num_blocks = max(2, share // page)
        left -= num_blocks * page
        ids = tuple(g.group_id for g in groups if g.pool_id == pool_id)
        pools.append(KVPool(pool_id, page, ids, num_blocks))
    return KVLayout(SIZE, groups, tuple(pools), budget, max_model_len, in_flight)


MODELS = (
    [FULL],
    [FULL, window(9)],
    [window(9)],
    [window(6, sinks=3)],
    [FULL, STATE],
    [STATE],
    [FULL, chunked(8)],
    [FULL, chunked(10), window(5)],
    [FULL, window(7), window(14), STATE],
    [chunked(12), STATE],
)


class HybridMachine(RuleBasedStateMachine):
    """Sequences over two token values come, grow, share and go."""

    @initialize(
        specs=st.sampled_from(MODELS),
        num_pages=st.integers(8, 60),
        pages=st.lists(st.sampled_from([10, 10, 20, 30]), min_size=4, max_size=4),
        policy=st.sampled_from(["value", "lru"]),
    )
    def begin(self, specs, num_pages, pages, policy):
        self.layout = layout_of(specs, num_pages, pages=pages[: len(specs)], in_flight=6)
        self.kv = KVCacheManager(self.layout, policy=policy)
        self.managers = self.kv._coordinator.managers
        self.holds = {}
        self.sequences = {}
        self.num_started = 0
        self.earlier = []
        self.present = set()
        self.new_epoch()

    def new_epoch(self):
        """Listeners begin anew. One hears everything, late; some of it is lost until it gets a snapshot again."""
        self.log = []
        self.mirror = MirrorIndex(len(self.managers))
        self.undelivered = []
        self.has_lost = False

    def follow(self):
        for resize in self.kv.take_resizes():
            moved = {t: self.holds.pop((resize.pool_id, s), None) for s, t in resize.moves}
            for target, content in moved.items():
                self.holds[resize.pool_id, target] = content

    def put(self, group, block_id, content):
        self.holds[self.layout.groups[group].pool_id, block_id] = (group, tuple(content))

    def content(self, group, block_id):
        return self.holds.get((self.layout.groups[group].pool_id, block_id))

    def copy(self, copies):
        read = [self.content(c.group, c.source) for c in copies]
        for c, content in zip(copies, read, strict=True):
            self.holds[self.layout.groups[c.group].pool_id, c.target] = content

    def brute_force(self, tokens):
        """The longest prefix of which the snapshot has all that every group needs."""
        present = set(self.kv.snapshot())
        hashes = split_hashes(joined(tokens))
        has_states = any(m.is_state for m in self.managers)
        whole = len(tokens) % SIZE == 0 and not has_states
        for length in sorted({*range(SIZE, len(tokens), SIZE), *([len(tokens) - 1] if whole else [])}, reverse=True):
            depth, found = -(-length // SIZE), True
            for manager in self.managers:
                first = depth - 1 if manager.is_state else manager.first_needed(length)
                needed = [*range(min(manager.num_sink_blocks, depth)), *range(first, depth)]
                found &= all((manager.group_id, hashes[i]) in present for i in needed)
            if found:
                return length
        return 0

    @rule(
        data=st.data(),
        num_old=st.integers(0, 40),
        new=st.lists(st.integers(0, 1), max_size=9),
        points=st.dictionaries(st.integers(1, 40), st.sampled_from(PointKind), max_size=3),
        sizes=st.lists(st.integers(1, 12), max_size=6),
    )
    def start(self, data, num_old, new, points, sizes):
        """A prompt that often begins as an earlier one did, and some of its prefill."""
        earlier = data.draw(st.sampled_from(self.earlier)) if self.earlier else []
        tokens = [*earlier[:num_old], *new] or [0]
        hashes = joined(tokens)
        computed = self.kv.get_computed_blocks(hashes, len(tokens))
        assert computed.num_tokens == self.brute_force(tokens)
        assert self.kv.is_current(computed, hashes)
        if not self.kv.can_allocate(computed, len(tokens)):
            return
        self.num_started += 1
        seq_id = self.num_started
        started = self.kv.start(
            seq_id, computed, hashes, points={at: kind for at, kind in points.items() if at <= len(tokens)}
        )
        self.follow()
        self.copy(started.copies)
        self.kv.release_sources()
        for group, ids in started.zeroes.items():
            for block_id in ids:
                self.put(group, block_id, ())
        self.sequences[seq_id] = [tokens, computed.num_tokens, len(tokens), started]
        self.check_readable(seq_id)
        for num_tokens in sizes:
            if seq_id in self.sequences:
                self.compute(seq_id, num_tokens, PointKind.TURN_END)

    def check_readable(self, seq_id):
        """All that the next token sees is there and right."""
        tokens, num_computed = self.sequences[seq_id][:2]
        for manager in self.managers:
            group, table = manager.group_id, self.kv.block_tables(seq_id)[manager.group_id]
            if manager.is_state:
                assert self.content(group, table[0]) == (group, tuple(tokens[:num_computed])), "a wrong state"
                continue
            depth = -(-num_computed // SIZE)
            first = manager.first_needed(num_computed)
            for i in [*range(min(manager.num_sink_blocks, depth)), *range(first, depth)]:
                held = self.content(group, table[i])
                wanted = tuple(tokens[: min((i + 1) * SIZE, num_computed)])
                assert held is not None
                assert held[0] == group
                assert held[1][: len(wanted)] == wanted, "a block in use was overwritten"

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12), kind=st.sampled_from(PointKind))
    def run(self, data, sizes, kind):
        seq_id = data.draw(st.sampled_from(sorted(self.sequences)))
        for num_tokens in sizes:
            if seq_id in self.sequences:
                self.compute(seq_id, num_tokens, kind)

    def compute(self, seq_id, num_tokens, kind):
        """Run some positions, with a checkpoint before them where one can be; register what becomes full."""
        tokens, num_computed, _, _ = self.sequences[seq_id]
        end = min(num_computed + num_tokens, len(tokens))
        if self.kv.has_states and num_computed // SIZE < end // SIZE:
            # Recurrent models stop at a block's end, so that there can be a checkpoint.
            end = end // SIZE * SIZE
        if end == num_computed:
            return
        new = self.kv.allocate(seq_id, end, num_computed)
        self.follow()
        if new is None:
            self.preempt(seq_id)
            return
        copies = ()
        if self.kv.has_states and num_computed and num_computed % SIZE == 0:
            copies = self.kv.checkpoint(seq_id, num_computed, kind)
            self.follow()
            self.copy(copies)
        self.check_readable(seq_id)
        for manager in self.managers:
            group, table = manager.group_id, self.kv.block_tables(seq_id)[manager.group_id]
            if manager.is_state:
                self.put(group, table[0], tokens[:end])
            else:
                for i in range(num_computed // SIZE, -(-end // SIZE)):
                    self.put(group, table[i], tokens[: min(end, (i + 1) * SIZE)])
        if copies:
            self.kv.confirm_checkpoint(seq_id, num_computed)
        self.sequences[seq_id][1] = end
        first, last = num_computed // SIZE, end // SIZE
        if last > first:
            for edit in self.kv.register(seq_id, first, joined(tokens)[first * 16 : last * 16]):
                wanted = tuple(tokens[: (edit.index + 1) * SIZE])
                assert self.content(edit.group, edit.block_id) == (edit.group, wanted), "an edit to other content"
        self.follow()
        self.check_readable(seq_id)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def extend(self, data, more):
        seq_id = data.draw(st.sampled_from(sorted(self.sequences)))
        tokens = self.sequences[seq_id][0]
        self.sequences[seq_id][0] = [*tokens, *more]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data):
        self.preempt(data.draw(st.sampled_from(sorted(self.sequences))))

    def preempt(self, seq_id):
        tokens, num_computed = self.sequences.pop(seq_id)[:2]
        if num_computed:
            self.earlier = [*self.earlier[-5:], tokens]
        self.kv.free(seq_id, num_computed)
        self.follow()
        assert self.kv.register(seq_id, 0, b"x" * 16) == []

    @precondition(lambda self: not self.sequences)
    @rule()
    def need_everything(self):
        """Whatever nobody references can be had."""
        coordinator = self.kv._coordinator
        pool_id = self.num_started % len(self.layout.pools)
        needs = [0] * len(self.layout.pools)
        needs[pool_id] = coordinator.pools.free_bytes // self.layout.pools[pool_id].page_bytes
        while needs[pool_id] and not coordinator.pools.fits(needs):
            needs[pool_id] -= 1
        assert coordinator.make_room(needs)
        self.follow()

    @precondition(lambda self: len(self.layout.pools) > 1)
    @rule(data=st.data(), evicts=st.booleans())
    def resplit(self, data, evicts):
        """The boundary moves, for nobody, while sequences live: one pool gets what another has to give."""
        coordinator = self.kv._coordinator
        pools = coordinator.pools
        pool_id = data.draw(st.integers(0, len(self.layout.pools) - 1))
        page = self.layout.pools[pool_id].page_bytes
        num_empty = pools[pool_id].num_empty
        others = [(p.num_empty, p_bytes) for p, p_bytes in zip(pools.pools, pools.page_bytes, strict=True)]
        del others[pool_id]
        most = (pools.spare_bytes + sum(num * p_bytes for num, p_bytes in others)) // page
        needs = [0] * len(self.layout.pools)
        needs[pool_id] = num_empty + data.draw(st.sampled_from([1, max(1, most // 2), max(1, most), most + 1]))
        before = [pool.num_blocks for pool in pools.pools]
        if evicts and pools.fits(needs):
            assert coordinator.make_room(needs)
        else:
            resizes = pools.rebalance(needs)
            assert (resizes is not None) == (needs[pool_id] <= num_empty + most)
            coordinator._follow(resizes or ())
            assert pools[pool_id].num_blocks == before[pool_id] + (needs[pool_id] - num_empty if resizes else 0)
        self.follow()
        for seq_id in self.sequences:
            self.check_readable(seq_id)

    @precondition(lambda self: self.log)
    @rule(data=st.data(), action=st.sampled_from(["lose", "lose", "snapshot", "overlapping snapshot", "replay"]))
    def listen(self, data, action):
        """A listener in the middle of things; then it hears what is left of the events, and checks itself."""
        if action == "replay":
            index = MirrorIndex(len(self.managers))
            for event in self.log:
                index.apply(event)
            assert index.present == set(self.kv.snapshot())
            assert index.digests() == self.kv.digests()
        elif action == "lose" and self.undelivered:
            self.undelivered.pop(data.draw(st.integers(0, len(self.undelivered) - 1)))
            self.has_lost = True
        elif action == "snapshot":
            self.mirror.load(self.kv.snapshot())
            self.undelivered.clear()
            self.has_lost = False
        elif action == "overlapping snapshot":
            # It knows already what the events on their way will say; hearing them again changes nothing in the end.
            self.mirror.load(self.kv.snapshot())
            self.has_lost &= bool(self.undelivered)
        if data.draw(st.booleans()):
            self.deliver()

    def deliver(self):
        """Events come, in order; what was lost among them shows in the digests, and a snapshot mends it."""
        for event in self.undelivered:
            self.mirror.apply(event)
        self.undelivered.clear()
        is_same = self.mirror.present == set(self.kv.snapshot())
        assert (self.mirror.digests() == self.kv.digests()) == is_same
        assert is_same or self.has_lost
        if not is_same:
            self.mirror.load(self.kv.snapshot())
            assert self.mirror.digests() == self.kv.digests()
        self.has_lost = False

    @precondition(lambda self: self.num_started % 8 == 7)
    @rule()
    def reset(self):
        self.kv.reset()
        self.holds.clear()
        self.sequences.clear()
        self.present.clear()
        self.kv.take_events()
        self.new_epoch()

    @invariant()
    def ledger_is_true(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        events = self.kv.take_events()
        self.log += events
        self.undelivered += events
        for event in events:
            keys = {(event.group, h) for h in split_hashes(event.hashes)}
            if isinstance(event, BlocksStored):
                assert not keys & self.present, "stored twice"
                self.present |= keys
            else:
                assert keys <= self.present, "removed what was not there"
                self.present -= keys
        snapshot = self.kv.snapshot()
        assert len(snapshot) == len(set(snapshot))
        assert set(snapshot) == self.present
        memory = self.kv.stats()
        assert sum((memory.referenced_bytes, memory.cached_bytes, memory.free_bytes)) == self.layout.usable_bytes
        assert memory.referenced_bytes == sum(pool.referenced_bytes for pool in memory.pools)
        for index, group in enumerate(memory.groups):
            assert group.findable_bytes == group.page_bytes * sum(key[0] == index for key in snapshot)
        for index, pool in enumerate(memory.pools):
            own = [group for group in memory.groups if group.pool_id == index]
            assert pool.cached_bytes == sum(group.cached_bytes for group in own)
            assert pool.referenced_bytes == sum(group.referenced_bytes for group in own)
