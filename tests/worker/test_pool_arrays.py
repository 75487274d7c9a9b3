"""Pools that are shared, moved and resized, and states that wait outside of them, against plain arrays."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from worker.kv_shapes import CacheGroup, LayerShape, StateShape
from worker.kv_tensors import KVTensors
from worker.metal.scatter_writer import ScatterWriter
from worker.pool_arrays import PoolArrays
from worker.states import PendingStates

SIZE = 4
_NARROW = LayerShape(num_kv_heads=4, head_dim=8, dtype=mx.float32)
_WIDE = LayerShape(num_kv_heads=1, head_dim=32, dtype=mx.float32)
_STATE = StateShape("state", ((3, 5), (2,)), (mx.float32, mx.float32))


def _numbers(array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def _read(writer, pool, first, last):
    return writer.read([pool], lambda array, after: array[mx.arange(first, last)])


def test_groups_of_one_pool_share_memory_whatever_the_heads():
    """Four heads of 8 and one of 32 have blocks of one size: a block of either group is the other's, reshaped."""
    writer = ScatterWriter()
    arrays = PoolArrays((_NARROW, _WIDE), (CacheGroup(0, (0,)), CacheGroup(0, (1,))), [10], SIZE, writer)
    assert arrays.pool_bytes() == 10 * SIZE * _NARROW.token_bytes
    (narrow, _), (wide, _) = arrays.pools
    content = mx.arange(SIZE * 32, dtype=mx.float32).reshape(1, SIZE, 32)
    writer.put(wide, content[None], [3])
    writer.commit()
    assert np.array_equal(_numbers(_read(writer, wide, 3, 4)), _numbers(content))
    assert np.array_equal(_numbers(_read(writer, narrow, 12, 16)).ravel(), _numbers(content).ravel())
    writer.commit()
    writer.finish()
    before = mx.get_active_memory()
    for _ in range(5):
        writer.put(wide, content[None], [2])
        writer.commit()
    writer.finish()
    assert mx.get_active_memory() <= before


def test_shrinking_a_pool_gives_its_memory_back():
    writer = ScatterWriter()
    arrays = PoolArrays((_NARROW,), (CacheGroup(0, (0,)),), [4096], SIZE, writer)
    arrays.reserve(0, 4095)
    before = mx.get_active_memory()
    arrays.resize(0, 1024, [])
    freed = 3072 * SIZE * _NARROW.token_bytes
    assert before - mx.get_active_memory() == pytest.approx(freed, rel=0.01)
    arrays.resize(0, 4096, [])
    arrays.reserve(0, 2000)
    assert writer.num_blocks(arrays.pools[0][0]) >= 2001


def test_a_pool_of_large_states_starts_with_few():
    """Tens of megabytes each: a Mac that runs one sequence commits a handful."""
    shape = StateShape("state", ((4 << 20,),), (mx.float32,))
    writer = ScatterWriter()
    arrays = PoolArrays((shape,), (CacheGroup(0, (0,)),), [40], SIZE, writer)
    (pool,) = arrays.pools[0]
    assert writer.num_blocks(pool) == 8
    arrays.reserve(0, 9)
    assert writer.num_blocks(pool) == 16


def test_a_pool_below_what_kernels_take_is_made_larger():
    """Two blocks of a state of three numbers; the manager knows nothing of it."""
    writer = ScatterWriter()
    arrays = PoolArrays((StateShape("state", ((3,),), (mx.float32,)),), (CacheGroup(0, (0,)),), [2], SIZE, writer)
    assert writer.num_blocks(arrays.pools[0][0]) == 3
    assert arrays.pool_bytes() == 2 * 3 * 4


class PoolMachine(RuleBasedStateMachine):
    """Every block holds what was last written there, wherever a resize has moved it."""

    @initialize(num_blocks=st.integers(20, 200))
    def begin(self, num_blocks):
        self.tensors = KVTensors(
            (_NARROW, _STATE),
            groups=(CacheGroup(0, (0,)), CacheGroup(1, (1,))),
            num_blocks=(num_blocks, 8),
            block_size=SIZE,
        )
        self.content: dict[int, float] = {}

    @rule(data=st.data(), value=st.integers(1, 1000))
    def write(self, data, value):
        block = data.draw(st.integers(1, self.tensors.num_blocks[0] - 1))
        self.tensors.reserve(0, block)
        self.tensors.fill_blocks(0, [block], value)
        self.content[block] = value

    @rule(data=st.data())
    def copy(self, data):
        if len(self.content) > 1:
            chosen = data.draw(st.lists(st.sampled_from(sorted(self.content)), min_size=2, max_size=2, unique=True))
            self.tensors.copy_blocks(0, chosen, chosen[::-1])
            one, other = chosen
            self.content[one], self.content[other] = self.content[other], self.content[one]

    @rule(data=st.data())
    def shrink(self, data):
        num_blocks = self.tensors.num_blocks[0]
        end = data.draw(st.integers(max(2, num_blocks - 10), num_blocks))
        free = [b for b in range(1, end) if b not in self.content]
        lost = [b for b in sorted(self.content) if b >= end]
        if len(lost) <= len(free):
            moves = list(zip(lost, free, strict=False))
            self.tensors.resize(0, end, moves)
            for source, target in moves:
                self.content[target] = self.content.pop(source)

    @rule(more=st.integers(1, 100))
    def grow(self, more):
        self.tensors.resize(0, self.tensors.num_blocks[0] + more, [])

    @invariant()
    def content_is_there(self):
        if hasattr(self, "tensors"):
            self.tensors.evaluate()
            pools = self.tensors.read(0, lambda *pools, after: tuple(pool + 0 for pool in pools))
            keys, values = (_numbers(pool).reshape(-1, 4, SIZE, 8) for pool in pools)
            self.tensors.evaluate()
            for block, value in self.content.items():
                assert (keys[block] == value).all()
                assert (values[block] == value).all()
            assert not keys[0].any()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


