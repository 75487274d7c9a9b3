"""What a sequence's own rules make of the model's logits before its token is drawn: bias, bans, grammar, penalties.

Everything is rebuilt from the sequence's tokens. A row without rules takes no part: the logits of those with rules are
a copy of their own.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from protos.cidery.v1.sampling_pb2 import SamplingParams
from protos.cidery.worker.v1.worker_pb2 import NewSequence
from worker.errors import ProtocolError
from worker.grammar import GrammarState, GrammarTable
from worker.penalties import Penalties, TokenCounts, penalise

# Of numbers, so that it needs no evaluation, which would belong to whoever imports this first.
_BITS = mx.array(list(range(8)), mx.uint8)


class RowRules:
    """The rules of one sequence and what they need to know of its answer so far."""

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int], stop_token_ids: frozenset[int]
    ) -> None:
        penalties = _penalties(params)
        self.counts = None if penalties.is_off else TokenCounts(penalties, prompt, answer)
        self.grammar: GrammarState | None = None
        self._num_answer = len(answer)
        self._min_tokens = params.min_tokens
        self.stops = tuple(stop_token_ids)
        self._sequences = [tuple(sequence.token_ids) for sequence in params.banned_sequences]
        banned = [*params.banned_token_ids, *(tokens[0] for tokens in self._sequences if len(tokens) == 1)]
        self._sequences = [tokens for tokens in self._sequences if len(tokens) > 1]
        longest = max((len(tokens) for tokens in self._sequences), default=1)
        self._tail = deque(answer, maxlen=longest - 1)
        self._static_ids = np.array([*params.logit_bias.keys(), *banned], np.int32)
        self._static_values = np.array([*params.logit_bias.values(), *[-np.inf] * len(banned)], np.float32)

    @property
    def failure(self) -> str:
        """Why the sequence can't go on; empty as long as it can."""
        return self.grammar.failure if self.grammar is not None else ""

    def along(self, drafts: Sequence[int]) -> "list[RowRules]":
        """These rules, and what they would be after each draft; the drafts must be ones that the grammar allows."""
        steps = [self]
        for token_id in drafts:
            after = steps[-1]._copy()
            after.take(token_id)
            steps.append(after)
        return steps

    def allowed(self, drafts: list[int]) -> list[int]:
        """The first of these tokens that the grammar lets follow each other."""
        return drafts if self.grammar is None else drafts[: self.grammar.num_allowed(drafts)]

    def forced(self) -> list[int]:
        """Tokens that the grammar leaves no choice about."""
        return [] if self.grammar is None else self.grammar.forced()

    def _copy(self) -> "RowRules":
        """O(different tokens) where tokens are counted."""
        other = copy(self)
        other._tail = self._tail.copy()
        other.counts = None if self.counts is None else self.counts.copy()
        other.grammar = None if self.grammar is None else self.grammar.copy()
        return other

    def take(self, token_id: int) -> None:
        """The answer has one more token and goes on."""
        self._num_answer += 1
        self._tail.append(token_id)
        if self.counts is not None:
            self.counts.add(token_id)
        if self.grammar is not None:
            self.grammar.take(token_id)

    @property
    def is_too_short(self) -> bool:
        """The answer must not end yet, if anything else can follow."""
        return self._num_answer < self._min_tokens

    def additions(self, *, must_end: bool) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Token ids, some of them more than once, and what is added to their logits before anything else.

        `must_end`: the grammar leaves nothing but an end token.
        """
        banned = self._banned_now(must_end=must_end)
        if not banned:
            return self._static_ids, self._static_values
        values = np.concatenate([self._static_values, np.full(len(banned), -np.inf, np.float32)])
        return np.concatenate([self._static_ids, np.array(banned, np.int32)]), values

    def _banned_now(self, *, must_end: bool) -> list[int]:
        """Tokens that would end the answer too early, or complete a banned sequence."""
        banned = list(self.stops) if self.is_too_short and not must_end else []
        tail = tuple(self._tail) if self._sequences else ()
        for sequence in self._sequences:
            if tail[-(len(sequence) - 1) :] == sequence[:-1]:
                banned.append(sequence[-1])
        return banned


def make_rules(message: NewSequence, vocab_size: int, grammars: GrammarTable | None) -> RowRules | None:
    """The rules of a sequence; None if it has none. Raises ProtocolError if they can't be kept."""
    params = message.sampling
    has_lists = params.logit_bias or params.banned_token_ids or params.banned_sequences
    if _penalties(params).is_off and not (has_lists or params.min_tokens or params.compiled_grammar):
        return None
    _check(message, vocab_size)
    prompt, answer = message.token_ids[: message.num_prompt_tokens], message.token_ids[message.num_prompt_tokens :]
    # A model may name end tokens that its output doesn't have.
    stops = frozenset(token for token in message.stop_token_ids if token < vocab_size)
    rules = RowRules(params, prompt, answer, stops)
    if params.compiled_grammar:
        if grammars is None:
            what = f"sequence {message.seq_id} has a grammar"
            raise ProtocolError(f"{what}, but this worker has no tokenizer to follow it with")
        rules.grammar = grammars.begin(params.compiled_grammar, answer)
    return rules


