"""The ledger of one Mac's KV memory, as the scheduler sees it: ids and counts, never a tensor.

Wires together what others own: the pool (references, free queue, content map), the coordinator (block tables) and
the event log.
"""

from collections.abc import Sequence

from cluster.kv.coordinator import (
    ComputedBlocks,
    GroupBlocks,
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from cluster.kv.events import BlockEvent, EventLog
from cluster.kv.hashing import BlockHash
from cluster.kv.layout import KVLayout
from cluster.kv.pool import BlockPool


class KVCacheManager:
    """Every decision about KV memory: what a prefix can reuse, who gets a block, what is forgotten.

    A sequence lives from `start` to `free`. A block is findable only after `register`, which is called when its KV has
    been computed, never when it is merely planned.
    """

    def __init__(self, layout: KVLayout, *, enable_prefix_caching: bool = True) -> None:
        self.layout = layout
        self._events = EventLog()
        self._pool = BlockPool(layout.num_blocks, len(layout.groups), self._events)
        coordinator = UnitaryKVCacheCoordinator if enable_prefix_caching else KVCacheCoordinatorNoPrefixCache
        self._coordinator: KVCacheCoordinator = coordinator(layout, self._pool)

    def get_computed_blocks(self, block_hashes: Sequence[BlockHash], num_tokens: int) -> ComputedBlocks:
        """The longest cached prefix of a sequence of `num_tokens` known tokens with these block hashes.

        A multiple of block_size and at most `num_tokens - 1`, because one token must run to sample the next.
        Does not pin it or count as a use. O(blocks found).
        """
        return self._coordinator.find_longest_cache_hit(block_hashes, num_tokens - 1)

    def can_allocate(self, computed: ComputedBlocks, num_tokens: int, *, num_reserved_blocks: int = 0) -> bool:
        """Whether all `num_tokens` known tokens of a new sequence fit, with so many free blocks left to others."""
        needed = self._coordinator.num_blocks_to_start(computed, num_tokens)
        return needed + num_reserved_blocks <= self._pool.num_free

    def start(self, seq_id: int, computed: ComputedBlocks) -> None:
        """Open a sequence on the cached prefix just looked up; its blocks stay until `free`. O(cached blocks)."""
        self._coordinator.start(seq_id, computed)

    def num_missing_blocks(self, seq_id: int, num_tokens: int) -> int:
        """Blocks that `allocate` would take."""
        return self._coordinator.num_missing_blocks(seq_id, num_tokens)

    def allocate(self, seq_id: int, num_tokens: int) -> GroupBlocks | None:
        """Make room for the KV of a sequence's first `num_tokens` positions.

        Returns the ids appended to its block tables, empty if it had room already (O(1)); None, with nothing changed,
        if too few blocks are free.
        """
        return self._coordinator.allocate(seq_id, num_tokens)

    def register(
        self,
        seq_id: int,
        group: int,
        block_index: int,
        block_id: int,
        block_hash: BlockHash,
        parent_hash: BlockHash | None,
    ) -> bool:
        """Make a block findable whose every slot now holds computed KV.

        False, and nothing done, if the sequence has ended or no longer holds that block at that index: by then the
        block may be somebody else's.
        """
        return self._coordinator.register(seq_id, group, block_index, block_id, block_hash, parent_hash)

    def free(self, seq_id: int) -> None:
        """End a sequence. Its registered blocks stay findable until their memory is needed. O(blocks)."""
        self._coordinator.free(seq_id)

    def block_tables(self, seq_id: int) -> GroupBlocks:
        """The block ids of a live sequence by group, first to last."""
        return self._coordinator.block_tables(seq_id)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no live sequence holds, cached or not."""
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        """Blocks that live sequences hold; a shared block counts once."""
        return self.layout.num_usable_blocks - self._pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by hash, whether or not a live sequence holds them."""
        return self._pool.num_cached

    @property
    def usage(self) -> float:
        """Share of the usable blocks that live sequences hold, 0 to 1."""
        return self.num_used_blocks / self.layout.num_usable_blocks

    def take_events(self) -> tuple[BlockEvent, ...]:
        """Presence transitions since the last call, oldest first; to be taken after every step."""
        return self._events.take()

    def snapshot(self) -> list[tuple[int, BlockHash]]:
        """(group, block_hash) of all that is present: the state that the events up to now lead to."""
        return self._pool.snapshot()

    def reset(self) -> None:
        """The worker and its memory are gone: forget all sequences and all content, and untaken events with them.

        Makes no BlockRemoved: the edge starts a new epoch, which says the same in one word.
        """
        self._coordinator.reset()
        self._pool.reset()
        self._events.take()

    def check(self) -> None:
        """Assert that pool and block tables agree. O(num_blocks): for tests and idle moments."""
        self._pool.check()
        references = self._coordinator.count_references()
        for block_id in range(self.layout.num_blocks):
            held, counted = references[block_id], self._pool.ref_count(block_id)
            assert held == counted, f"block {block_id} is in {held} block tables, its ref_count is {counted}"
