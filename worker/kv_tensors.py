"""The KV pools as a step uses them: keys and values written and read by block, states taken and put back by slot."""

from collections.abc import Sequence

import mlx.core as mx

from worker.batch import Batch
from worker.kv_shapes import CacheGroup, CacheShape, LayerShape, StateShape
from worker.metal.kv_pools import KVPool
from worker.metal.quantized import QuantizedPool
from worker.pool_arrays import PoolArrays, Tensor
from worker.states import PendingStates, Slots


class KVTensors:
    """Paged KV of all caches of a model.

    `groups[g]` are the caches (by index) that share block table g, `num_blocks` the size of each pool, its null block
    included. Shapes: a pool of keys is `[num_blocks * num_kv_heads, block_size, head_dim]`, which is
    `[num_blocks, num_kv_heads, block_size, head_dim]` in memory: one gather by `block_id * num_kv_heads + head` then
    yields what attention takes. A pool of states is `[num_blocks, *shape]`. Quantised keys are three such pools, of
    packed words, scales and biases, which is what the kernels of `worker.metal` read.
    """

    def __init__(
        self, caches: Sequence[CacheShape], *, groups: Sequence[CacheGroup], num_blocks: Sequence[int], block_size: int
    ) -> None:
        self.caches = tuple(caches)
        self.groups = tuple(groups)
        self.block_size = block_size
        self.group_of = {cache: number for number, group in enumerate(groups) for cache in group.caches}
        self._arrays = PoolArrays(caches, groups, num_blocks, block_size)
        self._states = {
            cache: PendingStates(shape, self._arrays, self._arrays.tensors[cache])
            for cache, shape in enumerate(caches)
            if isinstance(shape, StateShape)
        }

    @property
    def num_blocks(self) -> Sequence[int]:
        """Of each pool."""
        return self._arrays.num_blocks

    @property
    def total_bytes(self) -> int:
        """Bytes of the pools when every block is in use."""
        return self._arrays.pool_bytes()

    def is_state_group(self, group: int) -> bool:
        """Whether its blocks are states."""
        return isinstance(self.caches[self.groups[group].caches[0]], StateShape)

    def evaluate(self, *outputs: mx.array) -> None:
        """Compute `outputs` and all pending writes; the one evaluation of a step."""
        self._arrays.evaluate(*outputs, *(array for state in self._states.values() for array in state.arrays()))

    def reserve(self, group: int, block_id: int) -> None:
        """Make a block addressable; between steps only."""
        self._arrays.reserve(self.groups[group].pool, block_id)

    def pools(self, cache: int) -> tuple[KVPool, KVPool]:
        """Keys and values of an attention cache; of one that holds keys alone, these twice."""
        vectors = self._vectors(cache)
        return self._pool(cache, vectors[0]), self._pool(cache, vectors[-1])

    def write(self, cache: int, keys: mx.array, values: mx.array, batch: Batch) -> tuple[mx.array, mx.array]:
        """Store the step's new K and V, `[num_tokens, num_kv_heads, 1, head_dim]` or `[1, heads, num_tokens, dim]`.

        Returns them as whoever reads the pool will see them.
        """
        seen = [keys, values]
        for number, tensors in enumerate(self._vectors(cache)):
            parts, seen[number] = self._stored(cache, seen[number])
            for tensor, part in zip(tensors, parts, strict=True):
                self._write(cache, tensor, part, batch)
        return seen[0], seen[1]

    def _write(self, cache: int, tensor: Tensor, new: mx.array, batch: Batch) -> None:
        shape = self._layer(cache)
        rows, heads = batch.view(self.group_of[cache], shape.reach), shape.num_kv_heads
        if batch.num_tokens == 1:
            first, offset = int(rows.block_ids[0]) * heads, int(rows.block_offsets[0])
            self._arrays.write(tensor, (slice(first, first + heads), slice(offset, offset + 1)), new)
            return
        if batch.is_flat:
            new = new.swapaxes(1, 2)
        self._arrays.write(tensor, rows.write_index(heads), new.reshape(batch.num_tokens, heads, -1))

    def _stored(self, cache: int, new: mx.array) -> tuple[Sequence[mx.array], mx.array]:
        """What the pools are given for new rows, and what is read of them again."""
        quantization = self._layer(cache).quantization
        if quantization is None:
            return (new,), new
        bits, group_size = quantization.bits, quantization.group_size
        packed, scales, biases = mx.quantize(new, group_size=group_size, bits=bits)
        read = mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits)
        return (packed, scales, biases), read

    def _layer(self, cache: int) -> LayerShape:
        shape = self.caches[cache]
        assert isinstance(shape, LayerShape)
        return shape

    def _vectors(self, cache: int) -> list[tuple[Tensor, ...]]:
        """The tensors of keys, and those of values if there are any."""
        tensors, size = self._arrays.tensors[cache], 1 if self._layer(cache).quantization is None else 3
        return [tensors[first : first + size] for first in range(0, len(tensors), size)]

    def _pool(self, cache: int, tensors: Sequence[Tensor]) -> KVPool:
        shape = self._layer(cache)
        arrays = [self._arrays.read(tensor) for tensor in tensors]
        if shape.quantization is None:
            return arrays[0]
        packed, scales, biases = (array.reshape(-1, shape.num_kv_heads, *array.shape[1:]) for array in arrays)
        return QuantizedPool(packed, scales, biases, shape.quantization.bits, shape.quantization.group_size)

    def begin_states(self, slots: dict[int, list[Slots]], fresh: dict[int, frozenset[Slots]]) -> None:
        """What the next step's parts will ask of the states, by group; `fresh` are slots of sequences that begin."""
        for cache, state in self._states.items():
            group = self.group_of[cache]
            state.begin(slots[group], fresh[group])

    def take_state(self, cache: int, slots: Slots) -> list[mx.array | None]:
        """The state's tensors of the sequences in these slots, `[len(slots), *shape]` each; None where they begin."""
        return self._states[cache].take(slots)

    def put_state(self, cache: int, slots: Slots, arrays: Sequence[mx.array | None]) -> None:
        """The state after the step's rows."""
        self._states[cache].put(slots, arrays)

    def settle_states(self) -> None:
        """Write all pending states into their slots: to be called before slots are copied, zeroed or renamed."""
        for state in self._states.values():
            state.settle()

    def copy_blocks(self, group: int, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks in every cache of the group; all sources are read before any target is written."""
        self._arrays.copy_blocks(self.groups[group].caches, sources, targets)

    def fill_blocks(self, group: int, block_ids: Sequence[int], value: float = 0.0) -> None:
        """Set whole blocks to one value in every cache of the group."""
        tensors = (tensor for cache in self.groups[group].caches for tensor in self._arrays.tensors[cache])
        self._arrays.fill_blocks(tensors, block_ids, value)

    def clear_values(self, group: int, block_ids: Sequence[int]) -> None:
        """Zero what attention may multiply by a weight of zero: a number left by somebody else might not be finite."""
        for cache in self.groups[group].caches:
            shape, vectors = self._layer(cache), self._vectors(cache)
            # Packed words are finite whatever they are.
            first = 0 if shape.quantization is None else 1
            read = vectors if shape.is_latent else vectors[1:]
            self._arrays.fill_blocks((tensor for vector in read for tensor in vector[first:]), block_ids, 0.0)

    def resize(self, pool: int, num_blocks: int, moves: Sequence[tuple[int, int]]) -> None:
        """Move blocks of a pool and give it another size; states must be settled."""
        self._arrays.resize(pool, num_blocks, moves)
