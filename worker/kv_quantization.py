"""Quantised KV as an option: which caches of a model are stored in 8 or 4 bits, and in groups of how many elements.

A row (one head's key or value of one token) is quantised by itself, as `mx.quantize` and mlx-lm's `QuantizedKVCache` do
it: so what is stored depends neither on the batch nor on how a prompt was cut, and a block is worth the same to
whoever finds it. Rows are quantised from the first token on. Recurrent states never are: an error in a state stays.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from worker.errors import UnsupportedModelError
from worker.kv_shapes import CacheShape, LayerShape, Quantization
from worker.metal.quantized import BITS, GROUP_SIZES
from worker.models import LoadedModel


def quantise(loaded: LoadedModel, bits: int | None, group_size: int | None = None) -> LoadedModel:
    """The model with its keys and values in `bits` bits, unless they are None.

    Without a `group_size` each cache has the largest that its heads allow. Raises UnsupportedModelError naming the
    cache that can't be cut into such groups.
    """
    if bits is None:
        return loaded
    if bits not in BITS or group_size not in (None, *GROUP_SIZES):
        raise ValueError(f"KV in {bits} bits by {group_size}: bits are {BITS}, groups {GROUP_SIZES}")
    sizes = sorted(GROUP_SIZES, reverse=True) if group_size is None else [group_size]
    caches = [_quantised(loaded.family, index, shape, bits, sizes) for index, shape in enumerate(loaded.caches)]
    return replace(loaded, caches=tuple(caches))


def _quantised(family: str, index: int, shape: CacheShape, bits: int, sizes: Sequence[int]) -> CacheShape:
    if not isinstance(shape, LayerShape):
        return shape
    # Of no values it is the keys' width.
    common = gcd(shape.head_dim, shape.value_head_dim)
    for size in sizes:
        if common % size == 0:
            return replace(shape, quantization=Quantization(bits, size))
    widths = f"keys of {shape.head_dim} and values of {shape.value_head_dim} elements"
    groups = " or ".join(map(str, sizes))
    raise UnsupportedModelError(
        f"{family}: cache {index} has {widths}, which groups of {groups} do not divide: its KV can't be quantised so"
    )
