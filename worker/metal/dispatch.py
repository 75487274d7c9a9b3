"""The one place that decides between a Metal kernel and its MLX twin."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from worker.batch import DecodeGroup, PrefillSpan
from worker.metal import twins

PagedDecode = Callable[[mx.array, mx.array, mx.array, DecodeGroup, int, float], mx.array]
PagedPrefill = Callable[[mx.array, mx.array, mx.array, PrefillSpan, int, float], mx.array]
Causal = Callable[[mx.array, mx.array, mx.array, float], mx.array]


@dataclass(frozen=True, slots=True)
class Kernels:
    """What attention runs on; `name` is for people."""

    name: str
    paged_decode: PagedDecode
    paged_prefill: PagedPrefill
    causal: Causal


def choose_kernels() -> Kernels:
    """What this machine runs on."""
    return twin_kernels()


def twin_kernels() -> Kernels:
    """Everything in plain MLX."""
    return Kernels("mlx", twins.paged_decode, twins.paged_prefill, twins.causal)