def _check(message: NewSequence, vocab_size: int) -> None:
    params = message.sampling
    named = (*params.logit_bias, *params.banned_token_ids)
    for token_id in (*named, *(token for sequence in params.banned_sequences for token in sequence.token_ids)):
        if token_id >= vocab_size:
            what = f"sequence {message.seq_id}: token id {token_id} of its rules"
            raise ProtocolError(f"{what} is not below the vocabulary's {vocab_size}")
    if not all(sequence.token_ids for sequence in params.banned_sequences):
        raise ProtocolError(f"sequence {message.seq_id}: a banned sequence is empty; at least 1 token is needed")
    if not _penalties(params).repetition > 0:
        value = params.repetition_penalty
        raise ProtocolError(f"sequence {message.seq_id}: repetition_penalty is {value}; it must be greater than 0")


@dataclass(frozen=True, slots=True)
class ShapedLogits:
    """`logits [len(rows), vocab]` of float32 for the rows that have rules."""

    rows: list[int]
    logits: mx.array


def shape(
    logits: mx.array,
    rules: Sequence[RowRules | None],
    grammars: GrammarTable | None,
    begin: Callable[[Iterable[mx.array]], None],
) -> ShapedLogits | None:
    """Apply the rules of each row of `logits [rows, vocab]`; None if no row has any.

    `begin` is asked to compute the logits if there is something to do meanwhile.
    """
    rows = [row for row, of_row in enumerate(rules) if of_row is not None]
    if not rows:
        return None
    shaped = [of_row for of_row in rules if of_row is not None]
    held = [(row, of_row.grammar) for row, of_row in enumerate(shaped) if of_row.grammar is not None]
    masks = None
    must_end: set[int] = set()
    if held:
        assert grammars is not None, "make_rules refuses grammars without a table"
        # The device begins with the forward now; the masks are computed meanwhile.
        begin([logits])
        bits = grammars.masks([state for _, state in held]).view(np.uint8)
        must_end = {row for (row, _), own in zip(held, bits, strict=True) if _only_ends(shaped[row], own)}
        masks = mx.array(bits)
    picked = (logits if len(rows) == len(rules) else logits[mx.array(rows, mx.int32)]).astype(mx.float32)
    picked = _add(picked, [of_row.additions(must_end=row in must_end) for row, of_row in enumerate(shaped)])
    if masks is not None:
        picked = _mask(picked, [row for row, _ in held], masks)
    counted = [(row, of_row.counts) for row, of_row in enumerate(shaped) if of_row.counts is not None]
    return ShapedLogits(rows, penalise(picked, counted))


def _only_ends(rules: RowRules, bits: NDArray[np.uint8]) -> bool:
    """Whether a mask has nothing but stop tokens; asked only of an answer that is too short to end."""
    if not rules.is_too_short:
        return False
    others = bits.copy()
    for token in rules.stops:
        others[token // 8] &= ~np.uint8(1 << token % 8)
    return not others.any()


def _add(logits: mx.array, additions: Sequence[tuple[NDArray[np.int32], NDArray[np.float32]]]) -> mx.array:
    vocab_size = logits.shape[-1]
    ids = np.concatenate([row * vocab_size + ids for row, (ids, _) in enumerate(additions)])
    if not len(ids):
        return logits
    values = mx.array(np.concatenate([values for _, values in additions]))
    return logits.reshape(-1).at[mx.array(ids.astype(np.int32))].add(values).reshape(logits.shape)


def _mask(logits: mx.array, rows: list[int], masks: mx.array) -> mx.array:
    """Leave of some rows what their bytes of `masks`, lowest bit first, allow."""
    is_all = len(rows) == len(logits)
    held = logits if is_all else logits[mx.array(rows, mx.int32)]
    bits = ((masks[:, :, None] >> _BITS) & 1).reshape(len(rows), -1)[:, : logits.shape[-1]]
    held = mx.where(bits.astype(mx.bool_), held, -mx.inf)
    if is_all:
        return held
    result = mx.array(logits)
    result[mx.array(rows, mx.int32)] = held
    return result


def _penalties(params: SamplingParams) -> Penalties:
    repetition = params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
    return Penalties(params.frequency_penalty, params.presence_penalty, repetition)
