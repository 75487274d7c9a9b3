"""Recurrent states between steps.

A state is read and then replaced, and in one graph that would make MLX copy the whole pool: the reader still holds it
when the writer comes. So what a step leaves behind waits outside of the pool, and is written by the graph of the next
step that does not go on with the very same sequences; a step that does takes it as it is.
"""

from collections.abc import Sequence

import mlx.core as mx

from worker.kv_shapes import StateShape
from worker.metal.pool_writer import Pool, PoolWriter
from worker.metal.write_kv import tie

Slots = tuple[int, ...]


class PendingStates:
    """The states of one cache: in their slots of the pool, or pending."""

    def __init__(self, shape: StateShape, writer: PoolWriter, pools: Sequence[Pool]) -> None:
        self._shape = shape
        self._writer = writer
        self._pools = pools
        self._pending: dict[Slots, list[mx.array | None]] = {}
        self._fresh: frozenset[Slots] = frozenset()

    def arrays(self) -> list[mx.array]:
        """What is pending, to be evaluated with the step that made it."""
        return [array for arrays in self._pending.values() for array in arrays if array is not None]

    def begin(self, wanted: Sequence[Slots], fresh: frozenset[Slots]) -> None:
        """Before the graph of a step that will take these: whatever else is pending goes to its slots first.

        The sequences of `fresh` slots begin in this step, and have no state yet.
        """
        self._fresh = fresh
        for slots in fresh:
            self._pending.pop(slots, None)
        for slots in [slots for slots in self._pending if slots not in wanted]:
            self._write(slots)

    def take(self, slots: Slots) -> list[mx.array | None]:
        """Tensors `[len(slots), *shape]`; None, which mlx-lm's mixers may tell from zeros, before the first token."""
        if slots in self._pending:
            return list(self._pending[slots])
        if slots in self._fresh:
            return [None] * len(self._pools)
        index = mx.array(slots, mx.int32)

        def reader(*arrays: mx.array, after: mx.array | None) -> tuple[mx.array, ...]:
            at = index if after is None else tie(index, after)
            return tuple(array[at] for array in arrays)

        return list(self._writer.read(self._pools, reader))

    def put(self, slots: Slots, arrays: Sequence[mx.array | None]) -> None:
        """Replace the states in these slots. A state that several mixers share may not be there in whole yet."""
        self._pending[slots] = [
            None if array is None else _fitted(array, shape).astype(dtype)
            for array, shape, dtype in zip(arrays, self._shape.shapes, self._shape.dtypes, strict=True)
        ]

    def settle(self) -> None:
        """Write all that is pending."""
        for slots in list(self._pending):
            self._write(slots)

    def _write(self, slots: Slots) -> None:
        for pool, array in zip(self._pools, self._pending.pop(slots), strict=True):
            content = mx.zeros((len(slots), *pool.block_shape), pool.dtype) if array is None else array
            self._writer.put(pool, content, slots)


def _fitted(array: mx.array, shape: Sequence[int]) -> mx.array:
    """A window of the last inputs is shorter while the sequence is: zeros stand for what came before it."""
    missing = [whole - has for whole, has in zip(shape, array.shape[1:], strict=True)]
    if not any(missing):
        return array
    return mx.pad(array, [(0, 0), *((num, 0) for num in missing)])
