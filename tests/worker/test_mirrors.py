"""What decode rows see, kept from step to step, against what a gather of their blocks gives."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from worker import mirrors
from worker.group_rows import GroupRows, RowSpan
from worker.kv_shapes import FULL_REACH, Reach, ReachKind
from worker.mirrors import Layer, Mirrors
from worker.shared_prefix import SharedPrefix

_SIZE, _HEADS, _DIM, _NUM_BLOCKS = 16, 2, 4, 200
_WIDTHS = (_DIM, 3)


@pytest.fixture(autouse=True)
def _every_row(monkeypatch):
    monkeypatch.setattr(mirrors, "MIN_KEYS", 1)


class Sequences(RuleBasedStateMachine):
    """Sequences that come, grow, pause, go over to other blocks and leave; each step's rows are compared."""

    @initialize(
        reach=st.sampled_from([FULL_REACH, Reach(ReachKind.WINDOW, 20), Reach(ReachKind.CHUNK, 32)]),
        limit=st.sampled_from([0, 20_000, 1 << 30]),
    )
    def begin(self, reach, limit):
        self.reach = reach
        self.random = np.random.default_rng(0)
        self.pools = [np.zeros((_NUM_BLOCKS, _HEADS, _SIZE, width), np.float32) for width in _WIDTHS]
        self.free = list(range(1, _NUM_BLOCKS))
        self.tables: list[list[int]] = []
        self.lens: list[int] = []
        self.mirrors = Mirrors(limit)
        self.limit = limit
        self.num_mirrored = 0
        self.layers = [Layer(cache, 0, reach, _HEADS, _DIM, 2 * 4 * _HEADS * sum(_WIDTHS)) for cache in (0, 1)]

    @precondition(lambda self: len(self.tables) < 5)
    @rule(length=st.integers(1, 90))
    def come(self, length):
        self.tables.append([])
        self.lens.append(0)
        for _ in range(length):
            self._add_token(len(self.tables) - 1)

    def _add_token(self, index):
        table, position = self.tables[index], self.lens[index]
        if position % _SIZE == 0:
            # Left over from somebody else.
            block = self.free.pop(int(self.random.integers(len(self.free))))
            for pool in self.pools:
                pool[block] = self.random.normal(size=pool.shape[1:])
            table.append(block)
        for pool in self.pools:
            pool[table[-1], :, position % _SIZE] = self.random.normal(size=(_HEADS, pool.shape[-1]))
        self.lens[index] += 1

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def leave(self, data):
        index = data.draw(st.integers(0, len(self.tables) - 1))
        self.free += self.tables.pop(index)
        del self.lens[index]

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def move_a_block(self, data):
        """The same content elsewhere, and the old block is somebody else's."""
        table = self.tables[data.draw(st.integers(0, len(self.tables) - 1))]
        place = data.draw(st.integers(0, len(table) - 1))
        new = self.free.pop()
        for pool in self.pools:
            pool[new] = pool[table[place]]
            pool[table[place]] = self.random.normal(size=pool.shape[1:])
        self.free.insert(0, table[place])
        table[place] = new

    @precondition(lambda self: self.tables)
    @rule(num_steps=st.integers(1, 80), skipped=st.none() | st.integers(0, 4), others=st.booleans())
    def steps(self, num_steps, skipped, others):
        """All sequences decode, but perhaps one; the second cache may be left out once."""
        for step in range(min(num_steps, len(self.free) * _SIZE // 8)):
            chosen = [index for index in range(len(self.tables)) if index != skipped]
            for index in chosen:
                self._add_token(index)
            self._compare(chosen, caches=(0,) if others and step == 2 else (0, 1, 1))

    @precondition(lambda self: self.tables)
    @rule()
    def jump(self):
        """Several tokens at once, as after drafts that came true."""
        for _ in range(3):
            self._add_token(0)

    def _compare(self, chosen, caches):
        spans = [RowSpan(self.lens[index] - 1, self.lens[index], self.tables[index]) for index in chosen]
        spans.sort(key=lambda span: span.start)
        rows = GroupRows(spans, block_size=_SIZE, num_decodes=len(spans), reach=self.reach)
        pools = [mx.array(pool.reshape(-1, _SIZE, pool.shape[-1])) for pool in self.pools]
        self.mirrors.begin()
        for cache in caches:
            for group in rows.decode_groups:
                seen = self.mirrors.seen(self.layers[cache], group, pools)
                if seen is not None:
                    self.num_mirrored += 1
                    self._check(seen, spans[group.first : group.last])

    def _check(self, seen, spans):
        num_keys = seen.vectors[0].shape[2]
        mask = np.ones((len(spans), num_keys), bool) if seen.mask is None else np.array(seen.mask)[:, 0, 0]
        for vector, pool in zip(seen.vectors, self.pools, strict=True):
            for row, span in enumerate(spans):
                visible = range(self.reach.first_needed(span.start), span.end)
                expected = [pool[span.table[position // _SIZE], :, position % _SIZE] for position in visible]
                assert np.array_equal(np.array(vector)[row][:, mask[row]], np.stack(expected, axis=1))

    @invariant()
    def keeps_within_its_limit(self):
        if hasattr(self, "mirrors"):
            assert self.mirrors.num_bytes <= self.limit


TestSequences = Sequences.TestCase
TestSequences.settings = settings(max_examples=60, stateful_step_count=12, deadline=None)


def _rows(tables, lens):
    spans = [RowSpan(length - 1, length, table) for table, length in zip(tables, lens, strict=True)]
    return GroupRows(spans, block_size=_SIZE, num_decodes=len(spans)).decode_groups[0]


def _layer(num_heads=_HEADS):
    return Layer(0, 0, FULL_REACH, num_heads, _DIM, 4 * num_heads * _DIM)


def test_a_group_is_kept_from_its_second_step_on_until_a_step_does_without():
    pools = [mx.random.normal((_NUM_BLOCKS * _HEADS, _SIZE, _DIM))]
    kept, tables = Mirrors(1 << 20), [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16]]
    found = []
    for step in range(80):
        kept.begin()
        found.append(kept.seen(_layer(), _rows(tables, [20 + step, 21 + step]), pools) is not None)
    # Its room is used up after 64 tokens and what was left of the last block; then it is made again at once.
    assert found == [False] + [True] * 79
    assert kept.num_bytes > 0
    kept.begin()
    kept.begin()
    assert kept.num_bytes == 0


def test_equal_tables_of_other_sequences_are_others():
    pools = [mx.random.normal((_NUM_BLOCKS * _HEADS, _SIZE, _DIM))]
    kept = Mirrors(1 << 20)
    for step, table in enumerate(([1, 2, 3], [1, 2, 3], [1, 2, 3])):
        kept.begin()
        assert kept.seen(_layer(), _rows([table], [20 + step]), pools) is None


def test_what_is_cheaply_gathered_is_not_kept(monkeypatch):
    monkeypatch.setattr(mirrors, "MIN_KEYS", 1 << 13)
    pools = [mx.random.normal((_NUM_BLOCKS * _HEADS, _SIZE, _DIM))]
    kept, table = Mirrors(1 << 20), [1, 2, 3]
    for step in range(3):
        kept.begin()
        assert kept.seen(_layer(), _rows([table], [20 + step]), pools) is None


@given(num_rows=st.integers(1, 4), start=st.integers(1, 60))
def test_adding_a_token_does_not_copy_what_is_kept(num_rows, start):
    tables = [[1 + 5 * row + place for place in range(5)] for row in range(num_rows)]
    pools, kept = [mx.random.normal((_NUM_BLOCKS * _HEADS, _SIZE, _DIM))], Mirrors(1 << 20)
    places = set()
    for step in range(6):
        kept.begin()
        seen = kept.seen(_layer(), _rows(tables, [start + step] * num_rows), pools)
        if seen is None:
            assert step == 0
            continue
        mx.eval([vector.sum() for vector in seen.vectors])
        del seen
        (mirror,) = kept._mirrors.values()
        (vector,) = mirror._kept[0][1]
        places.add(np.asarray(memoryview(vector)).ctypes.data)
    assert len(places) == 1


def test_rows_that_see_more_than_is_kept_are_made_again():
    """A prefix that was read apart as long as somebody shared it is theirs to read from now on."""
    pools = [mx.random.normal((_NUM_BLOCKS * _HEADS, _SIZE, _DIM))]
    kept, tables = Mirrors(1 << 20), [[1, 2, 3, 4], [1, 2, 5, 6]]
    lens = []
    for step, skip in enumerate((2, 2, 2, 1, 2, 0, 0)):
        spans = [RowSpan(39 + step, 40 + step, table) for table in tables]
        shared = SharedPrefix(frozenset({0, 1}), (1, 2)) if skip else None
        rows = GroupRows(spans, block_size=_SIZE, num_decodes=2, shared=shared, skips=[skip, skip])
        kept.begin()
        seen = kept.seen(_layer(), rows.decode_groups[0], pools)
        lens.append(seen and seen.vectors[0].shape[2])
        if skip == 2 and step == 4:
            # What is kept beyond what they see is hidden.
            assert np.array(seen.mask)[:, 0, 0].sum(axis=-1).tolist() == [12, 12]
    # Layers that read all of it by themselves, perhaps in the same step, have a mirror of their own.
    assert lens == [None, 9, 10, 27, 28, None, 46]
