"""`short_conv` against float64, its twin, and mlx-lm's way of doing it; the kernel runs on the harness."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.msl_host.arrays import SparsePool
from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from tests.worker.metal.state_data import (
    SEEDS,
    TOLERANCE,
    bits,
    case_id,
    check_states,
    copy,
    f64,
    normal,
    pool_for,
    rows_of,
    sliced,
)
from worker.metal import state_twins
from worker.metal.short_conv import ShortConv
from worker.metal.state_rows import StateRows

_F32, _F16, _BF16 = mx.float32, mx.float16, mx.bfloat16
# Shorter than the window, a tile, a token more, several tiles; decode rows, some that begin or are skipped.
_CASES = [
    {"channels": 24, "width": 4, "dtype": _F32, "state": _F32, "bias": True, "silu": True, "rows": rows_of([1])},
    {
        "channels": 300,
        "width": 4,
        "dtype": _BF16,
        "state": _BF16,
        "bias": False,
        "silu": True,
        "rows": rows_of([1, 1, 1, 1], fresh=[2], skipped=[1]),
    },
    {"channels": 14, "width": 3, "dtype": _F16, "state": _F32, "bias": False, "silu": False, "rows": rows_of([1, 1])},
    {
        "channels": 24,
        "width": 4,
        "dtype": _F32,
        "state": _F32,
        "bias": True,
        "silu": True,
        "rows": rows_of([2, 32, 33, 100], fresh=[1]),
    },
    {
        "channels": 300,
        "width": 4,
        "dtype": _BF16,
        "state": _BF16,
        "bias": False,
        "silu": True,
        "rows": rows_of([3, 0, 40, 4], fresh=[0], skipped=[3]),
    },
    {"channels": 14, "width": 3, "dtype": _F16, "state": _F32, "bias": False, "silu": False, "rows": rows_of([1, 35])},
    {"channels": 5, "width": 2, "dtype": _F32, "state": _F32, "bias": True, "silu": False, "rows": rows_of([2, 1, 64])},
    {"channels": 8, "width": 8, "dtype": _BF16, "state": _F32, "bias": True, "silu": True, "rows": rows_of([3, 7, 39])},
]


def _case(channels, width, dtype, state, bias, silu, rows):
    pool = pool_for(rows, (width - 1, channels), dtype).astype(state)
    mx.eval(pool)
    return (
        normal(1, rows.num_rows, channels, dtype=dtype),
        normal(2, channels, width, 1, dtype=dtype, scale=0.5),
        normal(3, channels, dtype=dtype) if bias else None,
        pool,
        rows,
    )


def _reference(inputs, weights, bias, pool, rows, silu):
    """Outputs, and the last state of each slot that is written."""
    x, w = f64(inputs), f64(weights)[:, :, 0]
    out, states = np.zeros(x.shape), {}
    for sequence, slot in enumerate(rows.slots):
        first, last = rows.offsets[sequence : sequence + 2]
        if slot < 0 or first == last:
            continue
        state = np.zeros(pool.shape[1:]) if rows.is_fresh[sequence] else f64(pool[int(slot)])
        seen = np.concatenate([state, x[first:last]])
        for t in range(last - first):
            out[first + t] = (seen[t : t + w.shape[1]].T * w).sum(axis=1) + (0.0 if bias is None else f64(bias))
        states[int(slot)] = seen[-len(state) :]
    return out / (1.0 + np.exp(-out)) if silu else out, states


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    require_toolchain()
    host = MslHost()
    with host.compiling_ahead():
        for case in _CASES:
            ShortConv(host)(*_case(**case), silu=case["silu"])


@pytest.mark.parametrize("case", _CASES, ids=case_id)
@pytest.mark.parametrize("which", ["kernel", "twin"])
def test_outputs_and_states_are_those_of_the_convolution(which, case):
    inputs, weights, bias, pool, rows = _case(**case)
    before = copy(pool)
    run = ShortConv(MslHost(seeds=SEEDS)) if which == "kernel" else state_twins.short_conv
    y, _ = run(inputs, weights, bias, pool, rows, silu=case["silu"])
    expected, states = _reference(inputs, weights, bias, before, rows, case["silu"])
    assert y.dtype == case["dtype"]
    assert np.abs(f64(y) - expected).max() < TOLERANCE[case["dtype"]] * max(1.0, np.abs(expected).max())
    # Inputs are kept as they are.
    check_states(pool, before, rows, states, 1e-30)


def test_twin_is_what_mlx_lm_computes():
    inputs, weights, _, pool, rows = _case(24, 4, mx.float32, mx.float32, False, True, rows_of([12, 2]))
    before = copy(pool)
    y, _ = state_twins.short_conv(inputs, weights, None, pool, rows, silu=True)
    conv = nn.Conv1d(24, 24, 4, groups=24, bias=False)
    conv.weight = weights
    for first, last, slot in zip(rows.offsets, rows.offsets[1:], rows.slots, strict=False):
        seen = mx.concatenate([before[int(slot)][None], inputs[None, first:last]], axis=1)
        assert mx.abs(nn.silu(conv(seen))[0] - y[first:last]).max() < 1e-5
        assert mx.array_equal(seen[0, -3:], pool[int(slot)])


@pytest.mark.parametrize("cut", [1, 2, 32, 69])
def test_prefill_cut_in_two_gives_the_same_bits(cut):
    inputs, weights, bias, pool, rows = _case(24, 4, mx.float32, mx.float32, True, True, rows_of([70, 1]))
    parts = copy(pool)
    run = ShortConv(MslHost())
    whole, _ = run(inputs, weights, bias, pool, rows, silu=True)
    token, outputs = None, []
    for part, lengths in ((slice(0, cut), [cut, 0]), (slice(cut, 71), [70 - cut, 1])):
        y, token = run(inputs[part], weights, bias, parts, rows_of(lengths), token, silu=True)
        outputs.append(y)
    assert np.array_equal(bits(mx.concatenate(outputs)), bits(whole))
    assert np.array_equal(bits(parts), bits(pool))


def test_inputs_before_a_tile_are_all_that_is_read_twice():
    inputs, weights, bias, pool, rows = _case(64, 4, mx.float32, mx.float32, True, True, rows_of([70, 1]))
    host = MslHost(count_lines=True)
    ShortConv(host)(inputs, weights, bias, pool, rows, silu=True)
    (record,) = host.records
    counts = record.buffers["inputs"]
    # Two of the three tiles, and the state that the first one leaves.
    assert counts.load_lines == counts.least_load_lines
    assert counts.bytes_read == counts.unique_bytes_read + 3 * 3 * 64 * 4
    assert record.buffers["pool"].bytes_read == record.buffers["pool"].bytes_written == 2 * 3 * 64 * 4


@pytest.mark.parametrize("case", [_CASES[1], _CASES[3]], ids=case_id)
def test_slices_and_moved_axes_are_read_where_they_lie(case):
    inputs, weights, bias, pool, rows = _case(**case)
    again = copy(pool)
    run = ShortConv(MslHost())
    expected, _ = run(inputs, weights, bias, pool, rows, silu=case["silu"])
    moved = mx.contiguous(weights.transpose(1, 0, 2)).transpose(1, 0, 2)
    y, _ = run(sliced(inputs), moved, bias, again, rows, silu=case["silu"])
    assert np.array_equal(bits(y), bits(expected))
    assert np.array_equal(bits(again), bits(pool))


def test_offsets_into_a_large_pool_are_64_bit():
    inputs, weights, bias, small, rows = _case(24, 4, mx.float32, mx.float32, True, True, rows_of([3]))
    slots = 2**32 // (3 * 24) + 5
    far = StateRows(rows.offsets, np.array([slots - 2], np.int32), rows.is_fresh)
    pool = SparsePool((slots, 3, 24), mx.float32, {slots - 2: copy(small[int(rows.slots[0])])})
    y, _ = ShortConv(MslHost())(inputs, weights, bias, pool, far, silu=True)
    expected, _ = ShortConv(MslHost())(inputs, weights, bias, small, rows, silu=True)
    assert np.array_equal(bits(y), bits(expected))
    assert np.array_equal(bits(pool.rows[slots - 2]), bits(small[int(rows.slots[0])]))
