"""Attention of a step's rows over one layer's pools: which way each row goes, by kernel or in plain MLX.

Decode rows and prefill rows are decided apart. A kernel takes all rows of its kind in one launch; plain MLX takes them
by groups of alike lengths and by spans, gathering what they see.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from worker import lanes, odd_attention
from worker.batch import Batch
from worker.cascade import cascade_attention
from worker.group_rows import DecodeGroup, GroupRows, Seen
from worker.kv_shapes import LayerShape, ReachKind
from worker.metal import prefill, twins
from worker.metal.decode_plan import may_share_loads
from worker.metal.dispatch import Kernels
from worker.metal.kv_pools import KVPool
from worker.metal.prefill_rows import PrefillOptions
from worker.mirrors import Mirror
from worker.odd_attention import Extras


# Not frozen: that would make it take three times as long, once a layer.
@dataclass(slots=True)
class LayerCall:
    """One layer's attention in one step. `scale` is that of the scores.

    `is_plain`: the layer attends as plain kernels do, but perhaps for its reach. `has_states`: other layers of the
    model are recurrent.
    """

    shape: LayerShape
    batch: Batch
    rows: GroupRows
    kernels: Kernels
    scale: float
    extras: Extras
    is_plain: bool
    has_states: bool = False
    # Of the layer's cache, if it has any.
    mirror: Mirror | None = None


def attends_to_fresh_keys(call: LayerCall) -> bool:
    """Whether the step's own keys are the whole context, in the order that attention takes: a prompt's first chunk."""
    batch, rows = call.batch, call.rows
    if not (batch.is_flat and rows.prefills and call.is_plain and batch.spans[0].start == 0):
        return False
    if call.kernels.prefill is not None and (call.shape.quantization or not prefill.is_fused(call.shape.head_dim)):
        # What kernels write need not be what MLX rounds to, bit for bit.
        return False
    return isinstance(rows.prefills[0].mask, str)


def fresh(call: LayerCall, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Causal attention of a flat step among its own tokens."""
    return twins.causal(queries, keys, values, call.scale)


def attend(call: LayerCall, queries: mx.array, keys: KVPool, values: KVPool, *, after: mx.array | None) -> mx.array:
    """Over pools of keys and values; shape of the queries, with the values' last dimension."""
    batch, rows, kernels, heads = call.batch, call.rows, call.kernels, call.shape.num_kv_heads
    pools, outputs = (keys, values), []
    if rows.shared is not None:
        see = _sight(call, rows.decode_groups, pools)
        return cascade_attention(queries, keys, values, rows, heads, call.scale, see)
    verified = rows.verify_groups(shares_loads=_shares_loads(call)) if batch.num_verified else []
    if verified and batch.is_flat:
        queries = queries.transpose(2, 1, 0, 3)
    groups = [*rows.decode_groups, *verified]
    if kernels.decode is None:
        see = _sight(call, groups, pools)

        def decode(group: DecodeGroup) -> mx.array:
            part, seen = _rows_of(queries, group), see(group)
            if call.is_plain and group.num_hidden is None:
                return twins.decode(part, seen, call.scale)
            return odd_attention.decode(part, seen, call.scale, call.extras)

        outputs += lanes.by_group(decode, groups, heads, queries)
    else:
        soft_cap, sinks = call.extras.soft_cap or 0.0, call.extras.sinks
        for group in groups:
            part = _rows_of(queries, group).astype(keys.dtype)
            output = kernels.decode(part, *pools, group, heads, call.scale, softcap=soft_cap, sinks=sinks, after=after)
            outputs.append(output.astype(queries.dtype))
    if verified and batch.is_flat:
        return _joined(outputs).transpose(2, 1, 0, 3)
    if kernels.prefill is not None and rows.chunks:
        outputs.append(_prefill_by_kernel(call, queries, keys, values, after))
    else:
        outputs += _prefills(call, queries, pools)
    return _joined(outputs)


