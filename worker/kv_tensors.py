"""The KV pools as a step uses them: keys and values written and read by block, states taken and put back by slot.

All of it goes through one `PoolWriter`, which knows in which order a pool may be used.
"""

from collections.abc import Callable, Iterable, Sequence

import mlx.core as mx

from worker.batch import Batch
from worker.kv_shapes import CacheGroup, CacheShape, LayerShape, StateShape
from worker.metal.pool_writer import PoolWriter, Result, ScatterWriter
from worker.pool_arrays import PoolArrays
from worker.states import PendingStates, Slots


class KVTensors:
    """Paged KV of all caches of a model.

    `groups[g]` are the caches (by index) that share block table g, `num_blocks` the size of each pool, its null block
    included. Readers get keys as `[num_blocks * num_kv_heads, block_size, head_dim]`, which is `[num_blocks,
    num_kv_heads, block_size, head_dim]` in memory: one gather by `block_id * num_kv_heads + head` then yields what
    attention takes. A pool of states is `[num_blocks, *shape]`.
    """

    def __init__(
        self,
        caches: Sequence[CacheShape],
        *,
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        block_size: int,
        writer: PoolWriter | None = None,
    ) -> None:
        """Without a `writer` by MLX's scatter."""
        writer = writer or ScatterWriter()
        self.caches = tuple(caches)
        self.groups = tuple(groups)
        self.block_size = block_size
        self.group_of = {cache: number for number, group in enumerate(groups) for cache in group.caches}
        self._writer = writer
        self._arrays = PoolArrays(caches, groups, num_blocks, block_size, writer)
        self._states = {
            cache: PendingStates(shape, writer, self._arrays.pools[cache])
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
        self._writer.commit(*outputs, *(array for state in self._states.values() for array in state.arrays()))
        self._writer.finish()

    def reserve(self, group: int, block_id: int) -> None:
        """Make a block addressable; between steps only."""
        self._arrays.reserve(self.groups[group].pool, block_id)

    def read(self, cache: int, reader: Callable[..., Result]) -> Result:
        """What `reader(keys, values, after=token)` computes from an attention cache, this step's rows included.

        A cache that holds one tensor (keys alone, latents) gives `reader(keys, after=token)`. See `PoolWriter.read`.
        """
        return self._writer.read(self._arrays.pools[cache], reader)

    def write(self, cache: int, keys: mx.array, values: mx.array, batch: Batch) -> None:
        """Store the step's new K and V, `[num_tokens, num_kv_heads, 1, head_dim]` or `[1, heads, num_tokens, dim]`."""
        shape = self.caches[cache]
        assert isinstance(shape, LayerShape)
        slots = batch.view(self.group_of[cache], shape.reach).slots
        new = [mx.concatenate([keys, values], axis=-1)] if shape.is_latent else [keys, values]
        rows = new[: len(shape.tensor_widths)]
        if batch.num_tokens > 1:
            size = (batch.num_tokens, shape.num_kv_heads, -1)
            rows = [(row.swapaxes(1, 2) if batch.is_flat else row).reshape(size) for row in rows]
        # Some models' values are of another type than their keys.
        rows = [row if row.dtype == shape.dtype else row.astype(shape.dtype) for row in rows]
        self._writer.write(self._arrays.pools[cache], rows, slots)

    def update_state(self, cache: int, number: int, kernel: Callable[..., tuple[mx.array, mx.array]]) -> mx.array:
        """What `kernel(pool, after=token)` gives beside its token; it updates one tensor of a state by slot, in place.

        For kernels only, and in a step that does not take and put the same states.
        """
        return self._writer.update([self._arrays.pools[cache][number]], kernel)

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
        pools = [pool for cache in self.groups[group].caches for pool in self._arrays.pools[cache]]
        self._writer.move(pools, sources, targets)

    def fill_blocks(self, group: int, block_ids: Sequence[int], value: float = 0.0) -> None:
        """Set whole blocks to one value in every cache of the group."""
        for cache in self.groups[group].caches:
            self._writer.fill(self._arrays.pools[cache], block_ids, value)

    def clear_values(self, group: int, block_ids: Sequence[int]) -> None:
        """Zero what attention may multiply by a weight of zero: a number left by somebody else might not be finite."""
        caches: Iterable[int] = self.groups[group].caches
        # Of a latent cache, the values are the front of the keys.
        self._writer.fill([self._arrays.pools[cache][-1] for cache in caches], block_ids)

    def resize(self, pool: int, num_blocks: int, moves: Sequence[tuple[int, int]]) -> None:
        """Move blocks of a pool and give it another size; states must be settled."""
        self._arrays.resize(pool, num_blocks, moves)
