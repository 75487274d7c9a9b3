"""Which rows of a step go through which adapter.

Rows belong to sequences, and a sequence has one adapter or none. Layers see rows in a few arrangements, of which axis 0
always tells them apart: all rows of the step, those that need logits, or the sequences of one part of a mixer.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from worker.batch import Batch, Part
from worker.errors import UnsupportedModelError

BASE = ""


@dataclass(frozen=True, slots=True)
class Cut:
    """Entries sorted by adapter: `order` sorts them, `back` puts them back.

    `parts` are (adapter, first, last) of the sorted entries, BASE first if it has any.
    """

    order: mx.array
    back: mx.array
    parts: tuple[tuple[str, int, int], ...]


class Groups:
    """The adapter of each entry of an axis."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names
        distinct = set(names)
        self.uniform = names[0] if len(distinct) == 1 else None
        self._cuts: dict[tuple[str, ...], Cut] = {}

    def cut(self, known: Collection[str]) -> Cut:
        """By the adapters of `known`; whoever has another, or none, is BASE. Made once a step."""
        present = tuple(sorted({name for name in self.names if name in known}))
        if present not in self._cuts:
            self._cuts[present] = self._make(present)
        return self._cuts[present]

    def _make(self, present: tuple[str, ...]) -> Cut:
        place = {name: index for index, name in enumerate((BASE, *present))}
        keys = np.array([place.get(name, 0) for name in self.names])
        order = np.argsort(keys, kind="stable")
        ends = np.searchsorted(keys[order], np.arange(len(place) + 1))
        parts = [
            (name, int(ends[index]), int(ends[index + 1]))
            for name, index in place.items()
            if ends[index] < ends[index + 1]
        ]
        back = np.argsort(order, kind="stable")
        return Cut(mx.array(order.astype(np.int32)), mx.array(back.astype(np.int32)), tuple(parts))


class StepAdapters:
    """Of one forward in which some sequence has an adapter."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._of_spans = Groups([span.adapter for span in batch.spans])
        self._only: Groups | None = self._of_spans if self._of_spans.uniform is not None else None
        self._part: Part | None = None
        self._made: dict[tuple[str, int], Groups] = {}

    @classmethod
    def of(cls, batch: Batch) -> "StepAdapters | None":
        """None if no row needs one, so that layers have nothing to look at."""
        return cls(batch) if any(span.adapter for span in batch.spans) else None

    def groups(self, num_entries: int) -> Groups:
        """The adapters of an axis of this length. Raises UnsupportedModelError if it is none that is known."""
        if self._only is not None:
            return self._only
        part, batch = self._part, self._batch
        if part is not None:
            if num_entries == len(part.spans):
                return self._remembered("part", part.first, [batch.spans[index].adapter for index in part.spans])
            if num_entries == part.last - part.first:
                names = [batch.spans[index].adapter for index in part.spans for _ in range(part.num_tokens)]
                return self._remembered("part rows", part.first, names)
        elif num_entries == batch.num_tokens:
            return self._remembered("rows", 0, [span.adapter for span in batch.spans for _ in span.token_ids])
        elif num_entries == len(batch.sampled_rows):
            names = [span.adapter for span in batch.spans for _ in range(span.num_logits)]
            return self._remembered("logits", 0, names)
        raise UnsupportedModelError(
            f"a layer with adapters sees {num_entries} entries, which are neither the step's {batch.num_tokens} rows "
            f"nor its {len(batch.sampled_rows)} rows with logits"
        )

    @contextmanager
    def only(self, name: str) -> Iterator[None]:
        """All that runs inside has rows of this adapter alone."""
        before, self._only = self._only, Groups([name])
        try:
            yield
        finally:
            self._only = before

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """What runs inside sees the sequences of a part."""
        self._part = part
        try:
            yield
        finally:
            self._part = None

    def _remembered(self, kind: str, at: int, names: list[str]) -> Groups:
        if (kind, at) not in self._made:
            self._made[kind, at] = Groups(names)
        return self._made[kind, at]
