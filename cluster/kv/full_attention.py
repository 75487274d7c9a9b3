"""Block tables of the layers that attend to every past token.

Owns the block tables of one group. Position p of a sequence lives in block `table[p // block_size]`, for good.

    [0, num_cached)             found in the cache at the start; shared, full, never written again
    [num_cached, num_computed)  written by this sequence
    [.., len(table) * size)     allocated for the next step; holds nobody's data
"""

from collections import Counter
from collections.abc import Sequence

from cluster.kv.hashing import BlockHash
from cluster.kv.pool import BlockPool


class FullAttentionManager:
    """The block tables of one group, over a pool that other groups may share."""

    def __init__(self, group_id: int, block_size: int, pool: BlockPool) -> None:
        self.group_id = group_id
        self._block_size = block_size
        self._pool = pool
        self._tables: dict[int, list[int]] = {}

    def find_longest_cache_hit(self, block_hashes: Sequence[BlockHash], max_num_blocks: int) -> tuple[int, ...]:
        """Cached blocks of the prefix, left to right up to the first that is missing. O(hits)."""
        hits: list[int] = []
        for block_hash in block_hashes[:max_num_blocks]:
            block_id = self._pool.find(block_hash, self.group_id)
            if block_id is None:
                break
            hits.append(block_id)
        return tuple(hits)

    def start(self, seq_id: int, cached_block_ids: Sequence[int]) -> None:
        """Open a block table with blocks found in the cache, which are pinned from now on."""
        assert seq_id not in self._tables, f"sequence {seq_id} was started twice"
        self._pool.touch(cached_block_ids)
        self._tables[seq_id] = list(cached_block_ids)

    def num_missing_blocks(self, seq_id: int, num_tokens: int) -> int:
        """Blocks to add before the KV of the first `num_tokens` positions has a place."""
        return max(0, -(-num_tokens // self._block_size) - len(self._tables[seq_id]))

    def extend(self, seq_id: int, num_blocks: int) -> tuple[int, ...]:
        """Append fresh blocks to the table. The caller has made sure that they are free."""
        block_ids = self._pool.allocate(num_blocks)
        self._tables[seq_id] += block_ids
        return block_ids

    def holds(self, seq_id: int, block_index: int, block_id: int) -> bool:
        """Whether the sequence is alive and has this block at this index of its table."""
        table = self._tables.get(seq_id)
        return table is not None and block_index < len(table) and table[block_index] == block_id

    def free(self, seq_id: int) -> None:
        """Close the table and give its blocks back. O(blocks)."""
        self._pool.free(self._tables.pop(seq_id))

    def block_table(self, seq_id: int) -> tuple[int, ...]:
        """Block ids of the sequence, first to last."""
        return tuple(self._tables[seq_id])

    def reset(self) -> None:
        """Forget all tables without touching the pool, which is reset with them."""
        self._tables.clear()

    def count_references(self) -> Counter[int]:
        """How often each block occurs in the tables: for checks."""
        references: Counter[int] = Counter()
        for table in self._tables.values():
            references.update(table)
        return references
