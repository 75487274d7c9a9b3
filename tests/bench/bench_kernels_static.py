"""What the Metal kernels read, wait for and launch, counted exactly on a CPU.

    python -m tests.bench.bench_kernels_static
    python -m tests.bench.bench_kernels_static --quick            # a minute instead of several
    python -m tests.bench.bench_kernels_static --only "32 heads"  # cases whose name contains it

One JSON line on stdout, a table on stderr. These are counts of the harness (tests/msl_host), not times: they say what a
kernel asks of the memory, and nothing about how fast a GPU answers. The same commit gives the same counts anywhere.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from rich.console import Console
from rich.table import Table

from tests.bench import serve_report
from tests.msl_host.host import MslHost
from tests.msl_host.launch import LaunchRecord
from worker.metal.decode_plan import plan_verify, seen_ranges
from worker.metal.kv_pools import slot_bytes_of
from worker.metal.paged_decode import PagedDecode, choose_launch, cut_for
from worker.metal.paged_prefill import PagedPrefill, TileShape, WideShape, shape_for
from worker.metal.prefill_rows import PrefillOptions, PrefillRows
from worker.metal.quantized import QuantizedPool

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK_SIZE = 16
Row = dict[str, Any]


class Case(Protocol):
    """One launch; its text names it."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it reads: what makes it slow to count."""
        ...

    def run(self) -> Row:
        """Its counts."""
        ...


