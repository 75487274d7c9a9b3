"""Pools, and the one way to write and read them: in an order in which no pool is ever copied and no read is too early.

A step is: moves and fills, then for each pool its writes, then its reads, then `commit`. Writing a pool that the step
has read is an error in both routes (but for another part of it, which has no block in common with what was read):

- `ScatterWriter`: MLX's own scatter, which is in place only while nothing else refers to the array. Right everywhere.
  `commit` begins to evaluate everything and the next one waits for it, because a reader that has not completed would
  make the next scatter copy the pool.
- `InPlaceWriter`: kernels that write through their inputs, whatever else refers to the pool, so that `commit` need not
  wait. MLX does not see these writes: tokens order them. It is for GPUs on which the self-test proved it.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from worker.evaluation import Evaluator, Inline

Result = TypeVar("Result", mx.array, tuple[mx.array, ...])

# Below this an input lies in Metal's constant address space, which can't be written, and makes another kernel.
MIN_ELEMENTS = 8


class PoolOrderError(RuntimeError):
    """A pool was used in an order that would copy it, or would let a reader see what it must not."""


# A pool and its part.
Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Pool:
    """Names a pool: `[num_blocks, *block_shape]`. What it holds is only had by `PoolWriter.read`.

    `is_by_head`: readers get the first two axes as one, which is what a gather by head takes. `part`: whoever has
    blocks of its own in a shared pool.
    """

    name: str
    block_shape: tuple[int, ...]
    dtype: mx.Dtype
    is_by_head: bool = False
    part: int = 0
    # Of the array that readers get, without its first axis; and whose order of use it is. Made once: both are hot.
    row_shape: tuple[int, ...] = field(init=False)
    key: Key = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "row_shape", self.block_shape[1:] if self.is_by_head else self.block_shape)
        object.__setattr__(self, "key", (self.name, self.part))

    @property
    def num_rows(self) -> int:
        """Of a block, in the array that readers get."""
        return self.block_shape[0] if self.is_by_head else 1

    def seen_as(self, block_shape: tuple[int, ...], *, part: int = 0) -> "Pool":
        """The same pool with blocks of another shape, and as many elements: caches of several layers share pools."""
        if prod(block_shape) != prod(self.block_shape):
            raise ValueError(f"pool {self.name}: blocks {block_shape} have another size than {self.block_shape}")
        return replace(self, block_shape=tuple(block_shape), part=part)


class Slots:
    """Where a step's rows go: a slot is `block_id * block_size + offset`, -1 a row that goes nowhere.

    Built once a step. Raises ValueError where two rows go to the same slot.
    """

    def __init__(self, slots: Sequence[int] | NDArray[np.int32]) -> None:
        self.slots = np.asarray(slots, np.int32)
        self.num_rows = len(self.slots)
        used = self.slots[self.slots >= 0]
        # For as few as rows are, a set is several times faster than numpy's sorting.
        if len(set(used.tolist())) != len(used):
            raise ValueError("two rows go to the same slot")
        # The slot, where a single row goes somewhere.
        self.only = int(self.slots[0]) if self.num_rows == len(used) == 1 else None
        self._index: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}
        self._by_head: dict[tuple[int, int], mx.array] = {}

    @cached_property
    def array(self) -> mx.array:
        """For kernels: ends in rows that go nowhere, for at least 8 elements."""
        return mx.array(padded_ids(self.slots))

    @cached_property
    def kept(self) -> mx.array | None:
        """Which rows go somewhere; None if all do."""
        if (self.slots >= 0).all():
            return None
        return mx.array(np.flatnonzero(self.slots >= 0).astype(np.int32))

    def index(self, num_heads: int, block_size: int) -> tuple[mx.array, mx.array]:
        """Of the rows that go somewhere: place of each head's part of the block, and offset in it."""
        key = num_heads, block_size
        if key not in self._index:
            used = self.slots[self.slots >= 0][:, None]
            parts = used // block_size * num_heads + np.arange(num_heads, dtype=np.int32)
            self._index[key] = mx.array(parts), mx.array(used % block_size)
        return self._index[key]

    def by_head(self, num_heads: int, block_size: int) -> mx.array:
        """Of each row and head, its place among all slots of all heads; -1 for a row that goes nowhere.

        For kernels: padded as `array`.
        """
        key = num_heads, block_size
        if key not in self._by_head:
            at, inside = self.slots[:, None] // block_size, self.slots[:, None] % block_size
            places = (at * num_heads + np.arange(num_heads)) * block_size + inside
            self._by_head[key] = mx.array(padded_ids(np.where(self.slots[:, None] < 0, -1, places).reshape(-1)))
        return self._by_head[key]


