"""Guesses how a sequence goes on from what followed the same few tokens the last time: prompt look-up.

Answers that quote their prompt (code that is edited, text that is rewritten, tool calls) and answers that repeat
themselves are guessed well, for nothing: a token costs O(1), a prompt one pass in NumPy, and the index is a table of
positions, 8 to 32 bytes a token. How well it guesses is known without running a guess: each token that comes is held
against the one that would have been guessed.
"""

from array import array
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Tokens that must be alike. Two meet by chance too often, four come late.
GRAM_TOKENS = 3
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
_WORD = 2**64 - 1
_MIN_SLOTS_LOG2 = 8
_NOWHERE = -1


class NgramProposer:
    """Follows one list of tokens as it grows; the list is the sequence's own and is not copied."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens = token_ids
        self._num_seen = 0
        # Slot of a gram's hash -> position of the token after its newest occurrence. Another gram may have taken the
        # slot, so what is found is compared.
        self._slots = array("i")
        self._shift = 0
        self._rebuild()
        # Where the guessed token stands.
        self._next = self._put(self._num_seen)

    def follow(self) -> tuple[int, int]:
        """Take in the tokens that are new; returns how many of them were guessed at, and how many rightly."""
        tokens, num_guessed, num_right = self._tokens, 0, 0
        for place in range(self._num_seen, len(tokens)):
            is_right = False
            if self._next != _NOWHERE:
                is_right = tokens[self._next] == tokens[place]
                num_guessed += 1
                num_right += is_right
            earlier = self._put(place + 1)
            # A passage that goes on is followed rather than a newer one that has begun alike.
            self._next = self._next + 1 if is_right else earlier
        self._num_seen = len(tokens)
        if 2 * self._num_seen > len(self._slots):
            self._rebuild()
            self._put(self._num_seen)
        return num_guessed, num_right

    def propose(self, num_tokens: int) -> list[int]:
        """At most so many tokens; none where the last tokens are new."""
        if self._next == _NOWHERE:
            return []
        found = list(self._tokens[self._next : self._next + num_tokens])
        # A passage that reaches the end repeats itself.
        period = len(self._tokens) - self._next
        while len(found) < num_tokens:
            found.append(found[-period])
        return found

    def _put(self, end: int) -> int:
        """Note the gram before position `end`; returns the position after its last occurrence, or nowhere."""
        if end < GRAM_TOKENS:
            return _NOWHERE
        tokens = self._tokens
        gram = tokens[end - GRAM_TOKENS : end]
        mixed = 0
        for token, factor in zip(gram, _FACTORS, strict=True):
            mixed ^= token * factor & _WORD
        slot = (mixed * _FACTORS[0] & _WORD) >> self._shift
        earlier = self._slots[slot]
        self._slots[slot] = end
        if earlier != _NOWHERE and tokens[earlier - GRAM_TOKENS : earlier] == gram:
            return earlier
        return _NOWHERE

    def _rebuild(self) -> None:
        """Room for twice as many tokens again, all in one pass."""
        num_tokens = len(self._tokens)
        size_log2 = max(_MIN_SLOTS_LOG2, (4 * num_tokens).bit_length())
        self._shift = 64 - size_log2
        slots = np.full(1 << size_log2, _NOWHERE, np.int32)
        # The last gram has nothing behind it yet.
        if num_tokens > GRAM_TOKENS:
            hashes = self._hashes(np.array(self._tokens[:-1], np.uint64))
            # Where a slot is named twice the last one stays.
            slots[hashes] = np.arange(GRAM_TOKENS, num_tokens)
        self._slots = array("i", slots.tobytes())
        self._num_seen = num_tokens

    def _hashes(self, tokens: NDArray[np.uint64]) -> NDArray[np.int64]:
        num_grams = len(tokens) - GRAM_TOKENS + 1
        mixed = np.zeros(num_grams, np.uint64)
        for place, factor in enumerate(_FACTORS):
            mixed ^= tokens[place : place + num_grams] * np.uint64(factor)
        return ((mixed * np.uint64(_FACTORS[0])) >> np.uint64(self._shift)).astype(np.int64)
