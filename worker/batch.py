"""Packs the slices of one step, ragged and without padding, into the arrays that the model and attention read.

Rows are ordered: decode rows (one token), grouped by context length, then prefill spans. Every array is built once a
step and shared by all layers.

A step of several sequences runs in token rows, `[num_tokens, 1]`: each token is a batch row with its own position. A
step of one sequence is flat, `[1, num_tokens]`, which is mlx-lm's own layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from worker.batch_index import pool_rows
from worker.shared_prefix import SharedPrefix, find_shared_prefix

# Up to this, decode rows attend together whatever their length.
_SHORT_CONTEXT_BLOCKS = 15
# From here on a decode row attends alone: padding it to its group's longest costs more than one more call.
_LONE_CONTEXT_BLOCKS = 128


@dataclass(slots=True)
class Span:
    """Positions `[start, start + len(token_ids))` of one sequence, with the block table that covers them."""

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    samples: bool

    @property
    def end(self) -> int:
        """One past the last position: the context length of the last token."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class DecodeGroup:
    """Decode rows `[first, last)` that attend together, over block tables padded with the null block.

    Where the rows share the step's prefix (`is_sharing`), tables and lengths are those of what comes after it.

    Shapes: `block_tables [rows, max_blocks]`, `context_lens [rows]`, `mask [rows, 1, 1, max_blocks * block_size]`.
    No mask where every row fills its blocks.
    """

    first: int
    last: int
    block_tables: NDArray[np.int32]
    context_lens: NDArray[np.int32]
    mask: mx.array | None
    is_sharing: bool = False
    _gather: dict[int, mx.array] = field(default_factory=dict)

    @cached_property
    def block_table_array(self) -> mx.array:
        """`block_tables` for a kernel."""
        return mx.array(self.block_tables)

    @cached_property
    def context_len_array(self) -> mx.array:
        """`context_lens` for a kernel."""
        return mx.array(self.context_lens)

    def gather_index(self, num_kv_heads: int) -> mx.array:
        """Pool rows of every key of the group, `[rows, num_kv_heads, max_blocks]`."""
        if num_kv_heads not in self._gather:
            self._gather[num_kv_heads] = pool_rows(self.block_tables, num_kv_heads)
        return self._gather[num_kv_heads]


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Token rows `[first, last)` of one sequence at positions `[start, end)`; causal among themselves.

    Where it shares the step's prefix (`is_sharing`), `keys_table` and `num_keys` are those of what comes after it.
    """

    first: int
    last: int
    start: int
    end: int
    block_table: NDArray[np.int32]
    keys_table: NDArray[np.int32]
    num_keys: int
    is_sharing: bool
    _gather: dict[int, mx.array] = field(default_factory=dict)

    def gather_index(self, num_kv_heads: int) -> mx.array:
        """Pool rows of every key of the span, `[1, num_kv_heads, num_blocks]`."""
        if num_kv_heads not in self._gather:
            self._gather[num_kv_heads] = pool_rows(self.keys_table[None], num_kv_heads)
        return self._gather[num_kv_heads]


class Batch:
    """One step, packed. `order[i]` is the index, among the spans given, of the i-th packed span.

    `shared` is a prefix that is worth reading once; who shares it comes first among decodes and among prefills.
    `decodes_together`: all decode rows form one group without a mask, for a kernel that minds each row's own length.
    """

    def __init__(self, spans: Sequence[Span], *, block_size: int, decodes_together: bool = False) -> None:
        self.block_size = block_size
        self._decodes_together = decodes_together
        self.shared = None if decodes_together else _find_shared(spans, block_size)
        members = self.shared.members if self.shared else frozenset()
        decodes = [i for i, span in enumerate(spans) if len(span.token_ids) == 1]
        decodes.sort(key=lambda i: (i not in members, spans[i].start))
        prefills = [i for i, span in enumerate(spans) if len(span.token_ids) > 1]
        prefills.sort(key=lambda i: i not in members)
        self.order = decodes + prefills
        self._skips = [self.shared.num_blocks if self.shared and i in members else 0 for i in self.order]
        self.spans = [spans[i] for i in self.order]
        self.num_decodes = len(decodes)
        self.is_flat = len(self.spans) == 1
        self.decode_groups = self._group_decodes()
        self.prefills = self._list_prefills()
        token_ids = [token for span in self.spans for token in span.token_ids]
        self.num_tokens = len(token_ids)
        self.tokens = mx.array(token_ids, mx.int32).reshape(*((1, -1) if self.is_flat else (-1, 1)))
        positions = self._positions()
        self.block_ids, self.block_offsets = self._slots(positions)
        self.offset: int | mx.array = self.spans[0].start if self.is_flat else mx.array(positions)
        self.sampled_rows = self._sampled_rows()
        self._write_index: dict[int, tuple[mx.array, mx.array]] = {}

    @property
    def samples_all(self) -> bool:
        """Every row samples: no row has to be picked."""
        return len(self.sampled_rows) == self.num_tokens

    def write_index(self, num_kv_heads: int) -> tuple[mx.array, mx.array]:
        """Pool rows `[num_tokens, num_kv_heads]` and offsets in their block `[num_tokens, 1]` of the new keys."""
        if num_kv_heads not in self._write_index:
            rows = self.block_ids[:, None] * num_kv_heads + np.arange(num_kv_heads, dtype=np.int32)
            self._write_index[num_kv_heads] = mx.array(rows), mx.array(self.block_offsets[:, None])
        return self._write_index[num_kv_heads]

    def _positions(self) -> NDArray[np.int32]:
        decodes = np.array([span.start for span in self.spans[: self.num_decodes]], np.int32)
        prefills = [np.arange(span.start, span.end, dtype=np.int32) for span in self.prefills]
        return np.concatenate([decodes, *prefills]) if prefills else decodes

    def _slots(self, positions: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Block id of each token and its offset in the block."""
        size = self.block_size
        decodes = np.array([span.block_table[span.start // size] for span in self.spans[: self.num_decodes]], np.int32)
        prefills = [span.block_table[positions[span.first : span.last] // size] for span in self.prefills]
        return np.concatenate([decodes, *prefills]) if prefills else decodes, positions % size

    def _sampled_rows(self) -> list[int]:
        rows, end = [], 0
        for span in self.spans:
            end += len(span.token_ids)
            if span.samples:
                rows.append(end - 1)
        return rows

    def _list_prefills(self) -> list[PrefillSpan]:
        prefills, first = [], self.num_decodes
        for span, skip in zip(self.spans[self.num_decodes :], self._skips[self.num_decodes :], strict=True):
            last = first + len(span.token_ids)
            table = np.array(span.block_table[: _num_blocks(span.end, self.block_size)], np.int32)
            num_keys = span.end - skip * self.block_size
            prefills.append(PrefillSpan(first, last, span.start, span.end, table, table[skip:], num_keys, skip > 0))
            first = last
        return prefills

    def _group_decodes(self) -> list[DecodeGroup]:
        """Beyond short contexts, at most a factor of two in blocks, which bounds the padding; decodes come sorted."""
        groups, first = [], 0
        spans, skips = self.spans[: self.num_decodes], self._skips[: self.num_decodes]
        sizes = [_num_blocks(span.end, self.block_size) - skip for span, skip in zip(spans, skips, strict=True)]
        for row in range(1, self.num_decodes + 1):
            is_last = row == self.num_decodes
            if is_last or self._are_apart(skips[first], skips[row], sizes[first], sizes[row]):
                groups.append(self._decode_group(first, row, sizes[row - 1]))
                first = row
        return groups

    def _are_apart(self, skip: int, other_skip: int, shorter_blocks: int, longer_blocks: int) -> bool:
        """Whether two decode rows can't be in one group."""
        return not self._decodes_together and (skip != other_skip or _are_unlike(shorter_blocks, longer_blocks))

    def _decode_group(self, first: int, last: int, max_blocks: int) -> DecodeGroup:
        spans, skip = self.spans[first:last], self._skips[first]
        lens = np.array([span.end - skip * self.block_size for span in spans], np.int32)
        heads = (span.block_table[skip : _num_blocks(span.end, self.block_size)] for span in spans)
        tables = np.array([[*head, *[0] * (max_blocks - len(head))] for head in heads], np.int32)
        num_slots = max_blocks * self.block_size
        if lens[0] == num_slots or self._decodes_together:
            return DecodeGroup(first, last, tables, lens, None, skip > 0)
        mask = np.arange(num_slots, dtype=np.int32) < lens[:, None]
        return DecodeGroup(first, last, tables, lens, mx.array(mask[:, None, None, :]), skip > 0)


def _find_shared(spans: Sequence[Span], block_size: int) -> SharedPrefix | None:
    return find_shared_prefix([span.start for span in spans], [span.block_table for span in spans], block_size)


def _are_unlike(shorter_blocks: int, longer_blocks: int) -> bool:
    """Whether a context is too long to share a group with a shorter one."""
    if longer_blocks >= _LONE_CONTEXT_BLOCKS:
        return True
    classes = (max(blocks, _SHORT_CONTEXT_BLOCKS).bit_length() for blocks in (shorter_blocks, longer_blocks))
    return next(classes) != next(classes)


def _num_blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
