"""Attention over a prefix that several sequences of a step share, read once for all of them.

On a CPU each row otherwise gathers its own copy of every block, so sixteen chats with one long system prompt would copy
and multiply it sixteen times. Here the rows of all sharers meet the shared keys in one product, each row's own keys
come apart, and the two halves are merged by their softmax sums, as flash attention merges tiles (Hydragen and cascade
attention do the same on GPUs). Computed in float32, whatever the pools hold.
"""

from collections.abc import Callable

import mlx.core as mx

from worker import cpu_math, lanes
from worker.cpu_math import Part
from worker.group_rows import DecodeGroup, GroupRows, PrefillSpan, Seen
from worker.metal import twins
from worker.metal.kv_pools import KVPool
from worker.shared_prefix import SharedPrefix

# What one layer attends with: keys, values.
Pools = tuple[KVPool, KVPool]


def cascade_attention(
    queries: mx.array,
    key_pool: KVPool,
    value_pool: KVPool,
    rows: GroupRows,
    num_kv_heads: int,
    scale: float,
    see: Callable[[DecodeGroup], Seen],
) -> mx.array:
    """Attention of a whole step whose rows have a shared prefix. Shapes: `[num_tokens, num_heads, 1, head_dim]`.

    `see` gives what decode rows see beside it.
    """
    pools, dtype = (key_pool, value_pool), queries.dtype
    queries = queries.astype(mx.float32)
    sharing: list[tuple[int, int, Part]] = []
    outputs: dict[int, mx.array] = {}

    def decode(group: DecodeGroup) -> tuple[int, int, Part | mx.array]:
        part = queries[group.first : group.last]
        if group.is_sharing:
            return group.first, group.last, _decode_part(part, see(group), scale)
        return group.first, group.last, twins.decode(part, see(group), scale)

    for first, last, decoded in lanes.by_group(decode, rows.decode_groups, num_kv_heads, queries):
        if isinstance(decoded, Part):
            sharing.append((first, last, decoded))
        else:
            outputs[first] = decoded
    for span in rows.prefills:
        part = queries[span.first : span.last].transpose(2, 1, 0, 3)
        if span.is_sharing:
            sharing.append((span.first, span.last, _prefill_part(part, pools, span, num_kv_heads, scale)))
        else:
            output = twins.paged_prefill(part, *pools, span, num_kv_heads, scale)
            outputs[span.first] = output.transpose(2, 1, 0, 3)
    assert rows.shared is not None
    outputs |= _merged(queries, pools, rows.shared, sharing, num_kv_heads, scale)
    return mx.concatenate([outputs[first].astype(dtype) for first in sorted(outputs)])


def _merged(
    queries: mx.array,
    pools: Pools,
    shared_prefix: SharedPrefix,
    sharing: list[tuple[int, int, Part]],
    num_kv_heads: int,
    scale: float,
) -> dict[int, mx.array]:
    """The sharers' attention by first row: what each has of its own, merged with the shared part of all of them."""
    index = shared_prefix.gather_index(num_kv_heads)
    keys, values = (_gather(pool, index) for pool in pools)
    is_whole = sum(last - first for first, last, _ in sharing) == queries.shape[0]
    rows = queries if is_whole else mx.concatenate([queries[first:last] for first, last, _ in sharing])
    shared = _by_row(cpu_math.attend_part(rows.transpose(2, 1, 0, 3), keys, values, scale, None))
    own = Part(*(mx.concatenate(list(arrays)) for arrays in zip(*(part for *_, part in sharing), strict=True)))
    merged = cpu_math.merge(shared, own)
    if is_whole:
        return {0: merged}
    ends = [last - first for first, last, _ in sharing]
    starts = [sum(ends[:place]) for place in range(len(ends))]
    return {
        first: merged[start : start + length]
        for (first, _, _), start, length in zip(sharing, starts, ends, strict=True)
    }


def _decode_part(queries: mx.array, seen: Seen, scale: float) -> Part:
    keys, values = (vector.astype(mx.float32) for vector in seen.vectors)
    part = cpu_math.attend_part(twins.by_kv_head(queries, keys.shape[1]), keys, values, scale, seen.mask)
    by_row = (*queries.shape[:3], 1)
    return Part(part.output.reshape(queries.shape), part.top.reshape(by_row), part.total.reshape(by_row))


def _prefill_part(queries: mx.array, pools: Pools, span: PrefillSpan, num_kv_heads: int, scale: float) -> Part:
    index = span.gather_index(num_kv_heads)
    keys, values = (_gather(pool, index)[:, :, : span.num_keys] for pool in pools)
    return _by_row(cpu_math.attend_part(queries, keys, values, scale, "causal"))


def _gather(pool: KVPool, index: mx.array) -> mx.array:
    return twins.gather(pool, index).astype(mx.float32)


def _by_row(part: Part) -> Part:
    """A part of shape `[1, num_heads, num_rows, …]` as `[num_rows, num_heads, 1, …]`."""
    return Part(*(array.transpose(2, 1, 0, 3) for array in part))
