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
        # What verifying sequences had before the step, until it is known which drafts were right.
        self._revocable: frozenset[Slots] = frozenset()
        self._before: dict[Slots, list[mx.array | None]] = {}

    def arrays(self) -> list[mx.array]:
        """What is pending, to be evaluated with the step that made it."""
        held = [*self._pending.values(), *self._before.values()]
        return [array for arrays in held for array in arrays if array is not None]

    def begin(
        self, wanted: Sequence[Slots], fresh: frozenset[Slots], revocable: frozenset[Slots] = frozenset()
    ) -> None:
        """Before the graph of a step that will take these: whatever else is pending goes to its slots first.

        The sequences of `fresh` slots begin in this step, and have no state yet. What those of `revocable` slots have
        is kept until `settle_drafts`.
        """
        self._fresh, self._revocable = fresh, revocable
        for slots in fresh:
            self._pending.pop(slots, None)
        for slots in [slots for slots in self._pending if slots not in wanted]:
            self._write(slots)

    def take(self, slots: Slots) -> list[mx.array | None]:
        """Tensors `[len(slots), *shape]`; None, which mlx-lm's mixers may tell from zeros, before the first token."""
        if slots in self._pending:
            taken = list(self._pending[slots])
        elif slots in self._fresh:
            taken = [None] * len(self._pools)
        else:
            taken = self._read(slots)
        if slots in self._revocable:
            # The first of several mixers that share a state sees it as it was.
            self._before.setdefault(slots, list(taken))
        return taken

    def _read(self, slots: Slots) -> list[mx.array | None]:
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

    def settle_drafts(self, wrong: frozenset[int]) -> None:
        """After the step: states in `wrong` slots have seen drafts that were not right, and are what they were."""
        for slots, before in self._before.items():
            is_wrong = [slot in wrong for slot in slots]
            if all(is_wrong):
                self._pending[slots] = before
            elif any(is_wrong):
                after = self._pending[slots]
                self._pending[slots] = [_chosen(is_wrong, old, new) for old, new in zip(before, after, strict=True)]
        self._before.clear()

    def settle(self) -> None:
        """Write all that is pending."""
        for slots in list(self._pending):
            self._write(slots)

    def _write(self, slots: Slots) -> None:
        for pool, array in zip(self._pools, self._pending.pop(slots), strict=True):
            content = mx.zeros((len(slots), *pool.block_shape), pool.dtype) if array is None else array
            self._writer.put(pool, content, slots)


def _chosen(is_first: Sequence[bool], first: mx.array | None, second: mx.array | None) -> mx.array | None:
    """Row by row; of a tensor that is not there, what the model leaves is not there either."""
    if first is None or second is None:
        return second
    column = mx.array(list(is_first)).reshape(-1, *[1] * (second.ndim - 1))
    return mx.where(column, first, second)


def _fitted(array: mx.array, shape: Sequence[int]) -> mx.array:
    """A window of the last inputs is shorter while the sequence is: zeros stand for what came before it."""
    missing = [whole - has for whole, has in zip(shape, array.shape[1:], strict=True)]
    if not any(missing):
        return array
    return mx.pad(array, [(0, 0), *((num, 0) for num in missing)])
