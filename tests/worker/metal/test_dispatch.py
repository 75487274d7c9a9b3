"""Which of kernel and twin runs, and that a bad kernel never does."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from worker.batch import Batch, Span
from worker.kv_shapes import LayerShape
from worker.metal import twins
from worker.metal.decode_source import HEADER, merge_source, partials_source
from worker.metal.dispatch import choose_kernels
from worker.metal.write_kv import WRITE_SOURCE

_LAYERS = (LayerShape(num_kv_heads=2, head_dim=64, dtype=mx.float32),)


class FakeMetal:
    """A `metal_kernel` whose kernels return zeros: launched without an error, and wrong."""

    def __init__(self) -> None:
        self.launched: list[str] = []

    def __call__(self, *, name: str, output_names: list[str], **_: Any) -> Any:
        def launch(*, output_shapes, output_dtypes, **_: Any):
            self.launched.append(name)
            assert len(output_shapes) == len(output_names)
            return [mx.zeros(shape, dtype) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]

        return launch


def _broken_metal(**_: Any) -> Any:
    def launch(**_: Any):
        raise RuntimeError("no such function")

    return launch


@pytest.mark.skipif(mx.metal.is_available(), reason="needs a machine without Metal")
def test_twins_run_without_metal(caplog):
    """One line of the log says so, and why."""
    with caplog.at_level("INFO"):
        assert choose_kernels(_LAYERS).name == "mlx"
    assert caplog.messages == ["kernels: plain MLX, because this machine has no Metal"]
    assert choose_kernels(_LAYERS).paged_decode is twins.paged_decode


@pytest.mark.parametrize(
    ("metal", "reason"), [(FakeMetal(), "differs from its twin"), (_broken_metal, "no such function")]
)
def test_kernel_that_is_wrong_or_fails_gives_way_to_its_twin(caplog, metal, reason):
    """With a message that says why, and no error."""
    kernels = choose_kernels(_LAYERS, metal)
    assert (kernels.name, kernels.failed) == ("mlx", ("write_kv", "paged_decode"))
    assert reason in caplog.text


def test_head_dim_that_lanes_cannot_share_runs_on_twins(caplog):
    metal = FakeMetal()
    layers = (LayerShape(num_kv_heads=2, head_dim=1024, dtype=mx.float32),)
    assert choose_kernels(layers, metal).name == "mlx"
    assert metal.launched == []


@pytest.mark.metal
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs an Apple GPU")
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_kernels_agree_with_their_twins_on_this_gpu(head_dim, dtype):
    assert choose_kernels((LayerShape(2, head_dim, dtype),)).name == "metal paged_decode"


_SOURCES = [
    HEADER,
    *(partials_source(is_staged=staged, is_packed=True, values_in_keys=False) for staged in (False, True)),
    merge_source(has_sinks=True),
    WRITE_SOURCE,
]


@pytest.mark.parametrize("source", _SOURCES)
def test_sources_keep_to_the_metal_dialect(source):
    """What a C++ compiler would accept and Metal does not, or what overflows on a large pool."""
    assert "double" not in source
    assert "std::" not in source
    assert "INFINITY" not in source


def _case(context_lens, num_kv_heads=2, shared_heads=3, head_dim=16, block_size=8):
    rng = np.random.RandomState(0)
    num_blocks = sum(-(-length // block_size) for length in context_lens) + 1
    ids = rng.permutation(np.arange(1, num_blocks)).tolist()
    spans, first = [], 0
    for length in sorted(context_lens):
        used = -(-length // block_size)
        spans.append(Span([0], length - 1, ids[first : first + used], samples=True))
        first += used
    pools = rng.randn(2, num_blocks * num_kv_heads, block_size, head_dim).astype(np.float32)
    queries = rng.randn(len(spans), num_kv_heads * shared_heads, 1, head_dim).astype(np.float32)
    return spans, pools, queries


def _expected(span, pools, queries, num_kv_heads, position, block_size=8):
    """Attention of one query row in float64, position by position."""
    keys, values = pools.astype(np.float64)
    out = []
    for head, query in enumerate(queries):
        kv_head = head // (len(queries) // num_kv_heads)
        rows = [span.block_table[p // block_size] * num_kv_heads + kv_head for p in range(position + 1)]
        offsets = [p % block_size for p in range(position + 1)]
        scores = keys[rows, offsets] @ query.astype(np.float64) * 0.3
        weights = np.exp(scores - scores.max())
        out.append(weights @ values[rows, offsets] / weights.sum())
    return np.array(out)


@pytest.mark.parametrize("context_lens", [(1,), (8,), (5, 9, 40), (300, 310, 17, 600)])
def test_paged_decode_twin_attends_over_exactly_its_context(context_lens):
    """Small batches through `mx.fast`, large ones through the CPU's own softmax: one result."""
    spans, pools, queries = _case(context_lens)
    for group in Batch(spans, block_size=8).decode_groups:
        rows = slice(group.first, group.last)
        ours = twins.paged_decode(mx.array(queries[rows]), mx.array(pools[0]), mx.array(pools[1]), group, 2, 0.3)
        for row, span in enumerate(spans[rows]):
            expected = _expected(span, pools, queries[group.first + row, :, 0], 2, span.start)
            assert np.abs(np.array(ours[row, :, 0]) - expected).max() < 1e-5


@pytest.mark.parametrize(("start", "num_tokens"), [(0, 30), (7, 9), (100, 130), (3, 300)])
def test_paged_prefill_twin_is_causal_in_every_tile(start, num_tokens):
    """Each query sees the positions up to its own, however the queries are cut into tiles."""
    (span,), pools, _ = _case((start + num_tokens,))
    span = Span([0] * num_tokens, start, span.block_table, samples=True)
    (prefill,) = Batch([span], block_size=8).prefills
    queries = np.random.RandomState(1).randn(1, 6, num_tokens, 16).astype(np.float32)
    ours = twins.paged_prefill(mx.array(queries), mx.array(pools[0]), mx.array(pools[1]), prefill, 2, 0.3)
    for index in {0, 1, num_tokens // 2, min(127, num_tokens - 1), min(128, num_tokens - 1), num_tokens - 1}:
        expected = _expected(span, pools, queries[0, :, index], 2, start + index)
        assert np.abs(np.array(ours[0, :, index]) - expected).max() < 1e-5


def test_write_kv_twin_skips_rows_without_a_slot():
    pool = mx.zeros((6, 4, 8))
    rows = mx.arange(3 * 2 * 8).reshape(3, 2, 8).astype(mx.float32) + 1
    twins.write_kv(rows, mx.array([5, -1, 8], mx.int32), pool)
    expected = np.zeros((3, 2, 4, 8), np.float32)
    expected[1, :, 1], expected[2, :, 0] = np.array(rows[0]), np.array(rows[2])
    assert np.array_equal(np.array(pool).reshape(expected.shape), expected)
