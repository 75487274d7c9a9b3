"""Draws the next token of every row of a step in one graph, whatever the mix of parameters.

Greedy rows take the argmax. The others are drawn by inverse CDF: one uniform number, a function of (seed, position)
alone, picks a token in the row's truncated distribution. How a row is computed depends on its own parameters only, so
a row draws the same token in any batch.

Truncation works on the probabilities after temperature: `top_k` first, then `top_p` on what is left; `min_p` is
relative to the likeliest token.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b

import mlx.core as mx
import numpy as np

# Rows with at most this top_k are cut from so many candidates instead of a sorted vocabulary. The margin keeps the
# choice among equal logits at the cut out of the partition's hands.
_MAX_PARTITIONED_TOP_K = 64
_NUM_CANDIDATES = 256
MAX_TOP_LOGPROBS = 20

# The draw stays below 1 by at least the resolution of a float32 sum, so that it never lands past the last kept token.
_DRAW_BITS = 23


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Parameters of one row. `num_top_logprobs` None: no log-probabilities at all."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    num_top_logprobs: int | None


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Natural logarithms under the model's own distribution; `top` is likeliest first, ties by token id."""

    logprob: float
    top: tuple[tuple[int, float], ...]


class _Method(IntEnum):
    GREEDY = 0
    # In vocabulary order, no sorting.
    PLAIN = 1
    # From the likeliest candidates.
    PARTITIONED = 2
    SORTED = 3


