"""Which tokens a sequence has had, and what its penalties make of their logits.

As OpenAI and vLLM define them: frequency and presence count the answer alone, repetition counts prompt and answer. A
row costs what it has of different tokens, not the vocabulary.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

_FIRST_ROOM = 64


@dataclass(frozen=True, slots=True)
class Penalties:
    """Of one row. `repetition` divides positive logits and multiplies negative ones; the others are subtracted."""

    frequency: float
    presence: float
    repetition: float

    @property
    def is_off(self) -> bool:
        """Whether they change nothing."""
        return self.frequency == 0 and self.presence == 0 and self.repetition == 1


class TokenCounts:
    """The different tokens of a sequence, each with how often the answer has it. Appending is O(1), amortised."""

    def __init__(self, penalties: Penalties, prompt: Sequence[int], answer: Sequence[int]) -> None:
        self.penalties = penalties
        # A prompt's tokens matter to the repetition penalty only.
        seen = np.unique(np.array(prompt if penalties.repetition != 1 else (), np.int32))
        self._size = len(seen)
        self._ids = np.zeros(self._size + _FIRST_ROOM, np.int32)
        self._ids[: self._size] = seen
        self._counts = np.zeros(self._size + _FIRST_ROOM, np.float32)
        self.frequency, self.presence = np.float32(penalties.frequency), np.float32(penalties.presence)
        self._places = {token: place for place, token in enumerate(seen.tolist())}
        for token in answer:
            self.add(token)

    def add(self, token_id: int) -> None:
        """The answer has one more token."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = self._size
            if place == len(self._ids):
                self._ids, self._counts = (np.concatenate([a, np.zeros_like(a)]) for a in (self._ids, self._counts))
            self._ids[place] = token_id
            self._size += 1
        self._counts[place] += 1

    def copy(self) -> "TokenCounts":
        """The same, to go on by itself."""
        other = copy(self)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        other._places = dict(self._places)
        return other

    @property
    def ids(self) -> NDArray[np.int32]:
        """Different tokens, in the order in which they came."""
        return self._ids[: self._size]

    @property
    def subtracted(self) -> NDArray[np.float32]:
        """What frequency and presence take off the logit of each of `ids`."""
        counts = self._counts[: self._size]
        of_all = self.frequency * counts + self.presence * (counts > 0)
        return of_all.astype(np.float32, copy=False)


def penalise(logits: mx.array, rows: Sequence[tuple[int, TokenCounts]]) -> mx.array:
    """`logits [rows, vocab]` of float32 with the penalties of some rows."""
    rows = [(row, counts) for row, counts in rows if len(counts.ids)]
    if not rows:
        return logits
    vocab_size = logits.shape[-1]
    index = mx.array(np.concatenate([row * vocab_size + counts.ids for row, counts in rows]))
    sizes = [len(counts.ids) for _, counts in rows]
    repetition = mx.array(np.repeat(np.array([c.penalties.repetition for _, c in rows], np.float32), sizes))
    flat = logits.reshape(-1)
    values = flat[index]
    values = mx.where(values > 0, values / repetition, values * repetition)
    flat[index] = values - mx.array(np.concatenate([counts.subtracted for _, counts in rows]))
    return flat.reshape(logits.shape)
