"""Holds answers to a grammar: which tokens may come next, by llguidance.

All of a row's state follows from its grammar and its tokens. Masks of all rows are computed in one call, in Rust and
in parallel, while the device runs the forward; what takes longer (the vocabulary's table, compiling a grammar) runs in
a thread and is waited for where the sequence first samples.

Tokens that a grammar forces are drawn like any other; where a request may guess tokens, they go along as drafts of a
step that verifies several rows (`worker/speculation.py`), and what is guessed otherwise is cut where the grammar does
not allow it.

The table is not kept on disk: that would save two thirds of the second of CPU that it takes, and need calls back into
Python from within masks to spell forced text as the tokenizer does.
"""

import json
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

_MAX_KEPT_GRAMMARS = 64
_MAX_MESSAGE = 500
# As in cluster/grammars.py. A state takes 1 to 2 kB; what needs more of them than this is somebody's joke.
_LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)


class GrammarState:
    """Where one answer is in its grammar. `failure` is why it can't go on, empty as long as it can."""

    def __init__(self, matcher: "Future[LLMatcher]") -> None:
        self._future = matcher
        self.failure = ""

    def matcher(self) -> LLMatcher | None:
        """Waits until it is compiled; None, with `failure` set, if that went wrong."""
        try:
            return self._future.result()
        except ValueError as error:
            self.failure = f"the grammar table could not be built: {error}"
            return None

    def take(self, token_id: int) -> None:
        """The answer has one more token; it was allowed."""
        matcher = self.matcher()
        if matcher is not None:
            matcher.consume_token(token_id)

    def num_allowed(self, token_ids: list[int]) -> int:
        """How many of these tokens may follow each other."""
        matcher = self.matcher()
        return 0 if matcher is None else matcher.validate_tokens(token_ids)

    def forced(self) -> list[int]:
        """Tokens that the grammar leaves no choice about, as the tokenizer would write them."""
        matcher = self.matcher()
        return [] if matcher is None else matcher.compute_ff_tokens()

    def copy(self) -> "GrammarState":
        """The same, to go on by itself."""
        future: Future[LLMatcher] = Future()
        matcher = self.matcher()
        if matcher is not None:
            future.set_result(matcher.deep_copy())
        other = GrammarState(future)
        other.failure = self.failure
        return other

    def check(self) -> None:
        """Sets `failure` if the grammar broke off: too complex at this place, or not the one that the tokens follow."""
        matcher = self.matcher()
        if matcher is not None and matcher.is_error():
            self.failure = error_line(matcher.get_error())


class GrammarTable:
    """One model's tokens in the form that masks are computed from.

    Building it takes seconds for a large vocabulary, without holding the interpreter: it is begun here in a thread, and
    waited for by the first sequence with a grammar.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._vocab_size = vocab_size
        self._executor = LLExecutor()
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._tokenizer = self._pool.submit(_build, folder, vocab_size, eos_token_ids)

    def begin(self, grammar: str, answer: Sequence[int]) -> GrammarState:
        """For a sequence that has generated `answer` so far. Doesn't block."""
        return GrammarState(self._pool.submit(self._start, grammar, answer))

    def masks(self, states: Sequence[GrammarState]) -> NDArray[np.int32]:
        """One bit for each token that may come next, `[rows, ceil(vocab / 32)]`, the lowest bit first.

        Of a state that has failed, the row means nothing.
        """
        masks = np.full((len(states), -(-self._vocab_size // 32)), -1, np.int32)
        matchers = [(matcher, row) for row, state in enumerate(states) if (matcher := state.matcher()) is not None]
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, masks.shape[1] * 4, len(states))
        if self._vocab_size % 32:
            masks[:, -1] &= (1 << self._vocab_size % 32) - 1
        for state in states:
            state.check()
        return masks

    def _start(self, grammar: str, answer: Sequence[int]) -> LLMatcher:
        """Only in the pool's one thread."""
        first = self._compiled.get(grammar)
        if first is None:
            first = LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=_LIMITS)
            self._compiled[grammar] = first
            if len(self._compiled) > _MAX_KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        matcher = first.deep_copy()
        if answer:
            matcher.consume_tokens(list(answer))
        return matcher


def error_line(message: str) -> str:
    """What llguidance says went wrong, without the dump of its state."""
    return message.split("\n<", 1)[0].strip()[:_MAX_MESSAGE]


def _build(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    started_s = time.monotonic()
    table = LLTokenizer(_tokenizer_json(folder), n_vocab=vocab_size, eos_token=list(eos_token_ids))
    logger.info("grammar table tokens=%d build_s=%.1f", vocab_size, time.monotonic() - started_s)
    return table


def _tokenizer_json(folder: Path) -> str:
    path = folder / "tokenizer.json"
    if path.is_file():
        definition = json.loads(path.read_text())
    else:
        from transformers import AutoTokenizer

        definition = json.loads(AutoTokenizer.from_pretrained(str(folder)).backend_tokenizer.to_str())
    # They would change what the table learns of the tokenizer.
    return json.dumps(definition | {"padding": None, "truncation": None})
