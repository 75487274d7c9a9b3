"""`paged_prefill`: many queries of many sequences over their blocks, by tiles of 8x8 matrix products.

A threadgroup takes a tile of rows of one sequence and one KV head. A row is one query token of one of the heads that
share that KV head, so a few tokens with many shared heads still fill a tile, and what it reads of K and V serves all of
them. Two kernels: `tile_prefill` for heads up to 128, `wide_prefill` for all others.
"""

import functools
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from worker.metal import tile_prefill, wide_prefill
from worker.metal.factory import MetalKernel, dtype_tag
from worker.metal.kv_pools import KVPool, arrays_of
from worker.metal.prefill_rows import TILE_FIELDS, PrefillOptions, PrefillRows
from worker.metal.quantized import QuantizedPool
from worker.metal.slot_source import pool_names
from worker.metal.tile_prefill import TileShape, tile_shape
from worker.metal.wide_prefill import WideShape, wide_shape
from worker.metal.write_kv import nothing_if

_LOG2_E = 1.4426950408889634


# Every layer of every step asks.
@functools.cache
def shape_for(head_dim: int, value_dim: int, dtype: mx.Dtype, *, is_latent: bool = False) -> "TileShape | WideShape":
    """The tile of heads of such widths, of whichever kernel takes them. Raises ValueError for heads that have none."""
    is_narrow = head_dim == value_dim <= tile_prefill.MAX_HEAD_DIM and head_dim % 8 == 0
    if is_narrow and not is_latent:
        return tile_shape(head_dim, dtype)
    return wide_shape(head_dim, value_dim, dtype, is_latent=is_latent)