def padded_ids(ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """Ids with -1 behind them, which kernels skip, up to 8: a kernel's input of fewer is a variant of its own."""
    padded = np.full(max(len(ids), MIN_ELEMENTS), -1, np.int32)
    padded[: len(ids)] = ids
    return padded


class PoolWriter(ABC):
    """Owns pools; not thread-safe. All ids are of blocks, all writes lazy until `commit`."""

    def __init__(self, evaluator: Evaluator | None = None) -> None:
        """What is written and read must be built where the evaluator wants it; without one, anywhere."""
        self._evaluator = evaluator or Inline()
        self._arrays: dict[str, mx.array] = {}
        self._num_blocks: dict[str, int] = {}
        # How whoever made a pool sees it, which is how it is kept.
        self._kept_as: dict[str, tuple[int, ...]] = {}
        self._read: set[Key] = set()

    def create(
        self, name: str, num_blocks: int, block_shape: tuple[int, ...], dtype: mx.Dtype, *, is_by_head: bool = False
    ) -> Pool:
        """A new pool, all zero. Raises ValueError for a name that is taken or a pool too small for a kernel."""
        if name in self._arrays:
            raise ValueError(f"pool {name} exists")
        if num_blocks * prod(block_shape) < MIN_ELEMENTS:
            raise ValueError(f"pool {name}: {num_blocks} blocks {block_shape} are below {MIN_ELEMENTS} elements")
        pool = Pool(name, tuple(block_shape), dtype, is_by_head)
        self._kept_as[name] = pool.row_shape
        with self._evaluator.building():
            self._place(name, mx.zeros((num_blocks * pool.num_rows, *pool.row_shape), dtype), num_blocks)
        return pool

    def num_blocks(self, pool: Pool) -> int:
        """Its size."""
        return self._num_blocks[pool.name]

    def resize(self, pool: Pool, num_blocks: int) -> None:
        """Give a pool another size, new blocks zero: between steps only, since it copies the pool. Evaluates."""
        self.commit()
        self.finish()
        # Plain MLX is not ordered behind writes in place.
        self._evaluator.wait()
        array = self._arrays.pop(pool.name)
        old = self._num_blocks[pool.name]
        rows = array.shape[0] // old
        with self._evaluator.building():
            if num_blocks > old:
                fresh = mx.zeros(((num_blocks - old) * rows, *array.shape[1:]), array.dtype)
                array = mx.concatenate([array, fresh])
            else:
                # A slice would keep the whole buffer alive.
                array = array[mx.arange(num_blocks * rows)]
            self._place(pool.name, array, num_blocks)

    def write(self, pools: Sequence[Pool], rows: Sequence[mx.array], slots: Slots) -> None:
        """Store `rows[i] [num_rows, num_heads, dim]` in `pools[i]`, whose blocks are `[num_heads, block_size, dim]`.

        A single row may have more axes of one before its last.
        """
        num_rows, read = slots.num_rows, self._read
        for pool, new in zip(pools, rows, strict=True):
            if pool.key in read:
                self._check_unread(pool)
            heads, _, dim = pool.block_shape
            shape = new.shape
            is_alike = shape == (num_rows, heads, dim) or (
                num_rows == 1 and shape[-1] == dim and new.size == heads * dim
            )
            if not is_alike or new.dtype != pool.dtype:
                wanted = f"{num_rows} slots of {pool.dtype} {(heads, dim)}"
                raise ValueError(f"pool {pool.name}: rows {new.dtype} {shape} for {wanted}")
        self._write(pools, rows, slots)

    def quantize(
        self, pools: tuple[Pool, Pool, Pool], rows: mx.array, slots: Slots, *, bits: int, group_size: int
    ) -> None:
        """Store `rows [num_rows, num_heads, dim]` in the pools of packed words, scales and biases: `QuantizedPool`.

        Rows as of `write`.
        """
        for pool in pools:
            self._check_unread(pool)
        self._quantize(pools, rows, slots, bits, group_size)

    def move(self, pools: Sequence[Pool], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks; all sources are read before any target is written, so copies may chain or swap."""
        if len(set(targets)) != len(targets) or len(sources) != len(targets):
            raise ValueError(f"blocks {sources} to {targets}: one target each, and no target twice")
        if targets:
            for pool in pools:
                self._check_unread(pool)
            with self._evaluator.building():
                self._move(pools, sources, targets)

    def put(self, pool: Pool, contents: mx.array, block_ids: Sequence[int]) -> None:
        """Store whole blocks, `contents [len(block_ids), *block_shape]`: states, for one."""
        self._check_unread(pool)
        if len(set(block_ids)) != len(block_ids):
            raise ValueError(f"blocks {block_ids}: one is there twice")
        if contents.shape != (len(block_ids), *pool.block_shape) or contents.dtype != pool.dtype:
            raise ValueError(f"pool {pool.name}: {contents.dtype} {contents.shape} are not {len(block_ids)} blocks")
        if block_ids:
            self._put(pool, contents, block_ids)

    def fill(self, pools: Sequence[Pool], block_ids: Sequence[int], value: float = 0.0) -> None:
        """Set whole blocks to one value."""
        ids = sorted(set(block_ids))
        with self._evaluator.building():
            for pool in pools:
                self.put(pool, mx.broadcast_to(mx.array(value, pool.dtype), (len(ids), *pool.block_shape)), ids)

    def read(self, pools: Sequence[Pool], reader: Callable[..., Result]) -> Result:
        """`reader(*arrays, after=token)`: what it gives is computed from the pools with all writes so far in them.

        A reader is a kernel that takes `after`, or plain MLX that ties each of its indices to it (`write_kv.tie`);
        `after` is None where MLX keeps the order itself. It must not keep an array: raises PoolOrderError if it does.
        """
        arrays = list(map(self._seen, pools))
        references = list(map(sys.getrefcount, arrays))
        result = reader(*arrays, after=self._order(pools))
        # Compared at once: this is in every layer of every step.
        if list(map(sys.getrefcount, arrays)) != references:
            names = ", ".join(pool.name for pool in pools)
            raise PoolOrderError(f"a reader of pool {names} kept it, or returned it")
        for pool in pools:
            self._read.add(pool.key)
        self._has_read(result if isinstance(result, tuple) else (result,))
        return result

    def update(self, pools: Sequence[Pool], kernel: Callable[..., tuple[Result, mx.array]]) -> Result:
        """`kernel(*arrays, after=token)` reads and writes the pools in place: recurrent states.

        It gives its result and its token, and may load only what it itself stores.
        """
        for pool in pools:
            self._check_unread(pool)
        result, token = kernel(*map(self._seen, pools), after=self._order(pools))
        self._has_updated(pools, token)
        return result

    def commit(self, *outputs: mx.array) -> None:
        """End the step: begin to compute `outputs`, all writes and all reads; `finish` waits for them.

        A pool that was read may be written again.
        """
        self._commit(outputs)
        self._read.clear()

    def _check_unread(self, pool: Pool) -> None:
        if pool.key in self._read:
            raise PoolOrderError(f"pool {pool.name} is written after this step read it: commit first")

    def _place(self, name: str, array: mx.array, num_blocks: int) -> None:
        self._evaluate([array])
        self._arrays[name], self._num_blocks[name] = array, num_blocks

    def _evaluate(self, arrays: Sequence[mx.array]) -> None:
        self._evaluator.start(arrays)
        self._evaluator.wait()

    def _seen(self, pool: Pool) -> mx.array:
        array = self._arrays[pool.name]
        return array if self._kept_as[pool.name] == pool.row_shape else array.reshape(-1, *pool.row_shape)

    def _by_block(self, pool: Pool) -> mx.array:
        array = self._arrays[pool.name]
        return array if self._kept_as[pool.name] == pool.block_shape else array.reshape(-1, *pool.block_shape)

    @abstractmethod
    def _write(self, pools: Sequence[Pool], rows: Sequence[mx.array], slots: Slots) -> None: ...

    @abstractmethod
    def _quantize(
        self, pools: tuple[Pool, Pool, Pool], rows: mx.array, slots: Slots, bits: int, group_size: int
    ) -> None: ...

    @abstractmethod
    def _move(self, pools: Sequence[Pool], sources: Sequence[int], targets: Sequence[int]) -> None: ...

    @abstractmethod
    def _put(self, pool: Pool, contents: mx.array, block_ids: Sequence[int]) -> None: ...

    @abstractmethod
    def _order(self, pools: Sequence[Pool]) -> mx.array | None: ...

    @abstractmethod
    def _has_updated(self, pools: Sequence[Pool], token: mx.array) -> None: ...

    @abstractmethod
    def _has_read(self, results: Sequence[mx.array]) -> None: ...

    @abstractmethod
    def finish(self) -> None:
        """Wait until everything that was committed is done."""

    @abstractmethod
    def _commit(self, outputs: Sequence[mx.array]) -> None: ...
