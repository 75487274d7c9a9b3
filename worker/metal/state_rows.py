"""Which rows of a packed step belong to which recurrent state; built once a step, shared by all layers."""

from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

# Below this an input lies in Metal's constant address space.
_MIN_ELEMENTS = 8


@dataclass(frozen=True)
class StateRows:
    """Rows `[offsets[i], offsets[i + 1])` are the next tokens of the sequence whose state is in block `slots[i]`.

    Shapes: `offsets [num_sequences + 1]` from 0 on, `slots` and `is_fresh [num_sequences]`. A fresh sequence begins
    with a state of zeros, whatever its slot holds. Slot -1 skips: the sequence's outputs are zero and no state is
    touched. A sequence without rows is left alone. Raises ValueError where two sequences would write one slot.
    """

    offsets: NDArray[np.int32]
    slots: NDArray[np.int32]
    is_fresh: NDArray[np.bool_]
    _tiles: dict[int, mx.array] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.offsets.shape != (len(self.slots) + 1,) or self.is_fresh.shape != self.slots.shape:
            shapes = f"{self.offsets.shape}, {self.slots.shape}, {self.is_fresh.shape}"
            raise ValueError(f"offsets, slots, is_fresh have shapes {shapes}; [n + 1], [n], [n] are needed")
        if self.offsets[0] != 0 or (self.lengths < 0).any():
            raise ValueError(f"offsets are {self.offsets.tolist()}; they must begin with 0 and never fall")
        held = self.slots[self.slots >= 0]
        if len(np.unique(held)) < len(held) or (self.slots < -1).any():
            raise ValueError(f"slots are {self.slots.tolist()}; each must be there once, or be -1")

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """Rows of each sequence."""
        return np.diff(self.offsets).astype(np.int32)

    @cached_property
    def num_rows(self) -> int:
        """Of all sequences."""
        return int(self.offsets[-1])

    @cached_property
    def max_slot(self) -> int:
        """The last slot that is read or written, -1 if none is."""
        return int(self.slots.max(initial=-1))

    @property
    def num_sequences(self) -> int:
        """Skipped ones included."""
        return len(self.slots)

    @cached_property
    def is_decode(self) -> bool:
        """Whether every sequence has exactly one row."""
        return bool((self.lengths == 1).all())

    @cached_property
    def sequence_array(self) -> mx.array:
        """For kernels, `[num_sequences, 4]` int32: first row, number of rows, slot, 1 if fresh.

        Padded to 8 elements with what no kernel is launched for.
        """
        columns = [self.offsets[:-1], self.lengths, self.slots, self.is_fresh]
        return _padded(np.stack(columns, axis=1))

    def num_tiles(self, tile_rows: int) -> int:
        """Tiles that cover all rows, each of one sequence."""
        return int((-(-self.lengths // tile_rows)).sum())

    def tile_array(self, tile_rows: int) -> mx.array:
        """For kernels, `[num_tiles, 2]` int32: sequence, and first row within it; padded to 8 elements."""
        if tile_rows not in self._tiles:
            counts = -(-self.lengths // tile_rows)
            sequences = np.repeat(np.arange(self.num_sequences), counts)
            firsts = np.concatenate([np.arange(count) * tile_rows for count in counts])
            self._tiles[tile_rows] = _padded(np.stack([sequences, firsts], axis=1))
        return self._tiles[tile_rows]

    def check(self, num_rows: int, pool: mx.array, state_shape: tuple[int, ...]) -> None:
        """That a layer's rows and its pool fit; raises ValueError."""
        num_slots, *shape = pool.shape
        if num_rows != self.num_rows or num_rows == 0:
            raise ValueError(f"there are {num_rows} rows; offsets are for {self.num_rows}, and one is needed")
        if tuple(shape) != state_shape:
            raise ValueError(f"the pool has states of shape {tuple(shape)}; the inputs are for {state_shape}")
        if self.max_slot >= num_slots:
            raise ValueError(f"slot {self.max_slot} is outside of a pool of {num_slots} states")


def _padded(records: NDArray[np.int_]) -> mx.array:
    """With zeros behind them: a kernel's input below 8 elements is a variant of its own."""
    missing = -(-_MIN_ELEMENTS // records.shape[1]) - len(records)
    return mx.array(np.pad(records.astype(np.int32), ((0, max(missing, 0)), (0, 0))))


def token_or_none(after: mx.array | None) -> mx.array:
    """The token that a kernel takes: one int32 zero where there is nothing to wait for."""
    return mx.zeros((1,), mx.int32) if after is None else after
