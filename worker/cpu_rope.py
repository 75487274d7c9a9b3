"""RoPE for MLX's CPU build, where every call computes angles, sines and cosines anew, each an operation of its own.

In one step all layers rotate queries and keys by the same positions, so the tables are made once a step. What a
rotation does to a number stays bit for bit the same.
"""

import math
from typing import Any

import mlx.core as mx

from worker.attention import Step

_mlx_rope = mx.fast.rope

# (dims, base, scale, identity of freqs, dtype): what tables depend on besides the step's positions.
_Key = tuple[int, float | None, float, int, mx.Dtype]


class SharedRope:
    """Stands for `mx.fast.rope`; shares tables while a step's graph is built and is MLX's own function otherwise."""

    def __init__(self) -> None:
        self._tables: dict[_Key, tuple[mx.array, mx.array]] = {}
        # Whose positions the tables are for.
        self._batch: object = None

    def __call__(
        self,
        x: mx.array,
        dims: int,
        *,
        traditional: bool,
        base: float | None,
        scale: float,
        offset: int | mx.array,
        freqs: mx.array | None = None,
        **others: Any,
    ) -> mx.array:
        """See `mx.fast.rope`."""
        if traditional or not self._is_step_position(x, offset):
            return _mlx_rope(
                x, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs, **others
            )
        key = (dims, base, scale, id(freqs), x.dtype)
        if key not in self._tables:
            self._tables[key] = self._make_tables(x, dims, base, scale, offset, freqs)
        cosines, sines = self._tables[key]
        half = dims // 2
        rotated = x if dims == x.shape[-1] else x[..., :dims]
        swapped = mx.concatenate([x[..., half:dims], x[..., :half]], axis=-1)
        rotated = rotated * cosines + swapped * sines
        return rotated if dims == x.shape[-1] else mx.concatenate([rotated, x[..., dims:]], axis=-1)

    def _is_step_position(self, x: mx.array, offset: int | mx.array) -> bool:
        step = Step.now()
        if step is None or x.ndim != 4:
            return False
        batch = step.batch
        if batch is not self._batch:
            self._batch = batch
            self._tables.clear()
        if batch.is_flat:
            return isinstance(offset, int) and offset == batch.offset and x.shape[2] == batch.num_tokens
        return offset is batch.offset and x.shape[2] == 1

    def _make_tables(
        self, x: mx.array, dims: int, base: float | None, scale: float, offset: int | mx.array, freqs: mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """Cosines twice, and sines with the first half negative: `[tokens, dims]`, shaped to broadcast over `x`."""
        half = dims // 2
        # The same operations as MLX's, so that the same numbers come out.
        if freqs is None:
            inverse = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(base or 1.0) / half))
        else:
            inverse = mx.reciprocal(freqs)
        if isinstance(offset, int):
            positions = (mx.arange(x.shape[2], dtype=mx.float32) + offset) * scale
            angles = positions[:, None] * inverse
        else:
            positions = offset.astype(mx.float32) * scale
            angles = positions[:, None, None, None] * inverse
        cosines, sines = mx.cos(angles).astype(x.dtype), mx.sin(angles).astype(x.dtype)
        return mx.concatenate([cosines, cosines], axis=-1), mx.concatenate([-sines, sines], axis=-1)


def install() -> None:
    """Put a shared RoPE where models look `mx.fast.rope` up. Only for a CPU: Metal's is one fused kernel."""
    mx.fast.rope = SharedRope()  # type: ignore[assignment]