class StateMachine(RuleBasedStateMachine):
    """Whatever sequences share a step, each finds the state that it left, or had before guesses that were wrong."""

    def __init__(self):
        super().__init__()
        self.writer = ScatterWriter()
        self.pools = PoolArrays((_STATE,), (CacheGroup(0, (0,)),), [9], SIZE, self.writer).pools[0]
        self.states = PendingStates(_STATE, self.writer, self.pools)
        self.expected: dict[int, float] = {}
        self.clock = 0

    @rule(data=st.data())
    def step(self, data):
        order = data.draw(st.permutations(range(1, 9)))
        cut = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        parts, at = [], 0
        for size in cut:
            # A part holds either sequences that begin or others.
            members = order[at : at + size]
            known = [slot for slot in members if slot in self.expected]
            parts += [tuple(part) for part in (known, [slot for slot in members if slot not in known]) if part]
            at += size
        fresh = frozenset(part for part in parts if part[0] not in self.expected)
        guessing = frozenset(part for part in parts if part not in fresh and data.draw(st.booleans()))
        is_dense = data.draw(st.booleans())
        self.states.begin(parts, fresh, guessing)
        before = dict(self.expected)
        for part in parts:
            if is_dense:
                # One forward for each part.
                self.states.begin([part], fresh & {part}, guessing & {part})
            taken = self.states.take(part)
            if part in fresh:
                assert taken == [None, None]
            else:
                for tensor in taken:
                    for row, slot in zip(_numbers(tensor), part, strict=True):
                        assert (row == self.expected[slot]).all()
            self.clock += 1
            left = [self.clock + index for index in range(len(part))]
            self.states.put(part, [mx.stack([mx.full(shape, v) for v in left]) for shape in _STATE.shapes])
            self.expected |= dict(zip(part, left, strict=True))
            if is_dense:
                self.writer.commit(*self.states.arrays())
        self.writer.commit(*self.states.arrays())
        wrong = {slot for part in guessing for slot in part if (is_dense and slot % 2) or data.draw(st.booleans())}
        if is_dense:
            # A part is one sequence then.
            wrong = {slot for part in guessing if part[0] in wrong for slot in part}
        self.states.settle_drafts(frozenset(wrong))
        self.expected |= {slot: before[slot] for slot in wrong}

    @rule(data=st.data())
    def end(self, data):
        if self.expected:
            del self.expected[data.draw(st.sampled_from(sorted(self.expected)))]

    @rule(data=st.data())
    def checkpoint(self, data):
        """Copied into a slot that nobody has."""
        free = [slot for slot in range(1, 9) if slot not in self.expected]
        if free and self.expected:
            source, target = data.draw(st.sampled_from(sorted(self.expected))), data.draw(st.sampled_from(free))
            self.states.settle()
            self.writer.move(self.pools, [source], [target])
            self.expected[target] = self.expected[source]


TestStateMachine = StateMachine.TestCase
TestStateMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)


def test_a_short_window_of_inputs_is_filled_with_zeros_from_the_left():
    writer = ScatterWriter()
    states = PendingStates(_STATE, writer, PoolArrays((_STATE,), (CacheGroup(0, (0,)),), [4], SIZE, writer).pools[0])
    states.begin([(2,)], frozenset({(2,)}))
    states.put((2,), [mx.ones((1, 1, 5)), mx.ones((1, 2))])
    states.settle()
    states.begin([(2,)], frozenset())
    window, _ = states.take((2,))
    assert _numbers(window)[0].tolist() == [[0.0] * 5, [0.0] * 5, [1.0] * 5]


def test_no_step_of_states_copies_a_pool():
    """Reading and replacing a state leaves every pool where it is."""
    shape = StateShape("state", ((64, 64),), (mx.float32,))
    writer = ScatterWriter()
    arrays = PoolArrays((shape,), (CacheGroup(0, (0,)),), [64], SIZE, writer)
    states = PendingStates(shape, writer, arrays.pools[0])

    def pointer():
        (array,) = writer._arrays.values()
        return np.asarray(memoryview(array)).ctypes.data

    first = pointer()
    for parts in ([(1, 2, 3)], [(1, 2, 3)], [(1, 2), (3,)], [(3, 1)], [(2,)]):
        states.begin(parts, frozenset())
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        for part in parts:
            (taken,) = states.take(part)
            states.put(part, [taken * 2 + 1])
            del taken
        writer.commit(*states.arrays())
        assert mx.get_peak_memory() - before < 64 * 64 * 64 * 4
        assert pointer() == first
