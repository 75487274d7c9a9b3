"""Pools, and the one way to write and read them: in an order in which no pool is ever copied and no read is too early.

A step is: moves and fills, then for each pool its writes, then its reads, then `commit`. Writing a pool that the step
has read is an error in both routes (but for another part of it, which has no block in common with what was read):

- `ScatterWriter`: MLX's own scatter, which is in place only while nothing else refers to the array. Right everywhere;
  `commit` evaluates everything, because a reader that has not completed would make the next scatter copy the pool.
- `InPlaceWriter`: kernels that write through their inputs, whatever else refers to the pool, so that `commit` need not
  wait. MLX does not see these writes: tokens order them. It is for GPUs on which the self-test proved it.
"""

import operator
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from math import prod
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from worker.metal.factory import MetalKernel, dtype_tag
from worker.metal.quantized import QuantizedPool, WriteQuantized
from worker.metal.write_kv import VEC, PutBlocks, WriteKV, move_blocks, nothing_if

Result = TypeVar("Result", mx.array, tuple[mx.array, ...])

# Below this an input lies in Metal's constant address space, which can't be written.
MIN_ELEMENTS = 8


class PoolOrderError(RuntimeError):
    """A pool was used in an order that would copy it, or would let a reader see what it must not."""


# A pool and its part.
_Key = tuple[str, int]


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
    key: _Key = field(init=False)

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
        if len(np.unique(used)) != len(used):
            raise ValueError("two rows go to the same slot")
        # The slot, where a single row goes somewhere.
        self.only = int(self.slots[0]) if self.num_rows == len(used) == 1 else None
        self._index: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}

    @cached_property
    def array(self) -> mx.array:
        """For kernels."""
        return mx.array(self.slots)

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


class PoolWriter(ABC):
    """Owns pools; not thread-safe. All ids are of blocks, all writes lazy until `commit`."""

    def __init__(self) -> None:
        self._arrays: dict[str, mx.array] = {}
        self._num_blocks: dict[str, int] = {}
        # How whoever made a pool sees it, which is how it is kept.
        self._kept_as: dict[str, tuple[int, ...]] = {}
        self._read: set[_Key] = set()

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
        self._place(name, mx.zeros((num_blocks * pool.num_rows, *pool.row_shape), dtype), num_blocks)
        return pool

    def num_blocks(self, pool: Pool) -> int:
        """Its size."""
        return self._num_blocks[pool.name]

    def resize(self, pool: Pool, num_blocks: int) -> None:
        """Give a pool another size, new blocks zero: between steps only, since it copies the pool. Evaluates."""
        self.commit()
        # Plain MLX is not ordered behind writes in place.
        mx.synchronize()
        array = self._arrays.pop(pool.name)
        old = self._num_blocks[pool.name]
        rows = array.shape[0] // old
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
            self._move(pools, mx.array(list(sources), mx.int32), mx.array(list(targets), mx.int32))

    def put(self, pool: Pool, contents: mx.array, block_ids: Sequence[int]) -> None:
        """Store whole blocks, `contents [len(block_ids), *block_shape]`: states, for one."""
        self._check_unread(pool)
        if len(set(block_ids)) != len(block_ids):
            raise ValueError(f"blocks {block_ids}: one is there twice")
        if contents.shape != (len(block_ids), *pool.block_shape) or contents.dtype != pool.dtype:
            raise ValueError(f"pool {pool.name}: {contents.dtype} {contents.shape} are not {len(block_ids)} blocks")
        if block_ids:
            self._put(pool, contents, mx.array(list(block_ids), mx.int32))

    def fill(self, pools: Sequence[Pool], block_ids: Sequence[int], value: float = 0.0) -> None:
        """Set whole blocks to one value."""
        ids = sorted(set(block_ids))
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
        """End the step: compute `outputs`, all writes and all reads. A pool that was read may be written again."""
        self._commit(outputs)
        self._read.clear()

    def _check_unread(self, pool: Pool) -> None:
        if pool.key in self._read:
            raise PoolOrderError(f"pool {pool.name} is written after this step read it: commit first")

    def _place(self, name: str, array: mx.array, num_blocks: int) -> None:
        mx.eval(array)
        self._arrays[name], self._num_blocks[name] = array, num_blocks

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
    def _move(self, pools: Sequence[Pool], sources: mx.array, targets: mx.array) -> None: ...

    @abstractmethod
    def _put(self, pool: Pool, contents: mx.array, block_ids: mx.array) -> None: ...

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


