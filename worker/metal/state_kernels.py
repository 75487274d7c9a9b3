"""What layers with recurrent states run on: kernels that agree with their twins on this GPU, else the twins."""

import logging
import os
from collections.abc import Callable, Collection, Sequence
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
    if metal_kernel is None:
        return twin_state_kernels()
    if not is_switched_on():
        logger.info("metal kernels for recurrent layers off: %s=0", _SWITCH)
        return twin_state_kernels()
    works = set()
    for name, check in CHECKS.items():
        if not any(isinstance(shape, _SHAPES[name]) for shape in shapes):
            continue
        failure = check(metal_kernel, shapes)
        if failure is None:
            works.add(name)
        else:
            logger.warning("metal %s off, plain MLX instead: %s", name, failure)
    return state_kernels(metal_kernel, works)


def is_switched_on() -> bool:
    """Whether `CIDERY_GDN_LAZY_KERNELS` allows the kernels. Raises ValueError if it is neither 0 nor 1."""
    switch = os.environ.get(_SWITCH, "1")
    if switch not in ("0", "1"):
        raise ValueError(f"{_SWITCH} is {switch!r}; allowed are 0 and 1")
    return switch == "1"


def state_kernels(metal_kernel: MetalKernel, works: Collection[str]) -> StateKernels:
    """The kernels that work, by the names of `CHECKS`, and twins for the others."""
    twins = twin_state_kernels()
    return StateKernels(
        frozenset(works),
        GatedDelta(metal_kernel) if "gated_delta" in works else twins.gated_delta,
        Mamba2(metal_kernel) if "mamba2" in works else twins.mamba2,
        ShortConv(metal_kernel) if "short_conv" in works else twins.short_conv,
    )


def _check_gated_delta(metal_kernel: MetalKernel, needs: Sequence[object]) -> str | None:
    shapes = [shape for shape in needs if isinstance(shape, GatedDeltaShape)]
    beyond = [shape for shape in shapes if not GatedDelta.supports(shape.key_dim, shape.value_dim)]
    return _beyond(beyond) or state_self_test.run(GatedDelta(metal_kernel), state_twins.gated_delta, shapes)


def _check_mamba2(metal_kernel: MetalKernel, needs: Sequence[object]) -> str | None:
    shapes = [shape for shape in needs if isinstance(shape, Mamba2Shape)]
    beyond = [shape for shape in shapes if not Mamba2.supports(shape.head_dim, shape.state_dim)]
    return _beyond(beyond) or state_self_test.run(Mamba2(metal_kernel), state_twins.mamba2, shapes)


def _check_short_conv(metal_kernel: MetalKernel, needs: Sequence[object]) -> str | None:
    shapes = [shape for shape in needs if isinstance(shape, ShortConvShape)]
    beyond = [shape for shape in shapes if not ShortConv.supports(shape.kernel_width)]
    return _beyond(beyond) or state_self_test.run(ShortConv(metal_kernel), state_twins.short_conv, shapes)


def _beyond(shapes: Sequence[object]) -> str | None:
    return f"{shapes[0]} is beyond what it supports" if shapes else None


_SHAPES: dict[str, type] = {"gated_delta": GatedDeltaShape, "mamba2": Mamba2Shape, "short_conv": ShortConvShape}
# Kernels that stand or fall together: None if they are right for those of a model's layers that concern them, else what
# went wrong, for people. A layer beyond what they support is no error and counts as wrong.
CHECKS: dict[str, Callable[[MetalKernel, Sequence[object]], str | None]] = {
    "gated_delta": _check_gated_delta,
    "mamba2": _check_mamba2,
    "short_conv": _check_short_conv,
}