@dataclass(frozen=True)
class Decode:
    """One decode step of `batch` sequences of `context` tokens, of which `rows` rows each share loads.

    `latent`: values are the first so many elements of the keys.
    """

    heads: int
    kv_heads: int
    head_dim: int
    context: int
    batch: int = 1
    window: int = 0
    rows: int = 1
    bits: int = 0
    latent: int = 0
    dtype: mx.Dtype = mx.float16

    def __str__(self) -> str:
        kind = "verify" if self.rows > 1 else "latent decode" if self.latent else "decode"
        extras = {"batch": self.batch if self.batch > 1 else 0, "window": self.window, "bits": self.bits}
        extras["rows"] = self.rows if self.rows > 1 else 0
        shape = f"{self.heads} heads, GQA {self.heads // self.kv_heads}, D {self.head_dim}, {self.context} tokens"
        return ", ".join([f"{kind}, {shape}", *(f"{name} {value}" for name, value in extras.items() if value)])

    @property
    def num_tokens(self) -> int:
        return self.batch * self.kv_heads * (self.window or self.context)

    def run(self) -> Row:
        num_blocks = -(-self.context // BLOCK_SIZE)
        table = np.random.RandomState(7).permutation(self.batch * num_blocks).reshape(self.batch, -1).astype(np.int32)
        lens = [self.context - self.rows + 1 + row for _ in range(self.batch) for row in range(self.rows)]
        shared, value_dim = self.heads // self.kv_heads, self.latent or self.head_dim
        shape = (self.batch * num_blocks, self.kv_heads, BLOCK_SIZE, self.head_dim)
        keys, values = (_pool(shape, self.dtype, self.bits, seed) for seed in (1, 2))
        plan = plan_verify(
            table,
            seen_ranges(lens, window=self.window),
            self.kv_heads,
            rows_per_sequence=self.rows,
            shares_loads=True,
            cut=cut_for(shared, value_dim, slot_bytes_of(keys) * (1 if self.latent else 2)),
        )
        queries = mx.random.normal((len(lens), self.heads, 1, self.head_dim), key=mx.random.key(3)).astype(self.dtype)
        host = MslHost(count_lines=True, cpu_seconds=1800)
        kernel = PagedDecode(host)
        if self.latent:
            kernel.attend_latent(queries, keys, self.latent, plan, 0.1)
        else:
            kernel.attend(queries, keys, values, plan, self.kv_heads, 0.1)
        launch = choose_launch(shared * self.rows, self.head_dim, value_dim, self.dtype.size, is_latent=self.latent > 0)
        return counts(host.records, launch.staged_tokens * self.head_dim * (self.bits or self.dtype.size * 8) // 8)


@dataclass(frozen=True)
class Prefill:
    """The last `queries` tokens of a context of `context` tokens, by tiles. KV heads don't share anything, so one says
    what each does. `values`: their width, where it is not that of keys. `latent`: values are the first so many elements
    of the keys.
    """

    heads: int
    kv_heads: int
    head_dim: int
    queries: int
    context: int
    window: int = 0
    bits: int = 0
    values: int = 0
    latent: int = 0
    dtype: mx.Dtype = mx.float16

    def __str__(self) -> str:
        extras = {"window": self.window, "bits": self.bits, "values": self.values}
        shape = f"{self.heads} heads, GQA {self.heads // self.kv_heads}, D {self.head_dim}"
        shape = f"{shape}, {self.queries} of {self.context} tokens"
        kind = "latent prefill" if self.latent else "prefill"
        return ", ".join([f"{kind}, {shape}", *(f"{name} {value}" for name, value in extras.items() if value)])

    @property
    def num_tokens(self) -> int:
        """As many as a decode of a like cost has."""
        return self.heads * self.queries * (self.window or self.context) // 64

    def tile(self) -> "TileShape | WideShape":
        """The kernel's."""
        value_dim = self.latent or self.values or self.head_dim
        return shape_for(self.head_dim, value_dim, self.dtype, is_latent=self.latent > 0)

    def reaches(self) -> list[tuple[int, int]]:
        """Keys `[first, end)` of one KV head that each tile must read: from what its first row sees to its last."""
        shared, start = self.heads // self.kv_heads, self.context - self.queries
        reaches = []
        for row in range(0, self.queries * shared, self.tile().rows):
            first, last = (
                start + row // shared,
                start + (min(row + self.tile().rows, self.queries * shared) - 1) // shared,
            )
            reaches.append((max(0, first - self.window + 1) if self.window else 0, last + 1))
        return reaches

    def run(self) -> Row:
        num_blocks = -(-self.context // BLOCK_SIZE)
        table = np.random.RandomState(7).permutation(num_blocks).astype(np.int32)
        widths = (self.head_dim, self.latent or self.values or self.head_dim)
        shapes = [(num_blocks, self.kv_heads, BLOCK_SIZE, width) for width in widths]
        keys, values = (_pool(shape, self.dtype, self.bits, seed) for seed, shape in enumerate(shapes, 1))
        queries = mx.random.normal((self.queries, self.heads, self.head_dim), key=mx.random.key(3)).astype(self.dtype)
        rows = PrefillRows([0, self.queries], [self.context], [table])
        host = MslHost(count_lines=True, cpu_seconds=1800)
        kernel, options = PagedPrefill(host), PrefillOptions(0.1, window=self.window)
        if self.latent:
            assert isinstance(keys, mx.array)
            kernel.latent(queries, keys, self.latent, rows, options)
        else:
            kernel(queries, keys, values, rows, options)
        tile = self.tile()
        (record,) = host.records
        bits = self.bits or self.dtype.size * 8
        width = self.head_dim if self.latent else sum(widths)
        needed = self.kv_heads * sum(end - first for first, end in self.reaches()) * width * bits // 8
        read = sum(b.bytes_read for name, b in record.buffers.items() if name.endswith(("_pool", "_packed")))
        num_tiles = self.kv_heads * sum(-(-end // tile.keys) - first // tile.keys for first, end in self.reaches())
        return counts(host.records, 0) | {
            "read_per_needed_byte": read / needed,
            "barriers_per_tile": round(record.threadgroup_barriers / num_tiles, 3),
            "keys_per_tile": tile.keys,
            "rows_per_tile": tile.rows,
        }


def _pool(shape: tuple[int, ...], dtype: mx.Dtype, bits: int, seed: int) -> "mx.array | QuantizedPool":
    pool = mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
    return QuantizedPool(*mx.quantize(pool, group_size=64, bits=bits), bits, 64) if bits else pool


def counts(records: Sequence[LaunchRecord], tile_bytes: int) -> Row:
    """Figures of a launch that reads K and V, which comes first, and of those that merge its results.

    `tile_bytes`: keys that a threadgroup takes between two waits; 0 if it never waits.
    """
    first = records[0]
    pools = {name: buffer for name, buffer in first.buffers.items() if name.startswith(("key_", "value_"))}
    keys = next(buffer for name, buffer in pools.items() if name in ("key_pool", "key_packed"))
    pool_bytes = sum(buffer.unique_bytes_read for buffer in pools.values())
    # Lanes that share a scale read it in one load, each for itself: that is not read twice.
    elements = [buffer for name, buffer in pools.items() if name.endswith(("_pool", "_packed"))]
    read, unique, requests, lines, least = (
        sum(getattr(buffer, what) for buffer in elements)
        for what in ("bytes_read", "unique_bytes_read", "load_requests", "load_lines", "least_load_lines")
    )
    between = [record.buffers[name] for record in records for name in ("partial", "stats") if name in record.buffers]
    return {
        "kernel": first.kernel,
        "pool_bytes": pool_bytes,
        "read_per_unique_byte": read / unique,
        "partial_bytes_per_pool_byte": round(sum(b.bytes_read + b.bytes_written for b in between) / pool_bytes, 4),
        "lines_per_load": round(lines / requests, 3),
        "lines_per_least_lines": round(lines / least, 3),
        "barriers_per_tile": round(first.threadgroup_barriers * tile_bytes / keys.bytes_read, 3),
        "threadgroup_memory_bytes": max(record.threadgroup_memory for record in records),
        "threadgroups": first.threadgroups,
        "threads_per_threadgroup": first.threads // first.threadgroups,
        "simd_operations": first.simd_operations,
        "launches": len(records),
    }


# One more case is one more line.
CASES: list[Case] = [
    Decode(8, 8, 64, 2048),
    Decode(8, 2, 256, 4096),
    Decode(8, 1, 128, 16384),
    Decode(16, 16, 128, 8192),
    Decode(16, 2, 256, 32768),
    Decode(24, 8, 128, 8192),
    Decode(32, 32, 256, 2048),
    Decode(32, 16, 64, 8192),
    Decode(32, 8, 128, 2048),
    Decode(32, 8, 128, 32768),
    Decode(32, 4, 64, 32768),
    Decode(32, 4, 128, 2048, batch=8),
    Decode(32, 8, 128, 32768, window=1024),
    Decode(32, 8, 128, 8192, bits=8),
    Decode(16, 2, 256, 8192, bits=4),
    Decode(16, 1, 576, 8192, latent=512),
    Decode(128, 1, 576, 2048, latent=512),
    Decode(32, 8, 128, 8192, rows=5),
    Prefill(4, 1, 128, 512, 4096),
    Prefill(8, 1, 64, 512, 4096),
    Prefill(2, 1, 256, 512, 4096),
    Prefill(2, 1, 512, 256, 2048),
    Prefill(4, 1, 192, 512, 4096, values=128),
    Prefill(16, 1, 576, 64, 4096, latent=512),
    Prefill(4, 1, 128, 512, 4096, window=1024),
    Prefill(4, 1, 128, 512, 4096, bits=8),
]
_QUICK_TOKENS = 16384

_COLUMNS = {
    "read / unique": "read_per_unique_byte",
    "read / needed": "read_per_needed_byte",
    "partial / pool": "partial_bytes_per_pool_byte",
    "lines / load": "lines_per_load",
    "lines / least": "lines_per_least_lines",
    "barriers / tile": "barriers_per_tile",
    "tg memory": "threadgroup_memory_bytes",
    "tgs": "threadgroups",
    "threads": "threads_per_threadgroup",
}


def main() -> None:
    """Count all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="only the cases that are counted in a few seconds")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    options = parser.parse_args()
    cases = [case for case in CASES if options.only in str(case)]
    cases = [case for case in cases if not options.quick or case.num_tokens <= _QUICK_TOKENS]
    if not cases:
        parser.error(f"no case has {options.only!r} in its name")
    rows = []
    for case in cases:
        rows.append({"case": str(case), **case.run()})
        sys.stderr.write(f"{case}: done\n")
    table = Table(title="Counts, not times")
    table.add_column("case")
    for head in _COLUMNS:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(row["case"], *(f"{row[key]:g}" if key in row else "" for key in _COLUMNS.values()))
    Console(stderr=True, width=150).print(table)
    commit, is_dirty = serve_report.commit(REPOSITORY)
    about = {"commit": commit, "dirty": is_dirty, "machine": serve_report.machine()}
    sys.stdout.write(json.dumps({"bench": "kernels_static", "counts_not_times": True, **about, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
