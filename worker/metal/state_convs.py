"""mlx-lm's short convolutions, for states that lie in slots of a pool.

Where a convolution is a method or a module of its own (Mamba-2's `_conv`, Kimi's `ShortConv1d`, LFM2's `ShortConv`)
and finds a `SlotStates` in its cache, the kernel runs; with any other state mlx-lm's own code does. The mixers of
Qwen3-Next and Qwen3.5 have theirs written out within a longer call, and keep it.
"""

import functools
from types import ModuleType
from typing import Any

import mlx.core as mx

from worker.metal.state_updates import SlotStates, refuse


def conv_update(x: mx.array, conv: Any, state: SlotStates, *, silu: bool) -> mx.array:
    """What an `nn.Conv1d` makes of `x [B, T, channels]`, whose rows together are the packed rows of the states."""
    bias = conv.bias if "bias" in conv else None
    y, state.token = state.kernels.short_conv(
        x.flatten(0, 1), conv.weight, bias, state.pool, state.rows, state.token, silu=silu
    )
    return y.reshape(x.shape)


def install(module: ModuleType) -> None:
    """Have the mixers of a module of mlx_lm.models do so. Again is no harm."""
    for mixer in list(vars(module).values()):
        if not isinstance(mixer, type) or mixer.__module__ != module.__name__:
            continue
        if mixer.__name__ == "ShortConv1d":
            _replace(mixer, "__call__", _module_call)
        elif mixer.__name__ == "ShortConv":
            _replace(mixer, "__call__", _lfm2_call)
        elif "mamba" in mixer.__name__.lower() and hasattr(mixer, "_conv"):
            _replace(mixer, "_conv", _method)


def _replace(mixer: type, name: str, make: Any) -> None:
    original = getattr(mixer, name)
    if not hasattr(original, "cidery_over_slots"):
        wrapped = functools.wraps(original)(make(original))
        wrapped.cidery_over_slots = True  # type: ignore[attr-defined]
        setattr(mixer, name, wrapped)


def _method(original: Any) -> Any:
    def conv(self: Any, conv_input: mx.array, cache: Any, mask: mx.array | None) -> mx.array:
        if cache is None or not isinstance(cache[0], SlotStates):
            result: mx.array = original(self, conv_input, cache, mask)
            return result
        refuse(mask=mask, lengths=cache.lengths)
        return conv_update(conv_input, self.conv1d, cache[0], silu=True)

    return conv


def _module_call(original: Any) -> Any:
    def call(
        self: Any, x: mx.array, state: Any, mask: mx.array | None, lengths: mx.array | None
    ) -> tuple[mx.array, Any]:
        if not isinstance(state, SlotStates):
            result: tuple[mx.array, Any] = original(self, x, state, mask, lengths)
            return result
        refuse(mask=mask, lengths=lengths)
        return conv_update(x, self.conv, state, silu=True), state

    return call


def _lfm2_call(original: Any) -> Any:
    def call(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if cache is None or not isinstance(cache[0], SlotStates):
            result: mx.array = original(self, x, mask, cache)
            return result
        refuse(mask=mask, lengths=cache.lengths)
        gate, out_gate, values = mx.split(self.in_proj(x), 3, axis=-1)
        convolved = conv_update(gate * values, self.conv, cache[0], silu=False)
        output: mx.array = self.out_proj(out_gate * convolved)
        return output

    return call
