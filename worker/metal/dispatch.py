"""The one place that decides between a Metal kernel and its MLX twin."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx

from worker.batch import DecodeGroup, PrefillSpan
from worker.kv_shapes import LayerShape
from worker.metal import self_test, twins
from worker.metal.factory import MetalKernel
from worker.metal.paged_decode import PagedDecode
from worker.metal.write_kv import WriteKV

logger = logging.getLogger(__name__)

Decode = Callable[[mx.array, mx.array, mx.array, DecodeGroup, int, float], mx.array]
Prefill = Callable[[mx.array, mx.array, mx.array, PrefillSpan, int, float], mx.array]
Causal = Callable[[mx.array, mx.array, mx.array, float], mx.array]


@dataclass(frozen=True, slots=True)
class Kernels:
    """What attention runs on; `name` is for people.

    `takes_ragged_rows`: one launch of `paged_decode` serves rows of any context lengths without padding or masks.
    """

    name: str
    paged_decode: Decode
    paged_prefill: Prefill
    causal: Causal
    takes_ragged_rows: bool


def twin_kernels() -> Kernels:
    """Everything in plain MLX."""
    return Kernels("mlx", twins.paged_decode, twins.paged_prefill, twins.causal, takes_ragged_rows=False)


def choose_kernels(layers: Sequence[LayerShape], metal_kernel: MetalKernel | None = None) -> Kernels:
    """What runs a model with such layers on this machine.

    `metal_kernel` is MLX's where Metal is there. The kernels run only if they agree with their twins on this very GPU.
    """
    if metal_kernel is None:
        if not mx.metal.is_available():
            return twin_kernels()
        metal_kernel = mx.fast.metal_kernel
    unsupported = sorted({layer.head_dim for layer in layers if not PagedDecode.supports(layer.head_dim)})
    if unsupported:
        logger.info("metal kernels off: head_dim %s is not a multiple of 4 up to 512", unsupported)
        return twin_kernels()
    decode = PagedDecode(metal_kernel)
    failure = self_test.run(decode, WriteKV(metal_kernel), layers)
    if failure is not None:
        logger.warning("metal kernels off, plain MLX instead: %s", failure)
        return twin_kernels()
    return Kernels("metal paged_decode", decode, twins.paged_prefill, twins.causal, takes_ragged_rows=True)
