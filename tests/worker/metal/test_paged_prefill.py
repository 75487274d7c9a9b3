"""Prefill: the kernel on the harness and its twin, both against float64."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.msl_host.arrays import SparsePool
from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from tests.worker.metal.prefill_data import Case, as_float64, make, quantize, reference
from worker import odd_attention
from worker.metal import prefill
from worker.metal.paged_prefill import PagedPrefill, shape_for
from worker.metal.prefill import Prefill, goes_by_gather, latents_go_by_gather
from worker.metal.prefill_rows import PrefillOptions, PrefillRows
from worker.metal.wide_prefill import WideShape

_SEEDS = (0, 20261)
_F32, _F16, _BF16 = mx.float32, mx.float16, mx.bfloat16
_TOLERANCE = {_F32: 3e-6, _F16: 3e-3, _BF16: 2e-2}

# Head sizes, types, block sizes, tiles shorter and longer than a block, ratios of heads, ragged tails, one token, one
# block exactly, windows smaller than a block and larger than the context, chunks that end inside of a tile.
CASES = [
    Case(_F16, 64, 16, 2, 3, ((5, 37), (1, 1), (16, 16), (20, 50))),
    Case(_F32, 64, 32, 1, 8, ((3, 3), (9, 70))),
    Case(_BF16, 64, 16, 1, 4, ((3, 21), (1, 9))),
    Case(_F16, 80, 32, 1, 2, ((17, 33),), {"softcap": 2.5}),
    Case(_F32, 80, 16, 1, 3, ((5, 20),), {"window": 9}),
    Case(_F16, 96, 16, 2, 1, ((9, 17),), {"chunk": 8}),
    Case(_F32, 112, 32, 1, 2, ((6, 20),)),
    Case(_BF16, 112, 16, 1, 2, ((6, 35),), has_sinks=True),
    Case(_BF16, 80, 16, 2, 1, ((33, 40), (2, 18)), {"window": 7}),
    Case(_F32, 96, 16, 1, 4, ((10, 45), (4, 90)), {"window": 20}, has_sinks=True),
    Case(_BF16, 96, 32, 3, 2, ((1, 33), (7, 7)), {"softcap": 2.0}),
    Case(_F16, 112, 16, 1, 5, ((12, 60), (1, 40)), {"chunk": 24}),
    Case(_F16, 128, 32, 1, 7, ((6, 64), (11, 31)), {"window": 500}, skipped_rows=3),
    Case(_BF16, 128, 16, 2, 4, ((9, 41), (1, 17)), {"softcap": 1.5, "window": 33}, has_sinks=True),
    Case(_F32, 128, 16, 2, 2, ((17, 29),), {"chunk": 8}, has_sinks=True),
    Case(_F16, 192, 16, 1, 2, ((18, 35), (2, 2))),
    Case(_F32, 192, 16, 1, 1, ((9, 20),)),
    Case(_F16, 512, 16, 1, 2, ((3, 18),)),
    Case(_BF16, 256, 32, 1, 4, ((5, 40), (9, 33)), {"window": 16}, has_sinks=True),
    Case(_F32, 256, 16, 1, 1, ((3, 20),), {"softcap": 3.0}),
    Case(_BF16, 512, 16, 1, 2, ((9, 20), (1, 17)), {"chunk": 16}),
    Case(_F32, 512, 32, 1, 1, ((10, 19),), {"window": 5}),
    Case(_F16, 192, 16, 2, 2, ((9, 41), (1, 1), (20, 36)), {"window": 21}, has_sinks=True, value_dim=128),
    Case(_BF16, 192, 32, 1, 4, ((13, 70), (16, 16)), value_dim=128, skipped_rows=2),
    Case(_F32, 96, 16, 2, 3, ((13, 19), (3, 34)), {"softcap": 2.0}, has_sinks=True, value_dim=64),
    Case(_F32, 16, 16, 1, 5, ((7, 30),), {"chunk": 12}, value_dim=8),
    Case(_F32, 20, 16, 1, 2, ((40, 41), (2, 17)), value_dim=36),
    Case(_F16, 256, 16, 1, 8, ((4, 50), (1, 1), (33, 34)), {"chunk": 24}),
    Case(_F16, 576, 16, 1, 16, ((3, 45), (1, 1), (2, 16)), value_dim=512, is_latent=True),
    Case(_BF16, 576, 32, 1, 5, ((7, 33), (16, 16)), value_dim=512, is_latent=True, skipped_rows=1),
    Case(_F32, 576, 16, 1, 3, ((4, 21),), value_dim=512, is_latent=True),
    Case(_F32, 40, 16, 1, 4, ((12, 30), (1, 9)), value_dim=32, is_latent=True),
    Case(_F16, 288, 16, 1, 10, ((5, 20),), value_dim=256, is_latent=True),
]
# Type, head_dim, block size, bits, group; reach, soft cap, sinks.
_QUANTIZED = [
    (_F16, 64, 16, 8, 32, {"window": 30}, True),
    (_BF16, 128, 32, 4, 64, {"window": 30, "softcap": 2.0}, False),
    (_F32, 96, 16, 4, 32, {"window": 9, "softcap": 1.5}, True),
    (_F16, 256, 16, 8, 64, {"chunk": 24}, True),
    (_BF16, 256, 16, 4, 32, {"softcap": 2.0, "window": 20}, True),
    (_BF16, 64, 16, 8, 64, {}, False),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    require_toolchain()
    host = MslHost()
    with host.compiling_ahead():
        for case in CASES:
            _run(host, make(case), case.is_latent)
        for case in _QUANTIZED:
            _run(host, _quantized(*case)[0])


def _run(host, data, is_latent=False) -> mx.array:
    if is_latent:
        value_dim = data.values.shape[-1]
        return PagedPrefill(host).latent(data.queries, data.keys, value_dim, data.rows, data.options)
    return PagedPrefill(host)(data.queries, data.keys, data.values, data.rows, data.options)


def _error(ours: mx.array, expected: np.ndarray) -> float:
    assert ours.shape == expected.shape
    return np.abs(as_float64(ours) - expected).max()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_is_attention_over_what_each_query_sees(case):
    data = make(case)
    assert _error(_run(MslHost(seeds=_SEEDS), data, case.is_latent), reference(data)) < _TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_twin_is_attention_over_what_each_query_sees(case):
    data = make(case)
    ours = _twin(data, case.is_latent)
    assert _error(ours, reference(data)) < _TOLERANCE[case.dtype]


_SEQUENCE = st.tuples(st.integers(1, 40), st.integers(0, 60)).map(lambda pair: (pair[0], sum(pair)))
_REACH = st.one_of(st.just({}), *(st.fixed_dictionaries({name: st.integers(1, 70)}) for name in ("window", "chunk")))


# The kernel of narrow heads, that of wide ones and of uneven widths, and that of latents: width, values.
_KERNELS = [(16, 0, False), (16, 8, False), (40, 32, True)]


@pytest.mark.parametrize(("head_dim", "value_dim", "is_latent"), _KERNELS)
@settings(max_examples=25, deadline=None)
@given(st.lists(_SEQUENCE, min_size=1, max_size=3), _REACH, st.integers(1, 2), st.integers(1, 9), st.integers(0, 2))
def test_any_lengths_and_reaches(
    head_dim, value_dim, is_latent, sequences, reach, num_kv_heads, shared_heads, skipped_rows
):
    """Of one variant: all of these are arguments of the launch."""
    case = Case(_F32, head_dim, 16, num_kv_heads, shared_heads, tuple(sequences), reach, False, skipped_rows)
    data = make(replace(case, num_kv_heads=1 if is_latent else num_kv_heads, value_dim=value_dim, is_latent=is_latent))
    expected = reference(data)
    assert _error(_run(MslHost(), data, is_latent), expected) < _TOLERANCE[_F32]
    assert _error(_twin(data, is_latent), expected) < _TOLERANCE[_F32]


def _twin(data, is_latent) -> mx.array:
    """By way of what layers call."""
    if is_latent:
        return Prefill().latent(data.queries, data.keys, data.values.shape[-1], data.rows, data.options)
    return Prefill()(data.queries, data.keys, data.values, data.rows, data.options)


def _quantized(dtype, head_dim, block_size, bits, group_size, options, has_sinks):
    """Data with quantised pools, and what it stands for."""
    data = make(Case(dtype, head_dim, block_size, 2, 3, ((7, 37), (1, 1), (12, 16)), options, has_sinks))
    pools = [quantize(pool, bits, group_size) for pool in (data.keys, data.values)]
    plain = [pool.dequantize(mx.arange(pool.shape[0])) for pool in pools]
    return replace(data, keys=pools[0], values=pools[1]), replace(data, keys=plain[0], values=plain[1])


@pytest.mark.parametrize("case", _QUANTIZED, ids=lambda case: "-".join(map(str, case)).replace("mlx.core.", ""))
def test_quantized_pools_are_read_as_what_they_stand_for(case):
    data, plain = _quantized(*case)
    expected = reference(plain)
    assert _error(_run(MslHost(seeds=_SEEDS), data), expected) < _TOLERANCE[case[0]]
    assert (
        _error(Prefill()(data.queries, data.keys, data.values, data.rows, data.options), expected)
        < (_TOLERANCE[case[0]])
    )


def test_queries_may_be_strided():
    """The layout of a step of one sequence, `[1, heads, tokens, head_dim]`, is not copied first."""
    data = make(CASES[0])
    heads_first = mx.contiguous(data.queries.swapaxes(0, 1))
    ours = _run(MslHost(), replace(data, queries=heads_first.swapaxes(0, 1)))
    assert mx.array_equal(ours, _run(MslHost(), data))


@pytest.mark.parametrize(("head_dim", "shared_heads"), [(128, 7), (256, 4), (192, 2)])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_queries_are_read_by_each_of_their_strides(head_dim, shared_heads, axis):
    """NaN lies in the gaps along one axis. One tile of heads, one of wide heads, and a few rows before."""
    data = make(Case(_F16, head_dim, 16, 1, shared_heads, ((6, 20), (3, 3)), skipped_rows=2))
    gaps = mx.full(data.queries.shape, float("nan"), _F16)
    wide = mx.stack([data.queries, gaps], axis=axis + 1)
    mx.eval(wide)
    ours = _run(MslHost(), replace(data, queries=wide[(slice(None),) * (axis + 1) + (0,)]))
    assert _error(ours, reference(data)) < _TOLERANCE[_F16]


@pytest.mark.parametrize(("head_dim", "value_dim", "is_latent"), [(64, 0, False), (256, 0, False), (576, 512, True)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_scores_may_be_far_below_zero(head_dim, value_dim, is_latent, has_sinks):
    """Only their differences count: every score is near -500 here, over several tiles of keys.

    By the last element: it is no value of a latent.
    """
    data = make(Case(_F16, head_dim, 16, 1, 4, ((9, 80), (1, 1)), {}, has_sinks, 0, value_dim, is_latent))
    queries, keys = np.array(data.queries), np.array(data.keys)
    queries[..., -1], keys[..., -1] = -40, 12.5 * head_dim**0.5
    keys = mx.array(keys)
    values = keys[..., :value_dim] if is_latent else data.values
    options = replace(data.options, sinks=data.options.sinks - 500) if has_sinks else data.options
    data = replace(data, queries=mx.array(queries), keys=keys, values=values, options=options)
    assert _error(_run(MslHost(), data, is_latent), reference(data)) < _TOLERANCE[_F16]


@pytest.mark.parametrize(("head_dim", "value_dim", "is_latent"), [(64, 0, False), (256, 0, False), (576, 512, True)])
def test_blocks_of_a_pool_beyond_32_bits(head_dim, value_dim, is_latent):
    """More than 2^33 elements in each pool, blocks beyond element 2^32. No other block is there to be read."""
    data = make(Case(_F16, head_dim, 16, 1, 4, ((9, 30),), value_dim=value_dim, is_latent=is_latent))
    first = (1 << 32) // (16 * head_dim) + 1
    far = PrefillRows([0, 9], [30], [[first, first + 1]])
    pools = []
    for pool in (data.keys, data.values):
        blocks = {first + index: pool[int(block)] for index, block in enumerate(data.rows.table(0)[:2])}
        pools.append(SparsePool((2 * first, *pool.shape[1:]), _F16, blocks))
    ours = _run(MslHost(), replace(data, keys=pools[0], values=pools[1], rows=far), is_latent)
    assert mx.array_equal(ours, _run(MslHost(), data, is_latent))


def test_a_soft_cap_in_bfloat16_is_nearer_to_float64_than_that_of_mlx_lm():
    """Whose formula rounds scores twice, and weights once; plain MLX here does as mlx-lm does, to the bit."""
    data = make(Case(_BF16, 256, 16, 2, 2, ((8, 96),), {"softcap": 50.0}))
    data = replace(data, queries=data.queries * 8)
    expected = reference(data)
    table = mx.array(data.rows.table(0)[:6])
    keys, values = (pool[table].swapaxes(0, 1).reshape(1, 2, 96, 256) for pool in (data.keys, data.values))
    queries, mask = data.queries.swapaxes(0, 1)[None], mx.arange(96) <= mx.arange(88, 96)[:, None]
    scores = (queries * data.options.scale).reshape(1, 2, 2, 8, 256) @ keys[:, :, None].swapaxes(-1, -2)
    scores = mx.tanh(scores / 50.0) * 50.0
    scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
    theirs = (mx.softmax(scores, precise=True, axis=-1) @ values[:, :, None]).reshape(queries.shape)
    plain = odd_attention._capped(queries, keys, values, data.options.scale, mask, 50.0)
    assert mx.array_equal(plain, theirs)
    rounding = _error(mx.array(expected.astype(np.float32)).astype(_BF16), expected)
    assert _error(_run(MslHost(), data), expected) < 2 * rounding
    assert _error(_twin(data, False), expected) < 2 * rounding
    assert _error(theirs[0].swapaxes(0, 1), expected) > 4 * rounding


def test_tiles_that_no_query_sees_are_not_read():
    """4 queries at the end of 4096 tokens: a window of 64 costs what a context of 64 costs."""
    host = MslHost()
    for options in ({"window": 64}, {"chunk": 64}):
        _run(host, make(Case(_F16, 64, 16, 1, 8, ((4, 4096),), options)))
        record = host.records[-1]
        assert _read(record, "key_pool") <= 3 * 32 * 64 * 2
        assert record.threadgroup_barriers <= 2 * 3, "two barriers for each of three tiles of 32 keys"
    causal = Case(_F16, 64, 16, 1, 8, ((64, 64),))
    _run(host, make(causal))
    # 16 tiles of 4 tokens each; half of the keys lie above the diagonal.
    assert _read(host.records[-1], "key_pool") <= (16 / 2 + 2) * 64 * 64 * 2 * 1.2


def _read(record, name: str) -> int:
    return record.buffers[name].bytes_read


@pytest.mark.parametrize(
    ("head_dim", "value_dim", "dtype"),
    [(128, 128, _F16), (256, 256, _F16), (256, 256, _BF16), (512, 512, _F16), (192, 128, _BF16), (512, 512, _F32)],
)
def test_counts_of_a_tile(head_dim, value_dim, dtype):
    """Two barriers a tile of keys, and threadgroup memory within 16 KiB."""
    host = MslHost()
    _run(host, make(Case(dtype, head_dim, 16, 1, 4, ((4, 160),), value_dim=value_dim)))
    record = host.records[-1]
    assert record.threadgroups == 1
    assert record.threadgroup_barriers == 2 * 160 / shape_for(head_dim, value_dim, dtype).keys
    assert record.threadgroup_memory <= 16 * 1024
    for pool, width in (("key_pool", head_dim), ("value_pool", value_dim)):
        read = record.buffers[pool]
        assert read.bytes_read == read.unique_bytes_read == 160 * width * dtype.size, "once for all 4 heads"


def test_a_latent_is_read_once_for_keys_and_values_of_all_heads_of_a_tile():
    host = MslHost()
    _run(host, make(Case(_F16, 576, 16, 1, 16, ((1, 96),), value_dim=512, is_latent=True)), is_latent=True)
    (record,) = host.records
    read = record.buffers["key_pool"]
    assert read.bytes_read == read.unique_bytes_read == 96 * 576 * 2
    assert record.threadgroup_barriers == 2 * 96 / shape_for(576, 512, _F16, is_latent=True).keys
    assert record.threadgroup_memory <= 16 * 1024


@pytest.mark.parametrize("dtype", [_F32, _F16, _BF16], ids=str)
def test_every_tile_fits(dtype):
    for head_dim in range(4, 641, 4):
        for value_dim, is_latent in ((head_dim, False), (head_dim // 8 * 4, False), (max(head_dim - 64, 4), True)):
            if not 0 < value_dim <= 512:
                continue
            tile = shape_for(head_dim, value_dim, dtype, is_latent=is_latent)
            if isinstance(tile, WideShape):
                assert tile.threadgroup_bytes(dtype.size) <= 16 * 1024
                assert tile.softmax_lanes * tile.rows <= 32 * tile.simdgroups
                assert tile.keys % (8 * tile.simdgroups // tile.parts) == 0
            else:
                assert 2 * tile.keys * (head_dim * dtype.size + 16) <= 16 * 1024
            assert tile.simdgroups <= 8
    for widths in ((644, 512), (520, 520), (30, 32), (32, 30), (0, 4)):
        with pytest.raises(ValueError, match="multiples of 4"):
            shape_for(*widths, dtype)


def test_long_chunks_are_gathered_and_the_others_go_by_tiles():
    plain = PrefillOptions(0.125)

    def goes(num_queries, context_len, shared_heads=8, head_dim=128, options=plain, value_dim=0, is_quantized=False):
        queries = mx.zeros((num_queries, shared_heads, head_dim), _F16)
        pools = [mx.zeros((1, 1, 16, width), _F16) for width in (head_dim, value_dim or head_dim)]
        pools = [quantize(pool, 8, 64) for pool in pools] if is_quantized else pools
        rows = PrefillRows([0, num_queries], [context_len], [[0]])
        (by_gather,) = goes_by_gather(queries, *pools, rows, options)
        return by_gather

    assert goes(512, 8192)
    assert goes(128, 128)
    assert goes(1024, 4096, shared_heads=1)
    assert not goes(512, 4096, shared_heads=1)
    assert not goes(8, 8192)
    assert not goes(512, 8192, head_dim=112)
    assert not goes(512, 8192, head_dim=256)
    assert not goes(512, 8192, value_dim=64)
    assert not goes(512, 8192, is_quantized=True)
    assert not goes(512, 8192, options=PrefillOptions(0.125, softcap=50.0))
    assert not goes(512, 8192, options=PrefillOptions(0.125, window=4096))
    assert goes(512, 4096, options=PrefillOptions(0.125, window=4096))
    assert goes(512, 8192, options=PrefillOptions(0.125, chunk=8192))
    assert not goes(512, 8193, options=PrefillOptions(0.125, chunk=8192))
    assert goes(512, 8192, options=PrefillOptions(0.125, sinks=mx.zeros(8)))


@pytest.mark.parametrize(
    ("dtype", "widths", "bits", "group_size"), [(_BF16, (576, 512), 8, 64), (_F16, (96, 64), 4, 32)]
)
def test_quantized_latents_are_read_as_what_they_stand_for(dtype, widths, bits, group_size):
    head_dim, value_dim = widths
    data = make(Case(dtype, head_dim, 16, 1, 6, ((5, 29), (1, 1), (3, 16)), value_dim=value_dim, is_latent=True))
    pool = quantize(data.keys, bits, group_size)
    plain = pool.dequantize(mx.arange(pool.shape[0]))
    expected = reference(replace(data, keys=plain, values=plain[..., :value_dim]))
    data = replace(data, keys=pool)
    assert _error(_run(MslHost(seeds=_SEEDS), data, is_latent=True), expected) < _TOLERANCE[dtype]
    assert _error(_twin(data, is_latent=True), expected) < _TOLERANCE[dtype]
    assert not latents_go_by_gather(
        mx.zeros((512, 128, head_dim)), pool, PrefillRows([0, 512], [512], [[0]]), data.options
    )[0]


def test_latents_of_long_chunks_are_gathered_in_tiles_of_queries(monkeypatch):
    """Each way by itself and both in one step, with one result."""
    case = Case(_F32, 40, 16, 1, 32, ((33, 40), (2, 30), (32, 32)), value_dim=32, is_latent=True, skipped_rows=1)
    data = make(case)
    assert latents_go_by_gather(data.queries, data.keys, data.rows, data.options) == [True, False, True]
    expected = reference(data)
    for max_scores in (1 << 25, 1000 * 32):
        monkeypatch.setattr(prefill, "_MAX_SCORES", max_scores)
        host = MslHost()
        ours = Prefill(PagedPrefill(host)).latent(data.queries, data.keys, 32, data.rows, data.options)
        assert _error(ours, expected) < _TOLERANCE[_F32]
        assert len(host.records) == 1


def test_sequences_that_go_both_ways_come_out_in_order():
    """Long, short, short, long: two gathers and one launch of tiles."""
    case = Case(_F32, 64, 16, 1, 64, ((16, 30), (2, 20), (1, 5), (17, 17)), skipped_rows=2)
    data = make(case)
    host = MslHost()
    ours = Prefill(PagedPrefill(host))(data.queries, data.keys, data.values, data.rows, data.options)
    assert _error(ours, reference(data)) < _TOLERANCE[_F32]
    assert len(host.records) == 1
    assert host.records[0].threadgroups == 2 * 2 * 64 // 32 // 2 + 64 // 32


@pytest.mark.parametrize(
    ("limits", "lens", "tables", "message"),
    [
        ([0, 3], [2], [[0]], "3 queries and a context of 2"),
        ([0, 0], [2], [[0]], "0 queries"),
        ([0, 3, 4], [4], [[0]], "one limit more"),
        ([0, 3], [4], [[0], [1]], "one limit more"),
    ],
)
def test_rows_that_make_no_sense_are_refused(limits, lens, tables, message):
    with pytest.raises(ValueError, match=message):
        PrefillRows(limits, lens, tables)


def test_inputs_that_do_not_go_together_are_refused():
    data = make(CASES[0])
    kernel = PagedPrefill(MslHost())
    rest = data.keys, data.values, data.rows, data.options
    with pytest.raises(ValueError, match="queries are"):
        kernel(data.queries.astype(_F32), *rest)
    with pytest.raises(ValueError, match="do not go with pools"):
        kernel(data.queries[:, :5], *rest)
    with pytest.raises(ValueError, match="rows of queries"):
        kernel(data.queries[:7], *rest)
    with pytest.raises(ValueError, match="do not hold a context"):
        kernel(data.queries, data.keys, data.values, PrefillRows([0, 5], [37], [[1, 2]]), data.options)
    with pytest.raises(ValueError, match="at most one"):
        PrefillOptions(1.0, window=3, chunk=4)
