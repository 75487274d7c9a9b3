"""Finds the prefix that several sequences of a step share, by their block tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from worker.batch_index import pool_rows

# Key tokens that need not be gathered, over all sharers, for the additional operations to pay.
_MIN_SAVED_TOKENS = 2_048


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first blocks of the block tables of `members`, indices among the step's spans."""

    members: frozenset[int]
    block_table: tuple[int, ...]
    _gather: dict[int, mx.array] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        """Blocks of the prefix, all of them full and before every member's first row."""
        return len(self.block_table)

    def gather_index(self, num_kv_heads: int) -> mx.array:
        """Pool rows of every key, `[1, num_kv_heads, num_blocks]`."""
        if num_kv_heads not in self._gather:
            self._gather[num_kv_heads] = pool_rows(np.array([self.block_table], np.int32), num_kv_heads)
        return self._gather[num_kv_heads]


def find_shared_prefix(
    starts: Sequence[int], block_tables: Sequence[Sequence[int]], block_size: int
) -> SharedPrefix | None:
    """The prefix that saves most in this step, or None if none pays.

    `starts` are the positions of the spans' first rows: a shared key must lie before all of them. O(shared blocks).
    """
    by_first_block: dict[int, list[int]] = {}
    for index, table in enumerate(block_tables):
        if starts[index] >= block_size and table:
            by_first_block.setdefault(table[0], []).append(index)
    best: SharedPrefix | None = None
    best_saved = _MIN_SAVED_TOKENS - 1
    for members in by_first_block.values():
        if len(members) < 2:
            continue
        limit = min(starts[index] for index in members) // block_size
        num_blocks = _common_length([block_tables[index] for index in members], limit)
        saved = (len(members) - 1) * num_blocks * block_size
        if saved > best_saved:
            best, best_saved = SharedPrefix(frozenset(members), tuple(block_tables[members[0]][:num_blocks])), saved
    return best


def _common_length(tables: Sequence[Sequence[int]], limit: int) -> int:
    heads = np.array([table[:limit] for table in tables])
    differs = (heads != heads[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else limit
