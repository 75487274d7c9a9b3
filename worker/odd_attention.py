"""Attention that the plain kernels don't have, in MLX: windows and chunks, sinks, soft caps, latents, uneven heads.

Pools are `[num_blocks * num_kv_heads, block_size, head_dim]`: see `worker.kv_tensors`.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mlx.core as mx

from worker import cpu_math, lanes
from worker.group_rows import PrefillSpan, Seen
from worker.metal import twins
from worker.metal.kv_pools import KVPool

# Queries that meet their keys at once: bounds the scores, and skips those out of reach.
_QUERY_TILE = 128


@dataclass(frozen=True, slots=True)
class Extras:
    """What a layer adds to plain attention: a logit that takes weight from all keys, a bound on scores (Gemma 2)."""

    sinks: mx.array | None = None
    soft_cap: float | None = None


PLAIN = Extras()

Pools = tuple[KVPool, KVPool]


def decode(queries: mx.array, seen: Seen, scale: float, extras: Extras) -> mx.array:
    """One query a row over what it sees. Shapes: queries `[rows, num_heads, 1, head_dim]`, result alike."""
    keys, values = seen.vectors
    if extras.sinks is not None:
        # Sinks go by query head, so heads can't become rows.
        return _attend(queries, keys, values, scale, seen.mask, extras)
    output = _attend(twins.by_kv_head(queries, keys.shape[1]), keys, values, scale, seen.mask, extras)
    return output.reshape(*queries.shape[:3], values.shape[-1])


def prefill(
    queries: mx.array, pools: Pools, span: PrefillSpan, num_kv_heads: int, scale: float, extras: Extras
) -> mx.array:
    """The last tokens of a context over what they see of it. Shapes: queries `[1, num_heads, tokens, head_dim]`."""
    index = span.gather_index(num_kv_heads)
    keys, values = (twins.gather(pool, index) for pool in pools)

    def attend(tile: slice, seen: slice) -> mx.array:
        mask = span.mask_array[tile, seen]
        return _attend(queries[:, :, tile], keys[:, :, seen], values[:, :, seen], scale, mask, extras)

    return _by_tile(attend, span)


def latent_decode(queries: mx.array, seen: Seen, latent_dim: int, scale: float) -> mx.array:
    """Latent attention, one query a row: `[rows, num_heads, 1, latent_dim + rope_dim]`; result `latent_dim` wide.

    Values are the front of the keys; the rest is computed along and dropped, since cutting it off would copy them.
    """
    (latents,) = seen.vectors
    output = _fast(twins.by_kv_head(queries, 1), latents, latents, scale, seen.mask)
    return output.reshape(queries.shape)[..., :latent_dim]


def latent_prefill(queries: mx.array, pool: KVPool, latent_dim: int, span: PrefillSpan, scale: float) -> mx.array:
    """The last tokens of a context by latent attention. Shapes: `[1, num_heads, num_tokens, width]`, as above."""
    latents = twins.gather(pool, span.gather_index(1))

    def attend(tile: slice, seen: slice) -> mx.array:
        keys = latents[:, :, seen]
        return _fast(queries[:, :, tile], keys, keys, scale, span.mask_array[tile, seen])[..., :latent_dim]

    return _by_tile(attend, span)


def _by_tile(attend: Callable[[slice, slice], mx.array], span: PrefillSpan) -> mx.array:
    tiles = list(_tiles(span))
    runs = [functools.partial(attend, *tile) for tile in tiles]
    outputs = lanes.tiles(runs, [seen.stop - seen.start for _, seen in tiles])
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=2)


def _tiles(span: PrefillSpan) -> Iterator[tuple[slice, slice]]:
    """Runs of queries, and the keys that any of them sees."""
    num_queries, num_before = span.end - span.start, span.start - span.first_key
    for first in range(0, num_queries, _QUERY_TILE):
        last = min(first + _QUERY_TILE, num_queries)
        start = max(0, span.reach.first_needed(span.start + first) - span.first_key)
        yield slice(first, last), slice(start, num_before + last)


def _attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None, extras: Extras
) -> mx.array:
    if extras.soft_cap is not None:
        return _capped(queries, keys, values, scale, mask, extras.soft_cap)
    if extras.sinks is not None:
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=extras.sinks.astype(queries.dtype)
        )
    rows, num_heads, num_queries, _ = queries.shape
    is_even = keys.shape[-1] == values.shape[-1] and queries.dtype == mx.float32
    if is_even and rows * num_heads * num_queries * keys.shape[2] >= cpu_math.MIN_SCORES and cpu_math.is_available():
        return cpu_math.attend(queries, keys, values, scale, mask)
    return _fast(queries, keys, values, scale, mask)


def _fast(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None) -> mx.array:
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def _capped(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None, soft_cap: float
) -> mx.array:
    """Scores are squeezed through a tanh before the mask, which no fused attention knows."""
    rows, num_heads, num_queries, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    grouped = (queries * scale).reshape(rows, num_kv_heads, -1, num_queries, head_dim)
    scores = mx.tanh(grouped @ keys[:, :, None].swapaxes(-1, -2) / soft_cap) * soft_cap
    if mask is not None:
        # A decode group's mask has one row for all heads.
        scores = _masked(scores, mask if mask.ndim == 2 else mask[:, :, None])
    output = mx.softmax(scores, precise=True, axis=-1) @ values[:, :, None]
    return output.reshape(rows, num_heads, num_queries, values.shape[-1])


def _masked(scores: mx.array, mask: mx.array | None) -> mx.array:
    if mask is None:
        return scores
    return mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
