"""What layers with recurrent states run on: kernels that agree with their twins on this GPU, else the twins."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from worker.metal import state_self_test, state_twins
from worker.metal.factory import MetalKernel
from worker.metal.gated_delta import GatedDelta
from worker.metal.mamba2 import Mamba2
from worker.metal.short_conv import ShortConv
from worker.metal.state_self_test import GatedDeltaShape, Launch, Mamba2Shape, ShortConvShape

logger = logging.getLogger(__name__)


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


# Which kernel a kind of layer needs.
SHAPES: dict[str, type] = {"gated_delta": GatedDeltaShape, "mamba2": Mamba2Shape, "short_conv": ShortConvShape}
# Kernels that stand or fall together: None if they are right for those of a model's layers that concern them, else what
# went wrong, for people. A layer beyond what they support is no error and counts as wrong.
CHECKS: dict[str, Callable[[MetalKernel, Sequence[object]], str | None]] = {
    "gated_delta": _check_gated_delta,
    "mamba2": _check_mamba2,
    "short_conv": _check_short_conv,
}
