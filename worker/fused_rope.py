"""RoPE for Metal: queries and keys of a layer turned by one launch, each row at its own position.

Models turn queries first and keys next, by two calls. In a step of token rows the first call only gives a promise; the
second one launches the kernel for both, and attention takes the queries from the promise. That is for models of which
the registry says that they do nothing else with turned queries.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from worker.attention import Step, Turning
from worker.metal.dispatch import Turn
from worker.metal.rope import RopeOptions

# dims, order of pairs, base, scale, identity of freqs.
_Key = tuple[int, bool, float | None, float, int]


@dataclass
class FusedRope:
    """Stands for `mx.fast.rope`; `below` is what it stands for."""

    step: Step
    turn: Turn
    below: Callable[..., mx.array]
    _options: dict[_Key, RopeOptions] = field(default_factory=dict)
    _waiting: Turning | None = None
    # Whose rows are waiting.
    _batch: object = None

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
    ) -> "mx.array | Turning":
        """See `mx.fast.rope`."""
        step = self.step
        if others or not step.is_running or offset is not step.batch.offset or step.batch.is_flat or x.ndim != 4:
            return self.below(
                x, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs, **others
            )
        if step.batch is not self._batch:
            self._batch, self._waiting = step.batch, None
        if self._waiting is None:
            self._waiting = Turning(x)
            return self._waiting
        waiting, self._waiting = self._waiting, None
        key = dims, traditional, base, scale, id(freqs)
        if key not in self._options:
            self._options[key] = RopeOptions(dims, traditional=traditional, base=base, scale=scale, freqs=freqs)
        assert isinstance(offset, mx.array)
        queries, keys = self.turn(waiting.x[:, :, 0], x[:, :, 0], offset, self._options[key])
        waiting.turned = queries[:, :, None]
        return keys[:, :, None]


def install(step: Step, turn: Turn) -> None:
    """Put a fused RoPE for `step` where models look `mx.fast.rope` up."""
    below: Any = mx.fast.rope
    while isinstance(below, FusedRope):
        below = below.below
    mx.fast.rope = FusedRope(step, turn, below)  # type: ignore[assignment]
