"""Cuts a model's KV memory into groups, which share block tables, and pools, which share pages of one size.

No page is ever padded, and blocks keep the block size asked for: page sizes that differ get pools of their own instead.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cluster.kv.layout import KVGroup, KVLayout, KVPool
from cluster.kv.spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVSpec,
    LayerSpec,
    MLASpec,
    RecurrentStateSpec,
    SharedKVSpec,
    SlidingWindowSpec,
)

# Every group is one more block table to keep and to send with each step.
MAX_SPLIT_GROUPS = 6


class KVBudgetTooSmall(ValueError):
    """Not even one sequence of max_model_len tokens fits."""


def plan_layout(
    specs: Sequence[LayerSpec],
    *,
    kv_budget_bytes: int,
    max_model_len: int,
    block_size: int = 16,
    max_in_flight_tokens: int = 0,
    hybrid: bool = True,
) -> KVLayout:
    """The layout for layers whose KV cache is `specs[i]`.

    `hybrid=False` keeps every token of windows and chunks too. Raises KVBudgetTooSmall, and ValueError for sizes out of
    range, a model without KV and a layer that shares what no earlier layer keeps.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if max_model_len < 2:
        raise ValueError(f"max_model_len must be at least 2 (a prompt token and one to answer), got {max_model_len}")
    if max_in_flight_tokens < 0:
        raise ValueError(f"max_in_flight_tokens must be at least 0, got {max_in_flight_tokens}")
    kept = _layers_with_memory(specs)
    if not kept:
        raise ValueError("a model needs at least one layer with a KV cache, got none")
    if not hybrid:
        kept = {layer: _as_full(spec) for layer, spec in kept.items()}
    groups = _groups(kept, _cut(_kinds(kept), kept), block_size)
    page_bytes = {group.pool_id: group.page_bytes for group in groups}
    pools = tuple(
        KVPool(pool_id, page, tuple(g.group_id for g in groups if g.pool_id == pool_id), 0)
        for pool_id, page in page_bytes.items()
    )
    layout = KVLayout(block_size, groups, pools, kv_budget_bytes, max_model_len, max_in_flight_tokens)
    if layout.bytes_for(max_model_len) > layout.usable_bytes:
        raise KVBudgetTooSmall(_lacks(layout))
    return replace(layout, pools=_sized(layout))


def min_match_tokens(layout: KVLayout) -> int:
    """The shortest prefix that can be found again, and the step in which longer ones can."""
    return layout.block_size


def _layers_with_memory(specs: Sequence[LayerSpec]) -> dict[int, KVSpec]:
    kept: dict[int, KVSpec] = {}
    for layer, spec in enumerate(specs):
        if not isinstance(spec, SharedKVSpec):
            kept[layer] = spec
        elif isinstance(kept.get(spec.source), RecurrentStateSpec | None):
            raise ValueError(
                f"layer {layer} shares the KV of layer {spec.source}, which is no earlier layer with keys and values"
            )
    return kept


def _as_full(spec: KVSpec) -> KVSpec:
    if isinstance(spec, SlidingWindowSpec | ChunkedLocalSpec):
        return FullAttentionSpec(spec.num_kv_heads, spec.head_dim, spec.format, spec.value_head_dim)
    return spec


def _kind_key(spec: KVSpec) -> tuple[int, int, int]:
    """Equal for layers that need the same tokens, and in the order of groups."""
    if isinstance(spec, FullAttentionSpec | MLASpec):
        return 0, 0, 0
    if isinstance(spec, SlidingWindowSpec):
        return 1, spec.window, spec.num_sink_tokens
    if isinstance(spec, ChunkedLocalSpec):
        return 2, spec.chunk, 0
    # States of different recurrences too: a prefix can be resumed only where all of them are there.
    return 3, 0, 0


def _kinds(kept: Mapping[int, KVSpec]) -> list[list[int]]:
    kinds: dict[tuple[int, int, int], list[int]] = {}
    for layer, spec in kept.items():
        kinds.setdefault(_kind_key(spec), []).append(layer)
    return [kinds[key] for key in sorted(kinds)]


def _cut(kinds: Sequence[list[int]], kept: Mapping[int, KVSpec]) -> list[list[int]]:
    """The layers of each group: a kind is one group, unless all can share a pool when cut into runs of one length."""
    attention = [layers for layers in kinds if not isinstance(kept[layers[0]], RecurrentStateSpec)]
    states = kinds[len(attention) :]
    places = {_place(kept[layer]) for layers in attention for layer in layers}
    length = math.gcd(*map(len, attention))
    if len(places) != 1 or sum(map(len, attention)) // length > MAX_SPLIT_GROUPS:
        return [*attention, *states]
    runs = [layers[start : start + length] for layers in attention for start in range(0, len(layers), length)]
    return [*runs, *states]


def _groups(kept: Mapping[int, KVSpec], cut: Sequence[list[int]], block_size: int) -> tuple[KVGroup, ...]:
    pool_ids: dict[tuple[object, ...], int] = {}
    groups = []
    for group_id, layers in enumerate(cut):
        spec = kept[layers[0]]
        num_slots = 1 if isinstance(spec, RecurrentStateSpec) else block_size
        page_bytes = num_slots * sum(_layer_bytes(kept[layer]) for layer in layers)
        pool_id = pool_ids.setdefault(tuple(_place(kept[layer]) for layer in layers), len(pool_ids))
        groups.append(KVGroup(group_id, pool_id, spec, tuple(layers), page_bytes))
    return tuple(groups)