def attend_latent(
    call: LayerCall, queries: mx.array, rotary: mx.array, latents: KVPool, *, after: mx.array | None
) -> mx.array:
    """Latent attention over a pool of latents with their rotary keys; the result is as wide as a latent.

    Queries `[rows, heads, 1, latent_dim]`; `rotary [rows, heads, 1, rope_dim]` is scaled already.
    """
    rows, kernels, scale, latent_dim = call.rows, call.kernels, call.scale, queries.shape[-1]
    queries = mx.concatenate([queries, rotary * (1.0 / scale)], axis=-1)
    outputs = []
    verified = rows.verify_groups(shares_loads=False) if call.batch.num_verified else []
    groups = [*rows.decode_groups, *verified]
    if kernels.latent_decode is None:
        see = _sight(call, groups, (latents,))

        def decode(group: DecodeGroup) -> mx.array:
            return odd_attention.latent_decode(_rows_of(queries, group), see(group), latent_dim, scale)

        outputs += lanes.by_group(decode, groups, 1, queries)
    else:
        for group in groups:
            part = _rows_of(queries, group).astype(latents.dtype)
            output = kernels.latent_decode.decode_latent(part, latents, latent_dim, group, scale, after=after)
            outputs.append(output.astype(queries.dtype))
    if kernels.latent_prefill is not None and rows.chunks:
        by_block = latents.reshape(-1, 1, *latents.shape[1:]) if isinstance(latents, mx.array) else latents
        packed = queries[:, :, 0].astype(latents.dtype)
        output = kernels.latent_prefill.latent(packed, by_block, latent_dim, rows.prefill_rows, _options(call), after)
        outputs.append(output.astype(queries.dtype)[:, :, None])
    else:
        for span in rows.chunks:
            part = queries[span.first : span.last].transpose(2, 1, 0, 3)
            output = odd_attention.latent_prefill(part, latents, latent_dim, span, scale)
            outputs.append(output.transpose(2, 1, 0, 3))
    return _joined(outputs)


def _sight(call: LayerCall, groups: Sequence[DecodeGroup], pools: Sequence[KVPool]) -> Callable[[DecodeGroup], Seen]:
    """What the rows of a group, or of a part of one, see: from a mirror, or gathered when it is asked."""
    mirrored = {}
    if call.mirror is not None:
        # Before the groups are cut and go to lanes: a mirror is written once.
        mirrored = {group.first: seen for group in groups if (seen := call.mirror(group, pools)) is not None}

    def see(group: DecodeGroup) -> Seen:
        whole = group.whole or group
        if whole.first in mirrored:
            seen = mirrored[whole.first]
            return seen if whole is group else seen.of_rows(group.first - whole.first, group.last - whole.first)
        index = group.gather_index(call.shape.num_kv_heads)
        return Seen(tuple(twins.gather(pool, index) for pool in pools), group.mask)

    return see


def _shares_loads(call: LayerCall) -> bool:
    """Whether verified rows of a sequence share loads, rather than that each reads for itself."""
    return call.kernels.shares_verify_loads and may_share_loads(
        call.shape.head_dim, has_recurrent_layers=call.has_states
    )


def _joined(outputs: list[mx.array]) -> mx.array:
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def _rows_of(queries: mx.array, group: DecodeGroup) -> mx.array:
    num_rows = group.last - group.first
    return queries if len(queries) == num_rows else queries[group.first : group.last]


def _prefills(call: LayerCall, queries: mx.array, pools: odd_attention.Pools) -> list[mx.array]:
    batch, heads, outputs = call.batch, call.shape.num_kv_heads, []
    for span in call.rows.chunks:
        part = queries if batch.is_flat else queries[span.first : span.last].transpose(2, 1, 0, 3)
        if call.is_plain and isinstance(span.mask, str):
            output = twins.paged_prefill(part, *pools, span, heads, call.scale)
        else:
            output = odd_attention.prefill(part, pools, span, heads, call.scale, call.extras)
        outputs.append(output if batch.is_flat else output.transpose(2, 1, 0, 3))
    return outputs


def _prefill_by_kernel(
    call: LayerCall, queries: mx.array, keys: KVPool, values: KVPool, after: mx.array | None
) -> mx.array:
    """All prefill rows: `[rows, heads, 1, head_dim]`, or `[1, heads, rows, head_dim]` in a flat step."""
    assert call.kernels.prefill is not None
    is_flat = call.batch.is_flat
    packed = queries[0].swapaxes(0, 1) if is_flat else queries[:, :, 0]
    keys, values = (
        pool.reshape(-1, call.shape.num_kv_heads, *pool.shape[1:]) if isinstance(pool, mx.array) else pool
        for pool in (keys, values)
    )
    output = call.kernels.prefill(
        packed.astype(keys.dtype), keys, values, call.rows.prefill_rows, _options(call), after
    )
    output = output.astype(queries.dtype)
    return output.swapaxes(0, 1)[None] if is_flat else output[:, :, None]


def _options(call: LayerCall) -> PrefillOptions:
    reach = call.shape.reach
    return PrefillOptions(
        call.scale,
        window=reach.size if reach.kind is ReachKind.WINDOW else 0,
        chunk=reach.size if reach.kind is ReachKind.CHUNK else 0,
        softcap=call.extras.soft_cap or 0.0,
        sinks=call.extras.sinks,
    )
