"""Writes into pools, bit for bit: kernels on the harness against plain NumPy, and their twins."""

import mlx.core as mx
import numpy as np
import pytest

from tests.msl_host.arrays import SparsePool
from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from tests.worker.metal.decode_cases import HEAD_DIMS
from worker.metal.write_kv import PutBlocks, WriteKV, move_blocks, tie

_SEEDS = (0, 20261)
_F32, _F16, _BF16 = mx.float32, mx.float16, mx.bfloat16
# Type, heads, head_dim of keys and of values, block size: each head size in each type and with each block size.
WRITES = [
    (_F32, 4, 192, 128, 32),
    (_BF16, 1, 512, 64, 16),
    *(
        (dtype, heads, head_dim, head_dim, block_size)
        for heads, head_dim in enumerate(HEAD_DIMS, start=1)
        for dtype, block_size in ((_F32, 16), (_F16, 32 if heads % 2 else 16), (_BF16, 16 if heads % 2 else 32))
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    require_toolchain()
    host = MslHost()
    with host.compiling_ahead():
        for case in WRITES:
            _write(host, *case)
            _write(host, *case, slots=_MANY)
        for shape, dtype in _POOLS:
            _move(host, shape, dtype, [0], [1])


def _bits(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint32 if array.dtype.size == 4 else mx.uint16))


def _normal(seed: int, shape, dtype) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


_ONE = (37,)
_MANY = (17, -1, 3, 63, 32, 64, 95, -1, 31)


def _with_gaps(array: mx.array, axis: int) -> mx.array:
    """The same content, NaN between along one axis."""
    gaps = mx.full(array.shape, float("nan"), array.dtype)
    wide = mx.stack([array, gaps], axis=axis + 1)
    mx.eval(wide)
    return wide[(slice(None),) * (axis + 1) + (0,)]


def _write(host, dtype, heads, head_dim, value_dim, block_size, slots=_ONE, gaps=(None, None)):
    """Pools as they are after the write, and as they should be; the token. `gaps`: axes of keys and of values."""
    pools = [mx.full((6, heads, block_size, dim), float("nan"), dtype) for dim in (head_dim, value_dim)]
    expected = [_bits(pool).copy() for pool in pools]
    # The layout of a step of one sequence: heads first.
    rows = [
        _normal(seed, (heads, len(slots), dim), dtype).swapaxes(0, 1) for seed, dim in enumerate([head_dim, value_dim])
    ]
    for want, new in zip(expected, rows, strict=True):
        for row, slot in enumerate(slots):
            if slot >= 0:
                want[slot // block_size, :, slot % block_size] = _bits(new)[row]
    rows = [new if axis is None else _with_gaps(new, axis) for new, axis in zip(rows, gaps, strict=True)]
    mx.eval(pools)
    token = WriteKV(host)(*rows, mx.array(slots, mx.int32), *pools)
    return pools, expected, token


@pytest.mark.parametrize("slots", [_ONE, _MANY], ids=["one", "many"])
@pytest.mark.parametrize("case", WRITES, ids=str)
def test_rows_go_to_their_slots_and_nowhere_else(case, slots):
    pools, expected, token = _write(MslHost(seeds=_SEEDS), *case, slots=slots)
    for pool, want in zip(pools, expected, strict=True):
        assert np.array_equal(_bits(pool), want)
    assert token.tolist() == [0]


def test_all_rows_skipped_is_a_write_of_nothing():
    pools, expected, token = _write(MslHost(seeds=_SEEDS), *WRITES[0], slots=(-1, -1))
    for pool, want in zip(pools, expected, strict=True):
        assert np.array_equal(_bits(pool), want)
    assert token.tolist() == [0]


def test_slots_of_a_pool_beyond_32_bits():
    """2^33 elements in each pool: block 2^22 begins at element 2^32."""
    heads, block_size, head_dim = 1, 16, 64
    block = (1 << 22) + 1
    shape = (1 << 23, heads, block_size, head_dim)
    pools = [SparsePool(shape, _F32, {block: mx.zeros(shape[1:])}) for _ in range(2)]
    rows = _normal(1, (1, heads, head_dim), _F32)
    WriteKV(MslHost())(rows, -rows, mx.array([block * block_size + 3], mx.int32), *pools)
    for pool, sign in zip(pools, (1, -1), strict=True):
        assert pool.rows.keys() == {block}
        assert mx.array_equal(pool.rows[block][0, 3], sign * rows[0, 0])


@pytest.mark.parametrize(("is_keys", "axis"), [(True, 0), (True, 1), (True, 2), (False, 0), (False, 1), (False, 2)])
def test_rows_are_read_by_each_of_their_strides(is_keys, axis):
    """Keys, or values, with gaps along one axis."""
    pools, expected, _ = _write(MslHost(), *WRITES[0], slots=_MANY, gaps=(axis, None) if is_keys else (None, axis))
    for pool, want in zip(pools, expected, strict=True):
        assert np.array_equal(_bits(pool), want)


@pytest.mark.parametrize(
    ("keys", "values", "message"),
    [
        (mx.zeros((2, 2, 64), _F16), mx.zeros((2, 2, 64)), "keys"),
        (mx.zeros((2, 2, 32)), mx.zeros((2, 2, 64)), "keys"),
        (mx.zeros((2, 2, 64)), mx.zeros((1, 2, 64)), "values"),
    ],
)
def test_rows_that_do_not_fit_their_pool_are_refused(keys, values, message):
    pool = mx.zeros((4, 2, 16, 64))
    with pytest.raises(ValueError, match=message):
        WriteKV(MslHost())(keys, values, mx.zeros(2, mx.int32), pool, pool)


# K of two heads, packed K, an odd state, a state of one element in a block.
_POOLS = [((7, 2, 16, 64), _BF16), ((7, 3, 16, 8), mx.uint32), ((6, 5, 3), _F32), ((9,), _F16)]


def _move(host, shape, dtype, sources, targets):
    pool = (_normal(1, shape, _F32) * 1000).astype(dtype)
    mx.eval(pool)
    expected = _bits(pool).copy()
    expected[targets] = expected[sources]
    token = move_blocks(PutBlocks(host), pool, mx.array(sources, mx.int32), mx.array(targets, mx.int32))
    return pool, expected, token


@pytest.mark.parametrize("moves", [[(1, 2)], [(1, 2), (2, 3), (3, 1)], [(0, 5), (0, 4), (5, 0)]], ids=str)
@pytest.mark.parametrize(("shape", "dtype"), _POOLS, ids=str)
def test_moves_of_one_call_chain(shape, dtype, moves):
    """A target may be another move's source: what was there before the call is what moves."""
    sources, targets = (list(side) for side in zip(*moves, strict=True))
    pool, expected, token = _move(MslHost(seeds=_SEEDS), shape, dtype, sources, targets)
    assert np.array_equal(_bits(pool), expected)
    assert token.tolist() == [0]


@pytest.mark.parametrize(("shape", "dtype"), _POOLS, ids=str)
def test_blocks_are_filled(shape, dtype):
    pool = (_normal(1, shape, _F32) * 1000).astype(dtype)
    mx.eval(pool)
    expected = _bits(pool).copy()
    expected[[1, 4]] = 0
    zeros = mx.broadcast_to(mx.zeros((), dtype), (3, *shape[1:]))
    PutBlocks(MslHost(seeds=_SEEDS))(zeros, mx.array([4, -1, 1], mx.int32), pool)
    assert np.array_equal(_bits(pool), expected)


def test_blocks_of_a_pool_beyond_32_bits():
    """2^34 elements: block 2^27 begins at element 2^33. The compiled kernel is that of words."""
    shape, block = (1 << 28, 4, 16), (1 << 27) + 5
    pool = SparsePool(shape, mx.uint32, {block: mx.zeros(shape[1:], mx.uint32)})
    contents = mx.arange(64, dtype=mx.uint32).reshape(1, 4, 16)
    PutBlocks(MslHost())(contents, mx.array([block], mx.int32), pool)
    assert pool.rows.keys() == {block}
    assert mx.array_equal(pool.rows[block], contents[0])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_contents_may_be_strided(axis):
    contents = _with_gaps(_normal(2, (2, 5, 3), _F32), axis)
    pool = mx.zeros((6, 5, 3))
    mx.eval(pool)
    PutBlocks(MslHost())(contents, mx.array([4, 1], mx.int32), pool)
    assert np.array_equal(_bits(pool[mx.array([4, 1])]), _bits(contents))
    assert not pool[mx.array([0, 2, 3, 5])].any()


def test_contents_of_another_shape_are_refused():
    with pytest.raises(ValueError, match="no blocks of"):
        PutBlocks(MslHost())(mx.zeros((1, 2)), mx.zeros(1, mx.int32), mx.zeros((4, 3)))


def test_a_tied_index_has_the_values_of_the_index():
    assert tie(mx.array([3, 1], mx.int32), mx.zeros(1, mx.int32)).tolist() == [3, 1]
