"""The KV pools as a step uses them: keys and values written and read by block, states taken and put back by slot."""

from collections.abc import Iterable, Sequence

import mlx.core as mx

from worker.batch import Batch
from worker.kv_shapes import CacheGroup, CacheShape, LayerShape, StateShape
from worker.pool_arrays import PoolArrays
from worker.states import PendingStates, Slots


class KVTensors:
    """Paged KV of all caches of a model.

    `groups[g]` are the caches (by index) that share block table g, `num_blocks` the size of each pool, its null block
    included. Shapes: a pool of keys is `[num_blocks * num_kv_heads, block_size, head_dim]`, which is
    `[num_blocks, num_kv_heads, block_size, head_dim]` in memory: one gather by `block_id * num_kv_heads + head` then
    yields what attention takes. A pool of states is `[num_blocks, *shape]`.
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

    def pools(self, cache: int) -> tuple[mx.array, mx.array]:
        """Keys and values of an attention cache; of one that holds keys alone, these twice."""
        tensors = self._arrays.tensors[cache]
        return self._arrays.read(tensors[0]), self._arrays.read(tensors[-1])

    def write(self, cache: int, keys: mx.array, values: mx.array, batch: Batch) -> None:
        """Store the step's new K and V, `[num_tokens, num_kv_heads, 1, head_dim]` or `[1, heads, num_tokens, dim]`."""
        shape = self.caches[cache]
        assert isinstance(shape, LayerShape)
        rows = batch.view(self.group_of[cache], shape.reach)
        heads = shape.num_kv_heads
        for tensor, new in zip(self._arrays.tensors[cache], (keys, values), strict=False):
            if batch.num_tokens == 1:
                first, offset = int(rows.block_ids[0]) * heads, int(rows.block_offsets[0])
                self._arrays.write(tensor, (slice(first, first + heads), slice(offset, offset + 1)), new)
                continue
            if batch.is_flat:
                new = new.swapaxes(1, 2)
            self._arrays.write(tensor, rows.write_index(heads), new.reshape(batch.num_tokens, heads, -1))

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
        self._arrays.copy_blocks(self.groups[group].caches, sources, targets)

    def fill_blocks(self, group: int, block_ids: Sequence[int], value: float = 0.0) -> None:
        """Set whole blocks to one value in every cache of the group."""
        self._arrays.fill_blocks(self.groups[group].caches, block_ids, value)

    def clear_values(self, group: int, block_ids: Sequence[int]) -> None:
        """Zero what attention may multiply by a weight of zero: a number left by somebody else might not be finite."""
        caches: Iterable[int] = self.groups[group].caches
        latent = [cache for cache in caches if getattr(self.caches[cache], "is_latent", False)]
        others = [cache for cache in caches if cache not in latent]
        self._arrays.fill_blocks(latent, block_ids, 0.0)
        self._arrays.fill_blocks(others, block_ids, 0.0, first=1)

    def resize(self, pool: int, num_blocks: int, moves: Sequence[tuple[int, int]]) -> None:
        """Move blocks of a pool and give it another size; states must be settled."""
        self._arrays.resize(pool, num_blocks, moves)
