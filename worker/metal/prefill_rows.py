"""What the prefill kernel and its twin need to know of a step's rows, built once a step for all layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

# sequence, first row, first token, queries, context length, and three unused: no kernel argument changes its address
# space with the number of tiles.
TILE_FIELDS = 8
_MIN_ELEMENTS = 8

# `PrefillOptions.first_seen` for kernels.
FIRST_SEEN = r"""
// Oldest key that the query at `position` sees.
METAL_FUNC int cidery_first_seen(int position, int window, int chunk) {
  return window > 0 ? metal::max(0, position - window + 1) : chunk > 0 ? position / chunk * chunk : 0;
}
"""


@dataclass(frozen=True, slots=True)
class PrefillOptions:
    """How a layer attends.

    `window`: a token sees the last `window` with itself; `chunk`: those of its own chunk of so many; 0 for neither.
    `softcap`: scores become `softcap * tanh(score / softcap)`, 0 for none. `sinks [num_heads]`: one more score of each
    head that has no value.
    """

    scale: float
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: mx.array | None = None

    def __post_init__(self) -> None:
        if self.window < 0 or self.chunk < 0 or (self.window and self.chunk):
            raise ValueError(f"window {self.window} and chunk {self.chunk}: at most one of them, and above 0")
        if self.softcap < 0:
            raise ValueError(f"softcap {self.softcap} is below 0")

    def first_seen(self, position: int) -> int:
        """The oldest position that the token at `position` sees."""
        if self.window:
            return max(0, position - self.window + 1)
        return position // self.chunk * self.chunk if self.chunk else 0


class PrefillRows:
    """Sequences whose query tokens lie packed, one after another, at rows `cu_queries[i]` to `cu_queries[i + 1]`.

    The queries of sequence `i` are the last tokens of its context of `context_lens[i]`. Row 0 need not be the first:
    decode rows may come before. Entries of a block table that no query sees are never looked at.
    """

    def __init__(
        self,
        cu_queries: Sequence[int],
        context_lens: Sequence[int],
        block_tables: Sequence[Sequence[int] | NDArray[np.int32]],
    ) -> None:
        self.cu_queries = [int(row) for row in cu_queries]
        self.context_lens = [int(length) for length in context_lens]
        if not len(self.context_lens) == len(block_tables) == len(self.cu_queries) - 1:
            raise ValueError(
                f"{len(self.cu_queries)} row limits, {len(self.context_lens)} context lengths and "
                f"{len(block_tables)} block tables: one limit more than sequences, and one of the others each"
            )
        for index, (count, length) in enumerate(zip(self.query_lens, self.context_lens, strict=True)):
            if not 0 < count <= length:
                raise ValueError(f"sequence {index} has {count} queries and a context of {length} tokens")
        self._tables = [np.asarray(table, np.int32) for table in block_tables]
        self._tiles: dict[tuple[int, int], mx.array] = {}
        self._parts: dict[tuple[int, int], PrefillRows] = {}

    @property
    def query_lens(self) -> list[int]:
        """Query tokens of each sequence."""
        return [last - first for first, last in zip(self.cu_queries, self.cu_queries[1:], strict=False)]

    @property
    def first_row(self) -> int:
        """Row of the first query."""
        return self.cu_queries[0]

    @property
    def last_row(self) -> int:
        """One past the row of the last query."""
        return self.cu_queries[-1]

    @property
    def num_rows(self) -> int:
        """Query tokens of all sequences."""
        return self.last_row - self.first_row

    def table(self, sequence: int) -> NDArray[np.int32]:
        """Block table of one sequence."""
        return self._tables[sequence]

    def part(self, first: int, last: int) -> "PrefillRows":
        """Sequences `[first, last)` alone."""
        if (first, last) == (0, len(self.context_lens)):
            return self
        if (first, last) not in self._parts:
            limits, lens = self.cu_queries[first : last + 1], self.context_lens[first:last]
            self._parts[first, last] = PrefillRows(limits, lens, self._tables[first:last])
        return self._parts[first, last]

    @cached_property
    def block_table_array(self) -> mx.array:
        """Tables of all sequences, `[sequences, most blocks]`, padded with block 0."""
        width = max(_MIN_ELEMENTS, *map(len, self._tables))
        padded = np.zeros((len(self._tables), width), np.int32)
        for row, table in zip(padded, self._tables, strict=True):
            row[: len(table)] = table
        return mx.array(padded)

    def tiles(self, rows_of_tile: int, shared_heads: int) -> mx.array:
        """One record a tile, `[num_tiles, 8]`; a row of a tile is one query token of one of `shared_heads`."""
        key = rows_of_tile, shared_heads
        if key not in self._tiles:
            records = [
                (sequence, row, first, count, length, 0, 0, 0)
                for sequence, (first, count, length) in enumerate(
                    zip(self.cu_queries, self.query_lens, self.context_lens, strict=False)
                )
                for row in range(0, count * shared_heads, rows_of_tile)
            ]
            self._tiles[key] = mx.array(np.array(records, np.int32))
        return self._tiles[key]

    def check_tables(self, block_size: int) -> None:
        """Raises ValueError if a block table is shorter than its context."""
        for index, (table, length) in enumerate(zip(self._tables, self.context_lens, strict=True)):
            if len(table) * block_size < length:
                raise ValueError(
                    f"sequence {index}: {len(table)} blocks of {block_size} do not hold a context of {length} tokens"
                )
