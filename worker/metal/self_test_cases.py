"""What the self-test checks: one line a family. Each check compares kernels with their twins for what a model needs."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from worker.metal import prefill, rope, state_kernels, twins
from worker.metal.decode_checks import LatentNeeds, check_decode, check_latent, check_verify_window
from worker.metal.decode_plan import plan_decode, seen_ranges
from worker.metal.factory import MetalKernel
from worker.metal.in_place_writer import InPlaceWriter
from worker.metal.kv_pools import KVPool
from worker.metal.paged_decode import PagedDecode
from worker.metal.paged_prefill import PagedPrefill
from worker.metal.pool_writer import PoolWriter, Slots, padded_ids
from worker.metal.prefill_rows import PrefillOptions, PrefillRows
from worker.metal.quantized import QuantizedPool, WriteQuantized, write_twin, zero_pool
from worker.metal.scatter_writer import ScatterWriter
from worker.metal.self_test import AttentionNeeds, Family, Needs, RopeNeeds
from worker.metal.self_test_judge import ULP, differs, exact
from worker.metal.state_self_test import GatedDeltaShape, Mamba2Shape, ShortConvShape
from worker.metal.write_kv import PutBlocks, WriteKV, move_blocks, tie

_NUM_BLOCKS = 64
# Queries and context lengths: one token, one block, a tail behind a long context, more than a tile.
_PREFILLS = ((1, 1), (16, 16), (5, 130), (41, 77))
# Of a row's largest element: angles far out are large, and float32 has 24 bits for them.
_ROPE_SLACK = 2e-3
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
    """Moves that chain and swap, and rows by slot, bit for bit, in pools of each kind that a model has."""
    for number, (shape, dtype) in enumerate(_pool_kinds(needs)):
        if not _puts(PutBlocks(metal_kernel), shape, dtype, seed=3 * number):
            return f"it differs from its twin for blocks {shape} {dtype}".replace("mlx.core.", "")
    return None


def _pool_kinds(needs: Needs) -> list[tuple[tuple[int, ...], mx.Dtype]]:
    """Block and type of each kind of pool."""
    kinds: dict[tuple[tuple[int, ...], mx.Dtype], None] = {}
    for need in needs:
        if isinstance(need, (AttentionNeeds, LatentNeeds)):
            heads, widths = _stored(need)
            for width in widths:
                of_dtype = width // need.group_size if need.bits else width
                kinds[(heads, need.block_size, of_dtype), need.dtype] = None
                if need.bits:
                    kinds[(heads, need.block_size, width * need.bits // 32), mx.uint32] = None
        elif isinstance(need, (GatedDeltaShape, Mamba2Shape, ShortConvShape)):
            kinds[need.pool] = None
    return list(kinds)


def _puts(kernel: PutBlocks, shape: tuple[int, ...], dtype: mx.Dtype, seed: int) -> bool:
    pool, expected = (_content(seed, _NUM_BLOCKS, *shape, dtype=dtype) for _ in range(2))
    mx.eval(pool)
    sources, targets = [1, 2, 3, 9, 9], [2, 3, 1, 7, 63]
    mx.eval(move_blocks(kernel, pool, mx.array(sources, mx.int32), mx.array(padded_ids(targets))))
    expected[mx.array(targets)] = expected[mx.array(sources)]
    width = shape[-1]
    rows, slots = _content(seed + 1, 5, width, dtype=dtype), [5, 17, -1, 0, 33]
    mx.eval(kernel(rows, mx.array(padded_ids(slots)), pool.reshape(-1, width)))
    by_slot, kept = expected.reshape(-1, width), mx.array([0, 1, 3, 4])
    by_slot[mx.array(slots)[kept]] = rows[kept]
    return mx.array_equal(pool.reshape(-1, width), by_slot).item() is True


def _content(seed: int, *shape: int, dtype: mx.Dtype) -> mx.array:
    if dtype != mx.uint32:
        return _normal(seed, *shape, dtype=dtype)
    return mx.random.randint(0, 1 << 30, shape, dtype, key=mx.random.key(seed))


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
    with mx.stream(mx.cpu):
        keys, values = map(exact, pools)
        exact_options = replace(options, sinks=None if options.sinks is None else exact(options.sinks))
        truth = prefill.twin(exact(queries), keys, values, rows, exact_options)
    return differs(ours, truth)


def check_latent_prefill(metal_kernel: MetalKernel, needs: Needs) -> str | None:
    """The same for latents."""
    for need in dict.fromkeys(need for need in needs if isinstance(need, LatentNeeds)):
        rows, width = _prefill_rows(need), need.latent_dim + need.rope_dim
        pool = _pool(_normal(1, _NUM_BLOCKS, 1, need.block_size, width, dtype=need.dtype), rows, need)
        queries = _normal(4, rows.num_rows, need.num_heads, width, dtype=need.dtype)
        rest = need.latent_dim, rows, PrefillOptions(width**-0.5)
        ours = PagedPrefill(metal_kernel).latent(queries, pool, *rest)
        with mx.stream(mx.cpu):
            truth = prefill.latent_twin(exact(queries), exact(pool), *rest)
        failure = differs(ours, truth)
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
    slots, heads = [5, 17, -1, 0, 33], _stored(need)[0]
    rows = _normal(3, 5, heads, width, dtype=need.dtype)
    shape = (4, heads, need.block_size, width)
    ours, twin = (zero_pool(shape, need.dtype, need.bits, need.group_size) for _ in range(2))
    mx.eval(ours.packed, ours.scales, ours.biases)
    mx.eval(WriteQuantized(metal_kernel)(rows, mx.array(padded_ids(slots)), ours))
    write_twin(rows, mx.array(slots), twin)
    for got, want in ((ours.scales, twin.scales), (ours.biases, twin.biases)):
        if not (mx.abs(got - want).max() <= 0.01 * mx.abs(want).max()).item():
            return "its scales or biases differ from those of MLX"
    stored, wanted = (exact(pool).dequantize(mx.arange(4)) for pool in (ours, twin))
    error = mx.abs(stored - wanted).max()
    allowed = 1.01 * mx.abs(exact(twin.scales)).max() + ULP[need.dtype] * mx.abs(wanted).max()
    return None if (error <= allowed).item() else f"it differs from its twin by {error.item():.2g}"


def check_rope(metal_kernel: MetalKernel, needs: Needs) -> str | None:
    """At the beginning and far out, rows at one position; positions of fewer than 8 rows are a variant of their own."""
    for need in dict.fromkeys(need for need in needs if isinstance(need, RopeNeeds)):
        for rows in ([0, 1, 77, 77, 1000], [0, 1, 77, 77, 1000, 5, 6, 7]):
            failure = _check_rope(metal_kernel, need, mx.array(rows, mx.int32))
            if failure is not None:
                return f"{failure} for {need}"
    return None


def _check_rope(metal_kernel: MetalKernel, need: RopeNeeds, positions: mx.array) -> str | None:
    queries = _normal(4, positions.size, need.num_heads, need.head_dim, dtype=need.dtype)
    keys = _normal(5, positions.size, need.num_kv_heads, need.head_dim, dtype=need.dtype)
    freqs = mx.exp(mx.arange(need.dims // 2) * 0.2) if need.has_freqs else None
    base = None if need.has_freqs else 10000.0
    options = rope.RopeOptions(need.dims, traditional=need.is_traditional, base=base, freqs=freqs)
    ours = rope.Rope(metal_kernel)(queries, keys, positions, options)
    with mx.stream(mx.cpu):
        truth = rope.twin(exact(queries), exact(keys), positions, options)
    failures = (differs(got, want, slack=_ROPE_SLACK) for got, want in zip(ours, truth, strict=True))
    return next((failure for failure in failures if failure is not None), None)


def check_in_place(metal_kernel: MetalKernel, needs: Needs) -> str | None:
    """Steps of moves, writes and reads over several layers without a wait between them, bit for bit those by scatter.

    Each step reuses at once the blocks that the step before has read, so a missing order shows.
    """
    for need in dict.fromkeys(need for need in needs if isinstance(need, (AttentionNeeds, LatentNeeds))):
        ours, expected = (
            _chain(writer, metal_kernel, need) for writer in (InPlaceWriter(metal_kernel), ScatterWriter())
        )
        for step, (got, want) in enumerate(zip(ours, expected, strict=True)):
            if not mx.array_equal(got, want).item():
                return f"step {step} of a chain differs from the same chain by scatter for {need}"
    return None


def _chain(writer: PoolWriter, metal_kernel: MetalKernel, need: AttentionNeeds | LatentNeeds) -> list[mx.array]:
    """What each step's reads gave, and what a pool holds that was written in each step and read after the last."""
    size, (heads, widths) = need.block_size, _stored(need)
    layers = [
        [writer.create(f"{layer}.{side}", 8, (heads, size, width), need.dtype) for side, width in enumerate(widths)]
        for layer in range(_CHAIN_LAYERS)
    ]
    late = writer.create("late", 8, (heads, size, widths[0]), need.dtype)
    hidden = _normal(7, 2 * size, need.num_heads, widths[0], dtype=need.dtype)
    # Kernels take the token, plain MLX ties its index to it.
    ways = (_by_prefill(PagedPrefill(metal_kernel)), _by_decode(PagedDecode(metal_kernel)), _by_prefill(None))
    results = []
    for step in range(_CHAIN_STEPS):
        # The last two blocks are written: the oldest ones of the step before.
        table = [(step * 2 + block) % 8 for block in range(6)]
        slots = Slots([block * size + offset for block in table[4:] for offset in range(size)])
        for layer, pools in enumerate(layers):
            if step % 3 == 2:
                writer.move(pools, table[:2], [table[1], table[0]])
            noise = _normal(100 + step * _CHAIN_LAYERS + layer, *hidden.shape, dtype=need.dtype)
            new = (hidden * 0.5 + noise)[:, :heads]
            writer.write(pools, [new, *(-_as_wide(new, width) for width in widths[1:])], slots)
            attend = ways[layer % len(ways)]

            def read(*arrays: mx.array, after: mx.array | None, attend: _Attend = attend) -> mx.array:
                return attend(_Read(hidden, arrays, table, need, after))  # noqa: B023 - called before the next turn

            hidden = _as_wide(writer.read(pools, read), widths[0])
        writer.write([late], [hidden[:, :heads]], slots)
        writer.commit(hidden)
        results.append(hidden)
    results.append(writer.read([late], _copy))
    mx.eval(results)
    return results


