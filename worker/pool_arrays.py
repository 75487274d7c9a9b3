"""The arrays behind the pools: which array a cache's blocks lie in, and how far each pool is committed.

A block id of a pool is a block of any of its groups, so the n-th caches of those groups share one array: what one group
frees, another can take. Caches whose blocks have as many elements of the same type share; a cache of another shape sees
the array reshaped.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import mlx.core as mx

from worker.kv_shapes import CacheGroup, CacheShape, LayerShape

# Where pools start: fewer blocks are not worth a later growth, unless they are as large as some states.
_FIRST_BLOCKS = 64
_FIRST_BYTES = 1 << 27

Index = mx.array | tuple[mx.array, mx.array] | tuple[slice, slice]
# (pool, place in the group, tensor of the cache, elements of a block, type)
_Key = tuple[int, int, int, int, mx.Dtype]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a cache: its array, and how the cache sees it: `rows` rows of `shape` a block."""

    key: _Key
    rows: int
    shape: tuple[int, ...]


class PoolArrays:
    """Owns every byte of KV memory.

    A pool must never be copied inside a step. MLX scatters in place only while nothing else refers to the array, so
    arrays are held here alone, no view of one is handed out, and each step ends with a full evaluation.

    MLX commits memory when it allocates, so a pool starts small and doubles at a step's boundary when a block id first
    lies beyond it. That growth, and a boundary that moves, are the only copies of a pool there are.
    """

    def __init__(
        self, caches: Sequence[CacheShape], groups: Sequence[CacheGroup], num_blocks: Sequence[int], block_size: int
    ) -> None:
        self.num_blocks = list(num_blocks)
        self._arrays: dict[_Key, mx.array] = {}
        # How whoever came first sees the array, which is how it is kept.
        self._kept_as: dict[_Key, Tensor] = {}
        self.tensors: list[tuple[Tensor, ...]] = [()] * len(caches)
        for group in groups:
            for place, cache in enumerate(group.caches):
                self.tensors[cache] = _tensors(caches[cache], group.pool, place, block_size)
                for tensor in self.tensors[cache]:
                    self._kept_as.setdefault(tensor.key, tensor)
        self._capacity = [self._first_capacity(pool) for pool in range(len(num_blocks))]
        for key, tensor in self._kept_as.items():
            self._arrays[key] = _zeros(tensor, self._capacity[key[0]])
        self.evaluate()

    def evaluate(self, *outputs: mx.array) -> None:
        """Compute `outputs` and all pending writes; the one evaluation of a step."""
        mx.eval(*outputs, *self._arrays.values())

    def read(self, tensor: Tensor) -> mx.array:
        """The pool as the cache sees it, `[capacity * rows, *shape]`; to be read from and let go of."""
        array = self._arrays[tensor.key]
        return array if array.shape[1:] == tensor.shape else array.reshape(-1, *tensor.shape)

    def write(self, tensor: Tensor, index: Index, values: mx.array) -> None:
        """`pool[index] = values`, in place."""
        if self._kept_as[tensor.key].shape == tensor.shape:
            self._arrays[tensor.key][index] = values
            return
        array = self._arrays.pop(tensor.key)
        kept_shape = array.shape[1:]
        view = array.reshape(-1, *tensor.shape)
        # A second reference would make the scatter copy the pool.
        del array
        view[index] = values
        self._arrays[tensor.key] = view.reshape(-1, *kept_shape)

    def reserve(self, pool: int, block_id: int) -> None:
        """Make a block addressable. Between steps only: it copies the pool's arrays, one at a time, if they grow."""
        capacity = self._capacity[pool]
        if block_id < capacity:
            return
        while capacity <= block_id:
            capacity *= 2
        capacity = min(capacity, self.num_blocks[pool])
        for key in self._keys(pool):
            tensor = self._kept_as[key]
            fresh = _zeros(tensor, capacity - self._capacity[pool])
            self._replace(key, mx.concatenate([self._arrays[key], fresh]))
        self._capacity[pool] = capacity

    def copy_blocks(self, caches: Sequence[int], sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks of some caches; all sources are read before any target is written."""
        tensors = [tensor for cache in caches for tensor in self.tensors[cache]]
        contents = [self.read(tensor)[_block_rows(sources, tensor)] for tensor in tensors]
        # A pending reader of the old pool would make the scatter copy all of it.
        mx.eval(contents)
        for tensor, content in zip(tensors, contents, strict=True):
            self.write(tensor, _block_rows(targets, tensor), content)

    def fill_blocks(self, tensors: Iterable[Tensor], block_ids: Sequence[int], value: float) -> None:
        """Set whole blocks to one value."""
        for tensor in tensors:
            self.write(tensor, _block_rows(block_ids, tensor), mx.array(value, tensor.key[-1]))

    def resize(self, pool: int, num_blocks: int, moves: Sequence[tuple[int, int]]) -> None:
        """Move blocks and give the pool another size; memory beyond its end is given back."""
        if moves:
            sources, targets = ([move[side] for move in moves] for side in (0, 1))
            self.reserve(pool, max(*sources, *targets))
            for key in self._keys(pool):
                tensor = self._kept_as[key]
                content = self._arrays[key][_block_rows(sources, tensor)]
                mx.eval(content)
                self._arrays[key][_block_rows(targets, tensor)] = content
                mx.eval(self._arrays[key])
        self.num_blocks[pool] = num_blocks
        if self._capacity[pool] > num_blocks:
            for key in self._keys(pool):
                # A slice would keep the whole buffer alive.
                rows = mx.arange(num_blocks * self._kept_as[key].rows)
                self._replace(key, self._arrays[key][rows])
            self._capacity[pool] = num_blocks

    def pool_bytes(self) -> int:
        """Bytes of the pools when every block is in use."""
        return sum(self.num_blocks[key[0]] * _block_bytes(tensor) for key, tensor in self._kept_as.items())

    def _first_capacity(self, pool: int) -> int:
        block_bytes = sum(_block_bytes(tensor) for key, tensor in self._kept_as.items() if key[0] == pool)
        # The null block and one more at the least.
        affordable = max(2, _FIRST_BYTES // max(1, block_bytes))
        return min(self.num_blocks[pool], _FIRST_BLOCKS, affordable)

    def _keys(self, pool: int) -> list[_Key]:
        return [key for key in self._arrays if key[0] == pool]

    def _replace(self, key: _Key, array: mx.array) -> None:
        # One at a time: the old and the new array of a single tensor is all that exists twice.
        mx.eval(array)
        self._arrays[key] = array


def _tensors(cache: CacheShape, pool: int, place: int, block_size: int) -> tuple[Tensor, ...]:
    shapes: list[tuple[int, tuple[int, ...], mx.Dtype]]
    if isinstance(cache, LayerShape):
        vectors = [_vector(cache, dim) for dim in (cache.head_dim, cache.value_head_dim) if dim]
        shapes = [(cache.num_kv_heads, (block_size, size), dtype) for vector in vectors for size, dtype in vector]
    else:
        shapes = [(1, shape, dtype) for shape, dtype in zip(cache.shapes, cache.dtypes, strict=True)]
    return tuple(
        Tensor((pool, place, number, rows * prod(shape), dtype), rows, shape)
        for number, (rows, shape, dtype) in enumerate(shapes)
    )


def _vector(cache: LayerShape, dim: int) -> list[tuple[int, mx.Dtype]]:
    """Sizes and types of what stores one key or value: itself, or packed words, scales and biases."""
    if cache.quantization is None:
        return [(dim, cache.dtype)]
    num_groups = dim // cache.quantization.group_size
    return [(dim * cache.quantization.bits // 32, mx.uint32), (num_groups, cache.dtype), (num_groups, cache.dtype)]


def _block_bytes(tensor: Tensor) -> int:
    return tensor.rows * prod(tensor.shape) * tensor.key[-1].size


def _zeros(tensor: Tensor, num_blocks: int) -> mx.array:
    return mx.zeros((num_blocks * tensor.rows, *tensor.shape), tensor.key[-1])


def _block_rows(block_ids: Sequence[int], tensor: Tensor) -> mx.array:
    if tensor.rows == 1:
        return mx.array(list(block_ids), mx.int32)
    return mx.array([block_id * tensor.rows + row for block_id in block_ids for row in range(tensor.rows)], mx.int32)
