"""Draws the next token of every row of a step in one graph, whatever the mix of parameters.

Greedy rows take the argmax. The others are drawn by inverse CDF: one uniform number, a function of (seed, position)
alone, picks a token in the row's truncated distribution. How a row is computed depends on its own parameters and logits
only, so a row draws the same token in any batch.

Truncation works on the probabilities after temperature: `top_k` first, then `top_p` on what is left; `min_p` is
relative to the likeliest token. XTC comes last and looks at the probabilities of what is left without temperature, as
mlx-lm's does.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b

import mlx.core as mx
import numpy as np

from worker.row_rules import ShapedLogits

# Rows are cut from so many of their likeliest tokens: to find these takes a CPU a tenth of sorting the vocabulary. The
# few whose cut lies beyond them are drawn once more.
_NUM_CANDIDATES = 1024
MAX_TOP_LOGPROBS = 20

# The draw stays below 1 by at least the resolution of a float32 sum, so that it never lands past the last kept token.
_DRAW_BITS = 23
_DRAW_STREAM = b"cidery-draw-v1"
_XTC_STREAM = b"cidery-xtc-v1"


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Parameters of one row. `num_top_logprobs` None: no log-probabilities at all."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    num_top_logprobs: int | None
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    # Tokens that XTC never leaves out.
    xtc_exempt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Natural logarithms under the model's own distribution; `top` is likeliest first, ties by token id."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class _Method(IntEnum):
    GREEDY = 0
    # In vocabulary order, no sorting.
    PLAIN = 1
    # From the likeliest candidates, if the cut lies among them.
    CANDIDATES = 2
    SORTED = 3


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows that are drawn in the same way from the same array. Greedy ones need no `draws`."""

    method: _Method
    has_xtc: bool
    members: list[int]
    logits: mx.array
    rows: list[RowSampling]
    draws: list[float]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """`tokens [rows]` of a part, and whether each is final (None: all are)."""

    part: _Part
    tokens: mx.array
    is_final: mx.array | None


