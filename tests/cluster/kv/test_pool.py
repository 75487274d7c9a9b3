"""The block pool, by behaviour and against a naive twin that keeps its queue in a list."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.kv.events import BlockRemoved, BlockStored, EventLog
from cluster.kv.pool import BlockPool


def h(i):
    return bytes([i]) * 16


def pool_of(num_usable, num_groups=1):
    events = EventLog()
    return BlockPool(num_usable + 1, num_groups, events), events


def cache(pool, block_ids, first=0):
    for i, block_id in enumerate(block_ids, first):
        pool.register(block_id, 0, h(i), h(i - 1) if i else None, i)


def test_a_pool_of_the_null_block_alone_is_refused():
    with pytest.raises(ValueError, match=r"at least 2 .* got 1"):
        BlockPool(1, 1, EventLog())


def test_the_null_block_is_never_handed_out():
    pool, _ = pool_of(3)
    assert pool.allocate(3) == (1, 2, 3)
    assert pool.num_free == 0


def test_an_empty_free_list_gives_no_block_and_takes_one_back():
    pool, _ = pool_of(1)
    (block_id,) = pool.allocate(1)
    assert pool.allocate(0) == ()
    assert pool.free_queue() == []
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 free"):
        pool.allocate(1)
    pool.free([block_id])
    assert pool.free_queue() == [block_id]
    pool.check()


def test_blocks_without_content_are_reused_before_cached_ones():
    pool, _ = pool_of(4)
    a, b, c, d = pool.allocate(4)
    cache(pool, [a, b])
    pool.free([a, b, c, d])
    assert pool.free_queue() == [c, d, b, a]


def test_a_chain_is_evicted_tail_first():
    """Whatever is left of it can still be hit."""
    pool, events = pool_of(3)
    chain = pool.allocate(3)
    cache(pool, chain)
    pool.free(chain)
    events.take()
    pool.allocate(2)
    assert events.take() == (BlockRemoved(0, h(2)), BlockRemoved(0, h(1)))
    assert pool.find(h(0), 0) == chain[0]


def test_the_least_recently_used_chain_is_evicted_first():
    pool, _ = pool_of(4)
    a, b = pool.allocate(2), pool.allocate(2)
    cache(pool, a, 0)
    cache(pool, b, 2)
    pool.free(a)
    pool.free(b)
    pool.touch(a)
    pool.free(a)
    assert pool.free_queue() == [*reversed(b), *reversed(a)]


def test_a_block_leaves_the_middle_of_the_queue_when_touched():
    pool, _ = pool_of(5)
    pool.touch([3])
    assert pool.free_queue() == [1, 2, 4, 5]
    pool.touch([3])
    pool.free([3])
    assert pool.ref_count(3) == 1
    assert pool.free_queue() == [1, 2, 4, 5]
    pool.check()


def test_a_cache_full_of_referenced_blocks_evicts_nothing():
    pool, events = pool_of(2)
    cache(pool, pool.allocate(2))
    events.take()
    with pytest.raises(AssertionError, match="0 free"):
        pool.allocate(1)
    assert events.take() == ()
    assert pool.num_cached == 2


def test_the_first_copy_of_a_content_stays_and_the_second_is_unknown():
    pool, events = pool_of(3)
    a, b = pool.allocate(2)
    cache(pool, [a])
    pool.register(b, 0, h(0), None, 0)
    assert pool.find(h(0), 0) == a
    assert events.take() == (BlockStored(0, h(0), None, 0),)
    pool.free([b])
    assert pool.free_queue()[0] == b
    pool.check()


def test_groups_do_not_share_content():
    pool, _ = pool_of(2, num_groups=2)
    a, b = pool.allocate(2)
    pool.register(a, 0, h(7), None, 0)
    assert pool.find(h(7), 1) is None
    pool.register(b, 1, h(7), None, 0)
    assert sorted(pool.snapshot()) == [(0, h(7)), (1, h(7))]
    pool.check()


def test_register_after_free_is_a_bug():
    pool, _ = pool_of(1)
    (a,) = pool.allocate(1)
    pool.free([a])
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.register(a, 0, h(0), None, 0)


def test_register_twice_is_a_bug():
    pool, _ = pool_of(1)
    (a,) = pool.allocate(1)
    cache(pool, [a])
    with pytest.raises(AssertionError, match="registered twice"):
        pool.register(a, 0, h(1), None, 0)


def test_freeing_what_is_free_is_a_bug():
    with pytest.raises(AssertionError, match="freed more often"):
        pool_of(1)[0].free([1])


def test_touching_the_null_block_is_a_bug():
    with pytest.raises(AssertionError, match="null block"):
        pool_of(1)[0].touch([0])


class NaivePool:
    """The same rules over plain lists and dicts; every operation takes as long as it likes."""

    def __init__(self, num_blocks):
        self.queue = list(range(1, num_blocks))
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.content = {}

    def allocate(self, n):
        taken, self.queue = self.queue[:n], self.queue[n:]
        removed = [self.content.pop(b) for b in taken if b in self.content]
        self.refs |= dict.fromkeys(taken, 1)
        return tuple(taken), removed

    def touch(self, block_ids):
        for b in block_ids:
            self.refs[b] += 1
            self.queue = [x for x in self.queue if x != b]

    def free(self, block_ids):
        for b in reversed(block_ids):
            self.refs[b] -= 1
            if self.refs[b] == 0:
                self.queue = [*self.queue, b] if b in self.content else [b, *self.queue]

    def register(self, block_id, key):
        if key not in self.content.values():
            self.content[block_id] = key
            return [key]
        return []


class PoolMachine(RuleBasedStateMachine):
    """Chains of blocks are taken, shared, named and freed in any order."""

    @initialize(num_usable=st.integers(1, 8), num_groups=st.integers(1, 2))
    def begin(self, num_usable, num_groups):
        self.pool, self.events = pool_of(num_usable, num_groups)
        self.naive = NaivePool(num_usable + 1)
        self.num_groups = num_groups
        self.chains = []
        self.present = set()

    @rule(data=st.data())
    def allocate(self, data):
        n = data.draw(st.integers(0, self.pool.num_free))
        taken, removed = self.naive.allocate(n)
        assert self.pool.allocate(n) == taken
        assert [tuple(e) for e in self.events.take()] == removed
        self.present -= set(removed)
        self.chains.append(taken)

    @precondition(lambda self: self.chains)
    @rule(data=st.data())
    def free(self, data):
        chain = self.chains.pop(data.draw(st.integers(0, len(self.chains) - 1)))
        self.naive.free(chain)
        self.pool.free(chain)

    @precondition(lambda self: self.naive.content)
    @rule(data=st.data())
    def touch(self, data):
        chain = data.draw(st.lists(st.sampled_from(sorted(self.naive.content)), unique=True, min_size=1))
        self.naive.touch(chain)
        self.pool.touch(chain)
        self.chains.append(tuple(chain))

    @rule(data=st.data(), content=st.integers(1, 6))
    def register(self, data, content):
        nameless = [b for b, refs in self.naive.refs.items() if refs and b not in self.naive.content]
        if not nameless:
            return
        block_id = data.draw(st.sampled_from(nameless))
        key = (data.draw(st.integers(0, self.num_groups - 1)), h(content))
        stored = self.naive.register(block_id, key)
        self.pool.register(block_id, *key, h(content - 1), content)
        assert self.events.take() == tuple(BlockStored(*k, h(content - 1), content) for k in stored)
        self.present |= set(stored)

    @rule()
    def reset(self):
        self.pool.reset()
        assert self.events.take() == ()
        self.naive = NaivePool(self.pool.num_blocks)
        self.chains.clear()
        self.present.clear()

    @invariant()
    def twins_agree(self):
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.free_queue() == self.naive.queue
        assert {b: self.pool.ref_count(b) for b in self.naive.refs} == self.naive.refs
        assert set(self.pool.snapshot()) == self.present == set(self.naive.content.values())
        assert self.pool.num_cached == len(self.present)
        for block_id, (group, block_hash) in self.naive.content.items():
            assert self.pool.find(block_hash, group) == block_id


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPool = PoolMachine.TestCase
