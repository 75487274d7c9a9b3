"""One step as one group of layers sees it: which blocks each row reads and writes, ready for attention.

Layers of a group share block tables; what a token sees (`Reach`) may still differ between them, and so do the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Protocol

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from worker.batch_index import pool_rows
from worker.kv_shapes import FULL_REACH, Reach
from worker.metal.decode_plan import DecodePlan
from worker.metal.pool_writer import Slots
from worker.metal.prefill_rows import PrefillRows
from worker.shared_prefix import SharedPrefix

# Up to this, decode rows attend together whatever their length.
_SHORT_CONTEXT_BLOCKS = 15
# From here on a decode row attends alone: padding it to its group's longest costs more than one more call.
_LONE_CONTEXT_BLOCKS = 128


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows of one sequence at positions `[start, end)`, over the block table of one group."""

    start: int
    end: int
    table: Sequence[int]


@dataclass(frozen=True, slots=True)
class Seen:
    """What the rows of a decode group see: keys and values, or latents, each `[rows, num_kv_heads, num_keys, dim]`.

    `mask [rows, 1, 1, num_keys]`, None if every row sees all.
    """

    vectors: tuple[mx.array, ...]
    mask: mx.array | None

    def of_rows(self, first: int, last: int) -> "Seen":
        """What some of the rows see."""
        return Seen(
            tuple(vector[first:last] for vector in self.vectors), None if self.mask is None else self.mask[first:last]
        )


