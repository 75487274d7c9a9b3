"""Which of kernel and twin runs, and that a bad kernel never does."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from worker.batch import Batch, Span
from worker.evaluation import Inline
from worker.metal import twins
from worker.metal.decode_checks import LatentNeeds
from worker.metal.decode_source import HEADER, merge_source, partials_source
from worker.metal.dispatch import assemble, choose_kernels
from worker.metal.in_place_writer import InPlaceWriter
from worker.metal.scatter_writer import ScatterWriter
from worker.metal.self_test import AttentionNeeds
from worker.metal.self_test_cases import FAMILIES
from worker.metal.write_kv import WRITE_SOURCE

_NEEDS = [AttentionNeeds(4, 2, 64, mx.float32)]


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
        assert choose_kernels(()).name == "mlx"
    assert caplog.messages == ["kernels: plain MLX, because this machine has no Metal"]


@pytest.mark.parametrize(
    ("metal", "reason"), [(FakeMetal(), "differs from its twin"), (_broken_metal, "no such function")]
)
def test_kernel_that_is_wrong_or_fails_gives_way_to_its_twin(caplog, metal, reason):
    """With a message that says why, and no error."""
    kernels = choose_kernels(_NEEDS, metal)
    assert (kernels.name, kernels.decode, kernels.prefill) == ("mlx", None, None)
    assert kernels.failed[:4] == ("write_kv", "paged_decode", "put_blocks", "paged_prefill")
    assert isinstance(kernels.make_writer(Inline()), ScatterWriter)
    assert reason in caplog.text


_ALL = {family.name for family in FAMILIES}


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        ({"paged_decode"}, "metal paged_prefill"),
        ({"paged_prefill"}, "metal paged_decode"),
        ({"in_place"}, "metal paged_decode, paged_prefill"),
        ({"write_kv"}, "metal paged_decode, paged_prefill"),
        (set(), "metal paged_decode, paged_prefill, writes in place"),
    ],
)
def test_each_kernel_gives_way_by_itself(broken, name):
    """Pools are written in place only where every reader is a kernel that takes tokens."""
    kernels = assemble(FakeMetal(), _NEEDS, _ALL - broken, broken)
    assert (kernels.name, kernels.failed) == (name, tuple(broken))
    assert kernels.takes_ragged_rows == ("paged_decode" not in broken)
    assert type(kernels.make_writer(Inline())) is (ScatterWriter if broken else InPlaceWriter)


@pytest.mark.parametrize(
    ("broken", "name", "takes_ragged_rows"),
    [
        (set(), "metal latent_decode, latent_prefill, writes in place", True),
        ({"in_place"}, "metal latent_decode, latent_prefill", True),
        ({"latent_prefill"}, "metal latent_decode", True),
        ({"latent_decode"}, "metal latent_prefill", False),
    ],
)
def test_latents_are_written_in_place_where_kernels_read_them(broken, name, takes_ragged_rows):
    latents = [LatentNeeds(4, 64, 32, mx.float32)]
    kernels = assemble(FakeMetal(), latents, _ALL - broken)
    assert (kernels.name, kernels.takes_ragged_rows) == (name, takes_ragged_rows)
    assert kernels.reads_seen_slots_alone == (broken <= {"in_place"})
    assert type(kernels.make_writer(Inline())) is (ScatterWriter if broken else InPlaceWriter)
    both = assemble(FakeMetal(), [*latents, *_NEEDS], _ALL - broken)
    alone = set(name.removeprefix("metal ").split(", "))
    assert set(both.name.removeprefix("metal ").split(", ")) == alone | {"paged_decode", "paged_prefill"}
    assert both.takes_ragged_rows == takes_ragged_rows


@pytest.mark.parametrize(
    ("need", "reasons"),
    [
        (AttentionNeeds(2, 2, 1024, mx.float32), ("paged_decode: 2 heads over 2 of 1024", "paged_prefill: 2 heads")),
        (
            LatentNeeds(4, 1024, 32, mx.float32),
            ("latent_decode: 4 heads over latents of 1024", "latent_prefill: 4 heads over latents of 1024"),
        ),
    ],
)
def test_what_is_beyond_all_kernels_runs_on_plain_mlx(caplog, need, reasons):
    """That is no failure of a kernel; the log says why."""
    metal = FakeMetal()
    with caplog.at_level("INFO"):
        kernels = choose_kernels([need], metal)
    assert (kernels.name, kernels.failed, metal.launched) == ("mlx", (), [])
    assert all(reason in caplog.text for reason in reasons)


def test_heads_of_uneven_widths_run_on_kernels_in_all():
    needs = [AttentionNeeds(4, 2, 192, mx.float32, value_dim=128)]
    # The fake's kernels are wrong, and so each is seen to be tried.
    assert set(choose_kernels(needs, FakeMetal()).failed) >= {"paged_decode", "paged_prefill", "write_kv"}
    kernels = assemble(FakeMetal(), needs, _ALL)
    assert kernels.name == "metal paged_decode, paged_prefill, writes in place"


@pytest.mark.metal
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs an Apple GPU")
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_kernels_agree_with_their_twins_on_this_gpu(head_dim, dtype):
    name = choose_kernels([AttentionNeeds(8, 2, head_dim, dtype)], mx.fast.metal_kernel).name
    assert name == "metal paged_decode, paged_prefill, writes in place"


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
