"""What layers with recurrent states run on: kernels that agree with their twins on this GPU, else the twins."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from worker.metal import state_self_test, state_twins
from worker.metal.factory import MetalKernel
from worker.metal.gated_delta import GatedDelta
from worker.metal.mamba2 import Mamba2
from worker.metal.short_conv import ShortConv
from worker.metal.state_self_test import GatedDeltaShape, Launch, Mamba2Shape, ShortConvShape, StateLayerShape

logger = logging.getLogger(__name__)

_SWITCH = "CIDERY_GDN_LAZY_KERNELS"


@dataclass(frozen=True, slots=True)
class StateKernels:
    """Signatures are those of `GatedDelta`, `Mamba2` and `ShortConv`; `on_metal` names those that are kernels.

    What isn't on Metal is better left to mlx-lm's own updates: the twins take prefills token by token.
    """

    on_metal: frozenset[str]
    gated_delta: Launch
    mamba2: Launch
    short_conv: Launch

    @property
    def name(self) -> str:
        """For people."""
        return f"metal {', '.join(sorted(self.on_metal))}" if self.on_metal else "mlx"


def twin_state_kernels() -> StateKernels:
    """Everything in plain MLX."""
    return StateKernels(frozenset(), state_twins.gated_delta, state_twins.mamba2, state_twins.short_conv)


def choose_state_kernels(shapes: Sequence[StateLayerShape], metal_kernel: MetalKernel | None) -> StateKernels:
    """What runs a model with such layers; each kernel by itself gives way to its twin where it fails.

    `metal_kernel` is None on a machine without Metal. `CIDERY_GDN_LAZY_KERNELS=0` forces the twins. Raises ValueError
    if that is neither 0 nor 1.
    """
    switch = os.environ.get(_SWITCH, "1")
    if switch not in ("0", "1"):
        raise ValueError(f"{_SWITCH} is {switch!r}; allowed are 0 and 1")
    if metal_kernel is None or switch == "0":
        if metal_kernel is not None:
            logger.info("metal kernels for recurrent layers off: %s=0", _SWITCH)
        return twin_state_kernels()
    twins = twin_state_kernels()
    of_kind: dict[type, list[StateLayerShape]] = {GatedDeltaShape: [], Mamba2Shape: [], ShortConvShape: []}
    for shape in shapes:
        of_kind[type(shape)].append(shape)
    gated_delta = _choose("gated_delta", GatedDelta(metal_kernel), twins.gated_delta, of_kind[GatedDeltaShape])
    mamba2 = _choose("mamba2", Mamba2(metal_kernel), twins.mamba2, of_kind[Mamba2Shape])
    short_conv = _choose("short_conv", ShortConv(metal_kernel), twins.short_conv, of_kind[ShortConvShape])
    chosen = {"gated_delta": gated_delta, "mamba2": mamba2, "short_conv": short_conv}
    on_metal = frozenset(name for name, launch in chosen.items() if launch is not getattr(twins, name))
    return StateKernels(on_metal, gated_delta, mamba2, short_conv)


def _choose(name: str, kernel: Launch, twin: Launch, shapes: Sequence[StateLayerShape]) -> Launch:
    """The kernel if the model has such layers and it agrees with its twin for all of them."""
    if not shapes:
        return twin
    for shape in shapes:
        if not _is_supported(shape):
            logger.info("metal %s off, plain MLX instead: %s is beyond what it supports", name, shape)
            return twin
    failure = state_self_test.run(kernel, twin, shapes)
    if failure is not None:
        logger.warning("metal %s off, plain MLX instead: %s", name, failure)
        return twin
    return kernel


def _is_supported(shape: StateLayerShape) -> bool:
    if isinstance(shape, GatedDeltaShape):
        return GatedDelta.supports(shape.key_dim, shape.value_dim)
    if isinstance(shape, Mamba2Shape):
        return Mamba2.supports(shape.head_dim, shape.state_dim)
    return ShortConv.supports(shape.kernel_width)
