"""The worker's kernels through its own dispatch code, with the harness in the GPU's place."""

import mlx.core as mx
import numpy as np
import pytest

from tests.msl_host.host import MslHost, engine_on_host
from worker.batch import DecodeGroup
from worker.kv_shapes import LayerShape
from worker.metal import dispatch, self_test, twins
from worker.metal.paged_decode import PagedDecode
from worker.metal.write_kv import WriteKV

_TOLERANCE = {mx.float32: 2e-6, mx.float16: 2e-3, mx.bfloat16: 1.5e-2}
_SEEDS = (0, 20261)
_UNUSED = 1 << 30


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    host = MslHost()
    with host.compiling_ahead():
        for dtype in _TOLERANCE:
            dispatch.choose_kernels([LayerShape(2, 64, dtype)], host)
            for case in _CASES:
                _decode(host, dtype, **case)


_CASES = [
    {"context_lens": (1, 16, 37), "num_kv_heads": 2, "shared_heads": 4, "head_dim": 64, "block_size": 16},
    {"context_lens": (300, 33), "num_kv_heads": 1, "shared_heads": 8, "head_dim": 128, "block_size": 32},
    {"context_lens": (5, 5), "num_kv_heads": 3, "shared_heads": 1, "head_dim": 32, "block_size": 16},
]


def _decode(host, dtype, context_lens, num_kv_heads, shared_heads, head_dim, block_size):
    """Ours and float64's. Slots that no row owns hold NaN, unused table entries 2^30; the rows share a first block."""
    rng = np.random.RandomState(1)
    tables, num_blocks = [], 1
    for length in context_lens:
        count = -(-length // block_size)
        shares = length >= block_size and tables and context_lens[0] >= block_size
        own = list(range(num_blocks, num_blocks + count))
        tables.append([tables[0][0], *own[1:]] if shares else own)
        num_blocks += count
    table = np.full((len(context_lens), max(map(len, tables)) + 1), _UNUSED, np.int32)
    pools = np.full((2, num_blocks, num_kv_heads, block_size, head_dim), np.nan, np.float32)
    for row, (length, blocks) in enumerate(zip(context_lens, tables, strict=True)):
        table[row, : len(blocks)] = blocks
        for index, block in enumerate(blocks):
            filled = min(block_size, length - index * block_size)
            if np.isnan(pools[0, block, 0, filled - 1, 0]):
                pools[:, block, :, :filled] = rng.randn(2, num_kv_heads, filled, head_dim)
    keys, values = (mx.array(pool.reshape(-1, block_size, head_dim)).astype(dtype) for pool in pools)
    heads = num_kv_heads * shared_heads
    queries = mx.array(rng.randn(len(context_lens), heads, 1, head_dim).astype(np.float32)).astype(dtype)
    group = DecodeGroup(0, len(context_lens), table, np.array(context_lens, np.int32), None)
    ours = PagedDecode(host)(queries, keys, values, group, num_kv_heads, 0.3)
    return ours, _reference(queries, keys, values, group, num_kv_heads, block_size)


def _reference(queries, keys, values, group, num_kv_heads, block_size):
    q, k, v = (np.array(x.astype(mx.float32)).astype(np.float64) for x in (queries, keys, values))
    out = np.zeros(q.shape)
    for row, length in enumerate(group.context_lens):
        at = np.arange(length)
        for head in range(q.shape[1]):
            kv_head = head // (q.shape[1] // num_kv_heads)
            rows = group.block_tables[row, at // block_size] * num_kv_heads + kv_head
            scores = k[rows, at % block_size] @ q[row, head, 0] * 0.3
            weights = np.exp(scores - scores.max())
            out[row, head, 0] = weights @ v[rows, at % block_size] / weights.sum()
    return out


@pytest.mark.parametrize("dtype", _TOLERANCE, ids=str)
@pytest.mark.parametrize("case", _CASES, ids=str)
def test_paged_decode_is_attention_over_its_own_slots(dtype, case):
    host = MslHost(seeds=_SEEDS)
    ours, expected = _decode(host, dtype, **case)
    assert np.abs(np.array(ours.astype(mx.float32)) - expected).max() < _TOLERANCE[dtype]
    assert [record.kernel.rsplit("_", 1)[0] for record in host.records] == [
        "cidery_paged_decode",
        "cidery_paged_decode_merge",
    ]


@pytest.mark.parametrize("dtype", _TOLERANCE, ids=str)
def test_write_kv_writes_what_its_twin_writes(dtype):
    rows = mx.random.normal((5, 2, 64), key=mx.random.key(1)).astype(dtype)
    slots = mx.array([17, -1, 3, 63, 32], mx.int32)
    pools = [mx.full((8, 16, 64), float("nan"), dtype) for _ in range(4)]
    mx.eval(pools)
    token = WriteKV(MslHost(seeds=_SEEDS))(rows, -rows, slots, pools[0], pools[1])
    assert token.tolist() == [0]
    twins.write_kv(rows, slots, pools[2])
    twins.write_kv(-rows, slots, pools[3])
    for ours, twin in ((pools[0], pools[2]), (pools[1], pools[3])):
        size = mx.uint32 if dtype == mx.float32 else mx.uint16
        assert mx.array_equal(ours.view(size), twin.view(size))


@pytest.mark.parametrize("dtype", _TOLERANCE, ids=str)
def test_dispatch_finds_a_gpu_whose_kernels_agree_with_their_twins(monkeypatch, dtype):
    """The start of a worker, self-test included, and only the dispatch sees Metal."""
    host = MslHost()
    engine_on_host(monkeypatch, host)
    assert dispatch.choose_kernels([LayerShape(2, 64, dtype)]).name == "metal paged_decode"
    assert len(host.records) > 2
    assert not mx.metal.is_available()


def test_a_home_that_can_not_be_written_costs_the_memory_only(monkeypatch, caplog):
    engine_on_host(monkeypatch, MslHost())

    def refuse(needs):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(self_test, "ResultMemory", refuse)
    assert dispatch.choose_kernels([LayerShape(2, 64, mx.float16)]).name == "metal paged_decode"
    assert "each start will test again: read-only file system" in caplog.text


def test_kernel_with_a_defect_gives_way_to_its_twin(monkeypatch, caplog):
    """A write that is not declared, here: the log says what, where, and who."""
    engine_on_host(monkeypatch, MslHost(in_place={}))
    assert dispatch.choose_kernels([LayerShape(2, 64, mx.float32)]).name == "mlx"
    assert "write-to-input, source line" in caplog.text
    assert "target[i] = keys[" in caplog.text
