"""The KV ledger, by behaviour and against an oracle that remembers what every block really holds."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.kv.events import BlockStored
from cluster.kv.hashing import hash_blocks, root_hash
from cluster.kv.layout import KVGroup, KVLayout
from cluster.kv.manager import KVCacheManager

SIZE = 4
ROOT = root_hash(model="m", tokenizer="t", kv_format="f", block_size=SIZE)


def manager_of(num_usable=8, *, caching=True, num_groups=1):
    groups = tuple(KVGroup(i, (i,)) for i in range(num_groups))
    return KVCacheManager(KVLayout(SIZE, groups, num_usable + 1, 1, 64), enable_prefix_caching=caching)


def chain(tokens):
    return hash_blocks(ROOT, tokens, SIZE)


def fill(kv, seq_id, tokens):
    """Start a sequence, compute all its tokens and register what is full; returns what it found."""
    computed = kv.get_computed_blocks(chain(tokens), len(tokens))
    kv.start(seq_id, computed)
    assert kv.allocate(seq_id, len(tokens)) is not None
    hashes, table = chain(tokens), kv.block_tables(seq_id)[0]
    for i in range(computed.num_tokens // SIZE, len(hashes)):
        assert kv.register(seq_id, 0, i, table[i], hashes[i], hashes[i - 1] if i else None)
    return computed


class TestLookup:
    def test_an_empty_cache_is_limited_by_its_group(self):
        computed = manager_of().get_computed_blocks(chain(range(9)), 9)
        assert (computed.num_tokens, computed.block_ids, computed.limited_by) == (0, {0: ()}, 0)

    def test_a_prompt_of_exactly_its_blocks_hits_all_but_the_last(self):
        kv = manager_of()
        fill(kv, 1, range(8))
        computed = kv.get_computed_blocks(chain(range(8)), 8)
        assert computed.num_tokens == 4
        assert computed.limited_by is None, "the cap ended it, not a missing block"

    def test_a_prompt_of_exactly_one_block_hits_nothing(self):
        kv = manager_of()
        fill(kv, 1, range(4))
        assert kv.get_computed_blocks(chain(range(4)), 4).num_tokens == 0
        assert kv.get_computed_blocks(chain(range(5)), 5).num_tokens == 4

    def test_a_one_token_prompt_hits_nothing(self):
        assert manager_of().get_computed_blocks([], 1).num_tokens == 0

    def test_a_look_up_neither_pins_nor_counts_as_a_use(self):
        kv = manager_of(2)
        fill(kv, 1, range(8))
        kv.free(1)
        kv.get_computed_blocks(chain(range(9)), 9)
        kv.start(2, kv.get_computed_blocks([], 9))
        kv.allocate(2, 8)
        assert kv.num_cached_blocks == 0

    @given(
        st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), max_size=6),
        st.lists(st.integers(0, 1), min_size=1),
    )
    def test_it_finds_what_brute_force_finds(self, earlier, tokens):
        """The longest multiple of a block below the length whose every prefix was computed before."""
        kv = manager_of(40)
        for seq_id, other in enumerate(earlier, 1):
            fill(kv, seq_id, other)
        known = {tuple(other[:n]) for other in earlier for n in range(SIZE, len(other) + 1, SIZE)}
        lengths = range(SIZE, len(tokens), SIZE)
        expected = max((n for n in lengths if all(tuple(tokens[:m]) in known for m in lengths if m <= n)), default=0)
        assert kv.get_computed_blocks(chain(tokens), len(tokens)).num_tokens == expected


class TestAllocation:
    def test_blocks_come_when_a_position_needs_them_and_not_before(self):
        kv = manager_of()
        kv.start(1, kv.get_computed_blocks([], 5))
        assert kv.allocate(1, 5) == {0: (1, 2)}
        assert [dict(kv.allocate(1, n)) for n in (6, 7, 8)] == [{}, {}, {}]
        assert kv.num_missing_blocks(1, 9) == 1
        assert kv.allocate(1, 9) == {0: (3,)}
        assert kv.block_tables(1) == {0: (1, 2, 3)}
        assert (kv.num_used_blocks, kv.num_free_blocks, kv.usage) == (3, 5, 3 / 8)

    def test_out_of_blocks_changes_nothing(self):
        kv = manager_of(3)
        kv.start(1, kv.get_computed_blocks([], 8))
        kv.allocate(1, 8)
        assert kv.allocate(1, 16) is None
        assert (kv.num_free_blocks, len(kv.block_tables(1)[0])) == (1, 2)
        kv.check()

    def test_groups_get_all_or_nothing(self):
        kv = manager_of(5, caching=False, num_groups=2)
        kv.start(1, kv.get_computed_blocks([], 8))
        assert kv.allocate(1, 8) == {0: (1, 2), 1: (3, 4)}
        assert kv.allocate(1, 9) is None
        assert kv.num_free_blocks == 1
        kv.check()

    def test_cached_blocks_that_nobody_holds_count_as_used_up(self):
        kv = manager_of(3)
        fill(kv, 1, range(8))
        tokens = [*range(8), 9]
        computed = kv.get_computed_blocks(chain(tokens), 9)
        assert kv.can_allocate(computed, 9)
        assert not kv.can_allocate(computed, 9, num_reserved_blocks=1)
        assert not kv.can_allocate(computed, 13)
        kv.free(1)
        assert kv.can_allocate(computed, 9)
        assert not kv.can_allocate(computed, 9, num_reserved_blocks=1)

    def test_starting_twice_is_a_bug(self):
        kv = manager_of()
        nothing = kv.get_computed_blocks([], 1)
        kv.start(1, nothing)
        with pytest.raises(AssertionError, match="sequence 1 was started twice"):
            kv.start(1, nothing)


class TestRegistration:
    def test_a_block_of_a_sequence_that_has_ended_is_ignored(self):
        kv = manager_of()
        kv.start(1, kv.get_computed_blocks([], 4))
        kv.allocate(1, 4)
        kv.free(1)
        assert kv.register(1, 0, 0, 1, chain(range(4))[0], None) is False
        assert kv.snapshot() == []

    @pytest.mark.parametrize(("index", "block_id"), [(0, 2), (1, 1), (2, 3)])
    def test_a_block_that_the_sequence_holds_elsewhere_or_not_at_all_is_ignored(self, index, block_id):
        kv = manager_of()
        kv.start(1, kv.get_computed_blocks([], 8))
        kv.allocate(1, 8)
        assert kv.register(1, 0, index, block_id, chain(range(4))[0], None) is False
        assert kv.take_events() == ()

    def test_without_prefix_caching_nothing_is_kept(self):
        kv = manager_of(caching=False)
        kv.start(1, kv.get_computed_blocks([], 4))
        kv.allocate(1, 4)
        assert kv.register(1, 0, 0, 1, chain(range(4))[0], None) is False
        assert kv.num_cached_blocks == 0

    def test_an_event_tells_where_in_the_prefix_the_block_stands(self):
        kv = manager_of()
        fill(kv, 1, range(8))
        first, second = chain(range(8))
        assert kv.take_events() == (BlockStored(0, first, None, 0), BlockStored(0, second, first, 1))
        assert kv.take_events() == ()


class TestReset:
    def test_everything_is_gone_without_an_event(self):
        kv = manager_of()
        fill(kv, 1, range(8))
        kv.reset()
        assert kv.take_events() == ()
        assert (kv.snapshot(), kv.num_used_blocks, kv.num_cached_blocks) == ([], 0, 0)
        fill(kv, 1, range(8))
        kv.check()


class TestCheck:
    """It finds what it is there for."""

    def test_a_reference_nobody_holds(self):
        kv = manager_of()
        kv._pool.touch([3])
        with pytest.raises(AssertionError, match="block 3 is in 0 block tables, its ref_count is 1"):
            kv.check()

    def test_a_map_entry_without_its_block(self):
        kv = manager_of()
        fill(kv, 1, range(4))
        kv._pool._hashes[1] = None
        with pytest.raises(AssertionError, match="the map and the blocks' own hashes differ"):
            kv.check()

    def test_a_free_block_outside_the_queue(self):
        kv = manager_of()
        kv._pool._ref_counts[2] = 1
        with pytest.raises(AssertionError, match="queued and unreferenced blocks differ"):
            kv.check()


class ManagerMachine(RuleBasedStateMachine):
    """Sequences over two token values come, grow, share and go; `holds` is what the blocks really contain."""

    @initialize(num_usable=st.integers(2, 10))
    def begin(self, num_usable):
        self.kv = manager_of(num_usable)
        self.holds = {}
        self.sequences = {}
        self.num_started = 0
        self.present = set()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=18))
    def start(self, tokens):
        computed = self.kv.get_computed_blocks(chain(tokens), len(tokens))
        fits = self.kv.can_allocate(computed, len(tokens))
        self.num_started += 1
        seq_id = self.num_started
        num_free = self.kv.num_free_blocks
        self.kv.start(seq_id, computed)
        assert 0 <= computed.num_tokens < len(tokens)
        for i, block_id in enumerate(computed.block_ids[0]):
            assert self.holds[block_id] == tokens[: (i + 1) * SIZE], "a hit on content that is not there"
        self.sequences[seq_id] = (tokens, computed.num_tokens)
        taken = self.grow(seq_id, len(tokens))
        assert fits == (taken is not None)
        if taken is None:
            self.free(seq_id)
            assert self.kv.num_free_blocks == num_free

    def grow(self, seq_id, num_tokens):
        new_blocks = self.kv.allocate(seq_id, num_tokens)
        for block_id in (new_blocks or {}).get(0, ()):
            self.holds[block_id] = None
        return new_blocks

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_tokens=st.integers(1, 9))
    def compute(self, data, num_tokens):
        """Run some positions; blocks that become full are registered, as the worker reports them."""
        seq_id = data.draw(st.sampled_from(sorted(self.sequences)))
        tokens, num_computed = self.sequences[seq_id]
        end = min(num_computed + num_tokens, len(tokens))
        table, hashes = self.kv.block_tables(seq_id)[0], chain(tokens)
        for i in range(num_computed // SIZE, -(-end // SIZE)):
            self.holds[table[i]] = tokens[: min(end, (i + 1) * SIZE)]
        for i in range(num_computed // SIZE, end // SIZE):
            assert self.kv.register(seq_id, 0, i, table[i], hashes[i], hashes[i - 1] if i else None)
        self.sequences[seq_id] = (tokens, end)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def extend(self, data, more):
        seq_id = data.draw(st.sampled_from(sorted(self.sequences)))
        tokens, num_computed = self.sequences[seq_id]
        num_missing = self.kv.num_missing_blocks(seq_id, len(tokens) + len(more))
        taken = self.grow(seq_id, len(tokens) + len(more))
        if taken is not None:
            assert len(taken.get(0, ())) == num_missing
            self.sequences[seq_id] = ([*tokens, *more], num_computed)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def finish(self, data):
        self.free(data.draw(st.sampled_from(sorted(self.sequences))))

    def free(self, seq_id):
        table = self.kv.block_tables(seq_id)[0]
        self.kv.free(seq_id)
        del self.sequences[seq_id]
        if table:
            assert self.kv.register(seq_id, 0, 0, table[0], b"x" * 16, None) is False

    @rule()
    def reset(self):
        self.kv.take_events()
        self.kv.reset()
        self.holds.clear()
        self.sequences.clear()
        self.present.clear()

    @invariant()
    def ledger_is_true(self):
        if not hasattr(self, "kv"):
            return
        self.kv.check()
        for event in self.kv.take_events():
            key = tuple(event)[:2]
            if isinstance(event, BlockStored):
                assert key not in self.present
                self.present.add(key)
            else:
                self.present.remove(key)
        assert set(self.kv.snapshot()) == self.present
        used = Counter(b for seq_id in self.sequences for b in self.kv.block_tables(seq_id)[0])
        assert self.kv.num_used_blocks == len(used)
        for seq_id, (tokens, num_computed) in self.sequences.items():
            table = self.kv.block_tables(seq_id)[0]
            assert len(table) == -(-len(tokens) // SIZE)
            for i in range(-(-num_computed // SIZE)):
                assert self.holds[table[i]] == tokens[: min(num_computed, (i + 1) * SIZE)], (
                    "a block in use was overwritten"
                )


ManagerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestManager = ManagerMachine.TestCase
