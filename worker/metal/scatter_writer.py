"""Pools written by MLX's own scatter: right everywhere, and in place while nothing else refers to an array."""

import operator
import weakref
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from math import prod
from typing import Any

import mlx.core as mx

from worker.evaluation import Evaluator
from worker.metal.pool_writer import Key, Pool, PoolOrderError, PoolWriter, Slots

# Blocks of so many elements are copied one by one: a scatter takes MLX on a CPU ten times as long, a copy 5 us more.
_MIN_SLICED = 2_048


class ScatterWriter(PoolWriter):
    """MLX's scatter with donation, and a full evaluation a step: one step at a time."""

    def __init__(self, evaluator: Evaluator | None = None) -> None:
        """See `PoolWriter`."""
        super().__init__(evaluator)
        self._results: list[weakref.ref[mx.array]] = []
        # Of kernels that wrote in place since the last commit.
        self._tokens: dict[Key, mx.array] = {}
        self._is_running = False

    def _write(self, pools: Sequence[Pool], rows: Sequence[mx.array], slots: Slots) -> None:
        for pool, new in zip(pools, rows, strict=True):
            self._store_slots(pool, new if slots.kept is None else new[slots.kept], slots)

    def _quantize(
        self, pools: tuple[Pool, Pool, Pool], rows: mx.array, slots: Slots, bits: int, group_size: int
    ) -> None:
        parts = mx.quantize(rows if slots.kept is None else rows[slots.kept], group_size=group_size, bits=bits)
        for pool, part in zip(pools, parts, strict=True):
            self._store_slots(pool, part, slots)

    def _move(self, pools: Sequence[Pool], sources: Sequence[int], targets: Sequence[int]) -> None:
        index = mx.array(list(sources), mx.int32)
        contents = [self._by_block(pool)[index] for pool in pools]
        # A pending reader of the old pool would make the scatter copy all of it, be it of this step or the one before.
        self.finish()
        self._evaluate(contents)
        for pool, content in zip(pools, contents, strict=True):
            self._put(pool, content, targets)

    def _put(self, pool: Pool, contents: mx.array, block_ids: Sequence[int]) -> None:
        if prod(pool.block_shape) < _MIN_SLICED:
            self._store(pool, pool.block_shape, mx.array(list(block_ids), mx.int32), contents)
            return
        parts = [(slice(block, block + num), contents[first : first + num]) for first, num, block in _runs(block_ids)]
        self._store_parts(pool, pool.block_shape, parts)

    def _store_slots(self, pool: Pool, rows: mx.array, slots: Slots) -> None:
        # Two indices: a scatter with a third one for the heads takes MLX twice as long on a CPU.
        heads, block_size, _ = pool.block_shape
        index: tuple[Any, Any]
        if slots.only is None:
            index = slots.index(heads, block_size)
        else:
            block, offset = divmod(slots.only, block_size)
            index = slice(block * heads, (block + 1) * heads), slice(offset, offset + 1)
            if rows.ndim == 3:
                rows = rows.swapaxes(0, 1)
        self._store(pool, pool.row_shape if pool.is_by_head else pool.block_shape[1:], index, rows)

    def _store(
        self, pool: Pool, row_shape: tuple[int, ...], index: mx.array | tuple[Any, Any], values: mx.array
    ) -> None:
        """`array.reshape(-1, *row_shape)[index] = values`, in place."""
        self._store_parts(pool, row_shape, [(index, values)])

    def _store_parts(self, pool: Pool, row_shape: tuple[int, ...], parts: Iterable[tuple[Any, mx.array]]) -> None:
        if self._tokens and any(name == pool.name for name, _ in self._tokens):
            raise PoolOrderError(f"pool {pool.name} is written after a kernel of this step updated it: commit first")
        kept_as = self._kept_as[pool.name]
        if kept_as == row_shape:
            for index, values in parts:
                self._arrays[pool.name][index] = values
            return
        # No name may refer to the array beside its view, or the scatter copies it.
        view = self._arrays.pop(pool.name).reshape(-1, *row_shape)
        for index, values in parts:
            view[index] = values
        self._arrays[pool.name] = view.reshape(-1, *kept_as)

    def _order(self, pools: Sequence[Pool]) -> mx.array | None:
        """MLX keeps its own order; only what kernels wrote in place needs tokens."""
        if not self._tokens:
            return None
        tokens = [self._tokens[pool.key] for pool in pools if pool.key in self._tokens]
        return reduce(operator.add, tokens) if tokens else None

    def _has_updated(self, pools: Sequence[Pool], token: mx.array) -> None:
        self._tokens |= dict.fromkeys((pool.key for pool in pools), token)

    def _has_read(self, results: Sequence[mx.array]) -> None:
        # Not held: a step's attention outputs would all stay in memory until its end.
        self._results += map(weakref.ref, results)

    def _commit(self, outputs: Sequence[mx.array]) -> None:
        # A reader that has not completed would make the next scatter copy the pool.
        self.finish()
        unread = [result for reference in self._results if (result := reference()) is not None]
        self._evaluator.start([*outputs, *unread, *self._tokens.values(), *self._arrays.values()])
        self._results.clear()
        self._tokens.clear()
        self._is_running = True

    def finish(self) -> None:
        """Wait until everything that was committed is done."""
        if self._is_running:
            self._is_running = False
            self._evaluator.wait()


def _runs(ids: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Ids that follow each other: index of the first, their number, the first."""
    first = 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or ids[place] != ids[place - 1] + 1:
            yield first, place - first, ids[first]
            first = place
