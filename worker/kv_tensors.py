"""The KV pools: one K and one V array a layer, addressed by block id. Owns every byte of KV memory.

A pool must never be copied inside a step. MLX scatters in place only while nothing else refers to the array, so pools
are held here alone, no view of one is handed out, and each step ends with a full evaluation.
"""

from collections.abc import Sequence

import mlx.core as mx

from worker.batch import Batch
from worker.kv_shapes import LayerShape

# Fewer blocks are not worth a later growth.
_MIN_CAPACITY_BLOCKS = 64


class KVTensors:
    """Paged K and V of all layers.

    Shapes: each pool is `[num_blocks * num_kv_heads, block_size, head_dim]`, which is `[num_blocks, num_kv_heads,
    block_size, head_dim]` in memory: one gather by `block_id * num_kv_heads + head` then yields what attention takes.

    MLX commits memory when it allocates, so a pool starts small and doubles at a step's boundary when a block id first
    lies beyond it. That growth is the only copy of a pool there is: each byte is copied at most about once.
    """

    def __init__(self, layers: Sequence[LayerShape], *, block_size: int, num_blocks: int) -> None:
        self.layers = tuple(layers)
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.capacity_blocks = min(num_blocks, _MIN_CAPACITY_BLOCKS)
        self.keys = [self._zeros(layer, self.capacity_blocks) for layer in self.layers]
        self.values = [self._zeros(layer, self.capacity_blocks) for layer in self.layers]
        self.evaluate()

    @property
    def total_bytes(self) -> int:
        """Bytes of the pools when every block is in use."""
        return self.num_blocks * self.block_size * sum(layer.token_bytes for layer in self.layers)

    def evaluate(self, *outputs: mx.array) -> None:
        """Compute `outputs` and all pending writes; the one evaluation of a step."""
        mx.eval(*outputs, *self.keys, *self.values)

    def reserve(self, block_id: int) -> None:
        """Make `block_id` addressable. Between steps only: it copies the pools, one at a time, when they must grow."""
        if block_id < self.capacity_blocks:
            return
        capacity = self.capacity_blocks
        while capacity <= block_id:
            capacity *= 2
        capacity = min(capacity, self.num_blocks)
        for pools in (self.keys, self.values):
            for index, layer in enumerate(self.layers):
                fresh = self._zeros(layer, capacity - self.capacity_blocks)
                pools[index] = mx.concatenate([pools[index], fresh])
                # One at a time: the old and the new array of a single layer is all that exists twice.
                mx.eval(pools[index])
        self.capacity_blocks = capacity

    def write(self, layer: int, keys: mx.array, values: mx.array, batch: Batch) -> None:
        """Store the step's new K and V, `[num_tokens, num_kv_heads, 1, head_dim]` or `[1, heads, num_tokens, dim]`."""
        shape = self.layers[layer]
        if batch.num_tokens == 1:
            first, offset = int(batch.block_ids[0]) * shape.num_kv_heads, int(batch.block_offsets[0])
            rows, slot = slice(first, first + shape.num_kv_heads), slice(offset, offset + 1)
            self.keys[layer][rows, slot] = keys
            self.values[layer][rows, slot] = values
            return
        rows_index, offsets = batch.write_index(shape.num_kv_heads)
        by_token = (batch.num_tokens, shape.num_kv_heads, shape.head_dim)
        if batch.is_flat:
            keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        self.keys[layer][rows_index, offsets] = keys.reshape(by_token)
        self.values[layer][rows_index, offsets] = values.reshape(by_token)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks in every layer; all sources are read before any target is written."""
        rows = [_block_rows(sources, layer) for layer in self.layers]
        contents = [[pool[row] for pool, row in zip(pools, rows, strict=True)] for pools in (self.keys, self.values)]
        # A pending reader of the old pool would make the scatter copy all of it.
        mx.eval(contents)
        for index, layer in enumerate(self.layers):
            target_rows = _block_rows(targets, layer)
            self.keys[index][target_rows] = contents[0][index]
            self.values[index][target_rows] = contents[1][index]

    def zero_blocks(self, block_ids: Sequence[int]) -> None:
        """Set whole blocks to zero in every layer."""
        for index, layer in enumerate(self.layers):
            rows = _block_rows(block_ids, layer)
            for pools in (self.keys, self.values):
                pools[index][rows] = mx.zeros((), layer.dtype)

    def _zeros(self, layer: LayerShape, num_blocks: int) -> mx.array:
        return mx.zeros((num_blocks * layer.num_kv_heads, self.block_size, layer.head_dim), layer.dtype)


def _block_rows(block_ids: Sequence[int], layer: LayerShape) -> mx.array:
    heads = range(layer.num_kv_heads)
    return mx.array([block_id * layer.num_kv_heads + head for block_id in block_ids for head in heads], mx.int32)
