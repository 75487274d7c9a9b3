"""`paged_decode`: attention of single query rows over paged K and V, cut into partitions and merged by log-sum-exp.

Pass 1 reads each K and V byte of a partition once for all query heads that share the KV head. While their outputs fit
into the registers of one simdgroup, it takes a partition by itself, without a barrier; beyond that the simdgroups of a
threadgroup divide the heads and share K and V through threadgroup memory. Pass 2 merges the partitions.
"""

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from worker.batch import DecodeGroup
from worker.metal.decode_plan import Cut, DecodePlan, plan_decode
from worker.metal.decode_source import HEADER, merge_source, partials_source
from worker.metal.factory import MetalKernel, dtype_tag
from worker.metal.kv_pools import KVPool, arrays_of, slot_bytes_of
from worker.metal.slot_source import pool_names

_LANES = 32
# Output elements that a lane holds for its query heads; with K and V of a tile that stays near 100 registers.
_MAX_OUTPUT_REGISTERS = 32
_MAX_HEADS = 8
_MAX_SIMDGROUPS = 8
# Partitions that a threadgroup takes where its simdgroups share nothing.
_DIRECT_SIMDGROUPS = 4
_MAX_STAGED_TOKENS = 16
_MAX_STAGED_BYTES = 16 * 1024
_MAX_PARTIAL_SHARE = 0.5
_MAX_HEAD_DIM = 640
_MAX_VALUE_DIM = 512
_MAX_CONSTANTS = 1024
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Launch:
    """How heads are divided. `num_simdgroups` threadgroups' simdgroups, of `num_heads` query heads each.

    `num_splits` threadgroups for the heads of one KV head: 1 unless they are too many. `staged_tokens`: 0 if simdgroups
    share nothing.
    """

    num_heads: int
    num_simdgroups: int
    num_splits: int
    staged_tokens: int


