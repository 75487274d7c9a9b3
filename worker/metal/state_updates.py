"""mlx-lm's two state updates, for states that lie in slots of a pool.

All of mlx-lm's gated delta nets call `gated_delta_update`, and its Mamba-2 mixers `ssm_update`, with the state that was
in their cache. Where that is a `SlotStates` these run kernels over the pool, in place; any other state goes to
mlx-lm's own. So mixers run unmodified, and a state is read and written once a step instead of gathered and scattered.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models import gated_delta, ssm

from worker.metal.state_kernels import StateKernels
from worker.metal.state_rows import StateRows


@dataclass(slots=True)
class SlotStates:
    """The states of the rows that a mixer is called with; stands where it expects their array.

    `pool [num_slots, *state]` float32; `token` is that of the last launch over the pool, None if it was evaluated.
    After the call it is the new one, which the next launch over the pool must get. A step evaluates it, even where
    nobody needs the outputs: a kernel whose results are not wanted does not run, and its states stay as they were.
    """

    pool: mx.array
    rows: StateRows
    kernels: StateKernels
    token: mx.array | None = None


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
    packed = [array.flatten(0, 1) for array in (q, k, v, gates, betas)]
    y, state.token = state.kernels.gated_delta(*packed, state.pool, state.rows, state.token)
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
    x, b, c, steps = (array.flatten(0, 1) for array in (hidden_states, B, C, dt))
    arguments = (x, A_log, b, c, D, steps, dt_bias, state.pool, state.rows, state.token)
    limit = (float(time_step_limit[0]), float(time_step_limit[1]))
    y, state.token = state.kernels.mamba2(*arguments, time_step_limit=limit)
    return y.reshape(hidden_states.shape), state


def refuse(**given: mx.array | None) -> None:
    """Raises ValueError for what packed rows can't have."""
    for name, array in given.items():
        if array is not None:
            raise ValueError(
                f"{name} of shape {array.shape} is given; packed rows need none, and states in slots allow none"
            )
