"""Prefill as layers call it: which way each sequence goes; and the way of plain MLX, which is the kernel's twin."""

from collections.abc import Iterable, Iterator, Sequence

import mlx.core as mx
import numpy as np

from worker.metal.kv_pools import KVPool
from worker.metal.paged_prefill import PagedPrefill, shape_for
from worker.metal.prefill_rows import PrefillOptions, PrefillRows
from worker.metal.quantized import QuantizedPool
from worker.metal.write_kv import tie

# Heads for which every MLX 0.32 has a fused kernel of many queries; without one it would write all scores to memory.
_FUSED_HEAD_DIMS = (64, 80, 128)
# Query rows of one KV head from which the gather is worth it: see `goes_by_gather`.
_MIN_GATHER_ROWS = 1024
# Scores of latents that plain MLX may have in memory at once.
_MAX_SCORES = 1 << 25


class Prefill:
    """Attention of a step's prefill rows; without a kernel all of it runs in plain MLX."""

    def __init__(self, kernel: PagedPrefill | None = None) -> None:
        self._kernel = kernel

    def __call__(
        self,
        queries: mx.array,
        key_pool: KVPool,
        value_pool: KVPool,
        rows: PrefillRows,
        options: PrefillOptions,
        after: mx.array | None = None,
    ) -> mx.array:
        """Shapes, types and errors are those of `PagedPrefill`."""
        if self._kernel is None:
            return twin(queries, key_pool, value_pool, rows, options, after)
        tiles, ways = self._kernel, goes_by_gather(queries, key_pool, value_pool, rows, options)
        return _joined(
            (twin if by_gather else tiles)(queries, key_pool, value_pool, rows.part(first, last), options, after)
            for first, last, by_gather in _runs(ways)
        )

    def latent(
        self,
        queries: mx.array,
        latent_pool: KVPool,
        value_dim: int,
        rows: PrefillRows,
        options: PrefillOptions,
        after: mx.array | None = None,
    ) -> mx.array:
        """Shapes, types and errors are those of `PagedPrefill.latent`."""
        if self._kernel is None:
            return latent_twin(queries, latent_pool, value_dim, rows, options, after)
        tiles, ways = self._kernel.latent, latents_go_by_gather(queries, latent_pool, rows, options)
        return _joined(
            (latent_twin if by_gather else tiles)(
                queries, latent_pool, value_dim, rows.part(first, last), options, after
            )
            for first, last, by_gather in _runs(ways)
        )


def is_fused(head_dim: int) -> bool:
    """Whether MLX attends with many queries of such heads without writing their scores to memory."""
    return head_dim in _FUSED_HEAD_DIMS


