"""Data for prefill: slots that no row owns hold NaN, table entries that no query sees 2^30."""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from worker.metal.prefill_rows import PrefillOptions, PrefillRows
from worker.metal.quantized import QuantizedPool

UNUSED = 1 << 30


@dataclass(frozen=True)
class Case:
    """Sequences of (queries, context length); those with a full first block in common share it."""

    dtype: mx.Dtype
    head_dim: int
    block_size: int
    num_kv_heads: int
    shared_heads: int
    sequences: tuple[tuple[int, int], ...]
    options: dict = field(default_factory=dict)
    has_sinks: bool = False
    # Decode rows that come before.
    skipped_rows: int = 0
    # Of values, where it is not that of keys; of latents, their front.
    value_dim: int = 0
    is_latent: bool = False

    def __str__(self) -> str:
        widths = f"{self.head_dim}-{self.value_dim}" if self.value_dim else f"{self.head_dim}"
        widths = f"latent-{widths}" if self.is_latent else widths
        name = f"{self.dtype}-{widths}-bs{self.block_size}-{self.num_kv_heads}x{self.shared_heads}"
        return name.removeprefix("mlx.core.") + "".join(f"-{key}{value}" for key, value in self.options.items())


@dataclass(frozen=True)
class Data:
    queries: mx.array
    keys: mx.array
    values: mx.array
    rows: PrefillRows
    options: PrefillOptions


def make(case: Case, seed: int = 0) -> Data:
    rng = np.random.RandomState(seed)
    size, heads = case.block_size, case.num_kv_heads
    sinks = mx.array(rng.randn(heads * case.shared_heads).astype(np.float32)) if case.has_sinks else None
    options = PrefillOptions(case.head_dim**-0.5, **case.options, sinks=sinks)
    num_blocks = sum(-(-length // size) for _, length in case.sequences) + 2
    free = rng.permutation(np.arange(num_blocks)).tolist()
    value_dim = case.value_dim or case.head_dim
    pools = [np.full((num_blocks, heads, size, dim), np.nan, np.float32) for dim in (case.head_dim, value_dim)]
    tables, shared = [], None
    for count, length in case.sequences:
        oldest = options.first_seen(length - count)
        table = []
        for index in range(-(-length // size)):
            if (index + 1) * size <= oldest:
                table.append(UNUSED)
                continue
            if index == 0 and shared is not None and length >= size and oldest == 0:
                table.append(shared)
                continue
            block = free.pop()
            table.append(block)
            owned = slice(max(0, oldest - index * size), min(size, length - index * size))
            for pool in pools:
                pool[block, :, owned] = rng.randn(heads, owned.stop - owned.start, pool.shape[3])
            if index == 0 and length >= size and oldest == 0:
                shared = block
        tables.append([*table, UNUSED])
    limits = np.cumsum([case.skipped_rows, *(count for count, _ in case.sequences)]).tolist()
    queries = rng.randn(limits[-1], heads * case.shared_heads, case.head_dim).astype(np.float32)
    queries[: case.skipped_rows] = np.nan
    rows = PrefillRows(limits, [length for _, length in case.sequences], tables)
    keys, values = (mx.array(pool).astype(case.dtype) for pool in pools)
    if case.is_latent:
        values = keys[..., :value_dim]
    return Data(mx.array(queries).astype(case.dtype), keys, values, rows, options)


def as_float64(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def reference(data: Data) -> np.ndarray:
    """Row by row, head by head, position by position, in float64."""
    q, k, v = map(as_float64, (data.queries, data.keys, data.values))
    block_size, options, rows = k.shape[2], data.options, data.rows
    shared_heads = q.shape[1] // k.shape[1]
    out = np.zeros((rows.num_rows, q.shape[1], v.shape[3]))
    for sequence, length in enumerate(rows.context_lens):
        first, last = rows.cu_queries[sequence : sequence + 2]
        for row in range(first, last):
            position = length - (last - row)
            at = np.arange(options.first_seen(position), position + 1)
            blocks = rows.table(sequence)[at // block_size]
            for head in range(q.shape[1]):
                scores = k[blocks, head // shared_heads, at % block_size] @ q[row, head] * options.scale
                if options.softcap:
                    scores = options.softcap * np.tanh(scores / options.softcap)
                sink = -np.inf if options.sinks is None else float(options.sinks[head])
                top = max(scores.max(), sink)
                weights = np.exp(scores - top)
                total = weights.sum() + np.exp(sink - top)
                out[row - rows.first_row, head] = weights @ v[blocks, head // shared_heads, at % block_size] / total
    return out


def quantize(pool: mx.array, bits: int, group_size: int) -> QuantizedPool:
    """A pool as MLX quantises it; NaN slots stay NaN."""
    clean = mx.where(mx.isnan(pool), mx.zeros((), pool.dtype), pool)
    packed, scales, biases = mx.quantize(clean, group_size=group_size, bits=bits)
    is_unowned = mx.isnan(pool[..., :1])
    nan = mx.array(float("nan"), pool.dtype)
    packed = mx.where(is_unowned, mx.array(0xFFFFFFFF, mx.uint32), packed)
    scales, biases = (mx.where(is_unowned, nan, x) for x in (scales, biases))
    mx.eval(packed, scales, biases)
    return QuantizedPool(packed, scales, biases, bits, group_size)
