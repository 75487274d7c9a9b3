"""Recurrent updates for MLX's CPU build: mlx-lm's are written for kernels, and read states several times.

Of one token: a state is decayed, a product of two vectors is added to it, and a third vector is multiplied with it.
Matrix products do each in one pass, in a fraction of the operations. Up to rounding the result is the same. Prompts go
by chunks (`chunked_states`).
"""

import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import gated_delta, ssm

from worker import chunked_states
from worker.attention import Step

_mlx_ssm_update = ssm.ssm_update
_mlx_gated_delta_ops = gated_delta.gated_delta_ops


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
    """As mlx-lm's."""
    is_one, is_prompt = _is_one_token(hidden_states, state, mask), _is_prompt(hidden_states, state, mask)
    if not (is_one or is_prompt) or lengths is not None:
        result: tuple[mx.array, Any] = _mlx_ssm_update(
            hidden_states, A_log, B, C, D, dt, dt_bias, state, time_step_limit, mask, lengths
        )
        return result
    rows, _, heads, dim = hidden_states.shape
    groups, size = B.shape[2:]
    dt, rates = ssm.compute_dt(dt, dt_bias, time_step_limit), -mx.exp(A_log.astype(mx.float32))
    if is_prompt:
        y, after = chunked_states.ssm(dt[..., None] * hidden_states, dt * rates, B, C, state)
        return y + hidden_states * D.reshape(heads, 1), after
    dt = dt.reshape(rows, heads, 1, 1)
    decay = mx.exp(dt * rates.reshape(heads, 1, 1))
    inputs = hidden_states.reshape(rows, heads, dim, 1)
    keys = mx.broadcast_to(B.reshape(rows, groups, 1, size), (rows, groups, heads // groups, size))
    after = mx.addmm(state * decay, dt * inputs, keys.reshape(rows, heads, 1, size))
    # The heads of a group read by the same vector: they are the rows of one product.
    read = after.reshape(rows, groups, -1, size) @ C.reshape(rows, groups, size, 1)
    return (read.reshape(inputs.shape) + inputs * D.reshape(heads, 1, 1)).reshape(hidden_states.shape), after


def gated_delta_ops(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """As mlx-lm's."""
    is_one, is_prompt = _is_one_token(v, state, mask), _is_prompt(v, state, mask)
    # Where each element of a key has a gate of its own, a chunk is no product.
    is_prompt = is_prompt and g.ndim == v.ndim - 1
    if not (is_one or is_prompt) or k.dtype != mx.float32:
        result: tuple[mx.array, mx.array] = _mlx_gated_delta_ops(q, k, v, g, beta, state, mask)
        return result
    rows, _, heads, dim = v.shape
    repeats = heads // k.shape[2]
    queries, keys = (mx.repeat(x, repeats, axis=2) if repeats > 1 else x for x in (q, k))
    if is_prompt:
        return chunked_states.gated_delta(queries, keys, v, g, beta, state)
    assert state is not None
    # A gate for each element of a key, or one for all.
    decay = g.reshape(rows, heads, 1, -1)
    decayed = state * decay
    missing = v.reshape(rows, heads, dim, 1) - decayed @ keys.reshape(rows, heads, -1, 1)
    after = mx.addmm(decayed, missing * beta.reshape(rows, heads, 1, 1), keys.reshape(rows, heads, 1, -1))
    return (after @ queries.reshape(rows, heads, -1, 1)).reshape(v.shape), after


def _is_one_token(inputs: mx.array, state: Any, mask: mx.array | None) -> bool:
    is_plain = isinstance(state, mx.array) and state.dtype == mx.float32 and mask is None
    return is_plain and inputs.shape[1] == 1 and inputs.dtype == mx.float32 and Step.now() is not None


def _is_prompt(inputs: mx.array, state: Any, mask: mx.array | None) -> bool:
    is_plain = mask is None and inputs.dtype == mx.float32 and (state is None or state.dtype == mx.float32)
    return is_plain and inputs.shape[1] >= chunked_states.MIN_TOKENS and Step.now() is not None


def install() -> None:
    """Put both where mlx-lm's models look theirs up. Only for a CPU, and they are mlx-lm's own outside of a step."""
    gated_delta.gated_delta_ops = gated_delta_ops
    ssm.ssm_update = ssm_update
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, "ssm_update", None) is _mlx_ssm_update:
            module.ssm_update = ssm_update  # type: ignore[attr-defined]