class ScatterWriter(PoolWriter):
    """MLX's scatter with donation, and a full evaluation a step."""

    def __init__(self) -> None:
        super().__init__()
        self._results: list[weakref.ref[mx.array]] = []
        # Of kernels that wrote in place since the last commit.
        self._tokens: dict[_Key, mx.array] = {}

    def _write(self, pools: Sequence[Pool], rows: Sequence[mx.array], slots: Slots) -> None:
        for pool, new in zip(pools, rows, strict=True):
            self._store_slots(pool, new if slots.kept is None else new[slots.kept], slots)

    def _quantize(
        self, pools: tuple[Pool, Pool, Pool], rows: mx.array, slots: Slots, bits: int, group_size: int
    ) -> None:
        parts = mx.quantize(rows if slots.kept is None else rows[slots.kept], group_size=group_size, bits=bits)
        for pool, part in zip(pools, parts, strict=True):
            self._store_slots(pool, part, slots)

    def _move(self, pools: Sequence[Pool], sources: mx.array, targets: mx.array) -> None:
        contents = [self._by_block(pool)[sources] for pool in pools]
        # A pending reader of the old pool would make the scatter copy all of it.
        mx.eval(contents)
        for pool, content in zip(pools, contents, strict=True):
            self._store(pool, pool.block_shape, targets, content)

    def _put(self, pool: Pool, contents: mx.array, block_ids: mx.array) -> None:
        self._store(pool, pool.block_shape, block_ids, contents)

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
        if self._tokens and any(name == pool.name for name, _ in self._tokens):
            raise PoolOrderError(f"pool {pool.name} is written after a kernel of this step updated it: commit first")
        kept_as = self._kept_as[pool.name]
        if kept_as == row_shape:
            self._arrays[pool.name][index] = values
            return
        # No name may refer to the array beside its view, or the scatter copies it.
        view = self._arrays.pop(pool.name).reshape(-1, *row_shape)
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
        unread = [result for reference in self._results if (result := reference()) is not None]
        mx.eval(*outputs, *unread, *self._tokens.values(), *self._arrays.values())
        self._results.clear()
        self._tokens.clear()

    def finish(self) -> None:
        """Nothing: each commit waits."""


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
        self._written: dict[_Key, mx.array] = {}
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
            at, inside = slots.slots[:, None] // block_size, slots.slots[:, None] % block_size
            places = (at * heads + np.arange(heads)) * block_size + inside
            ids = mx.array(np.where(slots.slots[:, None] < 0, -1, places).astype(np.int32).reshape(-1))
            by_slot = self._seen(pool).reshape(-1, dim)
            token = self._put_blocks(new.reshape(-1, dim), ids, by_slot, self._order([pool]))
            self._has_updated([pool], token)

    def _quantize(
        self, pools: tuple[Pool, Pool, Pool], rows: mx.array, slots: Slots, bits: int, group_size: int
    ) -> None:
        if rows.ndim != 3:
            rows = rows.reshape(1, -1, rows.shape[-1])
        packed, scales, biases = map(self._by_block, pools)
        pool = QuantizedPool(packed, scales, biases, bits, group_size)
        self._has_updated(pools, self._write_quantized(rows, slots.array, pool, self._order(pools)))

    def _move(self, pools: Sequence[Pool], sources: mx.array, targets: mx.array) -> None:
        for pool in pools:
            token = move_blocks(self._put_blocks, self._by_block(pool), sources, targets, self._order([pool]))
            self._has_updated([pool], token)

    def _put(self, pool: Pool, contents: mx.array, block_ids: mx.array) -> None:
        token = self._put_blocks(contents, block_ids, self._by_block(pool), self._order([pool]))
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
