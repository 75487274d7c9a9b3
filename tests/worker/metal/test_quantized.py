"""Rows quantised into pools: the kernel on the harness against `mx.quantize` and against float64."""

import mlx.core as mx
import numpy as np
import pytest

from tests.msl_host.arrays import SparsePool
from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from worker.metal.quantized import QuantizedPool, WriteQuantized, write_twin, zero_pool

_SEEDS = (0, 20261)
_F32, _F16, _BF16 = mx.float32, mx.float16, mx.bfloat16
# Type, heads, head_dim, block size, bits, group.
_CASES = [
    (_F32, 2, 64, 16, 8, 32),
    (_F16, 1, 64, 32, 4, 64),
    (_BF16, 3, 96, 16, 4, 32),
    (_F16, 2, 128, 16, 8, 64),
    (_BF16, 8, 256, 32, 8, 32),
    (_F32, 1, 512, 16, 4, 64),
]
_SLOTS = (17, -1, 3, 63, 32, 64, 95, -1, 31)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    require_toolchain()
    host = MslHost()
    with host.compiling_ahead():
        for case in _CASES:
            _write(WriteQuantized(host), *case)


def _rows(dtype, heads, head_dim) -> mx.array:
    """Groups of all kinds: plain, shifted, all zero, all the same, small, of one sign."""
    rows = mx.random.normal((len(_SLOTS), heads, head_dim), key=mx.random.key(3))
    rows[2] = rows[2] + 30
    rows[3] = -mx.abs(rows[3])
    rows[4] = 0
    rows[5] = 2.5
    rows[6] = rows[6] * 1e-2
    rows[8] = -7.0
    return rows.astype(dtype)


def _write(write, dtype, heads, head_dim, block_size, bits, group_size) -> QuantizedPool:
    pool = zero_pool((6, heads, block_size, head_dim), dtype, bits, group_size)
    mx.eval(pool.packed, pool.scales, pool.biases)
    write(_rows(dtype, heads, head_dim), mx.array(_SLOTS, mx.int32), pool)
    return pool


def _codes(pool: QuantizedPool) -> np.ndarray:
    words = np.array(pool.packed)
    shifts = np.arange(0, 32, pool.bits, dtype=np.uint32)
    return (words[..., None] >> shifts & (2**pool.bits - 1)).reshape(*words.shape[:-1], -1).astype(np.int64)


def _as_float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_kernel_writes_what_its_twin_writes(case):
    """Scales and biases are the same; a code may differ by one where an element lies between two levels."""
    ours = _write(WriteQuantized(MslHost(seeds=_SEEDS)), *case)
    theirs = _write(write_twin, *case)
    assert mx.allclose(ours.scales.astype(_F32), theirs.scales.astype(_F32), rtol=1e-6 if case[0] == _F32 else 0)
    assert mx.array_equal(ours.biases, theirs.biases)
    differs = _codes(ours) - _codes(theirs)
    assert np.abs(differs).max() <= 1
    assert (differs != 0).mean() < 1e-3


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_what_is_read_back_is_near_what_was_written(case):
    """Within a level, and the rounding of scale and bias. Slots that no row names stay zero.

    Half a level inside; at the end that is nearer to zero up to a whole one, because the scale is rounded so that zero
    falls on a level.
    """
    dtype, heads, head_dim, block_size, bits, group_size = case
    pool = _write(WriteQuantized(MslHost()), *case)
    got = _as_float64(pool.dequantize(mx.arange(6)))
    rows = _as_float64(_rows(dtype, heads, head_dim))
    named = np.zeros((6, block_size), bool)
    unit = {_F32: 2**-22, _F16: 2**-10, _BF16: 2**-7}[dtype]
    for row, slot in enumerate(_SLOTS):
        if slot < 0:
            continue
        named[slot // block_size, slot % block_size] = True
        groups = rows[row].reshape(heads, -1, group_size)
        spans = np.maximum(groups.max(-1), 0) - groups.min(-1)
        # Scale and bias are rounded to the type, the scale counts up to 2^bits times.
        allowed = spans / (2**bits - 1) * 1.05 + np.abs(groups).max(-1) * unit * 2
        error = np.abs(got[slot // block_size, :, slot % block_size].reshape(groups.shape) - groups).max(-1)
        assert (error <= allowed + 1e-7).all(), (row, error.max(), allowed.max())
    assert (got.swapaxes(1, 2)[~named] == 0).all()


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (0, 1, 2)])
def test_rows_are_read_by_each_of_their_strides(axes):
    """NaN lies in the gaps."""
    dtype, heads, head_dim, block_size, bits, group_size = _CASES[0]
    rows = _rows(dtype, heads, head_dim)
    wide = rows
    for axis in axes:
        wide = mx.repeat(wide, 2, axis=axis)
    at = tuple(slice(None, None, 2) if axis in axes else slice(None) for axis in range(3))
    wide[...] = float("nan")
    wide[at] = rows
    mx.eval(wide)
    pool, expected = (zero_pool((6, heads, block_size, head_dim), dtype, bits, group_size) for _ in range(2))
    mx.eval(pool.packed, pool.scales, pool.biases, expected.packed, expected.scales, expected.biases)
    for new, target in ((wide[at], pool), (rows, expected)):
        WriteQuantized(MslHost())(new, mx.array(_SLOTS, mx.int32), target)
    assert expected.packed.any()
    for name in ("packed", "scales", "biases"):
        assert mx.array_equal(getattr(pool, name), getattr(expected, name))


def test_slots_of_a_pool_beyond_32_bits():
    """2^31 slots of all heads, two scales each: not even offsets of scales fit 32 bits."""
    dtype, _, head_dim, block_size, bits, group_size = _CASES[0]
    heads, block, slot = 8, (1 << 24) + 1, 3
    rows = mx.random.normal((1, heads, head_dim), key=mx.random.key(3))
    near = zero_pool((2, heads, block_size, head_dim), dtype, bits, group_size)
    parts = near.packed, near.scales, near.biases
    mx.eval(*parts)
    far = [SparsePool((block + 2, *part.shape[1:]), part.dtype, {block: part[0] + 0}) for part in parts]
    WriteQuantized(MslHost())(rows, mx.array([block_size + slot], mx.int32), near)
    slots = mx.array([block * block_size + slot], mx.int32)
    WriteQuantized(MslHost())(rows, slots, QuantizedPool(*far, bits, group_size))
    for part, pool in zip(parts, far, strict=True):
        assert pool.rows.keys() == {block}
        assert part[1].any()
        assert mx.array_equal(pool.rows[block], part[1])


def test_formats_that_no_kernel_has_are_refused():
    for shape, bits, group_size, message in (
        ((2, 1, 16, 64), 3, 32, "3 bits"),
        ((2, 1, 16, 64), 4, 128, "groups of 128"),
        ((2, 1, 16, 80), 4, 32, "head_dim 80"),
    ):
        with pytest.raises(ValueError, match=message):
            zero_pool(shape, _F16, bits, group_size)
    pool = zero_pool((2, 1, 16, 64), _F16, 4, 32)
    with pytest.raises(ValueError, match="needs"):
        QuantizedPool(pool.packed, pool.scales[..., :1], pool.biases, 4, 32)
    for write in (WriteQuantized(MslHost()), write_twin):
        with pytest.raises(ValueError, match="do not fit"):
            write(mx.zeros((1, 1, 64)), mx.array([0], mx.int32), pool)
