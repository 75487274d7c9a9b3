"""mlx-lm's two state updates, for states that lie in slots of a pool.

All of mlx-lm's gated delta nets call `gated_delta_update`, and its Mamba-2 mixers `ssm_update`, with the state that was
in their cache. Where that is a `SlotStates` these run kernels over the pool, in place; any other state goes to
mlx-lm's own. So mixers run unmodified, and a state is read and written once a step instead of gathered and scattered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models import gated_delta, ssm

from worker.metal.state_kernels import StateKernels
from worker.metal.state_rows import StateRows

# Called with a part's packed inputs, pool, rows and the token to come after; its outputs and its token.
Launch = Callable[[Sequence[mx.array], mx.array, StateRows, mx.array | None], tuple[mx.array, mx.array]]


@dataclass(frozen=True, slots=True)
class SlotStates:
    """The states of the rows that a mixer is called with; stands where it expects their array.

    `parts` are rows `[first, last)` that are launched together. `update(launch)` gives what `launch(pool, after=token)`
    computes beside its token; it owns the pool and its order, and sees to it that all updates are evaluated: a kernel
    whose results are not wanted does not run, and its states stay as they were.
    """

    update: Callable[[Callable[..., tuple[mx.array, mx.array]]], mx.array]
    parts: Sequence[tuple[int, int, StateRows]]
    kernels: StateKernels

    def run(self, launch: Launch, packed: Sequence[mx.array]) -> mx.array:
        """The outputs of all rows; `packed` are inputs with an axis of rows."""
        if len(self.parts) == 1:
            rows = self.parts[0][2]
            return self.update(lambda pool, after: launch(packed, pool, rows, after))
        outputs = []
        for first, last, rows in self.parts:
            cut = [array[first:last] for array in packed]
            # Called before the loop goes on.
            outputs.append(self.update(lambda pool, after: launch(cut, pool, rows, after)))  # noqa: B023
        return mx.concatenate(outputs)


def install(module: ModuleType) -> None:
    """Have a module of mlx_lm.models, which imported mlx-lm's updates by name, call these."""
    for update in (gated_delta_update, ssm_update):
        if hasattr(module, update.__name__):
            setattr(module, update.__name__, update)


def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    A_log: mx.array,  # noqa: N803
    dt_bias: mx.array,
    state: Any = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
) -> tuple[mx.array, Any]:
    """As mlx-lm's. Batch and tokens `[B, T]` together are the packed rows of a `SlotStates`, which takes no mask."""
    if not isinstance(state, SlotStates):
        options: Any = {"use_kernel": use_kernel, "lower_bound": lower_bound, "allow_neg_eigval": allow_neg_eigval}
        result: tuple[mx.array, Any] = gated_delta.gated_delta_update(
            q, k, v, a, b, A_log, dt_bias, state, mask, **options
        )
        return result
    refuse(mask=mask)
    betas = mx.sigmoid(b) * 2.0 if allow_neg_eigval else mx.sigmoid(b)
    if lower_bound is None:
        gates = gated_delta.compute_g(A_log, a, dt_bias)
    else:
        gates = gated_delta.compute_lower_bound_g(A_log, a, dt_bias, lower_bound)
    kernel = state.kernels.gated_delta
    packed = [array.flatten(0, 1) for array in (q, k, v, gates, betas)]
    y = state.run(lambda inputs, pool, rows, after: kernel(*inputs, pool, rows, after), packed)
    return y.reshape(v.shape), state


def ssm_update(
    hidden_states: mx.array,
    A_log: mx.array,  # noqa: N803
    B: mx.array,  # noqa: N803
    C: mx.array,  # noqa: N803
    D: mx.array,  # noqa: N803
    dt: mx.array,
    dt_bias: mx.array,
    state: Any = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
) -> tuple[mx.array, Any]:
    """As mlx-lm's. Batch and tokens `[B, T]` together are the packed rows of a `SlotStates`, which takes no mask."""
    if not isinstance(state, SlotStates):
        result: tuple[mx.array, Any] = ssm.ssm_update(
            hidden_states, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask=mask, lengths=lengths
        )
        return result
    refuse(mask=mask, lengths=lengths)
    kernel = state.kernels.mamba2
    limit = (float(time_step_limit[0]), float(time_step_limit[1]))

    def launch(
        inputs: Sequence[mx.array], pool: mx.array, rows: StateRows, after: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        x, b, c, steps = inputs
        return kernel(x, A_log, b, c, D, steps, dt_bias, pool, rows, after, time_step_limit=limit)

    y = state.run(launch, [array.flatten(0, 1) for array in (hidden_states, B, C, dt)])
    return y.reshape(hidden_states.shape), state


def refuse(**given: mx.array | None) -> None:
    """Raises ValueError for what packed rows can't have."""
    for name, array in given.items():
        if array is not None:
            raise ValueError(
                f"{name} of shape {array.shape} is given; packed rows need none, and states in slots allow none"
            )
