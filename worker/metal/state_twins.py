"""The kernels over recurrent states in plain MLX: oracle and fallback. Signatures, checks and errors are the kernels'.

Prefills of the recurrences go token by token: about ten operations a token. A twin writes through the array object that
it is given, by scatter, so nothing else should refer to the pool. The token that it returns is one that a kernel can
take; MLX itself orders the twins.
"""

from collections.abc import Callable

import mlx.core as mx
import numpy as np

from worker.metal import gated_delta as gated_delta_kernel
from worker.metal import mamba2 as mamba2_kernel
from worker.metal import short_conv as short_conv_kernel
from worker.metal.state_rows import StateRows, token_or_none

# Outputs and next states of some rows: of decode rows one token each, else the tokens of one sequence.
_Run = Callable[[slice, mx.array], tuple[mx.array, mx.array]]


def gated_delta(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    gates: mx.array,
    betas: mx.array,
    pool: mx.array,
    rows: StateRows,
    after: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """As `GatedDelta.__call__`."""
    gated_delta_kernel.check_inputs(queries, keys, values, gates, betas, pool, rows)
    repeats = values.shape[1] // queries.shape[1]
    q, k = (mx.repeat(array.astype(mx.float32), repeats, axis=1) for array in (queries, keys))
    v, beta = values.astype(mx.float32), betas.astype(mx.float32)
    decay = gates.astype(mx.float32).reshape(*values.shape[:2], 1, -1)

    def advance(at: slice, states: mx.array) -> tuple[mx.array, mx.array]:
        states = states * decay[at]
        recalled = (states @ k[at][..., None])[..., 0]
        change = (v[at] - recalled) * beta[at][..., None]
        states = states + change[..., None] * k[at][:, :, None]
        return (states @ q[at][..., None])[..., 0], states

    outputs = _run_sequences(advance if rows.is_decode else _token_by_token(advance), pool, rows)
    return outputs.astype(queries.dtype), token_or_none(None)


def mamba2(
    x: mx.array,
    a_log: mx.array,
    b: mx.array,
    c: mx.array,
    d: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    pool: mx.array,
    rows: StateRows,
    after: mx.array | None = None,
    *,
    time_step_limit: tuple[float, float],
) -> tuple[mx.array, mx.array]:
    """As `Mamba2.__call__`."""
    mamba2_kernel.check_inputs(x, a_log, b, c, d, dt, dt_bias, pool, rows)
    repeats = x.shape[1] // b.shape[1]
    b, c = (mx.repeat(array.astype(mx.float32), repeats, axis=1) for array in (b, c))
    steps = mx.clip(mx.logaddexp(dt.astype(mx.float32) + dt_bias.astype(mx.float32), 0.0), *time_step_limit)
    decay = mx.exp(-mx.exp(a_log.astype(mx.float32)) * steps)[..., None, None]
    x32 = x.astype(mx.float32)
    change = x32 * steps[..., None]
    skipped = x32 * d.astype(mx.float32)[:, None]

    def advance(at: slice, states: mx.array) -> tuple[mx.array, mx.array]:
        states = states * decay[at] + change[at][..., None] * b[at][:, :, None]
        return (states @ c[at][..., None])[..., 0] + skipped[at], states

    outputs = _run_sequences(advance if rows.is_decode else _token_by_token(advance), pool, rows)
    return outputs.astype(x.dtype), token_or_none(None)


def short_conv(
    inputs: mx.array,
    weights: mx.array,
    bias: mx.array | None,
    pool: mx.array,
    rows: StateRows,
    after: mx.array | None = None,
    *,
    silu: bool,
) -> tuple[mx.array, mx.array]:
    """As `ShortConv.__call__`."""
    short_conv_kernel.check_inputs(inputs, weights, bias, pool, rows)
    channels, kernel_width, _ = weights.shape

    def convolve(at: slice, states: mx.array) -> tuple[mx.array, mx.array]:
        new = inputs[at][:, None] if rows.is_decode else inputs[None, at]
        seen = mx.concatenate([states.astype(inputs.dtype), new], axis=1)
        outputs = mx.conv1d(seen, weights.astype(inputs.dtype), groups=channels)
        outputs = outputs if bias is None else outputs + bias.astype(inputs.dtype)
        return outputs.reshape(-1, channels), seen[:, 1 - kernel_width :]

    outputs = _run_sequences(convolve, pool, rows)
    return (outputs * mx.sigmoid(outputs) if silu else outputs), token_or_none(None)


def _token_by_token(advance: _Run) -> _Run:
    """The tokens of one sequence, by what advances one."""

    def run(at: slice, state: mx.array) -> tuple[mx.array, mx.array]:
        outputs = []
        for row in range(at.start, at.stop):
            output, state = advance(slice(row, row + 1), state)
            outputs.append(output)
        return mx.concatenate(outputs), state

    return run


def _run_sequences(run: _Run, pool: mx.array, rows: StateRows) -> mx.array:
    """Outputs of all rows, zero for skipped ones; the states of the others are written."""
    states = pool[mx.array(np.maximum(rows.slots, 0))]
    has_none = rows.is_fresh | (rows.slots < 0)
    states = mx.where(_column(has_none, states), mx.zeros((), pool.dtype), states)
    if rows.is_decode:
        outputs, states = run(slice(0, rows.num_rows), states)
    else:
        parts, last = [], []
        for sequence, (first, end) in enumerate(zip(rows.offsets.tolist(), rows.offsets[1:].tolist(), strict=False)):
            state = states[sequence : sequence + 1]
            if end > first:
                output, state = run(slice(first, end), state)
                parts.append(output)
            last.append(state.astype(pool.dtype))
        outputs, states = mx.concatenate(parts), mx.concatenate(last)
    (written,) = np.nonzero((rows.slots >= 0) & (rows.lengths > 0))
    if len(written):
        pool[mx.array(rows.slots[written])] = states[mx.array(written.astype(np.int32))].astype(pool.dtype)
    is_skipped = np.repeat(rows.slots < 0, rows.lengths)
    return mx.where(_column(is_skipped, outputs), mx.zeros((), outputs.dtype), outputs) if is_skipped.any() else outputs


def _column(mask: np.ndarray, like: mx.array) -> mx.array:
    """One flag for each of the first axis."""
    return mx.array(mask).reshape(-1, *[1] * (like.ndim - 1))
