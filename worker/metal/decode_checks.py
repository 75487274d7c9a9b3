"""The self-test's checks of decode attention: kernels against twins, rows that share loads bit for bit."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from worker.metal import decode_twins
from worker.metal.decode_plan import DecodePlan, may_share_loads, plan_decode, plan_verify, seen_ranges
from worker.metal.factory import MetalKernel
from worker.metal.kv_pools import KVPool
from worker.metal.paged_decode import PagedDecode
from worker.metal.quantized import QuantizedPool
from worker.metal.self_test import AttentionNeeds, Needs
from worker.metal.self_test_judge import differs, exact

_NUM_BLOCKS = 64
# One token, a partial block, exact blocks, several partitions.
_CONTEXT_LENS = (1, 7, 32, 300)
# Where nobody said how many guesses there will be.
_MAX_VERIFY_ROWS = 4


@dataclass(frozen=True, slots=True)
class LatentNeeds:
    """Layers of multi-head latent attention, absorbed. `bits` 0: the pool of latents is not quantised."""

    num_heads: int
    latent_dim: int
    rope_dim: int
    dtype: mx.Dtype
    block_size: int = 16
    bits: int = 0
    group_size: int = 32

    def __str__(self) -> str:
        name = f"{self.num_heads} heads over latents of {self.latent_dim} + {self.rope_dim} {self.dtype}"
        return f"{name}, {self.bits} bits in groups of {self.group_size}" if self.bits else name


@dataclass(frozen=True, slots=True)
class VerifyNeeds:
    """Steps that verify guesses: up to `max_rows` rows of a sequence, of which one is no guess."""

    max_rows: int


def check_decode(metal_kernel: MetalKernel, need: AttentionNeeds) -> str | None:
    """Ragged rows in one launch, with all that the layer asks for; slots that no row sees hold NaN."""
    if not PagedDecode.supports(need.head_dim, need.value_dim):
        return None
    ranges = seen_ranges(_CONTEXT_LENS, window=need.window, chunk=need.chunk)
    table, is_seen = _tables(ranges, need.block_size)
    plan = plan_decode(table, ranges, need.num_kv_heads)
    queries, keys, values, sinks = _arrays(need, plan, is_seen)
    ours = _attend(PagedDecode(metal_kernel), need, plan, queries, keys, values, sinks)
    with mx.stream(mx.cpu):
        truth = _attend(decode_twins, need, plan, exact(queries), exact(keys), exact(values), exact(sinks))
    return differs(ours, truth)


def check_verify_window(metal_kernel: MetalKernel, needs: Needs) -> str | None:
    """Rows that share loads give the bits of rows on their own, for each number of rows that a sequence may have."""
    most = next((need.max_rows for need in needs if isinstance(need, VerifyNeeds)), _MAX_VERIFY_ROWS)
    for need in dict.fromkeys(need for need in needs if isinstance(need, AttentionNeeds)):
        if not PagedDecode.supports(need.head_dim, need.value_dim) or not may_share_loads(need.head_dim):
            continue
        for num_rows in range(2, most + 1):
            if not _share_alike(PagedDecode(metal_kernel), need, num_rows):
                return f"{num_rows} rows that share loads differ from rows on their own for {need}"
    return None


def _share_alike(decode: PagedDecode, need: AttentionNeeds, num_rows: int) -> bool:
    lens = [length + row for length in _CONTEXT_LENS for row in range(num_rows)]
    ranges = seen_ranges(lens, window=need.window, chunk=need.chunk)
    united = np.stack([ranges[::num_rows, 0], ranges[num_rows - 1 :: num_rows, 1]], axis=1)
    table, is_seen = _tables(united, need.block_size)
    apart, together = (
        plan_verify(table, ranges, need.num_kv_heads, rows_per_sequence=num_rows, shares_loads=shares_loads)
        for shares_loads in (False, True)
    )
    arrays = _arrays(need, together, is_seen)
    ours, expected = (_attend(decode, need, plan, *arrays) for plan in (together, apart))
    return mx.array_equal(ours, expected).item() is True


def check_latent(metal_kernel: MetalKernel, needs: Needs) -> str | None:
    """The same as `check_decode` for latents."""
    ranges = seen_ranges(_CONTEXT_LENS)
    for need in dict.fromkeys(need for need in needs if isinstance(need, LatentNeeds)):
        head_dim = need.latent_dim + need.rope_dim
        table, is_seen = _tables(ranges, need.block_size)
        plan = plan_decode(table, ranges, 1)
        pool = _pool(_normal(1, _NUM_BLOCKS, 1, need.block_size, head_dim, dtype=need.dtype), need, is_seen)
        queries = _normal(4, len(ranges), need.num_heads, 1, head_dim, dtype=need.dtype)
        rest = need.latent_dim, plan, head_dim**-0.5
        ours = PagedDecode(metal_kernel).attend_latent(queries, pool, *rest)
        with mx.stream(mx.cpu):
            truth = decode_twins.attend_latent(exact(queries), exact(pool), *rest)
        failure = differs(ours, truth)
        if failure is not None:
            return f"{failure} for {need}"
    return None


def _tables(ranges: NDArray[np.int32], block_size: int) -> tuple[NDArray[np.int32], mx.array]:
    """Scattered blocks for each sequence, and which slots of the pool any of them sees, `[blocks, 1, slots, 1]`."""
    ids = np.random.RandomState(0).permutation(np.arange(1, _NUM_BLOCKS)).tolist()
    table = np.zeros((len(ranges), -(-int(ranges[:, 1].max()) // block_size)), np.int32)
    is_seen = np.zeros((_NUM_BLOCKS, block_size), bool)
    for sequence, (begin, end) in enumerate(ranges):
        count = -(-int(end) // block_size)
        table[sequence, :count] = [ids.pop() for _ in range(count)]
        at = np.arange(begin, end)
        is_seen[table[sequence, at // block_size], at % block_size] = True
    return table, mx.array(is_seen)[:, None, :, None]


def _arrays(need: AttentionNeeds, plan: DecodePlan, is_seen: mx.array) -> tuple[mx.array, KVPool, KVPool, mx.array]:
    """Queries, keys, values and sinks."""
    shape = (_NUM_BLOCKS, need.num_kv_heads, need.block_size)
    keys, values = (
        _pool(_normal(seed, *shape, dim, dtype=need.dtype), need, is_seen)
        for seed, dim in ((1, need.head_dim), (2, need.value_dim))
    )
    queries = _normal(4, plan.num_rows, need.num_heads, 1, need.head_dim, dtype=need.dtype)
    return queries, keys, values, _normal(6, need.num_heads, dtype=need.dtype)


def _attend(
    kernel: Any,
    need: AttentionNeeds,
    plan: DecodePlan,
    queries: mx.array,
    keys: KVPool,
    values: KVPool,
    sinks: mx.array,
) -> mx.array:
    """Through `PagedDecode` or its twin."""
    scale, options = need.head_dim**-0.5, {"softcap": need.softcap, "sinks": sinks if need.has_sinks else None}
    out: mx.array = kernel.attend(queries, keys, values, plan, need.num_kv_heads, scale, **options)
    return out


def _pool(content: mx.array, need: AttentionNeeds | LatentNeeds, is_seen: mx.array) -> KVPool:
    if not need.bits:
        return _unseen_nan(content, is_seen)
    packed, *rest = mx.quantize(content, group_size=need.group_size, bits=need.bits)
    scales, biases = (_unseen_nan(part, is_seen) for part in rest)
    return QuantizedPool(packed, scales, biases, need.bits, need.group_size)


def _unseen_nan(pool: mx.array, is_seen: mx.array) -> mx.array:
    return mx.where(is_seen, pool, mx.array(float("nan"), pool.dtype))


def _normal(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
