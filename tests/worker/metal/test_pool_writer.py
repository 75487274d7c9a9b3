"""Pools through `PoolWriter`: contents against plain NumPy, no copies of pools, and the order of kernels in place."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.msl_host.host import MslHost
from tests.msl_host.in_place import IN_PLACE
from tests.msl_host.require import require_toolchain
from worker.metal import scatter_writer
from worker.metal.in_place_writer import InPlaceWriter
from worker.metal.pool_writer import PoolOrderError, Slots
from worker.metal.quantized import QuantizedPool
from worker.metal.scatter_writer import ScatterWriter
from worker.metal.write_kv import PutBlocks, tie

_BLOCKS = 5
# Keys and values of two heads, and a state.
_SHAPES = {"keys": (2, 4, 8), "values": (2, 4, 4), "state": (3, 5)}


@pytest.fixture(scope="module", autouse=True)
def _toolchain():
    require_toolchain()


def _address(array: mx.array) -> int:
    mx.eval(array)
    return np.array(array, copy=False).__array_interface__["data"][0]


class TracingHost:
    """The harness, which also knows which launches each launch comes after, by the arrays that it takes."""

    def __init__(self) -> None:
        self._host = MslHost()
        self._after: dict[int, frozenset[int]] = {}
        self._alive: list[mx.array] = []
        self.num_launches = 0
        self.before: dict[int, frozenset[int]] = {}
        # What each launch writes in place.
        self.writes: dict[int, set[int]] = {}

    def __call__(self, *, name, input_names, **rest):
        kernel = self._host(name=name, input_names=input_names, **rest)
        written = next((names for key, names in IN_PLACE.items() if name.startswith(key)), ())

        def launch(*, inputs, **call):
            outputs = kernel(inputs=inputs, **call)
            here = self.launch(*inputs)
            self.give(here, *outputs)
            self.writes[here] = {_address(x) for key, x in zip(input_names, inputs, strict=True) if key in written}
            return outputs

        return launch

    def launch(self, *inputs: mx.array) -> int:
        """A launch that takes these arrays."""
        self.num_launches += 1
        self.before[self.num_launches] = frozenset().union(*(self._after.get(id(x), ()) for x in inputs))
        return self.num_launches

    def give(self, launch: int, *outputs: mx.array) -> None:
        for output in outputs:
            self._after[id(output)] = self.before[launch] | {launch}
            self._alive.append(output)

    def comes_after(self, launch_arrays, launch: int) -> bool:
        return launch in frozenset().union(*(self._after.get(id(x), ()) for x in launch_arrays))


class PoolWriterMachine(RuleBasedStateMachine):
    """Any order of writes, fills, moves, reads and commits that the interface allows, against arrays of NumPy."""

    @initialize(in_place=st.booleans(), min_sliced=st.sampled_from((1, 1 << 20)))
    def start(self, in_place, min_sliced):
        # Whole blocks one by one, or scattered.
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(scatter_writer, "_MIN_SLICED", min_sliced)
        self.host = TracingHost()
        self.writer = InPlaceWriter(self.host) if in_place else ScatterWriter()
        self.in_place = in_place
        self.pools = {name: self.writer.create(name, _BLOCKS, shape, mx.float32) for name, shape in _SHAPES.items()}
        self.model = {name: np.zeros((_BLOCKS, *shape), np.float32) for name, shape in _SHAPES.items()}
        self.read = set()
        self.count = 0
        self.seen_launches = 0
        # Launches that touched each pool: writes, and reads by the result that they gave.
        self.touched = {name: [] for name in _SHAPES}
        self.addresses = {}

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()

    def _numbers(self, *shape):
        self.count += 1
        return np.random.RandomState(self.count).randn(*shape).astype(np.float32)

    def _refused(self, names, call) -> bool:
        if not self.read.intersection(names):
            return False
        with pytest.raises(PoolOrderError, match="commit first"):
            call()
        return True

    @rule(data=st.data(), viewed=st.booleans())
    def write(self, data, viewed):
        slots = data.draw(st.lists(st.integers(-1, _BLOCKS * 4 - 1), min_size=1, max_size=4, unique=True))
        rows = {name: self._numbers(len(slots), 2, _SHAPES[name][2]) for name in ("keys", "values")}
        pools = [self.pools["keys"], self.pools["values"]]
        if viewed:
            # As a cache with one head and blocks of 8 would see the pool.
            pools[0] = pools[0].seen_as((1, 8, 8))
            rows["keys"] = self._numbers(len(slots), 1, 8)
        arrays = [mx.array(rows[name]) for name in ("keys", "values")]
        if viewed:
            for pool, row, name in zip(pools, arrays, ("keys", "values"), strict=True):
                self._write_one(pool, row, rows[name], slots, name)
            return
        if self._refused(("keys", "values"), lambda: self.writer.write(pools, arrays, Slots(slots))):
            return
        self.writer.write(pools, arrays, Slots(slots))
        for name in ("keys", "values"):
            self._store(name, rows[name], slots, self.pools[name].block_shape)

    def _write_one(self, pool, row, content, slots, name):
        block_size = pool.block_shape[1]
        if max(slots) >= _BLOCKS * block_size:
            return
        if self._refused((name,), lambda: self.writer.write([pool], [row], Slots(slots))):
            return
        self.writer.write([pool], [row], Slots(slots))
        self._store(name, content, slots, pool.block_shape)

    def _store(self, name, content, slots, shape):
        view = self.model[name].reshape(-1, *shape)
        for row, slot in zip(content, slots, strict=True):
            if slot >= 0:
                view[slot // shape[1], :, slot % shape[1]] = row

    @rule(names=st.sets(st.sampled_from(list(_SHAPES)), min_size=1), data=st.data())
    def move(self, names, data):
        count = data.draw(st.integers(0, 3))
        ids = st.lists(st.integers(0, _BLOCKS - 1), min_size=count, max_size=count)
        sources = data.draw(ids)
        targets = data.draw(st.permutations(range(_BLOCKS)))[:count]
        pools = [self.pools[name] for name in sorted(names)]
        if count and self._refused(names, lambda: self.writer.move(pools, sources, targets)):
            return
        self.writer.move(pools, sources, targets)
        for name in names:
            self.model[name][list(targets)] = self.model[name][sources]

    @rule(name=st.sampled_from(list(_SHAPES)), ids=st.sets(st.integers(0, _BLOCKS - 1), max_size=3))
    def put(self, name, ids):
        ids, contents = list(ids), self._numbers(len(ids), *_SHAPES[name])
        if self._refused((name,), lambda: self.writer.put(self.pools[name], mx.array(contents), ids)):
            return
        self.writer.put(self.pools[name], mx.array(contents), ids)
        self.model[name][ids] = contents

    @precondition(lambda self: self.in_place)
    @rule(block=st.integers(0, _BLOCKS - 1))
    def update(self, block):
        """A kernel of somebody else's, which writes in place by itself."""
        contents = self._numbers(1, *_SHAPES["state"])

        def kernel(pool, after):
            token = PutBlocks(self.host)(mx.array(contents), mx.array([block], mx.int32), pool, after)
            return mx.ones(1), token

        if self._refused(("state",), lambda: self.writer.update([self.pools["state"]], kernel)):
            return
        assert self.writer.update([self.pools["state"]], kernel).item() == 1
        self.model["state"][block] = contents[0]

    @rule(name=st.sampled_from(list(_SHAPES)), ids=st.lists(st.integers(0, _BLOCKS - 1), max_size=3))
    def fill(self, name, ids):
        if self._refused((name,), lambda: self.writer.fill([self.pools[name]], ids, 3.0)):
            return
        self.writer.fill([self.pools[name]], ids, 3.0)
        self.model[name][ids] = 3.0

    @rule(names=st.sets(st.sampled_from(list(_SHAPES)), min_size=1))
    def look(self, names):
        """A reader sees all writes so far."""
        for name in sorted(names):
            result = self._look(name)
            assert np.array_equal(np.array(result), self.model[name])
            self.read.add(name)

    def _look(self, name):
        def reader(pool, after):
            assert (after is not None) == self.in_place
            launch = self.host.launch(*([] if after is None else [after]))
            index = mx.arange(_BLOCKS)
            result = pool[index if after is None else tie(index, after)]
            self.host.give(launch, result)
            if self.in_place:
                self._must_come_after_writes(name, after)
            self.touched[name].append(("read", launch))
            return result

        self._note_launches()
        return self.writer.read([self.pools[name]], reader)

    @rule()
    def commit(self):
        self.writer.commit()
        self._note_launches()
        self.read.clear()
        if not self.in_place:
            for name, pool in self.pools.items():
                self.writer.read([pool], lambda array, after, name=name: self._same_address(name, array))
            self.writer.commit()

    def _same_address(self, name, array):
        address = _address(array)
        assert self.addresses.setdefault(name, address) == address, f"pool {name} was copied"
        return mx.zeros(1)

    @precondition(lambda self: not self.read)
    @rule(name=st.sampled_from(list(_SHAPES)), num_blocks=st.sampled_from([_BLOCKS, _BLOCKS + 3]))
    def resize(self, name, num_blocks):
        """Longer, and back: what it holds stays."""
        self.writer.resize(self.pools[name], num_blocks)
        assert self.writer.num_blocks(self.pools[name]) == num_blocks
        self.writer.resize(self.pools[name], _BLOCKS)
        self.addresses.pop(name, None)
        self.read.clear()
        self._note_launches()
        self.touched = {name: [] for name in _SHAPES}

    def _note_launches(self):
        """Each write in place comes after all that touched its pool before."""
        if not self.in_place:
            return
        places = {_address(self.writer._arrays[name]): name for name in _SHAPES}
        for launch in range(self.seen_launches + 1, self.host.num_launches + 1):
            for address in self.host.writes.get(launch, ()):
                name = places[address]
                before = self.host.before[launch]
                for kind, other in self.touched[name]:
                    assert other in before, f"write {launch} of {name} does not wait for {kind} {other}"
                self.touched[name].append(("write", launch))
        self.seen_launches = self.host.num_launches

    def _must_come_after_writes(self, name, after):
        for kind, launch in self.touched[name]:
            if kind == "write":
                assert self.host.comes_after([after], launch), f"a read of {name} does not wait for write {launch}"

    @invariant()
    def check(self):
        if hasattr(self, "host"):
            self._note_launches()


