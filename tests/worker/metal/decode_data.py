"""Paged K and V for decode tests, and attention over them in float64.

Slots that no row sees hold NaN, unused table entries 2^30; with several rows the first full blocks are shared.
"""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from worker.metal.decode_plan import plan_verify, seen_ranges
from worker.metal.quantized import QuantizedPool

UNUSED = 1 << 30
TOLERANCE = {mx.float32: 1e-5, mx.float16: 3e-3, mx.bfloat16: 2e-2}
SCALE = 0.3


@dataclass(frozen=True)
class Case:
    """One launch: `context_lens` of each sequence's first row; its other `rows - 1` come one token later each."""

    name: str
    context_lens: tuple[int, ...]
    kv_heads: int = 2
    shared: int = 4
    head_dim: int = 64
    value_dim: int | None = None
    block_size: int = 16
    dtype: mx.Dtype = mx.float16
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    rows: int = 1
    bits: int = 0
    group: int = 0
    is_latent: bool = False

    def __str__(self) -> str:
        return self.name


@dataclass
class Data:
    """Arrays of one case. `ranges` and `lens` by query row; pools as the kernels take them, and what they hold."""

    case: Case
    queries: mx.array
    keys: mx.array | QuantizedPool
    values: mx.array | QuantizedPool
    table: np.ndarray
    ranges: np.ndarray
    lens: np.ndarray
    sinks: mx.array | None
    held: tuple[np.ndarray, np.ndarray] = field(repr=False)

    def plan(self, shares_loads: bool = False):
        return plan_verify(
            self.table, self.ranges, self.case.kv_heads, rows_per_sequence=self.case.rows, shares_loads=shares_loads
        )


def make(case: Case, seed: int = 1) -> Data:
    rng = np.random.RandomState(seed)
    value_dim = case.value_dim or case.head_dim
    lens = np.array([length + row for length in case.context_lens for row in range(case.rows)], np.int32)
    ranges = seen_ranges(lens, window=case.window, chunk=case.chunk)
    grouped = ranges.reshape(-1, case.rows, 2)
    tables, num_blocks = _tables(case, grouped[:, :, 1].max(axis=1), rng)
    keys = np.full((num_blocks, case.kv_heads, case.block_size, case.head_dim), np.nan, np.float32)
    values = np.full((num_blocks, case.kv_heads, case.block_size, value_dim), np.nan, np.float32)
    for sequence, table in enumerate(tables):
        for token in range(grouped[sequence, :, 0].min(), grouped[sequence, :, 1].max()):
            block, slot = table[token // case.block_size], token % case.block_size
            if np.isnan(keys[block, 0, slot, 0]):
                keys[block, :, slot] = rng.randn(case.kv_heads, case.head_dim)
                values[block, :, slot] = rng.randn(case.kv_heads, value_dim)
    unseen = [np.isnan(keys[:, 0, :, 0])]
    heads = case.kv_heads * case.shared
    queries = rng.randn(len(lens), heads, 1, case.head_dim).astype(np.float32)
    sinks = mx.array(rng.randn(heads).astype(np.float32) * 2) if case.has_sinks else None
    # A block wholly outside of what a row sees may be gone: its table entry means nothing.
    table = np.full((len(tables), max(map(len, tables)) + 1), UNUSED, np.int32)
    for sequence, blocks in enumerate(tables):
        first = grouped[sequence, :, 0].min() // case.block_size
        table[sequence, first : len(blocks)] = blocks[first:]
    pools, held = zip(*(_pool(case, pool, unseen[0]) for pool in (keys, values)), strict=True)
    if case.is_latent:
        pools, held = (pools[0], pools[0]), (held[0], held[0][..., :value_dim])
    return Data(case, mx.array(queries).astype(case.dtype), *pools, table, ranges, lens, sinks, held)


def _tables(case, ends, rng):
    """Scattered blocks; the second and later sequences share the first one's first block where both fill it."""
    counts = [-(-int(end) // case.block_size) for end in ends]
    ids = iter(rng.permutation(np.arange(1, sum(counts) + 2)).tolist())
    tables = [[next(ids) for _ in range(count)] for count in counts]
    for table, length in zip(tables[1:], case.context_lens[1:], strict=True):
        if min(length, case.context_lens[0]) >= case.block_size and case.rows == 1:
            table[0] = tables[0][0]
    return tables, sum(counts) + 2


def _pool(case, content, unseen):
    """The array or packed pool, and in float64 what it holds."""
    array = mx.array(content).astype(case.dtype)
    if not case.bits:
        return array, _float64(array)
    mask = mx.array(unseen)[:, None, :, None]
    packed, scales, biases = mx.quantize(mx.where(mask, 0, array), group_size=case.group, bits=case.bits)
    held = _float64(
        mx.dequantize(
            packed.astype(mx.uint32),
            *(x.astype(mx.float32) for x in (scales, biases)),
            group_size=case.group,
            bits=case.bits,
        )
    )
    nan = mx.array(float("nan"), case.dtype)
    return QuantizedPool(packed, mx.where(mask, nan, scales), mx.where(mask, nan, biases), case.bits, case.group), held


def _float64(array):
    return np.array(array.astype(mx.float32)).astype(np.float64)


def reference(data: Data, *, rounds_elements: bool = False) -> np.ndarray:
    """Attention row by row in float64, `[rows, heads, 1, value_dim]`.

    `rounds_elements`: over what kernels make of a packed pool, whose elements are rounded once to the case's type.
    """
    case, (keys, values) = data.case, data.held
    if case.bits and rounds_elements:
        keys, values = (_float64(mx.array(held.astype(np.float32)).astype(case.dtype)) for held in data.held)
    queries = _float64(data.queries)
    out = np.zeros((*queries.shape[:3], values.shape[-1]))
    for row, (begin, end) in enumerate(data.ranges):
        at = np.arange(begin, end)
        blocks = data.table[row // case.rows, at // case.block_size]
        for head in range(queries.shape[1]):
            kv_head = head // case.shared
            scores = keys[blocks, kv_head, at % case.block_size] @ queries[row, head, 0] * SCALE
            if case.softcap:
                scores = case.softcap * np.tanh(scores / case.softcap)
            sink = [] if data.sinks is None else [float(data.sinks[head])]
            top = max([*scores, *sink])
            weights = np.exp(scores - top)
            total = weights.sum() + sum(np.exp(np.array(sink) - top))
            out[row, head, 0] = weights @ values[blocks, kv_head, at % case.block_size] / total
    return out


def attend(decode, data: Data, shares_loads: bool = False) -> mx.array:
    """The case through the worker's own launch code."""
    case, plan = data.case, data.plan(shares_loads)
    if case.is_latent:
        return decode.attend_latent(data.queries, data.keys, case.value_dim, plan, SCALE)
    return decode.attend(
        data.queries, data.keys, data.values, plan, case.kv_heads, SCALE, softcap=case.softcap, sinks=data.sinks
    )


def error_of(ours: mx.array, data: Data, *, rounds_elements: bool = False) -> float:
    """The largest distance from float64."""
    return float(np.abs(_float64(ours) - reference(data, rounds_elements=rounds_elements)).max())


def bits_of(array: mx.array) -> np.ndarray:
    """For equality bit for bit, signs of zeros included."""
    return np.array(array.view(mx.uint32 if array.dtype == mx.float32 else mx.uint16))
