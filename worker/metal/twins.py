"""The kernels in plain MLX: the CPU's path, the oracle of the Metal kernels and their fallback.

Pools are `[num_blocks * num_kv_heads, block_size, head_dim]`: see `worker.kv_tensors`.
"""

import functools

import mlx.core as mx
import numpy as np

from worker import cpu_math, lanes
from worker.batch import DecodeGroup, PrefillSpan
from worker.group_rows import Seen
from worker.metal.kv_pools import KVPool, arrays_of

# On a CPU, causal attention by tiles of queries skips the scores above the diagonal; Metal's kernels do so themselves.
_QUERY_TILE = 128


def write_kv(rows: mx.array, slots: mx.array, pool: mx.array) -> None:
    """Store `rows [num_rows, num_kv_heads, head_dim]` at `slots [num_rows]` of one pool; -1 skips a row."""
    _, num_kv_heads, _ = rows.shape
    block_size = pool.shape[1]
    kept = mx.array(np.flatnonzero(np.array(slots) >= 0).astype(np.int32))
    slots = slots[kept]
    pool_rows = (slots // block_size)[:, None] * num_kv_heads + mx.arange(num_kv_heads)
    pool[pool_rows, (slots % block_size)[:, None]] = rows[kept]


def paged_decode(
    queries: mx.array, key_pool: KVPool, value_pool: KVPool, group: DecodeGroup, num_kv_heads: int, scale: float
) -> mx.array:
    """One query a row over the row's blocks. Shapes: queries and result `[rows, num_heads, 1, head_dim]`."""
    index = group.gather_index(num_kv_heads)
    return decode(queries, Seen((gather(key_pool, index), gather(value_pool, index)), group.mask), scale)


def decode(queries: mx.array, seen: Seen, scale: float) -> mx.array:
    """As `paged_decode`, over what was gathered."""
    keys, values = seen.vectors
    return _attention(by_kv_head(queries, keys.shape[1]), keys, values, scale, seen.mask).reshape(queries.shape)


def by_kv_head(queries: mx.array, num_kv_heads: int) -> mx.array:
    """`[rows, num_heads, 1, head_dim]` with the heads that share a KV head as its rows: no broadcast is left."""
    rows, num_heads, _, head_dim = queries.shape
    return queries.reshape(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)


def paged_prefill(
    queries: mx.array, key_pool: KVPool, value_pool: KVPool, span: PrefillSpan, num_kv_heads: int, scale: float
) -> mx.array:
    """The last tokens of a context over all of it. Shapes: queries and result `[1, num_heads, tokens, head_dim]`."""
    index = span.gather_index(num_kv_heads)
    keys, values = gather(key_pool, index), gather(value_pool, index)
    return causal(queries, keys[:, :, : span.num_keys], values[:, :, : span.num_keys], scale)


def causal(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Causal attention, queries aligned with the last keys. Shapes: `[1, heads, num_tokens, head_dim]`."""
    num_queries, num_keys = queries.shape[2], keys.shape[2]
    if num_queries <= _QUERY_TILE or not cpu_math.is_available():
        return _attention(queries, keys, values, scale, "causal")

    def tile(first: int, last: int, end: int) -> mx.array:
        return _attention(queries[:, :, first:last], keys[:, :, :end], values[:, :, :end], scale, "causal")

    limits = [(first, min(first + _QUERY_TILE, num_queries)) for first in range(0, num_queries, _QUERY_TILE)]
    ends = [num_keys - num_queries + last for _, last in limits]
    runs = [functools.partial(tile, *limit, end) for limit, end in zip(limits, ends, strict=True)]
    return mx.concatenate(lanes.tiles(runs, ends), axis=2)


def _attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None
) -> mx.array:
    rows, num_heads, num_queries, _ = queries.shape
    num_scores = rows * num_heads * num_queries * keys.shape[2]
    if num_scores >= cpu_math.MIN_SCORES and cpu_math.is_available() and queries.dtype == mx.float32:
        return cpu_math.attend(queries, keys, values, scale, mask)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def gather_slots(pool: KVPool, rows: mx.array, offsets: mx.array) -> mx.array:
    """Single keys of one pool, by row and offset `[num]`: `[num, head_dim]`."""
    if isinstance(pool, mx.array):
        return pool[rows, offsets]
    packed, scales, biases = (array.reshape(-1, *array.shape[-2:])[rows, offsets] for array in arrays_of(pool))
    return mx.dequantize(packed, scales, biases, group_size=pool.group_size, bits=pool.bits)


def gather(pool: KVPool, index: mx.array) -> mx.array:
    """Blocks of one pool by `gather_index`, in one copy: `[rows, num_kv_heads, num_tokens, head_dim]`."""
    rows, num_kv_heads, num_blocks = index.shape
    shape = (rows, num_kv_heads, num_blocks * pool.shape[-2], -1)
    if isinstance(pool, mx.array):
        return pool[index].reshape(shape)
    packed, scales, biases = (array.reshape(-1, *array.shape[-2:])[index].reshape(shape) for array in arrays_of(pool))
    return mx.dequantize(packed, scales, biases, group_size=pool.group_size, bits=pool.bits)