TestPoolWriter = PoolWriterMachine.TestCase
TestPoolWriter.settings = settings(max_examples=40, stateful_step_count=14, deadline=None)


def test_scatter_never_copies_a_pool():
    """Steps over four pools of 8 MiB: same addresses, and never so much as one pool more in memory."""
    writer = ScatterWriter()
    pools = [writer.create(f"pool{i}", 1024, (4, 16, 32), mx.float32) for i in range(4)]
    pool_bytes = 1024 * 4 * 16 * 32 * 4
    addresses = [int(writer.read([pool], lambda array, after: mx.array(_address(array)))) for pool in pools]
    writer.commit()
    mx.synchronize()
    mx.reset_peak_memory()
    base = mx.get_active_memory()
    rows = mx.random.normal((7, 4, 32))
    for step in range(5):
        slots = Slots(np.arange(7) * 16 + step)
        writer.move(pools, [1, 2], [2, 1])
        writer.fill(pools, [900 + step])
        outputs = []
        for pair in (pools[:2], pools[2:]):
            writer.write(pair, [rows, rows + step], slots)
            outputs.append(writer.read(pair, lambda keys, values, after: keys[:2].sum() + values[:2].sum()))
        writer.commit(*outputs)
    assert mx.get_peak_memory() - base < pool_bytes / 2
    assert [int(writer.read([pool], lambda array, after: mx.array(_address(array)))) for pool in pools] == addresses