class Draw:
    """The graph of one step's sampling: evaluate `outputs`, then read `token_ids()` and `logprobs()`."""

    def __init__(
        self,
        logits: mx.array,
        rows: Sequence[RowSampling],
        positions: Sequence[int],
        shaped: ShapedLogits | None = None,
    ) -> None:
        """`logits [rows, vocab]` are the model's own; rows in `shaped` are drawn from theirs.

        `positions` are those of the tokens drawn.
        """
        self._rows = rows
        self._redrawn: dict[int, int] = {}
        self._drawn = [_draw(part) for part in _partition(logits, rows, positions, shaped)]
        self.outputs = [drawn.tokens for drawn in self._drawn]
        self.outputs += [drawn.is_final for drawn in self._drawn if drawn.is_final is not None]
        self._logprob_rows = [i for i, row in enumerate(rows) if row.num_top_logprobs is not None]
        if self._logprob_rows:
            self._all_logprobs, self._top_ids, self._top_logprobs, self._own_logprobs = self._logprob_graph(logits)
            self.outputs += [self._top_ids, self._top_logprobs, self._own_logprobs]

    def token_ids(self) -> list[int]:
        """The tokens drawn, in row order. Evaluates once more for rows whose cut lay beyond the candidates."""
        tokens = [0] * len(self._rows)
        for drawn in self._drawn:
            members = drawn.part.members
            of_part = np.array(drawn.tokens)
            if drawn.is_final is not None and not np.array(drawn.is_final).all():
                places = np.flatnonzero(~np.array(drawn.is_final)).tolist()
                of_part[places] = np.array(_draw_sorted(drawn.part, places))
                self._redrawn |= {members[place]: int(of_part[place]) for place in places}
            for row, token in zip(members, of_part.tolist(), strict=True):
                tokens[row] = token
        return tokens

    def logprobs(self) -> dict[int, RowLogprobs]:
        """By row, for the rows that asked; after `token_ids`."""
        if not self._logprob_rows:
            return {}
        result = {}
        own, ids, values = (np.array(a) for a in (self._own_logprobs, self._top_ids, self._top_logprobs))
        for place, row in enumerate(self._logprob_rows):
            pairs = zip(ids[place].tolist(), values[place].tolist(), strict=True)
            likeliest = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
            of_drawn = float(own[place])
            if row in self._redrawn:
                of_drawn = float(np.array(self._all_logprobs[place, self._redrawn[row]]))
            result[row] = RowLogprobs(of_drawn, tuple(likeliest[: self._rows[row].num_top_logprobs]))
        return result

    def _logprob_graph(self, logits: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        by_part = mx.concatenate([drawn.tokens for drawn in self._drawn])
        places = {row: place for place, row in enumerate(row for each in self._drawn for row in each.part.members)}
        drawn = by_part[mx.array([places[row] for row in self._logprob_rows], mx.int32)]
        asked = logits[mx.array(self._logprob_rows, mx.int32)].astype(mx.float32)
        logprobs = asked - mx.logsumexp(asked, axis=-1, keepdims=True)
        num_top = min(MAX_TOP_LOGPROBS, logits.shape[-1])
        top_ids = mx.argpartition(-logprobs, kth=num_top - 1, axis=-1)[:, :num_top]
        top_logprobs = mx.take_along_axis(logprobs, top_ids, axis=-1)
        return logprobs, top_ids, top_logprobs, mx.take_along_axis(logprobs, drawn[:, None], axis=-1)[:, 0]


def uniform(seed: int, position: int, stream: bytes = _DRAW_STREAM) -> float:
    """A random number of a draw, in [0, 1); equal on every machine. A draw has one of each stream."""
    digest = blake2b(struct.pack("<QQ", seed & (2**64 - 1), position), digest_size=8, person=stream).digest()
    return float(int.from_bytes(digest, "little") >> (64 - _DRAW_BITS)) / (1 << _DRAW_BITS)


def _partition(
    logits: mx.array, rows: Sequence[RowSampling], positions: Sequence[int], shaped: ShapedLogits | None
) -> list[_Part]:
    of_shaped = {row: place for place, row in enumerate(shaped.rows)} if shaped is not None else {}
    members: dict[tuple[_Method, bool, bool], list[int]] = {}
    for i, row in enumerate(rows):
        method = _method(row, logits.shape[-1])
        has_xtc = method is not _Method.GREEDY and _has_xtc(row, positions[i])
        members.setdefault((method, has_xtc, i in of_shaped), []).append(i)
    parts = []
    for (method, has_xtc, is_shaped), some in sorted(members.items()):
        source, places = (shaped.logits, [of_shaped[i] for i in some]) if is_shaped and shaped else (logits, some)
        picked = source if len(places) == len(source) else source[mx.array(places, mx.int32)]
        draws = [] if method is _Method.GREEDY else [uniform(rows[i].seed, positions[i]) for i in some]
        parts.append(_Part(method, has_xtc, some, picked, [rows[i] for i in some], draws))
    return parts


def _has_xtc(row: RowSampling, position: int) -> bool:
    return row.xtc_probability > 0 and uniform(row.seed, position, _XTC_STREAM) < row.xtc_probability


def _method(row: RowSampling, vocab_size: int) -> _Method:
    if row.temperature == 0 or row.top_k == 1:
        return _Method.GREEDY
    if row.top_k == 0 and row.top_p >= 1:
        return _Method.PLAIN
    return _Method.CANDIDATES if vocab_size > _NUM_CANDIDATES > row.top_k else _Method.SORTED


def _draw(part: _Part) -> _Drawn:
    if part.method is _Method.GREEDY:
        return _Drawn(part, mx.argmax(part.logits, axis=-1), None)
    logits = part.logits.astype(mx.float32)
    tokens, is_final = _pick(part.method, logits, part.rows, _column(part.draws), has_xtc=part.has_xtc)
    return _Drawn(part, tokens, is_final)


def _draw_sorted(part: _Part, places: list[int]) -> mx.array:
    """Tokens of some rows of a part, from the sorted vocabulary."""
    logits = part.logits[mx.array(places, mx.int32)].astype(mx.float32)
    rows, draws = [part.rows[place] for place in places], _column([part.draws[place] for place in places])
    return _pick(_Method.SORTED, logits, rows, draws, has_xtc=part.has_xtc)[0]


def _pick(
    method: _Method, logits: mx.array, rows: Sequence[RowSampling], draws: mx.array, *, has_xtc: bool
) -> tuple[mx.array, mx.array | None]:
    """Token ids `[rows]`, and whether each is final (None: all are)."""
    # The maximum goes first: a tiny temperature would overflow otherwise.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / _column([row.temperature for row in rows])
    probs = mx.softmax(scaled, axis=-1, precise=True)
    min_p = _column([row.min_p for row in rows])
    enough = min_p * probs.max(axis=-1, keepdims=True)
    if method is _Method.PLAIN:
        kept = mx.where(probs >= enough, probs, 0)
        if has_xtc:
            kept = _leave_out(kept, logits, mx.arange(logits.shape[-1])[None], rows)
        return _invert(kept, draws)[:, 0], None
    ids = _likeliest(probs, _NUM_CANDIDATES) if method is _Method.CANDIDATES else mx.argsort(-probs, axis=-1)
    kept, is_final = _truncate(probs, ids, enough, rows)
    if has_xtc:
        kept = _leave_out(kept, mx.take_along_axis(logits, ids, axis=-1), ids, rows)
    tokens = mx.take_along_axis(ids, _invert(kept, draws), axis=-1)[:, 0]
    return tokens, is_final if method is _Method.CANDIDATES else None


def _likeliest(probs: mx.array, num: int) -> mx.array:
    """Ids of the `num` likeliest tokens, likeliest first, equals by id: as a stable sort of the vocabulary would."""
    candidates = mx.sort(mx.argpartition(-probs, kth=num - 1, axis=-1)[:, :num], axis=-1)
    order = mx.argsort(-mx.take_along_axis(probs, candidates, axis=-1), axis=-1)
    return mx.take_along_axis(candidates, order, axis=-1)


def _truncate(
    probs: mx.array, ids: mx.array, enough: mx.array, rows: Sequence[RowSampling]
) -> tuple[mx.array, mx.array]:
    """Probabilities of `ids`, likeliest first, with 0 for what the rows' parameters cut off; the likeliest stays.

    Also for each row whether `ids` had all that decides: the last of them is less likely than any that is kept.
    """
    sorted_probs = mx.take_along_axis(probs, ids, axis=-1)
    rank = mx.arange(ids.shape[-1])
    top_k = mx.array([row.top_k or probs.shape[-1] for row in rows])[:, None]
    kept = mx.where((rank < top_k) & (sorted_probs >= enough), sorted_probs, 0)
    # Without a top_k the share is one of all that is likely enough, candidate or not.
    all_enough = mx.where(probs >= enough, probs, 0).sum(axis=-1, keepdims=True)
    total = mx.where(top_k < probs.shape[-1], kept.sum(axis=-1, keepdims=True), all_enough)
    before = mx.cumsum(kept, axis=-1, inclusive=False)
    top_p = _column([row.top_p for row in rows])
    # Without a share nothing may go because the running sum is rounded: XTC weighs the rest by another temperature.
    kept = mx.where((before < top_p * total) | (top_p >= 1) | (rank == 0), kept, 0)
    least = mx.where(kept > 0, kept, mx.inf).min(axis=-1)
    return kept, least > sorted_probs[:, -1]


def _leave_out(kept: mx.array, logits: mx.array, ids: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """XTC: of the tokens still kept that are likelier than the threshold, only the least likely stays."""
    probs = mx.softmax(mx.where(kept > 0, logits, -mx.inf), axis=-1, precise=True)
    threshold = _column([row.xtc_threshold for row in rows])
    least = mx.where(probs > threshold, probs, mx.inf).min(axis=-1, keepdims=True)
    is_out = probs > least
    for exempt in zip(*_padded([row.xtc_exempt for row in rows]), strict=True):
        is_out = is_out & (ids != mx.array(exempt, mx.int32)[:, None])
    return mx.where(is_out, 0, kept)


def _padded(lists: Sequence[Sequence[int]]) -> list[list[int]]:
    """Of one length, filled up with an id that no token has."""
    longest = max(len(each) for each in lists)
    return [[*each, *[-1] * (longest - len(each))] for each in lists]


def _invert(weights: mx.array, draws: mx.array) -> mx.array:
    """Place `[rows, 1]` at which the running sum of `weights` passes the share `draws` of the total."""
    reached = mx.cumsum(weights, axis=-1)
    return (reached <= draws * reached[:, -1:]).sum(axis=-1, keepdims=True)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(np.array(values, np.float32)[:, None])