@dataclass(frozen=True)
class DecodeGroup:
    """Decode rows `[first, last)` that attend together, over block tables padded with the null block.

    Tables and lengths begin with the first block that a row sees, or, where the rows share the step's prefix
    (`is_sharing`), with what comes after it. `num_hidden` are the tokens of the first block that are out of reach; None
    if no row has any.

    Shapes: `block_tables [rows, max_blocks]`, `context_lens [rows]`, `mask [rows, 1, 1, max_blocks * block_size]`.
    No mask where every row fills its blocks.

    With `rows_per_sequence` above 1, as many rows one after another share one block table, `[rows / rows_per_sequence,
    max_blocks]`: only a kernel takes such a group.
    """

    first: int
    last: int
    block_tables: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    block_size: int
    num_hidden: NDArray[np.int32] | None = None
    is_sharing: bool = False
    rows_per_sequence: int = 1
    # Of rows that are their sequences' newest tokens: their whole tables, and where in them `block_tables` begin.
    owners: tuple[Sequence[int], ...] = ()
    starts: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    # What it was cut from.
    whole: "DecodeGroup | None" = None
    # Of kernels, by what they depend on beside the group.
    plans: dict[tuple[int, ...], DecodePlan] = field(default_factory=dict)
    _gather: dict[int, mx.array] = field(default_factory=dict)
    _cuts: dict[int, "list[DecodeGroup]"] = field(default_factory=dict)

    @property
    def num_slots(self) -> int:
        """Keys that all rows gather, padding included."""
        return self.block_tables.size * self.block_size

    def cut(self, num: int) -> "list[DecodeGroup]":
        """Its rows in so many groups, one after the other, or one of each row. Not of rows that share tables."""
        num_rows = self.last - self.first
        if num_rows == 1:
            return [self]
        if num not in self._cuts:
            limits = [num_rows * part // num for part in range(num + 1)]
            self._cuts[num] = [self._part(a, b) for a, b in pairwise(limits) if a < b]
        return self._cuts[num]

    def _part(self, first: int, last: int) -> "DecodeGroup":
        return replace(
            self,
            first=self.first + first,
            last=self.first + last,
            block_tables=self.block_tables[first:last],
            context_lens=self.context_lens[first:last],
            num_hidden=None if self.num_hidden is None else self.num_hidden[first:last],
            owners=self.owners[first:last],
            starts=self.starts[first:last],
            whole=self,
            plans={},
            _gather={},
            _cuts={},
        )

    @cached_property
    def seen_ranges(self) -> NDArray[np.int32]:
        """The slots of its table that each row sees, `[rows, 2]`: the first, and one past the last."""
        hidden = np.zeros_like(self.context_lens) if self.num_hidden is None else self.num_hidden
        return np.stack([hidden, self.context_lens], axis=1)

    @cached_property
    def mask(self) -> mx.array | None:
        """For attention over the gathered blocks; a kernel minds lengths by itself."""
        num_slots = self.block_tables.shape[1] * self.block_size
        if self.num_hidden is None and int(self.context_lens.min()) == num_slots:
            return None
        slots = np.arange(num_slots, dtype=np.int32)
        mask = slots < self.context_lens[:, None]
        if self.num_hidden is not None:
            mask &= slots >= self.num_hidden[:, None]
        return mx.array(mask[:, None, None, :])

    @cached_property
    def owner_ids(self) -> tuple[int, ...]:
        """Identities of `owners`."""
        return tuple(map(id, self.owners))

    @cached_property
    def ends(self) -> NDArray[np.int32]:
        """Context length of each row's sequence, this row included."""
        return self.starts + self.context_lens

    @cached_property
    def firsts_seen(self) -> NDArray[np.int32]:
        """First position that each row sees here."""
        return self.starts if self.num_hidden is None else self.starts + self.num_hidden

    def gather_index(self, num_kv_heads: int) -> mx.array:
        """Pool rows of every key of the group, `[rows, num_kv_heads, max_blocks]`."""
        if num_kv_heads not in self._gather:
            self._gather[num_kv_heads] = pool_rows(self.block_tables, num_kv_heads)
        return self._gather[num_kv_heads]


@dataclass(frozen=True)
class PrefillSpan:
    """Token rows `[first, last)` of one sequence at positions `[start, end)`; causal among themselves.

    `keys_table` has the blocks that they see, from position `first_key` on: all of the context, what a window or chunk
    leaves of it, or, where the span shares the step's prefix (`is_sharing`), what comes after that.
    """

    first: int
    last: int
    start: int
    end: int
    block_table: NDArray[np.int32]
    keys_table: NDArray[np.int32]
    first_key: int
    reach: Reach
    is_sharing: bool
    _gather: dict[int, mx.array] = field(default_factory=dict)

    @property
    def num_keys(self) -> int:
        """Keys from `first_key` to the span's end."""
        return self.end - self.first_key

    @cached_property
    def mask(self) -> "mx.array | str":
        """`[num_queries, num_keys]`, or "causal" if every earlier key is within reach."""
        if self.reach.first_needed(self.end - 1) <= self.first_key:
            return "causal"
        return self.mask_array

    @cached_property
    def mask_array(self) -> mx.array:
        """The mask as an array even if it is causal."""
        queries, keys = np.arange(self.start, self.end), np.arange(self.first_key, self.end)
        return mx.array(self.reach.mask(queries.astype(np.int32), keys.astype(np.int32)))

    def gather_index(self, num_kv_heads: int) -> mx.array:
        """Pool rows of every key of the span, `[1, num_kv_heads, num_blocks]`."""
        if num_kv_heads not in self._gather:
            self._gather[num_kv_heads] = pool_rows(self.keys_table[None], num_kv_heads)
        return self._gather[num_kv_heads]


class GroupRows:
    """Decode groups, prefill spans and where the step's keys go. `spans` are in the batch's order, decodes first.

    `skips`: blocks of each span that belong to `shared`. `decodes_together`: all decode rows form one group, for a
    kernel that minds each row's own length; and so may the rows of the first `num_verified` spans after them.
    """

    def __init__(
        self,
        spans: Sequence[RowSpan],
        *,
        block_size: int,
        num_decodes: int,
        reach: Reach = FULL_REACH,
        shared: SharedPrefix | None = None,
        skips: Sequence[int] = (),
        decodes_together: bool = False,
        num_verified: int = 0,
    ) -> None:
        self.block_size = block_size
        self.reach = reach
        self.shared = shared
        self._spans = spans
        self._num_decodes = num_decodes
        self._decodes_together = decodes_together
        self._num_verified = num_verified
        self._skips = skips or [0] * len(spans)
        self._verify_groups: dict[bool, list[DecodeGroup]] = {}

    @cached_property
    def decode_groups(self) -> list[DecodeGroup]:
        """Beyond short contexts, at most a factor of two in blocks, which bounds the padding; decodes come sorted."""
        groups, first = [], 0
        spans, skips = self._spans[: self._num_decodes], self._skips[: self._num_decodes]
        firsts = list(skips)
        if self.reach != FULL_REACH:
            firsts = [max(skip, self._first_block(span)) for span, skip in zip(spans, skips, strict=True)]
        sizes = [_num_blocks(span.end, self.block_size) - start for span, start in zip(spans, firsts, strict=True)]
        for row in range(1, self._num_decodes + 1):
            is_last = row == self._num_decodes
            if is_last or self._are_apart(skips[first], skips[row], sizes[first], sizes[row]):
                groups.append(self._decode_group(first, row, firsts, max(sizes[first:row])))
                first = row
        return groups

    def verify_groups(self, *, shares_loads: bool) -> list[DecodeGroup]:
        """Rows of the verified spans as decode rows, by their number a span.

        `shares_loads`: those of a span share a block table, and a kernel's loads; else each has its own. Same bits.
        """
        if shares_loads not in self._verify_groups:
            groups, first = [], self._num_decodes
            spans = self._spans[self._num_decodes : self._num_decodes + self._num_verified]
            for num_rows, run in groupby(spans, key=lambda span: span.end - span.start):
                alike = list(run)
                groups.append(self._verify_group(first, alike, num_rows, shares_loads=shares_loads))
                first += num_rows * len(alike)
            self._verify_groups[shares_loads] = groups
        return self._verify_groups[shares_loads]

    @cached_property
    def chunks(self) -> list[PrefillSpan]:
        """The prefills that are no decode rows of a kernel."""
        return self.prefills[self._num_verified :]

    @cached_property
    def prefills(self) -> list[PrefillSpan]:
        """One for each span of more than one token."""
        prefills, first = [], self._num_decodes
        for span, skip in zip(self._spans[self._num_decodes :], self._skips[self._num_decodes :], strict=True):
            last = first + span.end - span.start
            start = max(skip, self._first_block(span))
            table = np.array(span.table[: _num_blocks(span.end, self.block_size)], np.int32)
            prefills.append(
                PrefillSpan(
                    *(first, last, span.start, span.end, table, table[start:], start * self.block_size, self.reach),
                    is_sharing=skip > 0,
                )
            )
            first = last
        return prefills

    @cached_property
    def block_ids(self) -> NDArray[np.int32]:
        """Block of each token, `[num_tokens]`."""
        size = self.block_size
        decodes = np.array([span.table[span.start // size] for span in self._spans[: self._num_decodes]], np.int32)
        prefills = [span.block_table[np.arange(span.start, span.end, dtype=np.int32) // size] for span in self.prefills]
        return np.concatenate([decodes, *prefills]) if prefills else decodes

    @cached_property
    def block_offsets(self) -> NDArray[np.int32]:
        """Offset of each token in its block, `[num_tokens]`."""
        return positions_of(self._spans, self._num_decodes) % self.block_size

    @cached_property
    def slots(self) -> Slots:
        """Where each token's keys and values go."""
        return Slots(self.block_ids * self.block_size + self.block_offsets)

    @cached_property
    def prefill_rows(self) -> PrefillRows:
        """All chunks, for a kernel that takes them together. There must be one."""
        spans = self.chunks
        limits = [spans[0].first, *(span.last for span in spans)]
        return PrefillRows(limits, [span.end for span in spans], [span.block_table for span in spans])

    def _first_block(self, span: RowSpan) -> int:
        return self.reach.first_needed(span.start) // self.block_size

    def _are_apart(self, skip: int, other_skip: int, shorter_blocks: int, longer_blocks: int) -> bool:
        """Whether two decode rows can't be in one group."""
        return not self._decodes_together and (skip != other_skip or _are_unlike(shorter_blocks, longer_blocks))

    def _decode_group(self, first: int, last: int, firsts: Sequence[int], max_blocks: int) -> DecodeGroup:
        spans, size = self._spans[first:last], self.block_size
        starts = np.array(firsts[first:last], np.int32) * size
        lens = np.array([span.end for span in spans], np.int32) - starts
        heads = [
            span.table[start : _num_blocks(span.end, size)]
            for span, start in zip(spans, firsts[first:last], strict=True)
        ]
        tables = np.array([[*head, *[0] * (max_blocks - len(head))] for head in heads], np.int32)
        num_hidden = None
        if self.reach != FULL_REACH:
            # A skipped prefix is within reach of whoever shares it.
            hidden = np.array([self.reach.first_needed(span.start) for span in spans], np.int32) - starts
            num_hidden = hidden if hidden.any() else None
        return DecodeGroup(
            *(first, last, tables, lens, size, num_hidden),
            is_sharing=self._skips[first] > 0,
            owners=tuple(span.table for span in spans),
            starts=starts,
        )

    def _verify_group(self, first: int, spans: Sequence[RowSpan], num_rows: int, *, shares_loads: bool) -> DecodeGroup:
        """Of spans with `num_rows` rows each, the first of them at row `first`."""
        size = self.block_size
        heads = [span.table[self._first_block(span) : _num_blocks(span.end, size)] for span in spans]
        tables = np.zeros((len(spans), max(map(len, heads))), np.int32)
        for row, head in zip(tables, heads, strict=True):
            row[: len(head)] = head
        positions = np.array([range(span.start, span.end) for span in spans], np.int32)
        starts = np.array([[self._first_block(span)] for span in spans], np.int32) * size
        hidden = [[self.reach.first_needed(position) for position in range(span.start, span.end)] for span in spans]
        return DecodeGroup(
            first,
            first + num_rows * len(spans),
            tables if shares_loads else np.repeat(tables, num_rows, axis=0),
            (positions + 1 - starts).reshape(-1),
            size,
            num_hidden=(np.array(hidden, np.int32) - starts).reshape(-1),
            rows_per_sequence=num_rows if shares_loads else 1,
        )


class HasPositions(Protocol):
    """Positions `[start, end)` of one sequence."""

    @property
    def start(self) -> int:
        """First position."""
        ...

    @property
    def end(self) -> int:
        """One past the last."""
        ...


def positions_of(spans: Sequence[HasPositions], num_decodes: int) -> NDArray[np.int32]:
    """Position of each token, `[num_tokens]`; the first `num_decodes` spans have one token each."""
    decodes = np.array([span.start for span in spans[:num_decodes]], np.int32)
    prefills = [np.arange(span.start, span.end, dtype=np.int32) for span in spans[num_decodes:]]
    return np.concatenate([decodes, *prefills]) if prefills else decodes


def _are_unlike(one_blocks: int, other_blocks: int) -> bool:
    """Whether a context is too long to share a group with a shorter one."""
    longer_blocks = max(one_blocks, other_blocks)
    if longer_blocks >= _LONE_CONTEXT_BLOCKS:
        return True
    return _size_class(one_blocks) != _size_class(other_blocks)


def _size_class(num_blocks: int) -> int:
    return max(num_blocks, _SHORT_CONTEXT_BLOCKS).bit_length()


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
