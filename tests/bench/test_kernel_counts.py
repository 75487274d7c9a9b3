"""What the kernels read and launch, gated: exact counts, the same on every machine. No times."""

import mlx.core as mx
import pytest

from tests.bench.bench_kernels_static import CASES, Decode, Prefill
from tests.msl_host.require import require_toolchain

# GQA 1 to 8 (and beyond), D 64, 128 and 256; the last two columns: threadgroups and simdgroups of each.
_DECODE = [
    (Decode(8, 8, 64, 512), 32, 4),
    (Decode(8, 2, 64, 512), 8, 4),
    (Decode(8, 1, 64, 512), 4, 4),
    (Decode(4, 2, 128, 512), 8, 4),
    (Decode(8, 1, 128, 512, dtype=mx.bfloat16), 4, 4),
    (Decode(8, 2, 256, 512), 8, 4),
    (Decode(8, 1, 256, 512), 16, 2),
    (Decode(16, 1, 128, 512), 8, 2),
    (Decode(4, 1, 128, 512, bits=8), 4, 4),
    (Decode(8, 1, 256, 512, bits=4), 4, 2),
    (Decode(16, 1, 576, 512, latent=512), 4, 8),
    (Decode(16, 1, 576, 448, latent=512, bits=8), 2, 8),
    (Decode(4, 1, 128, 512, rows=4), 16, 2),
    (Decode(4, 1, 128, 256, batch=3), 6, 4),
]


@pytest.fixture(autouse=True)
def _toolchain():
    require_toolchain()


@pytest.mark.parametrize(("case", "threadgroups", "simdgroups"), _DECODE, ids=str)
def test_decode_reads_each_byte_once_and_waits_twice_a_tile_at_most(case, threadgroups, simdgroups):
    row = case.run()
    assert row["read_per_unique_byte"] == 1
    assert row["lines_per_least_lines"] == 1
    assert row["barriers_per_tile"] in (0, 2)
    assert row["threadgroup_memory_bytes"] <= 16 * 1024
    assert (row["threadgroups"], row["threads_per_threadgroup"]) == (threadgroups, 32 * simdgroups)
    assert row["launches"] == 2
    # Half for the rows' outputs; their maxima and sums, which each simdgroup of the merge reads, come on top.
    assert row["partial_bytes_per_pool_byte"] <= 0.55 * case.rows
    bits = case.bits + 32 / 64 if case.bits else case.dtype.size * 8
    pools = 1 if case.latent else 2
    assert row["pool_bytes"] == case.batch * case.kv_heads * case.context * case.head_dim * pools * bits / 8


def test_decode_reads_nothing_out_of_the_window():
    row = Decode(4, 2, 64, 2048, window=200).run()
    assert row["pool_bytes"] == 2 * 2 * 200 * 64 * 2
    assert row["read_per_unique_byte"] == 1
    # Tokens 1848 to 2047 lie in seven partitions of 32: two threadgroups of four for each KV head.
    assert row["threadgroups"] == 4


def test_latents_are_read_once_for_16_heads():
    assert Decode(32, 1, 576, 64, latent=512).run()["read_per_unique_byte"] == 2


# The last column: threadgroups.
_PREFILL = [
    (Prefill(4, 1, 128, 64, 512), 8),
    (Prefill(8, 2, 64, 40, 300), 10),
    (Prefill(8, 1, 64, 20, 200, dtype=mx.bfloat16), 5),
    (Prefill(2, 1, 112, 24, 96), 2),
    (Prefill(1, 1, 64, 64, 128), 2),
    (Prefill(4, 1, 128, 32, 512, window=64), 4),
    (Prefill(4, 1, 128, 16, 128, bits=8), 2),
    (Prefill(4, 1, 128, 16, 128, bits=4), 2),
    (Prefill(2, 1, 192, 32, 128), 2),
    (Prefill(2, 1, 256, 32, 128), 2),
    (Prefill(4, 1, 256, 16, 256, window=40, dtype=mx.bfloat16), 2),
    (Prefill(4, 1, 256, 16, 128, bits=8), 2),
    (Prefill(4, 1, 256, 16, 128, bits=4), 2),
    (Prefill(2, 1, 512, 16, 128), 2),
    (Prefill(4, 1, 192, 16, 128, values=128), 2),
    (Prefill(16, 1, 576, 3, 130, latent=512), 3),
    (Prefill(40, 1, 576, 2, 96, latent=512, dtype=mx.bfloat16), 5),
]


@pytest.mark.parametrize(("case", "threadgroups"), _PREFILL, ids=str)
def test_prefill_reads_what_its_tiles_see_once_a_tile_of_rows(case, threadgroups):
    """Nothing beyond the diagonal or out of the window; for all heads that share a KV head, and latents for both uses.

    Tiles are no smaller for it: 16 rows and 16 keys at least, 32 rows for all heads below 512.
    """
    row = case.run()
    assert row["read_per_needed_byte"] == 1
    # Of a packed wide head a simdgroup takes half a line a key, or a quarter; its neighbours take the rest.
    assert row["lines_per_least_lines"] == (16 / case.bits if case.bits and case.head_dim > 128 else 1)
    assert row["barriers_per_tile"] == 2
    assert row["threadgroup_memory_bytes"] <= 16 * 1024
    assert (row["threadgroups"], row["launches"]) == (threadgroups, 1)
    assert row["rows_per_tile"] == (32 if case.head_dim < 512 else 16)
    assert row["keys_per_tile"] >= 16


def test_cases_of_the_benchmark_have_names_of_their_own():
    assert len({str(case) for case in CASES}) == len(CASES)


# What the benchmark shows, as far as it takes the harness seconds: 8 to 32 heads, GQA 1 to 8, contexts from 2k to 32k.
_REFERENCE = [
    case
    for case in CASES
    if isinstance(case, Decode) and case.heads <= 32 and case.batch * case.kv_heads * case.context <= 2**17
]


@pytest.mark.parametrize("case", _REFERENCE, ids=str)
def test_reference_shapes_of_decode_keep_to_the_bars(case):
    row = case.run()
    assert row["read_per_unique_byte"] == 1
    assert row["lines_per_least_lines"] == 1
    assert row["barriers_per_tile"] in (0, 2)
    assert row["threadgroup_memory_bytes"] <= 16 * 1024


def test_the_reference_shape_of_prefill_keeps_to_the_bars():
    row = Prefill(4, 1, 128, 512, 4096).run()
    assert row["read_per_needed_byte"] == 1
    assert row["lines_per_least_lines"] == 1
    assert row["barriers_per_tile"] <= 2
    assert row["threadgroup_memory_bytes"] <= 16 * 1024
