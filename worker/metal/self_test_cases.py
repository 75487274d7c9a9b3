"""What the self-test checks: one line a family. Each check compares kernels with their twins for what a model needs."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from worker.metal import prefill, rope, state_kernels, twins
from worker.metal.decode_checks import LatentNeeds, check_decode, check_latent, check_verify_window
from worker.metal.factory import MetalKernel
from worker.metal.in_place_writer import InPlaceWriter
from worker.metal.kv_pools import KVPool
from worker.metal.paged_prefill import PagedPrefill
from worker.metal.pool_writer import PoolWriter, Slots
from worker.metal.prefill_rows import PrefillOptions, PrefillRows
from worker.metal.quantized import QuantizedPool, WriteQuantized, write_twin, zero_pool
from worker.metal.scatter_writer import ScatterWriter
from worker.metal.self_test import AttentionNeeds, Family, Needs, RopeNeeds
from worker.metal.write_kv import PutBlocks, WriteKV, move_blocks

_NUM_BLOCKS = 64
# Queries and context lengths: one token, one block, a tail behind a long context, more than a tile.
_PREFILLS = ((1, 1), (16, 16), (5, 130), (41, 77))
# Relative to outputs of order 1: half precision rounds the result once, reduction order is free.
_TOLERANCE = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 3e-2}
_CHAIN_STEPS = 24
_CHAIN_LAYERS = 3


def _attention(
    check: Callable[[MetalKernel, AttentionNeeds], str | None],
) -> Callable[[MetalKernel, Needs], str | None]:
    """A check of each kind of attention layer, which stops at the first failure."""

    def run(metal_kernel: MetalKernel, needs: Needs) -> str | None:
        for need in dict.fromkeys(need for need in needs if isinstance(need, AttentionNeeds)):
            failure = check(metal_kernel, need)
            if failure is not None:
                return f"{failure} for {need}"
        return None

    return run


def _normal(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def _pools(need: AttentionNeeds) -> list[mx.array]:
    shape = (_NUM_BLOCKS, need.num_kv_heads, need.block_size)
    pools = [_normal(seed, *shape, dim, dtype=need.dtype) for seed, dim in ((1, need.head_dim), (2, need.value_dim))]
    mx.eval(pools)
    return pools


def _differs(ours: mx.array, twin: mx.array, dtype: mx.Dtype) -> str | None:
    error = float(mx.abs(ours.astype(mx.float32) - twin.astype(mx.float32)).max())
    # Not "error > tolerance", which a NaN would pass.
    return None if error <= _TOLERANCE[dtype] else f"it differs from its twin by {error:.2g}"


def check_write(metal_kernel: MetalKernel, need: AttentionNeeds) -> str | None:
    """Bit for bit what a scatter writes, and nothing else; a row with slot -1 goes nowhere."""
    slots = [5, 17, -1, 16 * need.block_size + 15, 0, 33, 64, 90, 2]
    keys, values = (
        _normal(3, len(slots), need.num_kv_heads, dim, dtype=need.dtype) for dim in (need.head_dim, need.value_dim)
    )
    written, expected = _pools(need), _pools(need)
    mx.eval(WriteKV(metal_kernel)(keys, -values, mx.array(slots, mx.int32), *written))
    for pool, want, content in zip(written, expected, (keys, -values), strict=True):
        by_head = want.reshape(-1, *want.shape[2:])
        twins.write_kv(content, mx.array(slots, mx.int32), by_head)
        if not mx.array_equal(pool, by_head.reshape(pool.shape)).item():
            return "it differs from its twin"
    return None


def _stored(need: AttentionNeeds | LatentNeeds) -> tuple[int, list[int]]:
    """KV heads, and the width of each pool."""
    if isinstance(need, LatentNeeds):
        return 1, [need.latent_dim + need.rope_dim]
    return need.num_kv_heads, [need.head_dim, need.value_dim]


def check_put(metal_kernel: MetalKernel, needs: Needs) -> str | None:
    """Moves that chain and swap, and rows by slot, bit for bit."""
    kernel = PutBlocks(metal_kernel)
    sources, targets = mx.array([1, 2, 3, 9, 9], mx.int32), mx.array([2, 3, 1, 7, 63], mx.int32)
    for need in dict.fromkeys(need for need in needs if isinstance(need, (AttentionNeeds, LatentNeeds))):
        heads, (width, *_) = _stored(need)
        shape = (_NUM_BLOCKS, heads, need.block_size, width)
        pool, expected = (_normal(1, *shape, dtype=need.dtype) for _ in range(2))
        mx.eval(pool)
        mx.eval(move_blocks(kernel, pool, sources, targets))
        expected[targets] = expected[sources]
        rows, slots = _normal(3, len(sources), width, dtype=need.dtype), mx.array([5, 17, -1, 0, 33], mx.int32)
        mx.eval(kernel(rows, slots, pool.reshape(-1, width)))
        by_slot = expected.reshape(-1, width)
        kept = mx.array([0, 1, 3, 4])
        by_slot[slots[kept]] = rows[kept]
        if not mx.array_equal(pool.reshape(-1, width), by_slot).item():
            return f"it differs from its twin for {need}"
    return None


def _prefill_rows(need: AttentionNeeds | LatentNeeds) -> PrefillRows:
    limits = np.cumsum([0, *(count for count, _ in _PREFILLS)]).tolist()
    ids = np.random.RandomState(0).permutation(np.arange(1, _NUM_BLOCKS)).tolist()
    tables = [[ids.pop() for _ in range(-(-length // need.block_size))] for _, length in _PREFILLS]
    return PrefillRows(limits, [length for _, length in _PREFILLS], tables)


def _unowned_nan(pool: mx.array, rows: PrefillRows) -> mx.array:
    """The pool with NaN in all slots of nobody: a kernel that reads them shows."""
    num_blocks, _, block_size, _ = pool.shape
    is_owned = np.zeros((num_blocks, block_size), bool)
    for sequence, length in enumerate(rows.context_lens):
        at = np.arange(length)
        is_owned[rows.table(sequence)[at // block_size], at % block_size] = True
    return mx.where(mx.array(is_owned)[:, None, :, None], pool, mx.array(float("nan"), pool.dtype))


def _pool(plain: mx.array, rows: PrefillRows, need: AttentionNeeds | LatentNeeds) -> KVPool:
    """What the layer keeps, with NaN in all slots of nobody."""
    if not need.bits:
        return _unowned_nan(plain, rows)
    packed, *rest = mx.quantize(plain, group_size=need.group_size, bits=need.bits)
    scales, biases = (_unowned_nan(part, rows) for part in rest)
    return QuantizedPool(packed, scales, biases, need.bits, need.group_size)


def check_prefill(metal_kernel: MetalKernel, need: AttentionNeeds) -> str | None:
    """Ragged sequences in one launch, with all that the layer asks for."""
    rows = _prefill_rows(need)
    options = PrefillOptions(
        scale=need.head_dim**-0.5,
        window=need.window,
        chunk=need.chunk,
        softcap=need.softcap,
        sinks=_normal(6, need.num_heads, dtype=need.dtype) if need.has_sinks else None,
    )
    pools = [_pool(plain, rows, need) for plain in _pools(need)]
    queries = _normal(4, rows.num_rows, need.num_heads, need.head_dim, dtype=need.dtype)
    ours = PagedPrefill(metal_kernel)(queries, pools[0], pools[1], rows, options)
    return _differs(ours, prefill.twin(queries, pools[0], pools[1], rows, options), need.dtype)


def check_latent_prefill(metal_kernel: MetalKernel, needs: Needs) -> str | None:
    """The same for latents."""
    for need in dict.fromkeys(need for need in needs if isinstance(need, LatentNeeds)):
        rows, width = _prefill_rows(need), need.latent_dim + need.rope_dim
        pool = _pool(_normal(1, _NUM_BLOCKS, 1, need.block_size, width, dtype=need.dtype), rows, need)
        queries = _normal(4, rows.num_rows, need.num_heads, width, dtype=need.dtype)
        arguments = queries, pool, need.latent_dim, rows, PrefillOptions(width**-0.5)
        failure = _differs(PagedPrefill(metal_kernel).latent(*arguments), prefill.latent_twin(*arguments), need.dtype)
        if failure is not None:
            return f"{failure} for {need}"
    return None


def check_quantized(metal_kernel: MetalKernel, needs: Needs) -> str | None:
    """Scales and biases as MLX has them; a code may differ by one where an element lies between two levels."""
    for need in dict.fromkeys(need for need in needs if isinstance(need, (AttentionNeeds, LatentNeeds)) and need.bits):
        for width in dict.fromkeys(_stored(need)[1]):
            failure = _check_quantized(metal_kernel, need, width)
            if failure is not None:
                return f"{failure} for {need}"
    return None


def _check_quantized(metal_kernel: MetalKernel, need: AttentionNeeds | LatentNeeds, width: int) -> str | None:
    slots, heads = mx.array([5, 17, -1, 0, 33], mx.int32), _stored(need)[0]
    rows = _normal(3, 5, heads, width, dtype=need.dtype)
    shape = (4, heads, need.block_size, width)
    ours, twin = (zero_pool(shape, need.dtype, need.bits, need.group_size) for _ in range(2))
    mx.eval(ours.packed, ours.scales, ours.biases)
    mx.eval(WriteQuantized(metal_kernel)(rows, slots, ours))
    write_twin(rows, slots, twin)
    for got, want in ((ours.scales, twin.scales), (ours.biases, twin.biases)):
        if not (mx.abs(got - want).max() <= 0.01 * mx.abs(want).max()).item():
            return "its scales or biases differ from those of MLX"
    index = mx.arange(4)
    step = mx.abs(twin.scales).max().astype(mx.float32)
    error = mx.abs(ours.dequantize(index).astype(mx.float32) - twin.dequantize(index).astype(mx.float32)).max()
    allowed = 1.01 * step + _TOLERANCE[need.dtype]
    return None if (error <= allowed).item() else f"it differs from its twin by {error.item():.2g}"


def check_rope(metal_kernel: MetalKernel, needs: Needs) -> str | None:
    """At the beginning and far out; rows at one position."""
    positions = mx.array([0, 1, 77, 77, 1000], mx.int32)
    for need in dict.fromkeys(need for need in needs if isinstance(need, RopeNeeds)):
        queries = _normal(4, 5, need.num_heads, need.head_dim, dtype=need.dtype)
        keys = _normal(5, 5, need.num_kv_heads, need.head_dim, dtype=need.dtype)
        freqs = mx.exp(mx.arange(need.dims // 2) * 0.2) if need.has_freqs else None
        base = None if need.has_freqs else 10000.0
        options = rope.RopeOptions(need.dims, traditional=need.is_traditional, base=base, freqs=freqs)
        ours = rope.Rope(metal_kernel)(queries, keys, positions, options)
        for got, want in zip(ours, rope.twin(queries, keys, positions, options), strict=True):
            error = float(mx.abs(got.astype(mx.float32) - want.astype(mx.float32)).max())
            # MLX's own sine is the fast one.
            if not error <= max(_TOLERANCE[need.dtype], 2e-3):
                return f"it differs from its twin by {error:.2g} for {need}"
    return None


def check_in_place(metal_kernel: MetalKernel, needs: Needs) -> str | None:
    """Steps of moves, writes and reads over several layers without a wait between them, bit for bit those by scatter.

    Each step reuses at once the blocks that the step before has read, so a missing order shows.
    """
    kernel = PagedPrefill(metal_kernel)
    for need in dict.fromkeys(need for need in needs if isinstance(need, (AttentionNeeds, LatentNeeds))):
        ours = _chain(InPlaceWriter(metal_kernel), kernel, need)
        expected = _chain(ScatterWriter(), kernel, need)
        for step, (got, want) in enumerate(zip(ours, expected, strict=True)):
            if not mx.array_equal(got, want).item():
                return f"step {step} of a chain differs from the same chain by scatter for {need}"
    return None


def _chain(writer: PoolWriter, kernel: PagedPrefill, need: AttentionNeeds | LatentNeeds) -> list[mx.array]:
    """What each step's reads gave."""
    size, (heads, widths) = need.block_size, _stored(need)
    layers = [
        [writer.create(f"{layer}.{side}", 8, (heads, size, width), need.dtype) for side, width in enumerate(widths)]
        for layer in range(_CHAIN_LAYERS)
    ]
    hidden = _normal(7, 2 * size, need.num_heads, widths[0], dtype=need.dtype)
    results = []
    for step in range(_CHAIN_STEPS):
        # The last two blocks are written: the oldest ones of the step before.
        table = [(step * 2 + block) % 8 for block in range(6)]
        slots = Slots([block * size + offset for block in table[4:] for offset in range(size)])
        rows = PrefillRows([0, 2 * size], [6 * size], [table])
        for layer, pools in enumerate(layers):
            if step % 3 == 2:
                writer.move(pools, table[:2], [table[1], table[0]])
            noise = _normal(100 + step * _CHAIN_LAYERS + layer, *hidden.shape, dtype=need.dtype)
            new = (hidden * 0.5 + noise)[:, :heads]
            writer.write(pools, [new, *(-_as_wide(new, width) for width in widths[1:])], slots)
            # A kernel takes the token, plain MLX ties its index to it.
            reader = _reader(None if layer % 2 else kernel, hidden, rows, need)
            hidden = _as_wide(writer.read(pools, reader), widths[0])
        writer.commit(hidden)
        results.append(hidden)
    mx.eval(results)
    return results


