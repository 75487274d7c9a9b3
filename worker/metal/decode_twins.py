"""`PagedDecode` in plain MLX, with the same arguments: oracle and fallback for every variant of decode attention."""

import mlx.core as mx

from worker.batch import DecodeGroup
from worker.metal.decode_plan import DecodePlan, plan_decode
from worker.metal.kv_pools import KVPool, arrays_of


def paged_decode(
    queries: mx.array,
    key_pool: KVPool,
    value_pool: KVPool,
    group: DecodeGroup,
    num_kv_heads: int,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: mx.array | None = None,
    after: mx.array | None = None,
) -> mx.array:
    """What `PagedDecode` does when called; MLX orders its own operations, so `after` is only taken."""
    plan = plan_decode(group.block_tables, group.seen_ranges, num_kv_heads)
    return attend(queries, key_pool, value_pool, plan, num_kv_heads, scale, softcap=softcap, sinks=sinks, after=after)


def attend(
    queries: mx.array,
    key_pool: KVPool,
    value_pool: KVPool,
    plan: DecodePlan,
    num_kv_heads: int,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: mx.array | None = None,
    after: mx.array | None = None,
) -> mx.array:
    """`PagedDecode.attend` in float32. Gathers every block of the table, so it costs what the longest row costs."""
    ids, seen = _visible(plan, key_pool.shape[-2])
    keys, values = (_gather(pool, ids, num_kv_heads, seen) for pool in (key_pool, value_pool))
    return _attend(queries, keys, values, seen, scale, softcap, sinks)


def attend_latent(
    queries: mx.array,
    latent_pool: KVPool,
    value_dim: int,
    plan: DecodePlan,
    scale: float,
    *,
    after: mx.array | None = None,
) -> mx.array:
    """`PagedDecode.attend_latent` in float32."""
    ids, seen = _visible(plan, latent_pool.shape[-2])
    keys = _gather(latent_pool, ids, 1, seen)
    return _attend(queries, keys, keys[..., :value_dim], seen, scale, 0.0, None)


def _visible(plan: DecodePlan, block_size: int) -> tuple[mx.array, mx.array]:
    """Block ids `[rows, blocks]`, 0 where a row sees nothing, and which tokens it sees, `[rows, 1, tokens]`."""
    ranges = plan.ranges[: plan.num_rows]
    table = mx.repeat(plan.block_tables[: plan.num_sequences], plan.rows_per_sequence, axis=0)
    at = mx.arange(table.shape[1] * block_size)
    seen = (at >= ranges[:, :1]) & (at < ranges[:, 1:])
    used = seen.reshape(*table.shape, block_size).any(axis=-1)
    return mx.where(used, table, 0), seen[:, None]


def _gather(pool: KVPool, ids: mx.array, num_kv_heads: int, seen: mx.array) -> mx.array:
    """`[rows, num_kv_heads, tokens, head_dim]` in float32, zero where nothing is seen."""
    rows = ids[:, None] * num_kv_heads + mx.arange(num_kv_heads)[:, None]
    found, *scaling = (array.reshape(-1, *array.shape[-2:])[rows] for array in arrays_of(pool))
    if not isinstance(pool, mx.array):
        # In float32: MLX rounds twice in a half type.
        scales, biases = (array.astype(mx.float32) for array in scaling)
        found = mx.dequantize(found, scales, biases, group_size=pool.group_size, bits=pool.bits)
    found = found.astype(mx.float32).reshape(*rows.shape[:2], -1, found.shape[-1])
    return mx.where(seen[..., None], found, 0.0)


def _attend(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    seen: mx.array,
    scale: float,
    softcap: float,
    sinks: mx.array | None,
) -> mx.array:
    rows, num_heads, _, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    grouped = queries.astype(mx.float32).reshape(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = (grouped @ keys.swapaxes(-1, -2)) * scale
    if softcap > 0:
        scores = softcap * mx.tanh(scores / softcap)
    # Finite, so that a row that sees nothing gives no NaN.
    scores = mx.where(seen[:, None], scores, -1e30)
    top = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        logits = sinks.astype(mx.float32).reshape(1, num_kv_heads, -1, 1)
        top = mx.maximum(top, logits)
    weights = mx.where(seen[:, None], mx.exp(scores - top), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(logits - top)
    out = mx.where(total > 0, (weights @ values) / total, 0.0)
    return out.reshape(rows, num_heads, 1, values.shape[-1]).astype(queries.dtype)
