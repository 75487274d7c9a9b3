"""Packs the slices of one step, ragged and without padding, into the arrays that the model and attention read.

Rows are ordered: decode rows (one token), grouped by context length, then prefill spans. Every array is built once a
step and shared by all layers.

A step of several sequences runs in token rows, `[num_tokens, 1]`: each token is a batch row with its own position. A
step of one sequence is flat, `[1, num_tokens]`, which is mlx-lm's own layout, unless the model takes rows alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from worker.group_rows import DecodeGroup as DecodeGroup
from worker.group_rows import GroupRows, RowSpan, positions_of
from worker.group_rows import PrefillSpan as PrefillSpan
from worker.kv_shapes import FULL_REACH, Reach
from worker.metal.state_rows import StateRows
from worker.shared_prefix import SharedPrefix, find_shared_prefix

if TYPE_CHECKING:
    from worker.reading import SequenceReading


@dataclass(slots=True)
class Span:
    """Positions `[start, start + len(token_ids))` of one sequence, with the block table that covers them.

    `block_table` is that of the first group whose tokens are all kept; `tables` are those of every group. The last
    `num_drafts` tokens are guesses: a span that samples does so behind each of them, and behind the token before.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    samples: bool
    tables: Sequence[Sequence[int]] = ()
    # What is wanted of its prompt, and of how many of its last rows the logits for that.
    reading: "SequenceReading | None" = None
    num_read: int = 0
    # Digest of its adapter, empty for none.
    adapter: str = ""
    num_drafts: int = 0
    # Its last token is being drawn by the step before; a number stands in its place until then.
    is_late: bool = False

    @property
    def drafts(self) -> Sequence[int]:
        """The guesses."""
        return self.token_ids[len(self.token_ids) - self.num_drafts :]

    @property
    def num_logits(self) -> int:
        """Of its last rows, how many need logits."""
        return max(self.num_read, 1 + self.num_drafts if self.samples else 0)

    @property
    def end(self) -> int:
        """One past the last position: the context length of the last token."""
        return self.start + len(self.token_ids)

    @property
    def is_verified(self) -> bool:
        """Whether it is a newest token with guesses around it: so few rows that they attend as decodes do."""
        return len(self.token_ids) <= 1 + 2 * self.num_drafts


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that a recurrent mixer can run at once: of sequences that have as many tokens, `[len(spans), num_tokens]`.

    `is_fresh`: the sequences begin here and have no state yet. `has_drafts`: some of the tokens are guesses.
    """

    first: int
    last: int
    spans: tuple[int, ...]
    num_tokens: int
    is_fresh: bool
    has_drafts: bool = False


class Batch:
    """One step, packed. `order[i]` is the index, among the spans given, of the i-th packed span.

    `shared` is a prefix that is worth reading once; who shares it comes first among decodes and among prefills.
    `decodes_together`: all decode rows form one group without a mask, for a kernel that minds each row's own length;
    for the same kernel are the rows of `num_verified` spans with guesses, the first of the prefills. `allows_flat`
    false: token rows even for a single sequence.
    """

    def __init__(
        self, spans: Sequence[Span], *, block_size: int, decodes_together: bool = False, allows_flat: bool = True
    ) -> None:
        self.block_size = block_size
        self._decodes_together = decodes_together
        self.shared = None if decodes_together else _find_shared(spans, block_size)
        members = self.shared.members if self.shared else frozenset()
        decodes = [i for i, span in enumerate(spans) if len(span.token_ids) == 1]
        decodes.sort(key=lambda i: (i not in members, spans[i].start))
        prefills = [i for i, span in enumerate(spans) if len(span.token_ids) > 1]
        verified = frozenset(i for i in prefills if spans[i].is_verified) if decodes_together else frozenset()
        self.num_verified = len(verified)
        # Those of one length lie side by side, so that recurrent mixers can take them together.
        prefills.sort(key=lambda i: (i not in members, i not in verified, len(spans[i].token_ids), spans[i].start > 0))
        self.order = decodes + prefills
        self._skips = [self.shared.num_blocks if self.shared and i in members else 0 for i in self.order]
        self.spans = [spans[i] for i in self.order]
        self.num_decodes = len(decodes)
        self.is_flat = allows_flat and len(self.spans) == 1
        token_ids = [token for span in self.spans for token in span.token_ids]
        self.num_tokens = len(token_ids)
        self._token_ids = mx.array(token_ids, mx.int32)
        self.tokens = self._token_ids.reshape(*((1, -1) if self.is_flat else (-1, 1)))
        self._slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self._views: dict[tuple[int, Reach, bool], GroupRows] = {}
        self._state_parts: dict[int, list[tuple[int, int, StateRows]]] = {}
        self.rows = self._whole_rows([span.block_table for span in self.spans])
        self.offset: int | mx.array = self.spans[0].start if self.is_flat else mx.array(self._positions())
        self.sampled_rows = self._sampled_rows()

    def set_last_tokens(self, token_ids: Mapping[int, int]) -> None:
        """The last tokens of late spans, by place among the packed ones; before the graph is evaluated."""
        ends = list(accumulate(len(span.token_ids) for span in self.spans))
        # MLX shares the array's memory with NumPy, and nothing has read it yet.
        shared = np.array(self._token_ids, copy=False)
        for place, token_id in token_ids.items():
            shared[ends[place] - 1] = token_id

    @property
    def has_drafts(self) -> bool:
        """Whether some tokens are guesses."""
        return any(span.num_drafts for span in self.spans)

    @property
    def samples_all(self) -> bool:
        """Every row's logits are needed: no row has to be picked."""
        return len(self.sampled_rows) == self.num_tokens

    @property
    def decode_groups(self) -> list[DecodeGroup]:
        """Of full attention over the spans' own block tables."""
        return self.rows.decode_groups

    @property
    def prefills(self) -> list[PrefillSpan]:
        """Of full attention over the spans' own block tables."""
        return self.rows.prefills

    def view(self, group: int, reach: Reach, *, may_share: bool = True) -> GroupRows:
        """The step as layers of a group see it whose tokens see so far; made once a step.

        `may_share`: such layers can attend to a shared prefix apart from the rest.
        """
        key = (group, reach, may_share)
        if key not in self._views:
            self._views[key] = self._make_view(group, reach, may_share)
        return self._views[key]

    @cached_property
    def parts(self) -> list[Part]:
        """The step cut for mixers that aren't token-parallel: runs of decode rows, then of prefills of one length."""
        parts, first = [], 0
        spans = enumerate(self.spans)
        for (num_tokens, is_fresh), run in groupby(spans, key=lambda row: (len(row[1].token_ids), row[1].start == 0)):
            indices = tuple(index for index, _ in run)
            last = first + num_tokens * len(indices)
            has_drafts = any(self.spans[index].num_drafts for index in indices)
            parts.append(Part(first, last, indices, num_tokens, is_fresh, has_drafts))
            first = last
        return parts

    def slots(self, part: Part, group: int) -> tuple[int, ...]:
        """The state block of each of a part's sequences; looked up once a step."""
        key = (part.first, group)
        if key not in self._slots:
            self._slots[key] = tuple(self.spans[index].tables[group][0] for index in part.spans)
        return self._slots[key]

    def state_parts(self, group: int) -> list[tuple[int, int, StateRows]]:
        """Rows `[first, last)` for kernels over the states of a group: decode rows, then prefills of any lengths."""
        if group not in self._state_parts:
            cuts = [self.spans[: self.num_decodes], self.spans[self.num_decodes :]]
            parts, first = [], 0
            for spans in filter(None, cuts):
                offsets = np.cumsum([0, *(len(span.token_ids) for span in spans)]).astype(np.int32)
                slots = np.array([span.tables[group][0] for span in spans], np.int32)
                is_fresh = np.array([span.start == 0 for span in spans])
                last = first + int(offsets[-1])
                parts.append((first, last, StateRows(offsets, slots, is_fresh)))
                first = last
            self._state_parts[group] = parts
        return self._state_parts[group]

    def _make_view(self, group: int, reach: Reach, may_share: bool) -> GroupRows:
        tables = [span.tables[group] for span in self.spans]
        if reach != FULL_REACH or not may_share:
            return self._make_rows(tables, reach=reach)
        if all(table is span.block_table for table, span in zip(tables, self.spans, strict=True)):
            return self.rows
        return self._whole_rows(tables)

    def _whole_rows(self, tables: Sequence[Sequence[int]]) -> GroupRows:
        """With the shared prefix, if these tables share it too."""
        if self.shared is None:
            return self._make_rows(tables)
        num_blocks = self.shared.num_blocks
        heads = [list(table[:num_blocks]) for table, skip in zip(tables, self._skips, strict=True) if skip]
        if any(head != heads[0] for head in heads):
            return self._make_rows(tables)
        return self._make_rows(tables, shared=SharedPrefix(self.shared.members, tuple(heads[0])), skips=self._skips)

    def _make_rows(
        self,
        tables: Sequence[Sequence[int]],
        *,
        reach: Reach = FULL_REACH,
        shared: SharedPrefix | None = None,
        skips: Sequence[int] = (),
    ) -> GroupRows:
        return GroupRows(
            [RowSpan(span.start, span.end, table) for span, table in zip(self.spans, tables, strict=True)],
            block_size=self.block_size,
            num_decodes=self.num_decodes,
            reach=reach,
            shared=shared,
            skips=skips,
            decodes_together=self._decodes_together,
            num_verified=self.num_verified,
        )

    def _positions(self) -> NDArray[np.int32]:
        return positions_of(self.spans, self.num_decodes)

    def _sampled_rows(self) -> list[int]:
        rows: list[int] = []
        end = 0
        for span in self.spans:
            end += len(span.token_ids)
            rows += range(end - span.num_logits, end)
        return rows


def _find_shared(spans: Sequence[Span], block_size: int) -> SharedPrefix | None:
    return find_shared_prefix([span.start for span in spans], [span.block_table for span in spans], block_size)
