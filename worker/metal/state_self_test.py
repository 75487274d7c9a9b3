"""Kernels over recurrent states against their twins on the machine's own GPU, before any of them serves a request.

A chain of launches over one pool, evaluated at once: prefills and decode rows of sequences that begin, go on, are
skipped and take over a slot. Each launch reads what another wrote, so the chain also tests that tokens order them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from worker.metal.state_rows import StateRows

_NUM_SLOTS = 8
# (lengths, slots, which begin). Few rows of few heads are a variant of their own, of decode rows and of prefills: their
# rates lie in Metal's constant address space.
_CHAIN = [
    ((19, 1, 70), (3, 1, 5), (True, True, True)),
    ((1, 1, 1), (5, 3, 1), (False, False, False)),
    ((1, 1, 1), (1, -1, 5), (False, False, False)),
    ((2, 0, 33), (3, 1, 6), (False, False, True)),
    ((1, 1), (6, 3), (False, True)),
    ((1,), (3,), (False,)),
    ((1,) * 8, (3, 1, 5, 6, 0, 2, 4, 7), (False,) * 4 + (True,) * 4),
    ((2,), (5,), (False,)),
]
# Relative to the largest output: half precision rounds the result once, reduction order is free.
_TOLERANCE = {mx.float32: 1e-4, mx.float16: 4e-3, mx.bfloat16: 3e-2}

# Called with inputs, pool, rows, and the token to come after; the outputs and the token.
Launch = Callable[..., tuple[mx.array, mx.array]]


@dataclass(frozen=True, slots=True)
class GatedDeltaShape:
    """A layer of gated delta net; `is_by_channel`: with a decay for each key channel."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    is_by_channel: bool = False

    @property
    def keywords(self) -> dict[str, Any]:
        """What the kernel takes by name."""
        return {}

    @property
    def pool(self) -> tuple[tuple[int, ...], mx.Dtype]:
        """Shape and type of a state."""
        return (self.value_heads, self.value_dim, self.key_dim), mx.float32

    def inputs(self, num_rows: int, seed: int) -> list[Any]:
        """What the kernel takes before the pool: keys of length one, decays and rates between 0 and 1."""
        heads = (num_rows, self.value_heads)
        by_key = (num_rows, self.key_heads, self.key_dim)
        by_gate = (*heads, self.key_dim) if self.is_by_channel else heads
        queries, keys, values, gates, betas = (
            mx.random.normal(shape, key=mx.random.key(seed + number))
            for number, shape in enumerate((by_key, by_key, (*heads, self.value_dim), by_gate, heads))
        )
        queries, keys = (array / mx.linalg.norm(array, axis=-1, keepdims=True) for array in (queries, keys))
        gates, betas = mx.sigmoid(gates * 2.0 + 2.0), mx.sigmoid(betas)
        return [*(array.astype(self.dtype) for array in (queries, keys, values)), gates, betas.astype(self.dtype)]


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """A layer of Mamba-2."""

    heads: int
    groups: int
    head_dim: int
    state_dim: int
    dtype: mx.Dtype
    time_step_limit: tuple[float, float]

    @property
    def keywords(self) -> dict[str, Any]:
        """What the kernel takes by name."""
        return {"time_step_limit": self.time_step_limit}

    @property
    def pool(self) -> tuple[tuple[int, ...], mx.Dtype]:
        """Shape and type of a state."""
        return (self.heads, self.head_dim, self.state_dim), mx.float32

    def inputs(self, num_rows: int, seed: int) -> list[Any]:
        """What the kernel takes before the pool: decays from slow to fast."""
        mix = (num_rows, self.groups, self.state_dim)
        x, b, c, d, dt = (
            mx.random.normal(shape, key=mx.random.key(seed + number)).astype(self.dtype)
            for number, shape in enumerate(
                ((num_rows, self.heads, self.head_dim), mix, mix, (self.heads,), (num_rows, self.heads))
            )
        )
        per_head = mx.linspace(-2.0, 1.0, self.heads)
        return [x, per_head, b * self.state_dim**-0.25, c * self.state_dim**-0.25, d, dt, per_head]


@dataclass(frozen=True, slots=True)
class ShortConvShape:
    """A causal convolution; `state_dtype` is its type or float32."""

    channels: int
    kernel_width: int
    dtype: mx.Dtype
    state_dtype: mx.Dtype
    has_bias: bool
    has_silu: bool

    @property
    def keywords(self) -> dict[str, Any]:
        """What the kernel takes by name."""
        return {"silu": self.has_silu}

    @property
    def pool(self) -> tuple[tuple[int, ...], mx.Dtype]:
        """Shape and type of a state."""
        return (self.kernel_width - 1, self.channels), self.state_dtype

    def inputs(self, num_rows: int, seed: int) -> list[Any]:
        """What the kernel takes before the pool."""
        x, weights, bias = (
            mx.random.normal(shape, key=mx.random.key(seed + number)).astype(self.dtype)
            for number, shape in enumerate(
                ((num_rows, self.channels), (self.channels, self.kernel_width, 1), (self.channels,))
            )
        )
        return [x, weights, bias if self.has_bias else None]


StateLayerShape = GatedDeltaShape | Mamba2Shape | ShortConvShape


def run(kernel: Launch, twin: Launch, shapes: Sequence[StateLayerShape]) -> str | None:
    """None if a kernel agrees with its twin for every shape of layer, else what went wrong, for people."""
    try:
        for shape in dict.fromkeys(shapes):
            failure = _check(kernel, twin, shape)
            if failure is not None:
                return f"{failure} for {shape}"
    except (RuntimeError, ValueError) as error:
        # How MLX reports a kernel that does not compile or cannot be launched.
        return str(error)
    return None


def _check(kernel: Launch, twin: Launch, shape: StateLayerShape) -> str | None:
    pools = [_pool(shape), _pool(shape)]
    pairs, token = [], None
    for number, (lengths, slots, begins) in enumerate(_CHAIN):
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        rows = StateRows(offsets, np.array(slots, np.int32), np.array(begins))
        inputs = shape.inputs(rows.num_rows, seed=10 * number)
        ours, token = kernel(*inputs, pools[0], rows, token, **shape.keywords)
        theirs, _ = twin(*inputs, pools[1], rows, None, **shape.keywords)
        pairs.append((ours, theirs))
    mx.eval(pairs, token)
    for number, (ours, theirs) in enumerate(pairs):
        expected = theirs.astype(mx.float32)
        error, largest = float(mx.abs(ours - expected).max()), float(mx.abs(expected).max())
        # Not "error > tolerance", which a NaN would pass.
        if not error <= _TOLERANCE[shape.dtype] * largest:
            return f"differs from its twin by {error:.2g} of {largest:.2g} in launch {number}"
    error = float(mx.abs(pools[0] - pools[1]).max())
    if not error <= 1e-3:
        return f"leaves states that differ from its twin's by {error:.2g}"
    return None


def _pool(shape: StateLayerShape) -> mx.array:
    size, dtype = shape.pool
    pool = mx.random.normal((_NUM_SLOTS, *size), key=mx.random.key(99)).astype(dtype)
    mx.eval(pool)
    return pool
