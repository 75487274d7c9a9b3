"""Text to tokens and back: chat template, where messages end, incremental detokenising, stop strings."""

import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from cluster.errors import InvalidRequest, RequestTooLong, StartupFailed
from cluster.model_files import tokenizer_digest
from cluster.piece_encoder import PieceEncoder

Message = Mapping[str, str]

MAX_MESSAGES = 4_096
# Where a next turn of the same conversation can branch off.
_NUM_LAST_BOUNDARIES = 8

# What a decoder shows for bytes that are no character (yet).
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def _longest_token(core: Any) -> int | None:
    """Most characters of a text that one token can stand for; None where a normalizer may drop any number of them."""
    longest = max(len(token) for token in core.get_vocab(with_added_tokens=True))
    if core.normalizer is None:
        return longest
    # Composition makes one character of at most four.
    return 4 * longest if type(core.normalizer).__name__ == "NFC" else None


def _byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes each byte as a printable character: itself where it is one, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + at): byte for at, byte in enumerate(others)}


_BYTE_OF = _byte_of_character()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in tokens. `boundaries` are the offsets at which messages end: prefixes that later turns share."""

    token_ids: tuple[int, ...]
    boundaries: tuple[int, ...] = ()


class Tokenizer:
    """The model's own tokenizer. Encoding is O(characters); not safe for use by several threads at once."""

    def __init__(self, folder: Path) -> None:
        # Imported here: it takes seconds, and `cidery --help` should not.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it tells everyone that PyTorch is missing
        from transformers import AutoTokenizer

        try:
            self._hf: Any = AutoTokenizer.from_pretrained(str(folder))
        except (OSError, ValueError) as error:
            raise StartupFailed(f"tokenizer: {folder} holds none that transformers can load: {error}") from error
        if not self._hf.is_fast:
            raise StartupFailed(f"tokenizer: {folder} has no tokenizer.json form, which offsets and streaming need")
        self._core = self._hf.backend_tokenizer
        self._is_byte_level = "ByteLevel" in str(self._core.decoder)
        self._encoder = PieceEncoder(self._core)
        self.digest = tokenizer_digest(folder)
        self._longest_token = _longest_token(self._core)
        self.vocab_size = int(self._core.get_vocab_size(with_added_tokens=True))
        self.eos_token_id: int | None = self._hf.eos_token_id
        self.has_chat_template = bool(self._hf.chat_template)

    def check_length(self, num_characters: int, max_model_len: int) -> None:
        """Refuses, before it costs seconds to count its tokens, a text that has too many whatever they are."""
        if self._longest_token is None:
            return
        least_tokens = -(-num_characters // self._longest_token)
        if least_tokens > max_model_len:
            raise RequestTooLong(
                f"{num_characters} characters are at least {least_tokens} tokens, but the context holds {max_model_len}"
            )

    def encode(self, text: str) -> Prompt:
        """A plain prompt, with the special tokens that the tokenizer itself puts in front."""
        return Prompt(tuple(self._core.encode_batch([checked_text(text, "prompt")])[0].ids))

    def encode_chat(self, messages: Sequence[Message]) -> Prompt:
        """A conversation rendered by the chat template, ready for the assistant's turn.

        Raises InvalidRequest for an empty list and for whatever the template itself refuses.
        """
        if not messages:
            raise InvalidRequest("messages", "is empty; at least one message is needed")
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequest("messages", f"at most {MAX_MESSAGES} messages are allowed, got {len(messages)}")
        if not self.has_chat_template:
            raise InvalidRequest("messages", "this model has no chat template; use a plain prompt instead")
        for index, message in enumerate(messages):
            checked_text(message["role"], f"messages[{index}].role")
            checked_text(message["content"], f"messages[{index}].content")
        full = self._render(messages, add_generation_prompt=True)
        token_ids, starts = self._encoder.encode(full)
        return Prompt(tuple(token_ids), self._boundaries(messages, full, starts))

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """A piece of text as it would be within a prompt: no special tokens around it."""
        return tuple(self._core.encode(text, add_special_tokens=False).ids)

    def definition(self) -> str:
        """All that it is, as tokenizer.json has it, without padding and truncation."""
        parts = json.loads(self._core.to_str())
        return json.dumps(parts | {"padding": None, "truncation": None})

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out; incomplete characters become U+FFFD."""
        return str(self._core.decode(list(token_ids), skip_special_tokens=True))

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, special ones by their name."""
        return str(self._core.decode([token_id], skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to the text, which may be part of a character."""
        piece = self._core.id_to_token(token_id) or ""
        if self._is_byte_level and all(character in _BYTE_OF for character in piece):
            return bytes(_BYTE_OF[character] for character in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return self.token_text(token_id).encode()

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        try:
            return str(
                self._hf.apply_chat_template(
                    [dict(message) for message in messages],
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                )
            )
        except jinja2.TemplateError as error:
            raise InvalidRequest("messages", f"the model's chat template refuses them: {error}") from error

    def _boundaries(self, messages: Sequence[Message], full: str, starts: Sequence[int]) -> tuple[int, ...]:
        """Ends of the first message and of the last few: each costs a rendering of all before it.

        `starts` are the characters at which the tokens of `full` start.
        """
        ends: list[int] = []
        for count in sorted({1, *range(max(1, len(messages) - _NUM_LAST_BOUNDARIES + 1), len(messages) + 1)}):
            try:
                prefix = self._render(messages[:count], add_generation_prompt=False)
            except InvalidRequest:
                continue  # templates that insist on alternating roles refuse some prefixes
            if full.startswith(prefix):
                ends.append(bisect_left(starts, len(prefix)))
        return tuple(ends)


def checked_text(text: str, field: str) -> str:
    """Refuses lone surrogates, which JSON can carry but no UTF-8 can."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"is not valid Unicode: lone surrogate at character {error.start}") from error
    return text


class Detokenizer:
    """Turns a growing list of tokens into a growing text, never showing part of a character.

    Decoding starts a few tokens back (the last emitted piece), because a token's text can depend on the one before it;
    the method is that of the field's engines. Amortised O(1) a token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        # tokens[:prefix] no longer matter; of the text of tokens[prefix:], `shown` characters have been given out.
        self._prefix = 0
        self._read = 0
        self._shown = 0

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that has become certain."""
        self._tokens.extend(token_ids)
        text = self._tokenizer.decode(self._tokens[self._prefix :])
        # Only replacements at the end can still change: they may be the first bytes of a character that goes on
        # (as many replacements as bytes, where tokens are bytes).
        certain = text.rstrip(REPLACEMENT)
        new, self._shown = certain[self._shown :], max(self._shown, len(certain))
        if certain == text and new:
            self._prefix, self._read = self._read, len(self._tokens)
            self._shown = len(self._tokenizer.decode(self._tokens[self._prefix : self._read]))
        return new

    def flush(self) -> str:
        """What is left at the end, incomplete characters as U+FFFD."""
        text = self._tokenizer.decode(self._tokens[self._prefix :])
        new, self._shown = text[self._shown :], len(text)
        return new


class StopStrings:
    """Withholds text while it may be the beginning of a stop string; O(text * number of stops)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Text that may be shown; sets `hit` and ends before the first stop string once there is one."""
        if self.hit is not None or not text:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.hit = min(found, key=lambda pair: pair[0])
            shown, self._held = self._held[:at], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was withheld, at the end of a generation that met no stop string."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
