"""Kernels against their twins on the machine's own GPU, before any of them serves a request."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from worker.batch import Batch, Span
from worker.kv_shapes import LayerShape
from worker.metal import twins
from worker.metal.paged_decode import PagedDecode
from worker.metal.write_kv import WriteKV

_BLOCK_SIZE = 16
_NUM_BLOCKS = 64
# One token, a partial block, exact blocks, several splits.
_CONTEXT_LENS = (1, 7, 32, 300)
_SHARED_HEADS = (1, 4, 8)
# Relative to outputs of order 1: half precision rounds the result once, reduction order is free.
_TOLERANCE = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 3e-2}


def run(decode: PagedDecode, write: WriteKV, layers: Sequence[LayerShape]) -> str | None:
    """None if every kernel agrees for every shape of layer, else what went wrong, for people."""
    try:
        for layer in dict.fromkeys(layers):
            failure = _check_write(write, layer) or _check_decode(decode, layer)
            if failure is not None:
                return f"{failure} for {layer.num_kv_heads} KV heads of {layer.head_dim} {layer.dtype}"
    except (RuntimeError, ValueError) as error:
        # How MLX reports a kernel that does not compile or cannot be launched.
        return str(error)
    return None


def _pools(layer: LayerShape) -> tuple[mx.array, mx.array]:
    shape = (_NUM_BLOCKS * layer.num_kv_heads, _BLOCK_SIZE, layer.head_dim)
    keys, values = (mx.random.normal(shape, key=mx.random.key(seed)).astype(layer.dtype) for seed in (1, 2))
    mx.eval(keys, values)
    return keys, values


def _check_write(write: WriteKV, layer: LayerShape) -> str | None:
    """Bit for bit what a scatter writes, and nothing else; a row with slot -1 goes nowhere."""
    slots = [5, 17, -1, 16 * _BLOCK_SIZE + 15, 0, 33, 64, 90, 2]
    shape = (len(slots), layer.num_kv_heads, layer.head_dim)
    rows = mx.random.normal(shape, key=mx.random.key(3)).astype(layer.dtype)
    written, expected = _pools(layer), _pools(layer)
    mx.eval(write(rows, -rows, mx.array(slots, mx.int32), *written))
    for pool, want, content in zip(written, expected, (rows, -rows), strict=True):
        twins.write_kv(content, mx.array(slots, mx.int32), want)
        if not mx.array_equal(pool, want).item():
            return "write_kv differs from its twin"
    return None


def _check_decode(decode: PagedDecode, layer: LayerShape) -> str | None:
    ids = np.random.RandomState(0).permutation(np.arange(1, _NUM_BLOCKS)).tolist()
    spans, first = [], 0
    for length in _CONTEXT_LENS:
        num_blocks = -(-length // _BLOCK_SIZE)
        spans.append(Span([0], length - 1, ids[first : first + num_blocks], samples=True))
        first += num_blocks
    pools = _pools(layer)
    (ragged,) = Batch(spans, block_size=_BLOCK_SIZE, decodes_together=True).decode_groups
    groups = Batch(spans, block_size=_BLOCK_SIZE).decode_groups
    scale = layer.head_dim**-0.5
    for shared_heads in _SHARED_HEADS:
        shape = (len(spans), layer.num_kv_heads * shared_heads, 1, layer.head_dim)
        queries = mx.random.normal(shape, key=mx.random.key(4)).astype(layer.dtype)
        ours = decode(queries, *pools, ragged, layer.num_kv_heads, scale).astype(mx.float32)
        for group in groups:
            rows = slice(group.first, group.last)
            twin = twins.paged_decode(queries[rows], *pools, group, layer.num_kv_heads, scale)
            error = float(mx.abs(ours[rows] - twin.astype(mx.float32)).max())
            # Not "error > tolerance", which a NaN would pass.
            if not error <= _TOLERANCE[layer.dtype]:
                return f"paged_decode differs from its twin by {error:.2g} at {shared_heads} heads a KV head"
    return None
