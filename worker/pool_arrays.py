"""The pools behind the caches: which pool a cache's blocks lie in, and how far each one is committed.

A block id of a pool is a block of any of its groups, so the n-th caches of those groups share one array: what one group
frees, another can take. Caches whose blocks have as many elements of the same type share; a cache of another shape sees
the array reshaped.
"""

from collections.abc import Sequence
from math import prod

import mlx.core as mx

from worker.kv_shapes import CacheGroup, CacheShape, LayerShape
from worker.metal.pool_writer import MIN_ELEMENTS, Pool, PoolWriter

# Where pools start: fewer blocks are not worth a later growth, unless they are as large as some states.
_FIRST_BLOCKS = 64
_FIRST_BYTES = 1 << 27


class PoolArrays:
    """Which part of every byte of KV memory belongs to whom; the bytes themselves are the writer's.

    MLX commits memory when it allocates, so a pool starts small and doubles at a step's boundary when a block id first
    lies beyond it. That growth, and a boundary that moves, are the only copies of a pool there are.
    """

    def __init__(
        self,
        caches: Sequence[CacheShape],
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        block_size: int,
        writer: PoolWriter,
    ) -> None:
        self.num_blocks = list(num_blocks)
        self.writer = writer
        # Of each cache; a group is a part of the pools that it shares.
        self.pools: list[tuple[Pool, ...]] = [()] * len(caches)
        # Those that were made, by the pool of the layout that they belong to.
        self._made: list[list[Pool]] = [[] for _ in num_blocks]
        wanted: dict[str, tuple[int, Pool]] = {}
        for part, group in enumerate(groups):
            for place, cache in enumerate(group.caches):
                pools = _pools(caches[cache], f"{group.pool}.{place}", part, block_size)
                for pool in pools:
                    wanted.setdefault(pool.name, (group.pool, pool))
                self.pools[cache] = pools
        self._capacity = [
            _first_capacity(size, [pool for number, pool in wanted.values() if number == place])
            for place, size in enumerate(num_blocks)
        ]
        for name, (number, pool) in wanted.items():
            capacity = self._capacity[number]
            # A kernel takes no array below that.
            capacity = max(capacity, -(-MIN_ELEMENTS // prod(pool.block_shape)))
            made = writer.create(name, capacity, pool.block_shape, pool.dtype, is_by_head=pool.is_by_head)
            self._made[number].append(made)

    def reserve(self, pool: int, block_id: int) -> None:
        """Make a block addressable. Between steps only: it copies the pool's arrays, one at a time, if they grow."""
        capacity = self._capacity[pool]
        if block_id < capacity:
            return
        while capacity <= block_id:
            capacity *= 2
        self._set_capacity(pool, min(capacity, self.num_blocks[pool]))

    def resize(self, pool: int, num_blocks: int, moves: Sequence[tuple[int, int]]) -> None:
        """Move blocks and give the pool another size; memory beyond its end is given back."""
        if moves:
            sources, targets = ([move[side] for move in moves] for side in (0, 1))
            self.reserve(pool, max(*sources, *targets))
            for made in self._made[pool]:
                # One at a time: what is moved exists twice.
                self.writer.move([made], sources, targets)
                self.writer.commit()
        self.num_blocks[pool] = num_blocks
        if self._capacity[pool] > num_blocks:
            self._set_capacity(pool, num_blocks)

    def pool_bytes(self) -> int:
        """Bytes of the pools when every block is in use."""
        return sum(
            size * _block_bytes(pool) for size, made in zip(self.num_blocks, self._made, strict=True) for pool in made
        )

    def _set_capacity(self, pool: int, num_blocks: int) -> None:
        for made in self._made[pool]:
            self.writer.resize(made, max(num_blocks, -(-MIN_ELEMENTS // prod(made.block_shape))))
        self._capacity[pool] = num_blocks


def _pools(cache: CacheShape, place: str, part: int, block_size: int) -> tuple[Pool, ...]:
    shapes: list[tuple[tuple[int, ...], mx.Dtype]]
    is_by_head = isinstance(cache, LayerShape)
    if isinstance(cache, LayerShape):
        vectors = [_vector(cache, width) for width in cache.vector_widths]
        shapes = [((cache.num_kv_heads, block_size, size), dtype) for vector in vectors for size, dtype in vector]
    else:
        shapes = list(zip(cache.shapes, cache.dtypes, strict=True))
    return tuple(
        Pool(f"{place}.{number}.{prod(shape)}.{dtype}", tuple(shape), dtype, is_by_head, part)
        for number, (shape, dtype) in enumerate(shapes)
    )


def _vector(cache: LayerShape, width: int) -> list[tuple[int, mx.Dtype]]:
    """Sizes and types of what stores one key or value: itself, or packed words, scales and biases."""
    if cache.quantization is None:
        return [(width, cache.dtype)]
    num_groups = width // cache.quantization.group_size
    return [(width * cache.quantization.bits // 32, mx.uint32), (num_groups, cache.dtype), (num_groups, cache.dtype)]


def _block_bytes(pool: Pool) -> int:
    return prod(pool.block_shape) * pool.dtype.size


def _first_capacity(num_blocks: int, pools: Sequence[Pool]) -> int:
    block_bytes = sum(map(_block_bytes, pools))
    # The null block and one more at the least.
    affordable = max(2, _FIRST_BYTES // max(1, block_bytes))
    return min(num_blocks, _FIRST_BLOCKS, affordable)
