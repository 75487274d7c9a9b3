"""Decode over blocks where they lie, for MLX's CPU build: without a copy of the keys and values that a row sees.

The blocks of a long prompt that ran by itself lie in a row, and a slice of a pool is no copy. Each block and head is
then a small product of its own, which takes two thirds (250 blocks) to three fifths (500) of the time of gathering
them and attending to the copy. What lies elsewhere is gathered and treated alike.
"""

from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from worker import cpu_math

# Shorter runs are gathered: each part costs some ten operations more. Fifteen runs of 16 blocks were a quarter slower
# than a gather of all.
_MIN_RUN_BLOCKS = 96


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """The blocks that one row sees, in parts: runs in a row `[first, last)`, and ids of all others.

    The order of keys does not matter to attention, but their last block may not be full, so it comes last.
    """

    runs: tuple[tuple[int, int], ...]
    others: mx.array

    def of(self, pool: mx.array, num_kv_heads: int) -> list[mx.array]:
        """Their keys, or values, by part: `[blocks, num_kv_heads, block_size, head_dim]`."""
        parts = [pool[first * num_kv_heads : last * num_kv_heads] for first, last in self.runs]
        parts.append(pool.reshape(-1, num_kv_heads, *pool.shape[1:])[self.others])
        return [part.reshape(-1, num_kv_heads, *pool.shape[1:]) for part in parts]


def find_runs(table: NDArray[np.int32]) -> BlockRuns | None:
    """None if less than half of the blocks lie in long runs, or on a GPU. O(blocks)."""
    if len(table) <= _MIN_RUN_BLOCKS or not cpu_math.is_available():
        return None
    body = table[:-1]
    edges = np.flatnonzero(np.diff(body) != 1) + 1
    firsts, lasts = np.concatenate([[0], edges]), np.concatenate([edges, [len(body)]])
    is_long = lasts - firsts >= _MIN_RUN_BLOCKS
    if 2 * int((lasts - firsts)[is_long].sum()) < len(table):
        return None
    runs = tuple((int(body[a]), int(body[b - 1]) + 1) for a, b in zip(firsts[is_long], lasts[is_long], strict=True))
    others = [table[a:b] for a, b in zip(firsts[~is_long], lasts[~is_long], strict=True)]
    return BlockRuns(runs, mx.array(np.concatenate([*others, table[-1:]])))


def decode(
    queries: mx.array,
    key_pool: mx.array,
    value_pool: mx.array,
    runs: BlockRuns,
    num_keys: int,
    num_kv_heads: int,
    scale: float,
) -> mx.array:
    """One row's attention over its first `num_keys` keys. Shapes: queries and result `[1, num_heads, 1, head_dim]`."""
    grouped = (queries * (scale * cpu_math.LOG2_E)).reshape(1, num_kv_heads, -1, queries.shape[-1])
    by_block = [grouped @ keys.swapaxes(-1, -2) for keys in runs.of(key_pool, num_kv_heads)]
    # Slots behind the last key may hold anything, and have no part in the weights.
    weights, total = _weights(mx.concatenate([_by_head(part) for part in by_block], axis=-1)[..., :num_keys])
    num_behind = sum(part.shape[0] * part.shape[-1] for part in by_block) - num_keys
    if num_behind:
        weights = mx.concatenate([weights, mx.zeros((*weights.shape[:2], num_behind), weights.dtype)], axis=-1)
    output, first = mx.zeros(()), 0
    for part, values in zip(by_block, runs.of(value_pool, num_kv_heads), strict=True):
        num_blocks, _, num_queries, block_size = part.shape
        last = first + num_blocks * block_size
        of_part = weights[..., first:last].reshape(num_kv_heads, num_queries, num_blocks, block_size)
        output = output + (of_part.transpose(2, 0, 1, 3) @ values).sum(axis=0)
        first = last
    return (output / total).reshape(*queries.shape[:-1], value_pool.shape[-1])


def _by_head(scores: mx.array) -> mx.array:
    """`[blocks, heads, queries, block_size]` to `[heads, queries, keys]`."""
    return scores.transpose(1, 2, 0, 3).reshape(*scores.shape[1:3], -1)


def _weights(scores: mx.array) -> tuple[mx.array, mx.array]:
    """Powers of two relative to the largest, and their sums."""
    weights = cpu_math.exp2(scores - scores.max(axis=-1, keepdims=True))
    return weights, weights.sum(axis=-1, keepdims=True)