def _copy(pool: mx.array, after: mx.array | None) -> mx.array:
    index = mx.arange(pool.shape[0])
    return pool[index if after is None else tie(index, after)]


@dataclass(frozen=True, slots=True)
class _Read:
    """The last tokens of one sequence attend to all of it; `after` is the token to come after."""

    queries: mx.array
    pools: tuple[mx.array, ...]
    table: list[int]
    need: AttentionNeeds | LatentNeeds
    after: mx.array | None


_Attend = Callable[[_Read], mx.array]


def _by_prefill(kernel: PagedPrefill | None) -> _Attend:
    """By the kernel or else by its twin."""

    def attend(read: _Read) -> mx.array:
        queries, pools, need, after = read.queries, read.pools, read.need, read.after
        rows = PrefillRows([0, len(queries)], [len(read.table) * need.block_size], [read.table])
        options = PrefillOptions(queries.shape[-1] ** -0.5)
        if isinstance(need, LatentNeeds):
            attend_latent = kernel.latent if kernel else prefill.latent_twin
            return attend_latent(queries, pools[0], need.latent_dim, rows, options, after)
        return (kernel or prefill.twin)(queries, pools[0], pools[1], rows, options, after)

    return attend


def _by_decode(kernel: PagedDecode) -> _Attend:
    """Each query as a row with a block table of its own."""

    def attend(read: _Read) -> mx.array:
        queries, pools, table, need = read.queries, read.pools, read.table, read.need
        num_rows, scale = len(queries), queries.shape[-1] ** -0.5
        last, num_kv_heads = len(table) * need.block_size, _stored(need)[0]
        ranges = seen_ranges(np.arange(last - num_rows, last) + 1)
        plan = plan_decode(np.array([table] * num_rows, np.int32), ranges, num_kv_heads)
        by_row = queries[:, :, None]
        if isinstance(need, LatentNeeds):
            return kernel.attend_latent(by_row, pools[0], need.latent_dim, plan, scale, after=read.after)[:, :, 0]
        return kernel.attend(by_row, pools[0], pools[1], plan, num_kv_heads, scale, after=read.after)[:, :, 0]

    return attend


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
    Family("verify_window", check_verify_window),
    Family("latent_decode", check_latent),
    Family("put_blocks", check_put),
    Family("write_quantized", check_quantized),
    Family("paged_prefill", _attention(check_prefill)),
    Family("latent_prefill", check_latent_prefill),
    Family("rope", check_rope),
    IN_PLACE,
    *(Family(name, check) for name, check in state_kernels.CHECKS.items()),
)
