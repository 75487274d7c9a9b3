"""The KV pools as a step uses them: keys and values written and read by block, states taken and put back by slot.

All of it goes through one `PoolWriter`, which knows in which order a pool may be used.
"""

from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from worker.batch import Batch
from worker.kv_shapes import CacheGroup, CacheShape, LayerShape, Quantization, StateShape
from worker.metal.pool_writer import Pool, PoolWriter, Result
from worker.metal.quantized import QuantizedPool
from worker.metal.scatter_writer import ScatterWriter
from worker.mirrors import Layer, Mirror, Mirrors
from worker.pool_arrays import PoolArrays
from worker.states import PendingStates, Slots


class KVTensors:
    """Paged KV of all caches of a model.

    `groups[g]` are the caches (by index) that share block table g, `num_blocks` the size of each pool, its null block
    included. Readers get keys as `[num_blocks * num_kv_heads, block_size, head_dim]`, which is `[num_blocks,
    num_kv_heads, block_size, head_dim]` in memory: one gather by `block_id * num_kv_heads + head` then yields what
    attention takes. Quantised keys are three pools, of packed words, scales and biases: `QuantizedPool`. A pool of
    states is `[num_blocks, *shape]`.
    """

    def __init__(
        self,
        caches: Sequence[CacheShape],
        *,
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        block_size: int,
        writer: PoolWriter | None = None,
        mirror_bytes: int = 0,
    ) -> None:
        """Without a `writer` by MLX's scatter; with `mirror_bytes`, up to so many of what decode rows see are kept."""
        writer = writer or ScatterWriter()
        self.caches = tuple(caches)
        self.groups = tuple(groups)
        self.block_size = block_size
        self.group_of = {cache: number for number, group in enumerate(groups) for cache in group.caches}
        self._writer = writer
        self._arrays = PoolArrays(caches, groups, num_blocks, block_size, writer)
        # Of attention caches: shape, group, pools.
        self._kept = {
            cache: (shape, self.group_of[cache], self._arrays.pools[cache])
            for cache, shape in enumerate(caches)
            if isinstance(shape, LayerShape)
        }
        self.mirrors = Mirrors(mirror_bytes) if mirror_bytes else None
        self._mirrored = self._mirrored_layers() if mirror_bytes else {}
        self._states = {
            cache: PendingStates(shape, writer, self._arrays.pools[cache])
            for cache, shape in enumerate(caches)
            if isinstance(shape, StateShape)
        }

    def mirror_of(self, cache: int) -> Mirror | None:
        """What decode rows see of an attention cache, where that is kept."""
        return self._mirrored.get(cache)

    def _mirrored_layers(self) -> dict[int, Mirror]:
        assert self.mirrors is not None
        slot_bytes = [0] * len(self.groups)
        for shape, group, _ in self._kept.values():
            slot_bytes[group] += shape.num_kv_heads * sum(shape.vector_widths) * shape.dtype.size
        return {
            cache: partial(
                self.mirrors.seen,
                Layer(cache, group, shape.reach, shape.num_kv_heads, shape.head_dim, slot_bytes[group]),
            )
            for cache, (shape, group, _) in self._kept.items()
        }

    @property
    def num_blocks(self) -> Sequence[int]:
        """Of each pool."""
        return self._arrays.num_blocks

    @property
    def total_bytes(self) -> int:
        """Bytes of the pools when every block is in use."""
        return self._arrays.pool_bytes()

    @property
    def has_states(self) -> bool:
        """Whether some caches are recurrent states."""
        return bool(self._states)

    def is_state_group(self, group: int) -> bool:
        """Whether its blocks are states."""
        return isinstance(self.caches[self.groups[group].caches[0]], StateShape)

    def start(self, *outputs: mx.array) -> None:
        """Begin to compute `outputs` and all pending writes; the one evaluation of a step."""
        self._writer.commit(*outputs, *(array for state in self._states.values() for array in state.arrays()))

    def finish(self) -> None:
        """Wait for what was started."""
        self._writer.finish()

    def evaluate(self, *outputs: mx.array) -> None:
        """Compute `outputs` and all pending writes now."""
        self.start(*outputs)
        self.finish()

    def reserve(self, group: int, block_id: int) -> None:
        """Make a block addressable; between steps only."""
        self._arrays.reserve(self.groups[group].pool, block_id)

    def read(self, cache: int, reader: Callable[..., Result]) -> Result:
        """What `reader(keys, values, after=token)` computes from an attention cache, this step's rows included.

        A cache that holds one vector (keys alone, latents) gives `reader(keys, after=token)`. See `PoolWriter.read`.
        """
        shape, _, pools = self._kept[cache]
        stored, heads = shape.quantization, shape.num_kv_heads
        if stored is None:
            return self._writer.read(pools, reader)

        def quantized_reader(*arrays: mx.array, after: mx.array | None) -> Result:
            by_block = [array.reshape(-1, heads, *array.shape[1:]) for array in arrays]
            thirds = zip(by_block[::3], by_block[1::3], by_block[2::3], strict=True)
            vectors = [QuantizedPool(*parts, bits=stored.bits, group_size=stored.group_size) for parts in thirds]
            return reader(*vectors, after=after)

        return self._writer.read(pools, quantized_reader)

    def write(self, cache: int, keys: mx.array, values: mx.array, batch: Batch) -> tuple[mx.array, mx.array]:
        """Store the step's new K and V, `[num_tokens, num_kv_heads, 1, head_dim]` or `[1, heads, num_tokens, dim]`.

        Returns them as whoever reads the pool will see them.
        """
        shape, group, pools = self._kept[cache]
        slots = batch.view(group, shape.reach).slots
        if shape.is_latent:
            rows = [mx.concatenate([keys, values], axis=-1)]
        else:
            rows = [keys, values] if shape.value_head_dim else [keys]
        if batch.num_tokens > 1:
            size = (batch.num_tokens, shape.num_kv_heads, -1)
            rows = [(row.swapaxes(1, 2) if batch.is_flat else row).reshape(size) for row in rows]
        # Some models' values are of another type than their keys.
        rows = [row if row.dtype == shape.dtype else row.astype(shape.dtype) for row in rows]
        stored = shape.quantization
        if stored is None:
            self._writer.write(pools, rows, slots)
            return keys, values
        for number, row in enumerate(rows):
            packed, scales, biases = pools[3 * number : 3 * number + 3]
            bits, group_size = stored.bits, stored.group_size
            self._writer.quantize((packed, scales, biases), row, slots, bits=bits, group_size=group_size)
        seen_keys, seen_values = (_rounded(rows, stored) for rows in (keys, values))
        return seen_keys, seen_values

    def update_state(self, cache: int, number: int, kernel: Callable[..., tuple[mx.array, mx.array]]) -> mx.array:
        """What `kernel(pool, after=token)` gives beside its token; it updates one tensor of a state by slot, in place.

        For kernels only, and in a step that does not take and put the same states.
        """
        return self._writer.update([self._arrays.pools[cache][number]], kernel)

    def begin_states(
        self,
        slots: dict[int, list[Slots]],
        fresh: dict[int, frozenset[Slots]],
        revocable: dict[int, frozenset[Slots]],
    ) -> None:
        """What the next step's parts will ask of the states, by group.

        `fresh` are slots of sequences that begin, `revocable` those of parts with drafts.
        """
        for cache, state in self._states.items():
            group = self.group_of[cache]
            state.begin(slots[group], fresh[group], revocable[group])

    def settle_drafts(self, wrong: Sequence[Sequence[Sequence[int]]]) -> None:
        """After a step with drafts: the block tables of the sequences with drafts that were not right."""
        for cache, state in self._states.items():
            group = self.group_of[cache]
            state.settle_drafts(frozenset(tables[group][0] for tables in wrong))

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
        pools = [pool for cache in self.groups[group].caches for pool in self._arrays.pools[cache]]
        self._writer.move(pools, sources, targets)

    def fill_blocks(self, group: int, block_ids: Sequence[int], value: float = 0.0) -> None:
        """Set whole blocks to one value in every cache of the group."""
        for cache in self.groups[group].caches:
            self._writer.fill(self._arrays.pools[cache], block_ids, value)

    def clear_values(self, group: int, block_ids: Sequence[int]) -> None:
        """Zero what attention may multiply by a weight of zero: a number left by somebody else might not be finite."""
        pools: list[Pool] = []
        for cache in self.groups[group].caches:
            # The last vector: values, or latents, whose front is the values. Packed words are finite whatever they are.
            is_plain = self._kept[cache][0].quantization is None
            pools += self._arrays.pools[cache][-1:] if is_plain else self._arrays.pools[cache][-2:]
        self._writer.fill(pools, block_ids)

    def resize(self, pool: int, num_blocks: int, moves: Sequence[tuple[int, int]]) -> None:
        """Move blocks of a pool and give it another size; states must be settled."""
        self._arrays.resize(pool, num_blocks, moves)


def _rounded(rows: mx.array, stored: Quantization) -> mx.array:
    """Rows as they are once they were quantised."""
    parts = mx.quantize(rows, group_size=stored.group_size, bits=stored.bits)
    return mx.dequantize(*parts, group_size=stored.group_size, bits=stored.bits)
