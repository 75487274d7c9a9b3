"""Pools written by kernels through their inputs, for GPUs on which the self-test proved it."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from worker.metal.factory import MetalKernel, dtype_tag
from worker.metal.pool_writer import Key, Pool, PoolWriter, Slots, padded_ids
from worker.metal.quantized import QuantizedPool, WriteQuantized
from worker.metal.write_kv import VEC, PutBlocks, WriteKV, move_blocks, nothing_if


class InPlaceWriter(PoolWriter):
    """Kernels that write through their inputs.

    The token of a pool's last write orders all that comes after it in the step. The token of the step's reads, which
    each read prolongs by a launch of nothing, orders the writes of the next step: a block may be reused at once.
    """

    def __init__(self, metal_kernel: MetalKernel) -> None:
        super().__init__()
        self._write_kv = WriteKV(metal_kernel)
        self._put_blocks = PutBlocks(metal_kernel)
        self._write_quantized = WriteQuantized(metal_kernel)
        self._join = _Join(metal_kernel)
        self._written: dict[Key, mx.array] = {}
        # Of all steps so far, and of this one.
        self._past: mx.array | None = None
        self._reads: mx.array | None = None

    def finish(self) -> None:
        """Wait until everything that was committed is done."""
        if self._past is not None:
            mx.eval(self._past)

    def _has_updated(self, pools: Sequence[Pool], token: mx.array) -> None:
        self._written |= dict.fromkeys((pool.key for pool in pools), token)

    def _write(self, pools: Sequence[Pool], rows: Sequence[mx.array], slots: Slots) -> None:
        rows = [new if new.ndim == 3 else new.reshape(1, -1, new.shape[-1]) for new in rows]
        if len(pools) == 2 and _go_together(*pools):
            keys, values = map(self._seen, pools)
            token = self._write_kv(rows[0], rows[1], slots.array, keys, values, self._order(pools))
            self._has_updated(pools, token)
            return
        for pool, new in zip(pools, rows, strict=True):
            heads, block_size, dim = pool.block_shape
            by_slot = self._seen(pool).reshape(-1, dim)
            places = slots.by_head(heads, block_size)
            token = self._put_blocks(new.reshape(-1, dim), places, by_slot, self._order([pool]))
            self._has_updated([pool], token)

    def _quantize(
        self, pools: tuple[Pool, Pool, Pool], rows: mx.array, slots: Slots, bits: int, group_size: int
    ) -> None:
        if rows.ndim != 3:
            rows = rows.reshape(1, -1, rows.shape[-1])
        packed, scales, biases = map(self._by_block, pools)
        pool = QuantizedPool(packed, scales, biases, bits, group_size)
        self._has_updated(pools, self._write_quantized(rows, slots.array, pool, self._order(pools)))

    def _move(self, pools: Sequence[Pool], sources: Sequence[int], targets: Sequence[int]) -> None:
        old, new = mx.array(list(sources), mx.int32), mx.array(padded_ids(targets))
        for pool in pools:
            token = move_blocks(self._put_blocks, self._by_block(pool), old, new, self._order([pool]))
            self._has_updated([pool], token)

    def _put(self, pool: Pool, contents: mx.array, block_ids: Sequence[int]) -> None:
        ids = mx.array(padded_ids(block_ids))
        token = self._put_blocks(contents, ids, self._by_block(pool), self._order([pool]))
        self._has_updated([pool], token)

    def _order(self, pools: Sequence[Pool]) -> mx.array:
        tokens = {id(token): token for pool in pools if (token := self._written.get(pool.key, self._past)) is not None}
        first, *others = tokens.values() if tokens else [nothing_if(None)]
        for token in others:
            first = self._join(first, token)
        return first

    def _has_read(self, results: Sequence[mx.array]) -> None:
        for result in results:
            self._reads = self._join(nothing_if(self._reads), result)

    def _commit(self, outputs: Sequence[mx.array]) -> None:
        unread = {id(token): token for key, token in self._written.items() if key not in self._read}
        token = self._past if self._reads is None else self._reads
        for other in unread.values():
            token = self._join(nothing_if(token), other)
        self._past, self._reads = token, None
        self._written.clear()
        mx.async_eval(*outputs, *([] if token is None else [token]))  # type: ignore[no-untyped-call]


def _go_together(keys: Pool, values: Pool) -> bool:
    """Whether one launch of `write_kv` takes both."""
    is_alike = keys.block_shape[:2] == values.block_shape[:2] and keys.dtype == values.dtype
    return is_alike and keys.block_shape[2] % VEC == 0 and values.block_shape[2] % VEC == 0


class _Join:
    """A token that is there when another one and some array are: a launch that computes nothing."""

    def __init__(self, metal_kernel: MetalKernel) -> None:
        self._metal_kernel = metal_kernel
        self._by_dtype: dict[str, Any] = {}

    def __call__(self, token: mx.array, result: mx.array) -> mx.array:
        tag = dtype_tag(result.dtype)
        if tag not in self._by_dtype:
            self._by_dtype[tag] = self._metal_kernel(
                name=f"cidery_join_{tag}",
                input_names=["before", "result"],
                output_names=["token"],
                source="token[thread_position_in_grid.x] = 0;",
                ensure_row_contiguous=False,
            )
        joined: mx.array
        (joined,) = self._by_dtype[tag](
            inputs=[token, result],
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )
        return joined