class Draw:
    """The graph of one step's sampling: evaluate `outputs`, then read `token_ids()` and `logprobs()`."""

    def __init__(self, logits: mx.array, rows: Sequence[RowSampling], positions: Sequence[int]) -> None:
        """`logits [rows, vocab]`; `positions` are those of the tokens drawn."""
        self._rows = rows
        methods = [_method(row, logits.shape[-1]) for row in rows]
        self._parts: list[tuple[list[int], mx.array]] = []
        for method in sorted(set(methods)):
            members = [i for i, m in enumerate(methods) if m == method]
            part = logits if len(members) == len(rows) else logits[mx.array(members, mx.int32)]
            picked = _pick(method, part, [rows[i] for i in members], [positions[i] for i in members])
            self._parts.append((members, picked))
        self.outputs = [picked for _, picked in self._parts]
        self._logprob_rows = [i for i, row in enumerate(rows) if row.num_top_logprobs is not None]
        if self._logprob_rows:
            self._top_ids, self._top_logprobs, self._own_logprobs = self._logprob_graph(logits)
            self.outputs += [self._top_ids, self._top_logprobs, self._own_logprobs]

    def token_ids(self) -> list[int]:
        """The tokens drawn, in row order."""
        tokens = [0] * len(self._rows)
        for members, picked in self._parts:
            for row, token in zip(members, np.array(picked).tolist(), strict=True):
                tokens[row] = token
        return tokens

    def logprobs(self) -> dict[int, RowLogprobs]:
        """By row, for the rows that asked."""
        if not self._logprob_rows:
            return {}
        result = {}
        own, ids, values = (np.array(a) for a in (self._own_logprobs, self._top_ids, self._top_logprobs))
        for place, row in enumerate(self._logprob_rows):
            pairs = zip(ids[place].tolist(), values[place].tolist(), strict=True)
            likeliest = sorted(pairs, key=lambda pair: (-pair[1], pair[0]))
            result[row] = RowLogprobs(float(own[place]), tuple(likeliest[: self._rows[row].num_top_logprobs]))
        return result

    def _logprob_graph(self, logits: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        by_part = mx.concatenate([picked for _, picked in self._parts])
        places = {row: place for place, row in enumerate(row for members, _ in self._parts for row in members)}
        drawn = by_part[mx.array([places[row] for row in self._logprob_rows], mx.int32)]
        asked = logits[mx.array(self._logprob_rows, mx.int32)].astype(mx.float32)
        logprobs = asked - mx.logsumexp(asked, axis=-1, keepdims=True)
        num_top = min(MAX_TOP_LOGPROBS, logits.shape[-1])
        top_ids = mx.argpartition(-logprobs, kth=num_top - 1, axis=-1)[:, :num_top]
        top_logprobs = mx.take_along_axis(logprobs, top_ids, axis=-1)
        return top_ids, top_logprobs, mx.take_along_axis(logprobs, drawn[:, None], axis=-1)[:, 0]


def uniform(seed: int, position: int) -> float:
    """The one random number of a draw, in [0, 1); equal on every machine."""
    digest = blake2b(struct.pack("<QQ", seed & (2**64 - 1), position), digest_size=8, person=b"cidery-draw-v1").digest()
    return float(int.from_bytes(digest, "little") >> (64 - _DRAW_BITS)) / (1 << _DRAW_BITS)


def _method(row: RowSampling, vocab_size: int) -> _Method:
    if row.temperature == 0 or row.top_k == 1:
        return _Method.GREEDY
    if row.top_k == 0 and row.top_p >= 1:
        return _Method.PLAIN
    if 0 < row.top_k <= _MAX_PARTITIONED_TOP_K and vocab_size > _NUM_CANDIDATES:
        return _Method.PARTITIONED
    return _Method.SORTED


def _pick(method: _Method, logits: mx.array, rows: Sequence[RowSampling], positions: Sequence[int]) -> mx.array:
    """Token ids `[rows]`."""
    if method is _Method.GREEDY:
        return mx.argmax(logits, axis=-1)
    scaled = logits.astype(mx.float32)
    # The maximum goes first: a tiny temperature would overflow otherwise.
    scaled = (scaled - scaled.max(axis=-1, keepdims=True)) / _column([row.temperature for row in rows])
    probs = mx.softmax(scaled, axis=-1, precise=True)
    draws = _column([uniform(row.seed, position) for row, position in zip(rows, positions, strict=True)])
    min_p = _column([row.min_p for row in rows])
    if method is _Method.PLAIN:
        kept = mx.where(probs >= min_p * probs.max(axis=-1, keepdims=True), probs, 0)
        return _invert(kept, draws)[:, 0]
    ids = _likeliest(probs, _NUM_CANDIDATES) if method is _Method.PARTITIONED else mx.argsort(-probs, axis=-1)
    probs = mx.take_along_axis(probs, ids, axis=-1)
    place = _invert(_truncate(probs, rows, min_p), draws)
    return mx.take_along_axis(ids, place, axis=-1)[:, 0]


def _likeliest(probs: mx.array, num: int) -> mx.array:
    """Ids of the `num` likeliest tokens, likeliest first, equals by id: as a stable sort of the vocabulary would."""
    candidates = mx.sort(mx.argpartition(-probs, kth=num - 1, axis=-1)[:, :num], axis=-1)
    order = mx.argsort(-mx.take_along_axis(probs, candidates, axis=-1), axis=-1)
    return mx.take_along_axis(candidates, order, axis=-1)


def _truncate(probs: mx.array, rows: Sequence[RowSampling], min_p: mx.array) -> mx.array:
    """Zero what the row's parameters cut off; `probs` come likeliest first. The likeliest always stays."""
    size = probs.shape[-1]
    rank = mx.arange(size)
    top_k = mx.array([row.top_k or size for row in rows])[:, None]
    probs = mx.where((rank < top_k) & (probs >= min_p * probs[:, :1]), probs, 0)
    before = mx.cumsum(probs, axis=-1, inclusive=False)
    reach = _column([row.top_p for row in rows]) * probs.sum(axis=-1, keepdims=True)
    return mx.where((before < reach) | (rank == 0), probs, 0)


def _invert(weights: mx.array, draws: mx.array) -> mx.array:
    """Place `[rows, 1]` at which the running sum of `weights` passes the share `draws` of the total."""
    reached = mx.cumsum(weights, axis=-1)
    return (reached <= draws * reached[:, -1:]).sum(axis=-1, keepdims=True)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(np.array(values, np.float32)[:, None])
