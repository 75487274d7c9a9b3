"""`gated_delta` against float64, its twin, and mlx-lm's own recurrence; the kernels run on the harness."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.gated_delta import gated_delta_ops

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
from worker.metal.gated_delta import GatedDelta
from worker.metal.state_rows import StateRows

# Decode rows: one, several, one that begins, one that is skipped.
_STEPS = [
    {"heads": (2, 4), "dims": (64, 64), "dtype": mx.float32, "by_channel": False, "rows": rows_of([1])},
    {"heads": (1, 2), "dims": (128, 128), "dtype": mx.bfloat16, "by_channel": False, "rows": rows_of([1, 1, 1])},
    {"heads": (2, 2), "dims": (96, 24), "dtype": mx.float16, "by_channel": True, "rows": rows_of([1, 1], fresh=[0])},
    {
        "heads": (1, 3),
        "dims": (256, 64),
        "dtype": mx.bfloat16,
        "by_channel": True,
        "rows": rows_of([1, 1, 1], fresh=[2], skipped=[1]),
    },
    {"heads": (2, 2), "dims": (192, 8), "dtype": mx.float16, "by_channel": False, "rows": rows_of([1, 1])},
]
# Prefills: below, exactly and beyond a tile of tokens; one token; none; decode rows among them.
_CHUNKS = [
    {"heads": (2, 4), "dims": (64, 64), "dtype": mx.float32, "by_channel": False, "rows": rows_of([16, 1, 37])},
    {
        "heads": (1, 2),
        "dims": (128, 128),
        "dtype": mx.bfloat16,
        "by_channel": False,
        "rows": rows_of([9, 8], fresh=[1]),
    },
    {
        "heads": (2, 2),
        "dims": (96, 24),
        "dtype": mx.float16,
        "by_channel": True,
        "rows": rows_of([5, 0, 23, 4], fresh=[0, 2], skipped=[3]),
    },
    {"heads": (1, 3), "dims": (256, 64), "dtype": mx.bfloat16, "by_channel": True, "rows": rows_of([7, 2])},
    {"heads": (2, 2), "dims": (192, 8), "dtype": mx.float16, "by_channel": False, "rows": rows_of([11], fresh=[0])},
    {"heads": (1, 1), "dims": (32, 40), "dtype": mx.float32, "by_channel": True, "rows": rows_of([33, 32])},
]


def _inputs(heads, dims, dtype, by_channel, rows):
    """Keys and queries of length one, decays from nearly none to nearly all, rates between 0 and 1."""
    (key_heads, value_heads), (key_dim, value_dim), n = heads, dims, rows.num_rows
    queries, keys = (normal(seed, n, key_heads, key_dim) for seed in (1, 2))
    queries, keys = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (queries, keys))
    values = normal(3, n, value_heads, value_dim, dtype=dtype)
    gates = mx.sigmoid(normal(4, n, value_heads, *([key_dim] if by_channel else []), scale=3.0) + 1.0)
    betas = mx.sigmoid(normal(5, n, value_heads)).astype(dtype)
    return [queries.astype(dtype), keys.astype(dtype), values, gates, betas]


def _case(**case):
    rows, ((_, value_heads), (key_dim, value_dim)) = case["rows"], (case["heads"], case["dims"])
    return _inputs(**case), pool_for(rows, (value_heads, value_dim, key_dim)), rows


def _reference(inputs, pool, rows):
    """Outputs, and the last state of each slot that is written."""
    q, k, v, g, beta = map(f64, inputs)
    repeats = v.shape[1] // q.shape[1]
    q, k = np.repeat(q, repeats, axis=1), np.repeat(k, repeats, axis=1)
    out, states = np.zeros(v.shape), {}
    for sequence, slot in enumerate(rows.slots):
        if slot < 0 or rows.lengths[sequence] == 0:
            continue
        state = np.zeros(pool.shape[1:]) if rows.is_fresh[sequence] else f64(pool[int(slot)])
        for t in range(rows.offsets[sequence], rows.offsets[sequence + 1]):
            state = state * (g[t][:, None, :] if g.ndim == 3 else g[t][:, None, None])
            change = beta[t][:, None] * (v[t] - np.einsum("hvk,hk->hv", state, k[t]))
            state = state + change[:, :, None] * k[t][:, None, :]
            out[t] = np.einsum("hvk,hk->hv", state, q[t])
        states[int(slot)] = state
    return out, states


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    require_toolchain()
    host = MslHost()
    with host.compiling_ahead():
        for case in _STEPS + _CHUNKS:
            inputs, pool, rows = _case(**case)
            GatedDelta(host)(*inputs, pool, rows)


@pytest.mark.parametrize("case", _STEPS + _CHUNKS, ids=case_id)
@pytest.mark.parametrize("which", ["kernel", "twin"])
def test_outputs_and_states_are_those_of_the_recurrence(which, case):
    inputs, pool, rows = _case(**case)
    before = copy(pool)
    run = GatedDelta(MslHost(seeds=SEEDS)) if which == "kernel" else state_twins.gated_delta
    y, _ = run(*inputs, pool, rows)
    expected, states = _reference(inputs, before, rows)
    assert y.dtype == case["dtype"]
    assert np.abs(f64(y) - expected).max() < TOLERANCE[case["dtype"]]
    check_states(pool, before, rows, states, 2e-5)


def test_twin_is_what_mlx_lm_computes():
    case = {"heads": (2, 4), "dims": (64, 32), "dtype": mx.float32, "by_channel": True, "rows": rows_of([12, 5])}
    inputs, pool, rows = _case(**case)
    before = copy(pool)
    y, _ = state_twins.gated_delta(*inputs, pool, rows)
    for first, last, slot in zip(rows.offsets, rows.offsets[1:], rows.slots, strict=False):
        q, k, v, g, beta = (array[None, first:last] for array in inputs)
        theirs, state = gated_delta_ops(q, k, v, g, beta, before[int(slot)][None])
        assert mx.abs(y[first:last] - theirs[0]).max() < 1e-5
        assert mx.abs(pool[int(slot)] - state[0]).max() < 1e-5


@pytest.mark.parametrize("cut", [1, 7, 16, 30])
def test_prefill_cut_in_two_gives_the_same_bits(cut):
    case = {"heads": (2, 4), "dims": (64, 64), "dtype": mx.float32, "by_channel": False, "rows": rows_of([38, 1])}
    inputs, pool, rows = _case(**case)
    parts = copy(pool)
    host = MslHost()
    whole, _ = GatedDelta(host)(*inputs, pool, rows)
    token, outputs = None, []
    for part, lengths in ((slice(0, cut), [cut, 0]), (slice(cut, 39), [38 - cut, 1])):
        y, token = GatedDelta(host)(*(array[part] for array in inputs), parts, rows_of(lengths), token)
        outputs.append(y)
    assert np.array_equal(bits(mx.concatenate(outputs)), bits(whole))
    assert np.array_equal(bits(parts), bits(pool))


def test_each_state_is_read_and_written_once_by_whole_lines():
    for lengths in ([1, 1, 1], [20, 9]):
        case = {"heads": (2, 4), "dims": (64, 64), "dtype": mx.float32, "by_channel": False, "rows": rows_of(lengths)}
        inputs, pool, rows = _case(**case)
        host = MslHost(count_lines=True)
        GatedDelta(host)(*inputs, pool, rows)
        (record,) = host.records
        state_bytes = len(lengths) * pool[0].nbytes
        counts = record.buffers["pool"]
        assert counts.bytes_read == counts.bytes_written == state_bytes
        assert counts.load_lines == counts.least_load_lines
        assert record.threadgroup_memory <= 16 * 1024


@pytest.mark.parametrize("case", [_STEPS[3], _CHUNKS[0]], ids=case_id)
def test_slices_of_a_projection_are_read_where_they_lie(case):
    inputs, pool, rows = _case(**case)
    again = copy(pool)
    run = GatedDelta(MslHost())
    expected, _ = run(*inputs, pool, rows)
    y, _ = run(*map(sliced, inputs), again, rows)
    assert np.array_equal(bits(y), bits(expected))
    assert np.array_equal(bits(again), bits(pool))


def test_offsets_into_a_large_pool_are_64_bit():
    slots = 2**33 // (2 * 32 * 64) + 5  # 2^31 vectors of four
    for lengths in ([1], [3]):
        case = {"heads": (1, 2), "dims": (64, 32), "dtype": mx.float32, "by_channel": False, "rows": rows_of(lengths)}
        inputs, small, rows = _case(**case)
        far = StateRows(rows.offsets, np.array([slots - 2], np.int32), rows.is_fresh)
        start = small[int(rows.slots[0])]
        pool = SparsePool((slots, 2, 32, 64), mx.float32, {slots - 2: copy(start)})
        y, _ = GatedDelta(MslHost())(*inputs, pool, far)
        expected, _ = GatedDelta(MslHost())(*inputs, small, rows)
        assert np.array_equal(bits(y), bits(expected))
        assert np.array_equal(bits(pool.rows[slots - 2]), bits(small[int(rows.slots[0])]))
