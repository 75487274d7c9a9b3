"""Encodes conversations piece by piece, so that a next turn costs its new text and not all of its history."""

import re
from collections import OrderedDict
from typing import Any

# Characters of text whose tokens are kept; about 20 bytes each.
_MAX_CACHED_CHARACTERS = 4_000_000
# A tokenizer whose pieces don't add up on this one is always asked for the whole.
_PROBE = ("  leading and trailing ", "Two words", "\n", "äöü 你好 12345", "\n\n", " x")

Piece = tuple[list[int], list[int]]


class PieceEncoder:
    """Special tokens cut a text before anything else does, so the pieces between them can be encoded by themselves.

    That holds for byte-level tokenizers and fails for those that treat the beginning of a text otherwise; which kind
    this is, is tried out once. Least recently used pieces are forgotten. One thread at a time.
    """

    def __init__(self, core: Any) -> None:
        self._core = core
        special = [token for token in core.get_added_tokens_decoder().values() if token.special]
        contents = sorted((token.content for token in special), key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, contents)) + ")") if contents else None
        self._cached: OrderedDict[str, Piece] = OrderedDict()
        self._num_characters = 0
        if self._special is not None and not self._adds_up(contents[0]):
            self._special = None

    def encode(self, text: str) -> Piece:
        """Tokens of a text, without what the tokenizer would put in front, and the characters at which they start."""
        if self._special is None:
            return self._encode_whole(text)
        token_ids: list[int] = []
        starts: list[int] = []
        at = 0
        for piece in self._special.split(text):
            if piece:
                ids, offsets = self._encode_piece(piece)
                token_ids += ids
                starts += [at + offset for offset in offsets] if at else offsets
                at += len(piece)
        return token_ids, starts

    def _encode_piece(self, piece: str) -> Piece:
        cached = self._cached.get(piece)
        if cached is not None:
            self._cached.move_to_end(piece)
            return cached
        encoded = self._cached[piece] = self._encode_whole(piece)
        self._num_characters += len(piece)
        while self._num_characters > _MAX_CACHED_CHARACTERS:
            forgotten, _ = self._cached.popitem(last=False)
            self._num_characters -= len(forgotten)
        return encoded

    def _encode_whole(self, text: str) -> Piece:
        # A batch of one, because that lets other threads run meanwhile.
        (encoding,) = self._core.encode_batch([text], add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def _adds_up(self, special: str) -> bool:
        text = special.join(_PROBE)
        return self.encode(text) == self._encode_whole(text)