def _place(spec: KVSpec) -> tuple[object, ...]:
    """What the arrays of a layer are like: groups share a pool, and so arrays, where all their layers' are alike."""
    if isinstance(spec, RecurrentStateSpec):
        return ("state", *spec.tensors)
    if isinstance(spec, MLASpec):
        return ("latent", spec.token_bytes, spec.format)
    value_head_dim = spec.head_dim if spec.value_head_dim is None else spec.value_head_dim
    return ("attention", spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * value_head_dim, spec.format)


def _layer_bytes(spec: KVSpec) -> int:
    """Of a token, or of a state."""
    return spec.state_bytes if isinstance(spec, RecurrentStateSpec) else spec.token_bytes


def _sized(layout: KVLayout) -> tuple[KVPool, ...]:
    """The pools with the budget split as the longest sequence needs it, to the last page that fits."""
    needed_bytes = layout.bytes_for(layout.max_model_len)
    counts = [
        1 + num_blocks * layout.usable_bytes // needed_bytes
        for num_blocks in layout.num_blocks_for(layout.max_model_len)
    ]
    pages = [pool.page_bytes for pool in layout.pools]
    left = layout.budget_bytes - sum(map(math.prod, zip(counts, pages, strict=True)))
    # Large pages first, so that small ones fill what remains.
    for pool_id in sorted(range(len(pages)), key=pages.__getitem__, reverse=True):
        num_blocks, left = divmod(left, pages[pool_id])
        counts[pool_id] += num_blocks
    return tuple(replace(pool, num_blocks=count) for pool, count in zip(layout.pools, counts, strict=True))


def _lacks(layout: KVLayout) -> str:
    """What one sequence needs, what there is, and what to do."""
    blocks = layout.num_blocks_for(layout.max_model_len)
    parts = [
        f"{num_blocks} + 1 blocks of {pool.page_bytes} bytes"
        for num_blocks, pool in zip(blocks, layout.pools, strict=True)
    ]
    null_bytes = layout.budget_bytes - layout.usable_bytes
    needed = layout.bytes_for(layout.max_model_len) + null_bytes
    # Needs never fall with the length.
    longest = 1 + bisect_right(range(2, layout.max_model_len), layout.usable_bytes, key=layout.bytes_for)
    advice = f"lower max_model_len to {longest} or less" if longest > 1 else "no max_model_len fits"
    return (
        f"a sequence of max_model_len {layout.max_model_len} tokens needs {needed} bytes of KV ({' and '.join(parts)}, "
        f"the one being each pool's null block), got a KV budget of {layout.budget_bytes} bytes; {advice}, or raise "
        f"the budget"
    )


def kind_name(spec: KVSpec) -> str:
    """What people call the group of such layers."""
    if isinstance(spec, FullAttentionSpec):
        return "full-attention"
    if isinstance(spec, MLASpec):
        return "latent-attention"
    if isinstance(spec, SlidingWindowSpec):
        return "window"
    return "chunked" if isinstance(spec, ChunkedLocalSpec) else spec.kind


def describe(layout: KVLayout) -> list[str]:
    """Why the memory is cut so, in sentences for people."""
    attention = [group for group in layout.groups if not group.is_state]
    states = [group for group in layout.groups if group.is_state]
    reasons = [_attention_reason(layout, attention)] if attention else []
    reasons += [_state_reason(layout, group, bool(attention)) for group in states]
    reasons.append(
        f"A cached prefix can be resumed in steps of {min_match_tokens(layout)} tokens"
        + (", wherever a state was kept." if states else ".")
    )
    return reasons


def _attention_reason(layout: KVLayout, groups: Sequence[KVGroup]) -> str:
    counts: dict[tuple[int, int, int], int] = {}
    names: dict[tuple[int, int, int], str] = {}
    for group in groups:
        key = _kind_key(group.spec)
        counts[key] = counts.get(key, 0) + len(group.layer_indices)
        names[key] = kind_name(group.spec)
    layers = _listed(f"{count} {names[key]}" for key, count in counts.items()) + " layers"
    pages = list(dict.fromkeys(group.page_bytes for group in groups))
    if len(groups) == 1:
        return f"{layers} need the same tokens: one block table and one pool, with pages of {pages[0]:,} bytes."
    if len({group.pool_id for group in groups}) == 1:
        return (
            f"{layers}: {len(groups)} groups, all with pages of {pages[0]:,} bytes, share one pool: what one kind "
            f"frees, another can take."
        )
    if len(pages) == 1:
        return (
            f"{layers}: pages of {pages[0]:,} bytes each, but of unlike arrays: only kinds of like ones share a pool."
        )
    start = f"{layers}: pages differ ({_listed(f'{page:,}' for page in pages)} bytes), so "
    start += (
        "each kind has its own pool; " if len(pages) == len(groups) else "only kinds with equal ones share a pool; "
    )
    width = _layer_bytes(groups[0].spec)
    is_alike = len({_place(group.spec) for group in groups}) == 1
    if is_alike and all(g.page_bytes == layout.block_size * len(g.layer_indices) * width for g in groups):
        return start + f"sharing one would take {sum(counts.values()) // math.gcd(*counts.values())} block tables."
    return start + "kinds are not cut into shorter runs, as their arrays differ."


def _state_reason(layout: KVLayout, group: KVGroup, beside_attention: bool) -> str:
    start = (
        f"{len(group.layer_indices)} recurrent layers ({kind_name(group.spec)}): a page is one state of them all, "
        f"{group.page_bytes:,} bytes, in a pool of its own"
    )
    return start + (f"; blocks of attention stay at {layout.block_size} tokens." if beside_attention else ".")


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