def choose_launch(num_shared_heads: int, head_dim: int, value_dim: int, itemsize: int, *, is_latent: bool) -> Launch:
    """For so many query heads a KV head, of all rows together. `is_latent`: values are the front of the keys."""
    most = min(_MAX_HEADS, _MAX_OUTPUT_REGISTERS // lane_elements(value_dim)[1])
    if num_shared_heads <= most and not is_latent:
        return Launch(num_shared_heads, _DIRECT_SIMDGROUPS, 1, 0)
    num_splits = -(-num_shared_heads // (most * _MAX_SIMDGROUPS))
    num_simdgroups = -(-num_shared_heads // (most * num_splits))
    num_heads = -(-num_shared_heads // (num_splits * num_simdgroups))
    token_bytes = (head_dim + (0 if is_latent else value_dim)) * itemsize
    staged_tokens = _MAX_STAGED_TOKENS
    while staged_tokens > 4 and staged_tokens * token_bytes > _MAX_STAGED_BYTES:
        staged_tokens //= 2
    return Launch(num_heads, num_simdgroups, num_splits, staged_tokens)


def cut_for(num_shared_heads: int, value_dim: int, token_bytes: float) -> Cut:
    """How to cut the work for `num_shared_heads` query heads a KV head. `token_bytes`: K and V of a token and KV head.

    Partitions are so long that partial results, written and read again, are at most half of what is read of K and V.
    """
    most = min(_MAX_HEADS, _MAX_OUTPUT_REGISTERS // lane_elements(value_dim)[1])
    simdgroups = -(-num_shared_heads // most)
    num_readings = -(-simdgroups // _MAX_SIMDGROUPS)
    partial_bytes = 2 * num_shared_heads * value_dim * mx.float32.size
    return Cut(simdgroups, math.ceil(partial_bytes / (_MAX_PARTIAL_SHARE * num_readings * token_bytes)))


def lane_elements(dim: int) -> tuple[int, int]:
    """Elements that a lane loads at once, and elements that it holds of a head: the fewest loads, then the fewest."""
    loads = {width: -(-dim // (_LANES * width)) for width in (4, 2)}
    width = min(loads, key=lambda width: (loads[width], loads[width] * width))
    return width, loads[width] * width


class PagedDecode:
    """Launches both passes; see README.md for shapes."""

    def __init__(self, metal_kernel: MetalKernel) -> None:
        self._metal_kernel = metal_kernel
        self._kernels: dict[str, Any] = {}
        self._constants: dict[tuple[mx.Dtype, tuple[float, ...]], mx.array] = {}

    @staticmethod
    def supports(head_dim: int, value_dim: int | None = None) -> bool:
        """Whether lanes can share heads of that size: multiples of 4, keys up to 640 and values up to 512."""
        value_dim = head_dim if value_dim is None else value_dim
        fits = 0 < head_dim <= _MAX_HEAD_DIM and 0 < value_dim <= _MAX_VALUE_DIM
        return fits and head_dim % 4 == 0 and value_dim % 4 == 0

    def __call__(
        self,
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
        """`attend` for a step's decode rows over what each of them sees.

        Shapes: queries and result `[rows, num_heads, 1, head_dim]`.
        """
        token_bytes = slot_bytes_of(key_pool) + slot_bytes_of(value_pool)
        plan = self._plan(group, num_kv_heads, queries.shape[1], value_pool.shape[-1], token_bytes)
        return self.attend(
            queries, key_pool, value_pool, plan, num_kv_heads, scale, softcap=softcap, sinks=sinks, after=after
        )

    def decode_latent(
        self,
        queries: mx.array,
        latent_pool: KVPool,
        value_dim: int,
        group: DecodeGroup,
        scale: float,
        *,
        after: mx.array | None = None,
    ) -> mx.array:
        """`attend_latent` for a step's decode rows."""
        plan = self._plan(group, 1, queries.shape[1], value_dim, slot_bytes_of(latent_pool))
        return self.attend_latent(queries, latent_pool, value_dim, plan, scale, after=after)

    def _plan(
        self, group: DecodeGroup, num_kv_heads: int, num_heads: int, value_dim: int, token_bytes: int
    ) -> DecodePlan:
        """Kept with the group: layers that are alike share it."""
        key = num_kv_heads, num_heads, value_dim, token_bytes
        if key not in group.plans:
            cut = cut_for(num_heads // num_kv_heads, value_dim, token_bytes)
            group.plans[key] = plan_decode(
                group.block_tables,
                group.seen_ranges,
                num_kv_heads,
                rows_per_sequence=group.rows_per_sequence,
                cut=cut,
            )
        return group.plans[key]

    def attend(
        self,
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
        """Attention of each row over the tokens that `plan` gives it, `[rows, num_heads, 1, value_dim]`.

        `queries [rows, num_heads, 1, head_dim]`; pools of the queries' dtype, both packed or none. `softcap`: scores
        become `softcap * tanh(score / softcap)`; 0 is none. `sinks [num_heads]`: a logit each, which takes weight and
        has no value. `after`: the token of the last write. A row that sees nothing gives zeros. Raises ValueError.
        """
        _check_pools(key_pool, value_pool, num_kv_heads)
        return self._attend(
            queries, key_pool, value_pool, value_pool.shape[-1], plan, num_kv_heads, (scale, softcap), sinks, after
        )

    def attend_latent(
        self,
        queries: mx.array,
        latent_pool: KVPool,
        value_dim: int,
        plan: DecodePlan,
        scale: float,
        *,
        after: mx.array | None = None,
    ) -> mx.array:
        """Absorbed multi-head latent attention: one KV head, whose values are the first `value_dim` of its keys.

        `latent_pool [num_blocks, 1, block_size, value_dim + rope_dim]`, or without the 1; queries `[rows, num_heads, 1,
        value_dim + rope_dim]`, result `[rows, num_heads, 1, value_dim]`. Raises ValueError.
        """
        return self._attend(queries, latent_pool, None, value_dim, plan, 1, (scale, 0.0), None, after)

    def _attend(
        self,
        queries: mx.array,
        key_pool: KVPool,
        value_pool: KVPool | None,
        value_dim: int,
        plan: DecodePlan,
        num_kv_heads: int,
        scaling: tuple[float, float],
        sinks: mx.array | None,
        after: mx.array | None,
    ) -> mx.array:
        _check_queries(queries, key_pool, value_dim, plan, num_kv_heads, sinks)
        rows, num_heads, _, head_dim = queries.shape
        dtype, num_rows = queries.dtype, plan.rows_per_sequence
        is_latent, is_packed = value_pool is None, not isinstance(key_pool, mx.array)
        shared_heads = num_heads // num_kv_heads
        launch = choose_launch(shared_heads * num_rows, head_dim, value_dim, dtype.size, is_latent=is_latent)
        num_items = max(plan.num_items, 1)
        num_groups = num_items if launch.staged_tokens else -(-num_items // launch.num_simdgroups)
        threads = _LANES * launch.num_simdgroups
        scale, softcap = scaling
        scales = (scale / softcap, softcap * _LOG2_E) if softcap > 0 else (scale * _LOG2_E, 0.0)
        partial, stats = self._partials(dtype, launch.staged_tokens > 0, is_packed, is_latent)(
            inputs=[
                queries,
                *arrays_of(key_pool),
                *([] if value_pool is None else arrays_of(value_pool)),
                *(plan.block_tables, plan.ranges, plan.items),
                self._constant(mx.int32, num_items, plan.partition_tokens, num_kv_heads),
                self._constant(mx.float32, *scales),
                self._constant(mx.int32, 0) if after is None else after,
            ],
            output_shapes=[(num_items, num_rows, num_heads, value_dim), (num_items, num_rows, num_heads, 2)],
            output_dtypes=[mx.float32, mx.float32],
            grid=(threads * num_groups, num_kv_heads * launch.num_splits, 1),
            threadgroup=(threads, 1, 1),
            template=[
                *(("T", dtype), ("D", head_dim), ("DV", value_dim), ("BS", key_pool.shape[-2])),
                *(("VK", lane_elements(head_dim)[0]), ("VV", lane_elements(value_dim)[0])),
                *(("G", shared_heads), ("R", num_rows), ("H", launch.num_heads)),
                *(("NSG", launch.num_simdgroups), ("SPLIT", launch.num_splits), ("STAGE", launch.staged_tokens)),
                *(("SAME", is_latent), ("CAPPED", softcap > 0)),
                *(("BITS", 0 if isinstance(key_pool, mx.array) else key_pool.bits),),
                *(("GROUP", 1 if isinstance(key_pool, mx.array) else key_pool.group_size),),
            ],
        )
        padded_dim = -(-value_dim // _LANES) * _LANES
        out: mx.array
        (out,) = self._merge(dtype, sinks is not None)(
            inputs=[partial, stats, plan.item_starts, *([] if sinks is None else [sinks])],
            output_shapes=[(rows, num_heads, 1, value_dim)],
            output_dtypes=[dtype],
            grid=(padded_dim, num_heads, rows),
            threadgroup=(next(width for width in (128, 96, 64, 32) if padded_dim % width == 0), 1, 1),
            template=[("T", dtype), ("DV", value_dim), ("R", num_rows)],
        )
        return out

    def _constant(self, dtype: mx.Dtype, *numbers: float) -> mx.array:
        """A small array, made once: there are only so many launch shapes."""
        if len(self._constants) > _MAX_CONSTANTS:
            self._constants.clear()
        key = (dtype, numbers)
        if key not in self._constants:
            self._constants[key] = mx.array(numbers, dtype)
        return self._constants[key]

    def _partials(self, dtype: mx.Dtype, is_staged: bool, is_packed: bool, is_latent: bool) -> Any:
        kinds = {"staged": is_staged, "packed": is_packed, "latent": is_latent}
        name = "_".join(["cidery_paged_decode", *(kind for kind, has in kinds.items() if has), dtype_tag(dtype)])
        if name not in self._kernels:
            pools = pool_names("key", is_packed) + ([] if is_latent else pool_names("value", is_packed))
            self._kernels[name] = self._metal_kernel(
                name=name,
                input_names=["queries", *pools, "block_tables", "ranges", "items", "sizes", "scale", "after"],
                output_names=["partial", "stats"],
                header=HEADER,
                source=partials_source(is_staged=is_staged, is_packed=is_packed, values_in_keys=is_latent),
            )
        return self._kernels[name]

    def _merge(self, dtype: mx.Dtype, has_sinks: bool) -> Any:
        name = f"cidery_paged_decode_merge_{'sinks_' if has_sinks else ''}{dtype_tag(dtype)}"
        if name not in self._kernels:
            self._kernels[name] = self._metal_kernel(
                name=name,
                input_names=["partial", "stats", "item_starts", *(["sinks"] if has_sinks else [])],
                output_names=["out"],
                header=HEADER,
                source=merge_source(has_sinks=has_sinks),
            )
        return self._kernels[name]


def _check_pools(key_pool: KVPool, value_pool: KVPool, num_kv_heads: int) -> None:
    """Raises ValueError for pools that do not go together."""
    formats = [
        f"{pool.dtype}" if isinstance(pool, mx.array) else f"{pool.dtype} in {pool.bits} bits by {pool.group_size}"
        for pool in (key_pool, value_pool)
    ]
    if key_pool.shape[:-1] != value_pool.shape[:-1] or formats[0] != formats[1]:
        raise ValueError(
            f"keys {formats[0]} {key_pool.shape} and values {formats[1]} {value_pool.shape} differ in more "
            "than the last axis"
        )
    if len(key_pool.shape) == 4 and key_pool.shape[1] != num_kv_heads:
        raise ValueError(f"a pool {key_pool.shape} has {key_pool.shape[1]} KV heads, not {num_kv_heads}")


def _check_queries(
    queries: mx.array, key_pool: KVPool, value_dim: int, plan: DecodePlan, num_kv_heads: int, sinks: mx.array | None
) -> None:
    """Raises ValueError for queries that do not fit pools and plan."""
    rows, num_heads, num_tokens, head_dim = queries.shape
    if (rows, num_tokens) != (plan.num_rows, 1) or num_heads % num_kv_heads:
        raise ValueError(
            f"queries {queries.shape}: [{plan.num_rows}, a multiple of {num_kv_heads}, 1, head_dim] are needed"
        )
    if head_dim != key_pool.shape[-1] or queries.dtype != key_pool.dtype:
        raise ValueError(
            f"queries {queries.dtype} of {head_dim} do not fit keys {key_pool.dtype} of {key_pool.shape[-1]}"
        )
    if not PagedDecode.supports(head_dim, value_dim):
        raise ValueError(f"heads of {head_dim}, values of {value_dim}: multiples of 4 up to 640 and 512 are supported")
    if key_pool.shape[-2] % _MAX_STAGED_TOKENS:
        raise ValueError(f"blocks of {key_pool.shape[-2]} tokens: a multiple of {_MAX_STAGED_TOKENS} is needed")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks {sinks.shape} for {num_heads} heads")