def test_a_write_after_a_read_would_copy_the_pool():
    """Why the interface forbids it: the copy is there as soon as the check is not."""
    writer = ScatterWriter()
    pool = writer.create("pool", 1024, (4, 16, 32), mx.float32)
    before = int(writer.read([pool], lambda array, after: mx.array(_address(array))))
    result = writer.read([pool], lambda array, after: array[:2])
    writer._read.clear()
    writer.write([pool], [mx.ones((1, 4, 32))], Slots([3]))
    writer.commit(result)
    assert int(writer.read([pool], lambda array, after: mx.array(_address(array)))) != before


@pytest.mark.parametrize("make", [ScatterWriter, lambda: InPlaceWriter(MslHost())], ids=["scatter", "in place"])
class TestBothRoutes:
    def test_quantized_rows_come_back(self, make):
        writer = make()
        shapes = {
            "packed": ((2, 16, 8), mx.uint32),
            "scales": ((2, 16, 1), mx.float32),
            "biases": ((2, 16, 1), mx.float32),
        }
        parts = tuple(writer.create(name, 4, *shape) for name, shape in shapes.items())
        rows = mx.random.normal((3, 2, 32))
        writer.quantize(parts, rows, Slots([5, -1, 40]), bits=8, group_size=32)
        got = writer.read(parts, lambda *arrays, after: QuantizedPool(*arrays, 8, 32).dequantize(mx.arange(4)) + 0)
        writer.commit()
        for row, slot in ((0, 5), (2, 40)):
            assert np.abs(np.array(got[slot // 16, :, slot % 16] - rows[row])).max() < 0.02

    def test_half_precision_and_strided_rows(self, make):
        writer = make()
        pools = [writer.create(name, 3, (2, 16, 64), mx.bfloat16) for name in "kv"]
        rows = mx.random.normal((2, 5, 64)).astype(mx.bfloat16).swapaxes(0, 1)
        writer.write(pools, [rows, -rows], Slots([0, 1, 33, -1, 17]))
        keys, values = writer.read(pools, lambda k, v, after: (k + 0, v + 0))
        writer.commit(keys, values)
        assert mx.array_equal(keys[2, :, 1], rows[2])
        assert mx.array_equal(values[1, :, 1], -rows[4])

    def test_readers_that_keep_a_pool_are_found(self, make):
        writer, kept = make(), []
        pool = writer.create("pool", 3, (4, 4), mx.float32)
        with pytest.raises(PoolOrderError, match="kept it"):
            writer.read([pool], lambda array, after: (kept.append(array), mx.zeros(1))[1])
        with pytest.raises(PoolOrderError, match="returned it"):
            writer.read([pool], lambda array, after: array)

    def test_bad_input_is_refused(self, make):
        writer = make()
        pool = writer.create("pool", 3, (2, 4, 4), mx.float32)
        with pytest.raises(ValueError, match="pool exists"):
            writer.create("pool", 3, (2, 4, 4), mx.float32)
        with pytest.raises(ValueError, match="below 8 elements"):
            writer.create("small", 3, (2,), mx.float32)
        with pytest.raises(ValueError, match="another size"):
            pool.seen_as((2, 4, 5))
        with pytest.raises(ValueError, match="rows"):
            writer.write([pool], [mx.zeros((1, 2, 5))], Slots([1]))
        with pytest.raises(ValueError, match="rows"):
            writer.write([pool], [mx.zeros((2, 2, 4))], Slots([1]))
        with pytest.raises(ValueError, match="rows"):
            writer.write([pool], [mx.zeros((1, 2, 4), mx.float16)], Slots([1]))
        with pytest.raises(ValueError, match="no target twice"):
            writer.move([pool], [0, 1], [2, 2])
        with pytest.raises(ValueError, match="there twice"):
            writer.put(pool, mx.zeros((2, 2, 4, 4)), [1, 1])
        with pytest.raises(ValueError, match="not 1 blocks"):
            writer.put(pool, mx.zeros((2, 2, 4, 4)), [1])
        with pytest.raises(ValueError, match="same slot"):
            Slots([3, -1, -1, 3])


def test_result_of_a_read_that_is_not_an_output_is_computed_by_the_commit():
    """Else it would read what a later step wrote, or make that write copy the pool."""
    writer = ScatterWriter()
    pool = writer.create("pool", 3, (2, 4, 4), mx.float32)
    result = writer.read([pool], lambda array, after: array.sum())
    writer.commit()
    address = int(writer.read([pool], lambda array, after: mx.array(_address(array))))
    writer.commit()
    writer.write([pool], [mx.ones((1, 2, 4))], Slots([3]))
    writer.commit()
    assert int(writer.read([pool], lambda array, after: mx.array(_address(array)))) == address
    assert result.item() == 0
