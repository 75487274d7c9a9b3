"""Grammars that an answer must match: brought into llguidance's form, and compiled here before anything is queued.

What compiles here compiles on the Macs: they have the same tokenizer and the same limits.
"""

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from cluster.errors import InvalidRequest
from cluster.tokenizer import Tokenizer, checked_text

MAX_GRAMMAR_CHARACTERS = 256 * 1024
MAX_CHOICES = 1024
# Rules of a Lark grammar, and references of a schema. The compiler recurses from one to the next: a chain of 3,000 of
# them overflows a thread's stack and ends the process.
MAX_LINKS = 1000
# Between JSON's tokens. A model may write on one line or many, but must come to an end: without a bound, a weak one
# fills its answer with blanks.
_WHITESPACE = r"( |\n {0,64})?"
# What may hold a colon that ends no rule's name.
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*')
_MAX_KEPT = 256
_MAX_LINE = 160
_MAX_MESSAGE_LINES = 12
# As in worker/grammar.py. A state takes 1 to 2 kB; what needs more of them than this is somebody's joke.
_LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)


@dataclass(frozen=True, slots=True)
class Grammar:
    """`source` in llguidance's form; `field` is where the request has it, as the API spells it."""

    field: str
    source: str


def json_schema(field: str, schema: object) -> Grammar:
    """Of a schema as a JSON value. Raises InvalidRequest."""
    if not isinstance(schema, dict):
        raise InvalidRequest(field, f"must be a JSON schema: an object, got {json.dumps(schema)[:60]}")
    text = _check_size(field, json.dumps(schema))
    _check_links(field, text.count('"$ref"'), "references ($ref)")
    return Grammar(field, LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": _WHITESPACE}))


def json_schema_text(field: str, text: str) -> Grammar:
    """Of a schema as JSON. Raises InvalidRequest."""
    try:
        schema = json.loads(checked_text(text, field))
    except ValueError as error:
        raise InvalidRequest(field, f"is not JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequest(field, "is nested too deeply") from error
    return json_schema(field, schema)


def json_object(field: str) -> Grammar:
    """Any JSON object."""
    return json_schema(field, {"type": "object"})


def regex(field: str, pattern: str) -> Grammar:
    """Text that the pattern matches from its first to its last character. Raises InvalidRequest."""
    return Grammar(field, LLMatcher.grammar_from_regex(_check_size(field, pattern)))


def choice(field: str, texts: Sequence[str]) -> Grammar:
    """One of the texts. Raises InvalidRequest."""
    if not texts or len(texts) > MAX_CHOICES:
        raise InvalidRequest(field, f"must have from 1 to {MAX_CHOICES} texts, got {len(texts)}")
    for index, text in enumerate(texts):
        if not checked_text(text, f"{field}[{index}]"):
            raise InvalidRequest(f"{field}[{index}]", "is empty; at least one character is needed")
    return lark(field, "start: " + " | ".join(json.dumps(text) for text in texts))


def lark(field: str, text: str) -> Grammar:
    """A context-free grammar whose start is `start`. Raises InvalidRequest."""
    _check_links(field, _QUOTED.sub("", _check_size(field, text)).count(":"), "rules")
    return Grammar(field, LLMatcher.grammar_from_lark(text))


class GrammarChecker:
    """Compiles grammars with one model's tokens; what was found good lately is not compiled again.

    The model's table takes seconds of another thread, begun by `start`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table: asyncio.Future[LLTokenizer] | None = None
        self._good: OrderedDict[str, None] = OrderedDict()

    def start(self) -> None:
        """Begin to build the table; on the event loop."""
        self._table = asyncio.ensure_future(asyncio.to_thread(self._build))

    async def check(self, grammar: Grammar) -> None:
        """Raises InvalidRequest with the compiler's message."""
        if grammar.source in self._good:
            self._good.move_to_end(grammar.source)
            return
        assert self._table is not None, "start comes first"
        try:
            table = await asyncio.shield(self._table)
        except ValueError as error:
            raise InvalidRequest(
                grammar.field, f"this model's tokenizer can't be held to a grammar: {error}"
            ) from error
        message = await asyncio.to_thread(self._compile, table, grammar.source)
        if message:
            raise InvalidRequest(grammar.field, f"can't be compiled: {message}")
        self._good[grammar.source] = None
        if len(self._good) > _MAX_KEPT:
            self._good.popitem(last=False)

    def _build(self) -> LLTokenizer:
        end = self._tokenizer.eos_token_id
        return LLTokenizer(self._tokenizer.definition(), eos_token=None if end is None else [end])

    def _compile(self, table: LLTokenizer, source: str) -> str:
        """What is wrong; empty if nothing is."""
        matcher = LLMatcher(table, source, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()
            if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
                return f"no answer matches it: {_short(matcher.get_error()) or matcher.stop_reason()}"
        return _short(matcher.get_error())


def _short(message: str) -> str:
    """Without the dump of its state, and with long quotes of the grammar cut."""
    lines = message.split("\n<", 1)[0].strip().splitlines()[:_MAX_MESSAGE_LINES]
    return "\n".join(line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}…" for line in lines)


def _check_links(field: str, num_links: int, what: str) -> None:
    if num_links > MAX_LINKS:
        raise InvalidRequest(field, f"may have at most {MAX_LINKS} {what}, got {num_links}")


def _check_size(field: str, text: str) -> str:
    if not checked_text(text, field):
        raise InvalidRequest(field, "is empty")
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(field, f"may have at most {MAX_GRAMMAR_CHARACTERS} characters, got {len(text)}")
    return text