def _reader(
    kernel: PagedPrefill | None, queries: mx.array, rows: PrefillRows, need: AttentionNeeds | LatentNeeds
) -> Callable[..., mx.array]:
    """Attention as `PoolWriter.read` calls it, by the kernel or else by its twin."""
    options = PrefillOptions(queries.shape[-1] ** -0.5)

    def read(*pools: mx.array, after: mx.array | None) -> mx.array:
        if isinstance(need, LatentNeeds):
            attend_latent = kernel.latent if kernel else prefill.latent_twin
            return attend_latent(queries, pools[0], need.latent_dim, rows, options, after)
        attend = kernel or prefill.twin
        return attend(queries, pools[0], pools[1], rows, options, after)

    return read


def _as_wide(rows: mx.array, width: int) -> mx.array:
    """Rows cut to a width, or repeated up to it."""
    times = -(-width // rows.shape[-1])
    return rows if rows.shape[-1] == width else mx.concatenate([rows] * times, axis=-1)[..., :width]


WRITE_KV = Family("write_kv", _attention(check_write))
PAGED_DECODE = Family("paged_decode", _attention(check_decode))
IN_PLACE = Family("in_place", check_in_place)

FAMILIES = (
    WRITE_KV,
    PAGED_DECODE,
    Family("verify_window", _attention(check_verify_window)),
    Family("latent_decode", check_latent),
    Family("put_blocks", check_put),
    Family("write_quantized", check_quantized),
    Family("paged_prefill", _attention(check_prefill)),
    Family("latent_prefill", check_latent_prefill),
    Family("rope", check_rope),
    IN_PLACE,
    *(Family(name, check) for name, check in state_kernels.CHECKS.items()),
)
