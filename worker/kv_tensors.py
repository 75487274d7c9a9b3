"""The KV pools as a step uses them: keys and values written and read by block, states taken and put back by slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import mlx.core as mx

from worker.batch import Batch
from worker.kv_shapes import CacheGroup, CacheShape, LayerShape, StateShape
from worker.metal.kv_pools import KVPool
from worker.metal.quantized import QuantizedPool
from worker.pool_arrays import Index, PoolArrays, Tensor
from worker.states import PendingStates, Slots


@dataclass(frozen=True, slots=True)
class _Kept:
    """An attention cache: what it keeps, its group, and the tensors of its keys and of its values, if it has any."""

    shape: LayerShape
    group: int
    vectors: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def of(cls, shape: LayerShape, group: int, tensors: Sequence[Tensor]) -> Self:
        """A quantised vector has three tensors: packed words, scales, biases."""
        size = 1 if shape.quantization is None else 3
        return cls(shape, group, tuple(tuple(tensors[at : at + size]) for at in range(0, len(tensors), size)))


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
        self._attention = {
            cache: _Kept.of(shape, self.group_of[cache], self._arrays.tensors[cache])
            for cache, shape in enumerate(caches)
            if isinstance(shape, LayerShape)
        }
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
        kept = self._attention[cache]
        return self._pool(kept.shape, kept.vectors[0]), self._pool(kept.shape, kept.vectors[-1])

    def write(self, cache: int, keys: mx.array, values: mx.array, batch: Batch) -> tuple[mx.array, mx.array]:
        """Store the step's new K and V, `[num_tokens, num_kv_heads, 1, head_dim]` or `[1, heads, num_tokens, dim]`.

        Returns them as whoever reads the pool will see them.
        """
        kept = self._attention[cache]
        heads, quantization = kept.shape.num_kv_heads, kept.shape.quantization
        rows = batch.view(kept.group, kept.shape.reach)
        index: Index = rows.first_slot(heads) if batch.num_tokens == 1 else rows.write_index(heads)
        if quantization is None:
            for (tensor,), new in zip(kept.vectors, (keys, values), strict=False):
                self._arrays.write(tensor, index, _by_token(new, batch))
            return keys, values
        seen = [keys, values]
        size, bits = quantization.group_size, quantization.bits
        for number, tensors in enumerate(kept.vectors):
            packed, scales, biases = mx.quantize(seen[number], group_size=size, bits=bits)
            for tensor, part in zip(tensors, (packed, scales, biases), strict=True):
                self._arrays.write(tensor, index, _by_token(part, batch))
            seen[number] = mx.dequantize(packed, scales, biases, group_size=size, bits=bits)
        return seen[0], seen[1]

    def _pool(self, shape: LayerShape, tensors: Sequence[Tensor]) -> KVPool:
        if shape.quantization is None:
            return self._arrays.read(tensors[0])
        packed, scales, biases = (
            array.reshape(-1, shape.num_kv_heads, *array.shape[1:]) for array in map(self._arrays.read, tensors)
        )
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
            shape, vectors = self._attention[cache].shape, self._attention[cache].vectors
            # Packed words are finite whatever they are.
            first = 0 if shape.quantization is None else 1
            read = vectors if shape.is_latent else vectors[1:]
            self._arrays.fill_blocks((tensor for vector in read for tensor in vector[first:]), block_ids, 0.0)

    def resize(self, pool: int, num_blocks: int, moves: Sequence[tuple[int, int]]) -> None:
        """Move blocks of a pool and give it another size; states must be settled."""
        self._arrays.resize(pool, num_blocks, moves)


def _by_token(new: mx.array, batch: Batch) -> mx.array:
    """A step's new rows `[num_tokens, heads, dim]`; of a single token as they are."""
    if batch.num_tokens == 1:
        return new
    if batch.is_flat:
        new = new.swapaxes(1, 2)
    return new.reshape(batch.num_tokens, -1, new.shape[-1])
