"""The one place that decides between a Metal kernel and its MLX twin."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from worker.batch import DecodeGroup, PrefillSpan
from worker.kv_shapes import LayerShape
from worker.metal import self_test, twins
from worker.metal.factory import MetalKernel
from worker.metal.kv_pools import KVPool
from worker.metal.paged_decode import PagedDecode
from worker.metal.pool_writer import InPlaceWriter, PoolWriter, ScatterWriter
from worker.metal.self_test import AttentionNeeds
from worker.metal.self_test_cases import IN_PLACE, PAGED_DECODE, WRITE_KV

logger = logging.getLogger(__name__)

_SHARED_HEADS = (1, 4, 8)

Decode = Callable[[mx.array, KVPool, KVPool, DecodeGroup, int, float], mx.array]
Prefill = Callable[[mx.array, KVPool, KVPool, PrefillSpan, int, float], mx.array]
Causal = Callable[[mx.array, mx.array, mx.array, float], mx.array]


@dataclass(frozen=True, slots=True)
class Kernels:
    """What attention runs on; `name` is for people, `failed` are the kernels that the self-test turned off.

    `takes_ragged_rows`: one launch of `paged_decode` serves rows of any context lengths without padding or masks.
    """

    name: str
    paged_decode: Decode
    paged_prefill: Prefill
    causal: Causal
    takes_ragged_rows: bool
    failed: tuple[str, ...] = ()


def twin_kernels(failed: Iterable[str] = ()) -> Kernels:
    """Everything in plain MLX."""
    return Kernels(
        "mlx", twins.paged_decode, twins.paged_prefill, twins.causal, takes_ragged_rows=False, failed=tuple(failed)
    )


def choose_kernels(layers: Sequence[LayerShape], metal_kernel: MetalKernel | None = None) -> Kernels:
    """What runs a model with such layers on this machine; one line of the log says what, and why.

    `metal_kernel` is MLX's where Metal is there. The kernels run only if they agree with their twins on this very GPU.
    """
    memory = None
    if metal_kernel is None:
        if not mx.metal.is_available():
            logger.info("kernels: plain MLX, because this machine has no Metal")
            return twin_kernels()
        metal_kernel = mx.fast.metal_kernel
        try:
            memory = self_test.ResultMemory(_needs(layers))
        except OSError as error:
            logger.warning("results of the self-test can't be kept, each start will test again: %s", error)
    unsupported = sorted({layer.head_dim for layer in layers if not PagedDecode.supports(layer.head_dim)})
    if unsupported:
        logger.info("kernels: plain MLX, because of head_dim %s: a multiple of 4 up to 512 is needed", unsupported)
        return twin_kernels()
    report = self_test.run((WRITE_KV, PAGED_DECODE), _needs(layers), metal_kernel, memory)
    if report.failures:
        logger.info("kernels: plain MLX, because of %s", ", ".join(report.failures))
        return twin_kernels(report.failures)
    logger.info("kernels: Metal, which agreed with plain MLX on this GPU (tested in %.1f s)", report.seconds)
    decode = PagedDecode(metal_kernel)
    return Kernels("metal paged_decode", decode, twins.paged_prefill, twins.causal, takes_ragged_rows=True)


def choose_writer(metal_kernel: MetalKernel | None, report: self_test.Report | None) -> PoolWriter:
    """In place where the self-test of this very GPU passed for it, else MLX's scatter."""
    if metal_kernel is not None and report is not None and report.works(IN_PLACE.name):
        return InPlaceWriter(metal_kernel)
    return ScatterWriter()


def _needs(layers: Sequence[LayerShape]) -> list[AttentionNeeds]:
    """What to test for such layers: some numbers of heads that share a KV head, since the layers don't tell theirs."""
    needs = []
    for layer in dict.fromkeys(layers):
        need = AttentionNeeds(layer.num_kv_heads, layer.num_kv_heads, layer.head_dim, layer.dtype)
        if layer.quantization is not None:
            need = replace(need, bits=layer.quantization.bits, group_size=layer.quantization.group_size)
        needs += [replace(need, num_heads=layer.num_kv_heads * shared) for shared in _SHARED_HEADS]
    return needs