class PagedPrefill:
    """Launches the kernels, over pools in full precision and over quantised ones."""

    def __init__(self, metal_kernel: MetalKernel) -> None:
        self._metal_kernel = metal_kernel
        self._by_name: dict[str, Any] = {}

    def __call__(
        self,
        queries: mx.array,
        key_pool: KVPool,
        value_pool: KVPool,
        rows: PrefillRows,
        options: PrefillOptions,
        after: mx.array | None = None,
    ) -> mx.array:
        """Attention of the rows of `queries [all rows, num_heads, head_dim]` that `rows` names, over their blocks.

        Pools: `[num_blocks, num_kv_heads, block_size, head_dim]` of the queries' type, or quantised; values may be of
        another width. `queries` may be strided. The result is `[rows.num_rows, num_heads, value_dim]`. `after`: the
        token of the last write. Raises ValueError.
        """
        _check_pools(key_pool, value_pool)
        return self._attend(queries, [key_pool, value_pool], value_pool.shape[3], rows, options, after)

    def latent(
        self,
        queries: mx.array,
        latent_pool: KVPool,
        value_dim: int,
        rows: PrefillRows,
        options: PrefillOptions,
        after: mx.array | None = None,
    ) -> mx.array:
        """Absorbed multi-head latent attention: one KV head, whose values are the first `value_dim` of its keys.

        `latent_pool [num_blocks, 1, block_size, value_dim + rope_dim]`, queries `[all rows, num_heads, value_dim +
        rope_dim]`, result `[rows.num_rows, num_heads, value_dim]`. Raises ValueError.
        """
        shape = latent_pool.shape
        if len(shape) != 4 or shape[1] != 1 or not 0 < value_dim <= shape[3]:
            raise ValueError(f"latents {shape}, {value_dim} of them values: one KV head of at least these")
        return self._attend(queries, [latent_pool], value_dim, rows, options, after)

    def _attend(
        self,
        queries: mx.array,
        pools: Sequence[KVPool],
        value_dim: int,
        rows: PrefillRows,
        options: PrefillOptions,
        after: mx.array | None,
    ) -> mx.array:
        _check_queries(queries, pools[0], rows)
        _, num_kv_heads, block_size, head_dim = pools[0].shape
        num_heads, dtype, is_latent = queries.shape[1], queries.dtype, len(pools) == 1
        shared_heads = num_heads // num_kv_heads
        shape = shape_for(head_dim, value_dim, dtype, is_latent=is_latent)
        tiles = rows.tiles(shape.rows, shared_heads)
        packed = pools[0] if isinstance(pools[0], QuantizedPool) else None
        template = [("T", dtype), ("D", head_dim), ("BS", block_size), ("BK", shape.keys), ("NSG", shape.simdgroups)]
        template += [("CAP", options.softcap > 0), ("SINK", options.sinks is not None)]
        template += [("BITS", packed.bits if packed else 0), ("GROUP", packed.group_size if packed else 1)]
        if isinstance(shape, WideShape):
            template += [("DV", value_dim), ("ROWS", shape.rows), ("PARTS", shape.parts)]
            template += [("LANES", shape.softmax_lanes), ("SAME", is_latent)]
        out: mx.array
        (out,) = self._kernel(
            dtype_tag(dtype), is_wide=isinstance(shape, WideShape), is_packed=packed is not None, is_latent=is_latent
        )(
            inputs=[
                queries,
                *(array for pool in pools for array in arrays_of(pool)),
                rows.block_table_array,
                tiles,
                mx.array([shared_heads, options.window, options.chunk, rows.first_row], mx.int32),
                mx.array([options.scale * _LOG2_E, options.softcap * _LOG2_E], mx.float32),
                mx.zeros((1,), mx.float32) if options.sinks is None else options.sinks,
                nothing_if(after),
            ],
            output_shapes=[(rows.num_rows, num_heads, value_dim)],
            output_dtypes=[dtype],
            grid=(shape.simdgroups * 32 * tiles.shape[0], num_kv_heads, 1),
            threadgroup=(shape.simdgroups * 32, 1, 1),
            template=template,
        )
        return out

    def _kernel(self, tag: str, *, is_wide: bool, is_packed: bool, is_latent: bool) -> Any:
        kinds = {"wide": is_wide, "latent": is_latent, "quantized": is_packed}
        name = "_".join(["cidery_paged_prefill", *(kind for kind, has in kinds.items() if has), tag])
        if name not in self._by_name:
            names = pool_names("key", is_packed) + ([] if is_latent else pool_names("value", is_packed))
            if is_wide:
                source = wide_prefill.source(is_packed=is_packed, is_latent=is_latent)
            else:
                source = tile_prefill.source(is_packed=is_packed)
            self._by_name[name] = self._metal_kernel(
                name=name,
                input_names=["queries", *names, "block_tables", "tiles", "ints", "floats", "sinks", "after"],
                output_names=["out"],
                source=source,
                header=wide_prefill.HEADER if is_wide else tile_prefill.HEADER,
                ensure_row_contiguous=False,
            )
        return self._by_name[name]


def _check_pools(key_pool: KVPool, value_pool: KVPool) -> None:
    shape = key_pool.shape
    is_alike = type(value_pool) is type(key_pool) and value_pool.dtype == key_pool.dtype
    if len(shape) != 4 or value_pool.shape[:3] != shape[:3] or not is_alike:
        raise ValueError(
            f"pools {key_pool.dtype} {shape} and {value_pool.dtype} {value_pool.shape}: two of "
            "[num_blocks, kv_heads, block_size, head_dim]"
        )


def _check_queries(queries: mx.array, key_pool: KVPool, rows: PrefillRows) -> None:
    shape = key_pool.shape
    if queries.ndim != 3 or queries.shape[2] != shape[3] or queries.shape[1] % shape[1]:
        raise ValueError(f"queries {queries.shape} do not go with pools {shape}")
    if queries.dtype != key_pool.dtype:
        raise ValueError(f"queries are {queries.dtype}, pools {key_pool.dtype}")
    if queries.shape[0] < rows.last_row:
        raise ValueError(f"{queries.shape[0]} rows of queries, and {rows.last_row} are needed")
    rows.check_tables(shape[2])


# The record of a tile is read as 8 numbers.
assert TILE_FIELDS == 8
