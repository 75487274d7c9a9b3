"""`mamba2` against float64, its twin, and mlx-lm's own scan; the kernels run on the harness."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.ssm import ssm_attn

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
from worker.metal.mamba2 import Mamba2
from worker.metal.state_rows import StateRows

_LIMIT = (0.001, 0.4)
_CASES = [
    {"heads": (4, 2), "dims": (32, 64), "dtype": mx.float32, "rows": rows_of([1])},
    {"heads": (3, 1), "dims": (64, 128), "dtype": mx.bfloat16, "rows": rows_of([1, 1, 1], fresh=[2], skipped=[1])},
    {"heads": (2, 2), "dims": (8, 256), "dtype": mx.float16, "rows": rows_of([1, 1])},
    {"heads": (2, 1), "dims": (16, 32), "dtype": mx.bfloat16, "rows": rows_of([1, 1], fresh=[1])},
    {"heads": (4, 2), "dims": (32, 64), "dtype": mx.float32, "rows": rows_of([16, 1, 37], fresh=[0])},
    {"heads": (3, 1), "dims": (64, 128), "dtype": mx.bfloat16, "rows": rows_of([9, 0, 8, 5], skipped=[3])},
    {"heads": (2, 2), "dims": (8, 256), "dtype": mx.float16, "rows": rows_of([11, 4])},
    {"heads": (2, 1), "dims": (40, 96), "dtype": mx.float16, "rows": rows_of([21], fresh=[0])},
]


def _case(heads, dims, dtype, rows):
    """Steps from below to above their limits, decays from nearly none to nearly all."""
    (heads, groups), (head_dim, state_dim), n = heads, dims, rows.num_rows
    inputs = [
        normal(1, n, heads, head_dim, dtype=dtype),
        mx.linspace(-2.0, 3.0, heads),
        normal(2, n, groups, state_dim, dtype=dtype, scale=state_dim**-0.25),
        normal(3, n, groups, state_dim, dtype=dtype, scale=state_dim**-0.25),
        normal(4, heads, dtype=dtype),
        normal(5, n, heads, dtype=dtype, scale=4.0) - 4.0,
        normal(6, heads),
    ]
    return inputs, pool_for(rows, (heads, head_dim, state_dim)), rows


def _reference(inputs, pool, rows):
    """Outputs, and the last state of each slot that is written."""
    x, a_log, b, c, d, dt, dt_bias = map(f64, inputs)
    repeats = x.shape[1] // b.shape[1]
    b, c = np.repeat(b, repeats, axis=1), np.repeat(c, repeats, axis=1)
    dt = np.clip(np.logaddexp(dt + dt_bias, 0.0), *_LIMIT)
    out, states = np.zeros(x.shape), {}
    for sequence, slot in enumerate(rows.slots):
        if slot < 0 or rows.lengths[sequence] == 0:
            continue
        state = np.zeros(pool.shape[1:]) if rows.is_fresh[sequence] else f64(pool[int(slot)])
        for t in range(rows.offsets[sequence], rows.offsets[sequence + 1]):
            decay = np.exp(-np.exp(a_log) * dt[t])
            state = decay[:, None, None] * state + (dt[t][:, None] * x[t])[:, :, None] * b[t][:, None, :]
            out[t] = np.einsum("hds,hs->hd", state, c[t]) + d[:, None] * x[t]
        states[int(slot)] = state
    return out, states


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    require_toolchain()
    host = MslHost()
    with host.compiling_ahead():
        for case in _CASES:
            inputs, pool, rows = _case(**case)
            Mamba2(host)(*inputs, pool, rows, time_step_limit=_LIMIT)


@pytest.mark.parametrize("case", _CASES, ids=case_id)
@pytest.mark.parametrize("which", ["kernel", "twin"])
def test_outputs_and_states_are_those_of_the_scan(which, case):
    inputs, pool, rows = _case(**case)
    before = copy(pool)
    run = Mamba2(MslHost(seeds=SEEDS)) if which == "kernel" else state_twins.mamba2
    y, _ = run(*inputs, pool, rows, time_step_limit=_LIMIT)
    expected, states = _reference(inputs, before, rows)
    assert y.dtype == case["dtype"]
    # Half precision rounds outputs of up to 8.
    assert np.abs(f64(y) - expected).max() < TOLERANCE[case["dtype"]] * np.abs(expected).max()
    check_states(pool, before, rows, states, 2e-5)


@pytest.mark.parametrize("limit", [(0.0, float("inf")), (0.001, 100.0)])
def test_twin_is_what_mlx_lm_computes(limit):
    inputs, pool, rows = _case(heads=(4, 2), dims=(32, 64), dtype=mx.float32, rows=rows_of([12, 5]))
    before = copy(pool)
    y, _ = state_twins.mamba2(*inputs, pool, rows, time_step_limit=limit)
    x, a_log, b, c, d, dt, dt_bias = inputs
    for first, last, slot in zip(rows.offsets, rows.offsets[1:], rows.slots, strict=False):
        part = [array[None, first:last] for array in (x, b, c, dt)]
        theirs, state = ssm_attn(part[0], a_log, part[1], part[2], d, part[3], dt_bias, before[int(slot)][None], limit)
        assert mx.abs(y[first:last] - theirs[0]).max() < 1e-4
        assert mx.abs(pool[int(slot)] - state[0]).max() < 1e-4


@pytest.mark.parametrize("cut", [1, 16, 30])
def test_prefill_cut_in_two_gives_the_same_bits(cut):
    inputs, pool, rows = _case(heads=(4, 2), dims=(32, 64), dtype=mx.float32, rows=rows_of([38, 1]))
    parts = copy(pool)
    host = MslHost()
    run = Mamba2(host)
    whole, _ = run(*inputs, pool, rows, time_step_limit=_LIMIT)
    token, outputs = None, []
    x, a_log, b, c, d, dt, dt_bias = inputs
    for part, lengths in ((slice(0, cut), [cut, 0]), (slice(cut, 39), [38 - cut, 1])):
        arguments = (x[part], a_log, b[part], c[part], d, dt[part], dt_bias)
        y, token = run(*arguments, parts, rows_of(lengths), token, time_step_limit=_LIMIT)
        outputs.append(y)
    assert np.array_equal(bits(mx.concatenate(outputs)), bits(whole))
    assert np.array_equal(bits(parts), bits(pool))


def test_each_state_is_read_and_written_once_by_whole_lines():
    for lengths in ([1, 1, 1], [20, 9]):
        inputs, pool, rows = _case(heads=(4, 2), dims=(32, 64), dtype=mx.float32, rows=rows_of(lengths))
        host = MslHost(count_lines=True)
        Mamba2(host)(*inputs, pool, rows, time_step_limit=_LIMIT)
        (record,) = host.records
        counts = record.buffers["pool"]
        assert counts.bytes_read == counts.bytes_written == len(lengths) * pool[0].nbytes
        assert counts.load_lines == counts.least_load_lines
        assert record.threadgroup_memory <= 16 * 1024


@pytest.mark.parametrize("case", [_CASES[1], _CASES[3]], ids=case_id)
def test_slices_of_a_projection_are_read_where_they_lie(case):
    inputs, pool, rows = _case(**case)
    again = copy(pool)
    run = Mamba2(MslHost())
    expected, _ = run(*inputs, pool, rows, time_step_limit=_LIMIT)
    y, _ = run(*map(sliced, inputs), again, rows, time_step_limit=_LIMIT)
    assert np.array_equal(bits(y), bits(expected))
    assert np.array_equal(bits(again), bits(pool))


def test_offsets_into_a_large_pool_are_64_bit():
    slots = 2**33 // (2 * 32 * 64) + 5  # 2^31 vectors of four
    for lengths in ([1], [3]):
        inputs, small, rows = _case(heads=(2, 1), dims=(32, 64), dtype=mx.float32, rows=rows_of(lengths))
        far = StateRows(rows.offsets, np.array([slots - 2], np.int32), rows.is_fresh)
        pool = SparsePool((slots, 2, 32, 64), mx.float32, {slots - 2: copy(small[int(rows.slots[0])])})
        y, _ = Mamba2(MslHost())(*inputs, pool, far, time_step_limit=_LIMIT)
        expected, _ = Mamba2(MslHost())(*inputs, small, rows, time_step_limit=_LIMIT)
        assert np.array_equal(bits(y), bits(expected))
        assert np.array_equal(bits(pool.rows[slots - 2]), bits(small[int(rows.slots[0])]))