def goes_by_gather(
    queries: mx.array, key_pool: KVPool, value_pool: KVPool, rows: PrefillRows, options: PrefillOptions
) -> list[bool]:
    """Of each sequence, whether its keys are gathered for MLX's own attention, rather than read by the tiles.

    MLX has the better tile kernel of each chip (87-98 % of an M3 Ultra's matrix products, tensor units of an M5), so it
    takes long chunks. The gather reads and writes K and V once, 8 bytes a head element and key in half precision, for
    4 FLOP a row: at 400 GB/s and 15 TFLOPS it costs 75 / rows of the attention itself, so 7 % at 1024 rows
    (queries times heads that share a KV head). Short chunks, what MLX has no fused kernel for, and what it would mask
    rather than skip (a window inside of the context) go by tiles; so do quantised pools, which a gather would blow up.
    """
    head_dim, is_packed = queries.shape[2], isinstance(key_pool, QuantizedPool)
    if is_packed or options.softcap > 0 or not is_fused(head_dim) or value_pool.shape[-1] != head_dim:
        return [False] * len(rows.context_lens)
    return _are_long(queries.shape[1] // key_pool.shape[1], rows, options)


def latents_go_by_gather(
    queries: mx.array, latent_pool: KVPool, rows: PrefillRows, options: PrefillOptions
) -> list[bool]:
    """The same of latents, which all heads share.

    MLX has no fused kernel for them, and needs none: a row and key cost 2,200 operations and 8 bytes of scores. Its
    products read latents once for 64 rows, a tile once for 16, which is 72 bytes a row and key: at 15 TFLOPS a cache
    must give 500 GB/s for that. So long chunks are gathered, in tiles of queries whose scores fit (`_MAX_SCORES`).
    """
    if isinstance(latent_pool, QuantizedPool):
        return [False] * len(rows.context_lens)
    return _are_long(queries.shape[1], rows, options)


def _are_long(shared_heads: int, rows: PrefillRows, options: PrefillOptions) -> list[bool]:
    """Which sequences have enough rows for a gather, and see all of it."""
    return [
        options.first_seen(length - 1) == 0 and count * shared_heads >= _MIN_GATHER_ROWS
        for count, length in zip(rows.query_lens, rows.context_lens, strict=True)
    ]


def twin(
    queries: mx.array,
    key_pool: KVPool,
    value_pool: KVPool,
    rows: PrefillRows,
    options: PrefillOptions,
    after: mx.array | None = None,
) -> mx.array:
    """`PagedPrefill` in plain MLX: each sequence gathers the keys that it sees and attends alone."""
    return _joined(
        _attend(mine, keys, values, length, options)[0].swapaxes(0, 1)
        for mine, (keys, values), length in _gathered(queries, (key_pool, value_pool), rows, options, after)
    )


def latent_twin(
    queries: mx.array,
    latent_pool: KVPool,
    value_dim: int,
    rows: PrefillRows,
    options: PrefillOptions,
    after: mx.array | None = None,
) -> mx.array:
    """`PagedPrefill.latent` in plain MLX: as `twin`, by tiles of queries."""
    outputs = []
    for mine, (latents,), length in _gathered(queries, (latent_pool,), rows, options, after):
        num_queries, num_keys = mine.shape[2], latents.shape[2]
        step = max(_MAX_SCORES // (mine.shape[1] * num_keys), 1)
        for first in range(0, num_queries, step):
            last = min(first + step, num_queries)
            # What is after the tile is cut off, and a window's beginning masked.
            seen = latents[:, :, : num_keys - num_queries + last]
            # Values are computed as wide as keys: cutting them would copy the latents.
            out = _attend(mine[:, :, first:last], seen, seen, length - num_queries + last, options)
            outputs.append(out[0, :, :, :value_dim].swapaxes(0, 1))
    return _joined(outputs)


def supports(head_dim: int, value_dim: int, dtype: mx.Dtype, *, is_latent: bool = False) -> bool:
    """Whether a kernel has a tile for such heads."""
    try:
        shape_for(head_dim, value_dim, dtype, is_latent=is_latent)
    except ValueError:
        return False
    return True


def _joined(parts: Iterable[mx.array]) -> mx.array:
    """One behind the other; at least one."""
    first, *others = parts
    return mx.concatenate([first, *others]) if others else first


def _runs(ways: Sequence[bool]) -> Iterator[tuple[int, int, bool]]:
    """Sequences `[first, last)` that go the same way, in their order."""
    first = 0
    for last in range(1, len(ways) + 1):
        if last == len(ways) or ways[last] != ways[first]:
            yield first, last, ways[first]
            first = last


def _gathered(
    queries: mx.array,
    pools: Sequence[KVPool],
    rows: PrefillRows,
    options: PrefillOptions,
    after: mx.array | None,
) -> Iterator[tuple[mx.array, list[mx.array], int]]:
    """Each sequence's queries `[1, num_heads, n, head_dim]`, what they see of each pool, and its context length."""
    for sequence, (first, count) in enumerate(zip(rows.cu_queries, rows.query_lens, strict=False)):
        length = rows.context_lens[sequence]
        oldest = options.first_seen(length - count)
        block_size = pools[0].shape[2]
        used = rows.table(sequence)[oldest // block_size : -(-length // block_size)]
        index = mx.array(used) if after is None else tie(mx.array(used), after)
        # What comes before or after belongs to others, and might not even be finite.
        seen = slice(oldest % block_size, length - oldest // block_size * block_size)
        found = [_gather(pool, index)[None, :, seen] for pool in pools]
        yield queries[first : first + count].swapaxes(0, 1)[None], found, length


def _gather(pool: KVPool, index: mx.array) -> mx.array:
    """Blocks by their ids: `[num_kv_heads, tokens, head_dim]`."""
    blocks = pool.dequantize(index) if isinstance(pool, QuantizedPool) else pool[index]
    num_blocks, num_kv_heads, block_size, head_dim = blocks.shape
    return blocks.swapaxes(0, 1).reshape(num_kv_heads, num_blocks * block_size, head_dim)


def _attend(queries: mx.array, keys: mx.array, values: mx.array, context_len: int, options: PrefillOptions) -> mx.array:
    """Shapes: queries and result `[1, num_heads, n, head_dim]`, keys the last ones of the context."""
    num_queries, num_keys = queries.shape[2], keys.shape[2]
    mask: mx.array | str = "causal"
    if options.window or options.chunk:
        mask = _mask(num_queries, num_keys, context_len, options)
    if options.softcap == 0:
        sinks = None if options.sinks is None else options.sinks.astype(queries.dtype)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=options.scale, mask=mask, sinks=sinks)
    if isinstance(mask, str):
        mask = _mask(num_queries, num_keys, context_len, options)
    _, num_heads, _, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    # In float32: in bfloat16 the scores alone would be off by more than all that a kernel rounds.
    dtype, keys, values = queries.dtype, keys.astype(mx.float32), values.astype(mx.float32)
    by_kv_head = queries.astype(mx.float32).reshape(num_kv_heads, num_heads // num_kv_heads, num_queries, head_dim)
    scores = (by_kv_head @ keys[0][:, None].swapaxes(-1, -2)) * options.scale
    scores = mx.where(mask, options.softcap * mx.tanh(scores / options.softcap), -mx.inf)
    if options.sinks is not None:
        sinks = options.sinks.astype(mx.float32).reshape(num_kv_heads, -1, 1, 1)
        scores = mx.concatenate([scores, mx.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., :num_keys]
    return (weights @ values[0][:, None]).reshape(1, num_heads, num_queries, values.shape[-1]).astype(dtype)


def _mask(num_queries: int, num_keys: int, context_len: int, options: PrefillOptions) -> mx.array:
    """Which keys each query sees: `[num_queries, num_keys]`."""
    queries = np.arange(context_len - num_queries, context_len)[:, None]
    keys = np.arange(context_len - num_keys, context_len)
    oldest = np.array([options.first_seen(int(position)) for position in queries[:, 0]])[:, None]
    return mx.array((keys <= queries) & (keys >= oldest))
