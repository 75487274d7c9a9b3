"""Joins the groups of one model: a prefix is cached when every group has it, blocks go to all groups or to none.

Owns the group managers; they own the block tables.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from cluster.kv.full_attention import FullAttentionManager
from cluster.kv.hashing import BlockHash
from cluster.kv.layout import KVLayout
from cluster.kv.pool import BlockPool

# Block ids by group id.
GroupBlocks = Mapping[int, tuple[int, ...]]

NO_BLOCKS: GroupBlocks = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """The longest cached prefix of a sequence, in tokens and in blocks by group.

    `limited_by` is the group whose missing block ended it; None if everything that may hit did.
    """

    num_tokens: int
    block_ids: GroupBlocks
    limited_by: int | None


class KVCacheCoordinator(ABC):
    """What all models share: allocation over all groups at once."""

    def __init__(self, layout: KVLayout, pool: BlockPool) -> None:
        self._block_size = layout.block_size
        self._pool = pool
        self._managers = tuple(FullAttentionManager(g.group_id, layout.block_size, pool) for g in layout.groups)

    @abstractmethod
    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_num_tokens: int) -> ComputedBlocks:
        """The longest prefix of at most `max_num_tokens` tokens that every group can resume. Does not pin it."""

    @abstractmethod
    def register(
        self,
        seq_id: int,
        group: int,
        block_index: int,
        block_id: int,
        block_hash: BlockHash,
        parent_hash: BlockHash | None,
    ) -> bool:
        """Make a filled block findable; False, and nothing done, if the sequence does not hold it there any more."""

    def num_blocks_to_start(self, computed: ComputedBlocks, num_tokens: int) -> int:
        """Free blocks that a sequence of `num_tokens` known tokens uses up when it starts from `computed`.

        A cached block that nobody references leaves the free queue too, so it counts; a shared one is for nothing.
        """
        num_blocks = -(-num_tokens // self._block_size)
        total = 0
        for manager in self._managers:
            cached = computed.block_ids[manager.group_id]
            total += num_blocks - len(cached) + sum(self._pool.ref_count(block_id) == 0 for block_id in cached)
        return total

    def start(self, seq_id: int, computed: ComputedBlocks) -> None:
        """Open the sequence's block tables with the cached blocks and pin them."""
        for manager in self._managers:
            manager.start(seq_id, computed.block_ids[manager.group_id])

    def num_missing_blocks(self, seq_id: int, num_tokens: int) -> int:
        """Blocks over all groups that `allocate` would take."""
        num_missing = 0
        for manager in self._managers:
            num_missing += manager.num_missing_blocks(seq_id, num_tokens)
        return num_missing

    def allocate(self, seq_id: int, num_tokens: int) -> GroupBlocks | None:
        """Give every group what it needs for the first `num_tokens` positions, or nothing to any of them."""
        num_missing = self.num_missing_blocks(seq_id, num_tokens)
        if num_missing == 0:
            return NO_BLOCKS
        if num_missing > self._pool.num_free:
            return None
        return {m.group_id: m.extend(seq_id, m.num_missing_blocks(seq_id, num_tokens)) for m in self._managers}

    def free(self, seq_id: int) -> None:
        """Close the sequence's block tables."""
        for manager in self._managers:
            manager.free(seq_id)

    def block_tables(self, seq_id: int) -> GroupBlocks:
        """The sequence's block ids by group."""
        return {manager.group_id: manager.block_table(seq_id) for manager in self._managers}

    def reset(self) -> None:
        """Forget all block tables; the pool is reset beside."""
        for manager in self._managers:
            manager.reset()

    def count_references(self) -> Counter[int]:
        """How often each block occurs in all block tables: for checks."""
        references: Counter[int] = Counter()
        for manager in self._managers:
            references += manager.count_references()
        return references


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """A model whose layers form one group: that group's hit is the hit."""

    def __init__(self, layout: KVLayout, pool: BlockPool) -> None:
        super().__init__(layout, pool)
        (self._manager,) = self._managers

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_num_tokens: int) -> ComputedBlocks:
        """See the base class."""
        max_num_blocks = min(max_num_tokens // self._block_size, len(block_hashes))
        group = self._manager.group_id
        hits = self._manager.find_longest_cache_hit(block_hashes, max_num_blocks)
        limited_by = group if len(hits) < max_num_blocks else None
        return ComputedBlocks(len(hits) * self._block_size, {group: hits}, limited_by)

    def register(
        self,
        seq_id: int,
        group: int,
        block_index: int,
        block_id: int,
        block_hash: BlockHash,
        parent_hash: BlockHash | None,
    ) -> bool:
        """See the base class."""
        if not self._managers[group].holds(seq_id, block_index, block_id):
            return False
        self._pool.register(block_id, group, block_hash, parent_hash, block_index)
        return True


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Nothing is ever found or kept; any number of groups."""

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_num_tokens: int) -> ComputedBlocks:
        """Always nothing."""
        return ComputedBlocks(0, {manager.group_id: () for manager in self._managers}, None)

    def register(
        self,
        seq_id: int,
        group: int,
        block_index: int,
        block_id: int,
        block_hash: BlockHash,
        parent_hash: BlockHash | None,
    ) -> bool:
        """Never kept."""
        return False
