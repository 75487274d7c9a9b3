"""mlx-lm's short convolutions, for states that lie in slots of a pool.

Where a convolution is a method or a module of its own and finds a `SlotStates` in its cache, the kernel runs; with any
other state mlx-lm's own code does. The gated delta nets of Qwen3-Next and Qwen3.5 have theirs written out within their
call, which is told anew here.
"""

import functools
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx_lm.models.gated_delta import normalize_qk

from worker.metal.state_updates import SlotStates, gated_delta_update, refuse

_QWEN_MODULES = ("mlx_lm.models.qwen3_next", "mlx_lm.models.qwen3_5")


def conv_update(x: mx.array, conv: Any, state: SlotStates, *, silu: bool) -> mx.array:
    """What an `nn.Conv1d` makes of `x [B, T, channels]`, whose rows together are the packed rows of the states."""
    bias = conv.bias if "bias" in conv else None
    kernel = state.kernels.short_conv
    y = state.run(
        lambda inputs, pool, rows, after: kernel(inputs[0], conv.weight, bias, pool, rows, after, silu=silu),
        [x.flatten(0, 1)],
    )
    return y.reshape(x.shape)


def _in_slots(cache: Any, index: int = 0) -> SlotStates | None:
    """What is to be found in a cache, unless it is a state for mlx-lm's own code. Not asked of the cache itself, which
    may have its rows cut by a wrapper within."""
    state = None if cache is None else cache.cache[index]
    return state if isinstance(state, SlotStates) else None


def install(module: ModuleType) -> None:
    """Have the mixers of a module of mlx_lm.models do so. Again is no harm."""
    for mixer in list(vars(module).values()):
        if not isinstance(mixer, type) or mixer.__module__ != module.__name__:
            continue
        if mixer.__name__ == "ShortConv1d":
            _replace(mixer, "__call__", _module_call)
        elif mixer.__name__ == "ShortConv":
            _replace(mixer, "__call__", _lfm2_call)
        elif mixer.__name__ in ("Qwen3NextGatedDeltaNet", "GatedDeltaNet") and module.__name__ in _QWEN_MODULES:
            _replace(mixer, "__call__", _qwen_call)
        elif hasattr(mixer, "_apply_conv1d"):
            _replace(mixer, "_apply_conv1d", _olmo_method)
        elif hasattr(mixer, "_causal_conv"):
            _replace(mixer, "_causal_conv", _ling_method)
        elif hasattr(mixer, "_conv") and ("mamba" in mixer.__name__.lower() or mixer.__name__ == "FalconH1Mixer"):
            _replace(mixer, "_conv", _method)


def _replace(mixer: type, name: str, make: Any) -> None:
    original = getattr(mixer, name)
    if not hasattr(original, "cidery_over_slots"):
        wrapped = functools.wraps(original)(make(original))
        wrapped.cidery_over_slots = True  # type: ignore[attr-defined]
        setattr(mixer, name, wrapped)


def _method(original: Any) -> Any:
    def conv(self: Any, conv_input: mx.array, cache: Any, mask: mx.array | None) -> mx.array:
        state = _in_slots(cache)
        if state is None or cache is None:
            result: mx.array = original(self, conv_input, cache, mask)
            return result
        refuse(mask=mask, lengths=cache.lengths)
        return conv_update(conv_input, self.conv1d, state, silu=True)

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
        state = _in_slots(cache)
        if state is None:
            result: mx.array = original(self, x, mask, cache)
            return result
        refuse(mask=mask, lengths=cache.lengths)
        gate, out_gate, values = mx.split(self.in_proj(x), 3, axis=-1)
        convolved = conv_update(gate * values, self.conv, state, silu=False)
        output: mx.array = self.out_proj(out_gate * convolved)
        return output

    return call


def _olmo_method(original: Any) -> Any:
    def conv(self: Any, x: mx.array, conv: Any, conv_state: Any, cache_slot: Any, slot_idx: int) -> mx.array:
        if not isinstance(conv_state, SlotStates):
            result: mx.array = original(self, x, conv, conv_state, cache_slot, slot_idx)
            return result
        return conv_update(x, conv, conv_state, silu=True)

    return conv


def _ling_method(original: Any) -> Any:
    def conv(self: Any, x: mx.array, conv: Any, cache: Any, cache_index: int, mask: mx.array | None) -> mx.array:
        state = _in_slots(cache, cache_index)
        if state is None:
            result: mx.array = original(self, x, conv, cache, cache_index, mask)
            return result
        refuse(mask=mask, lengths=cache.lengths)
        return conv_update(x, conv, state, silu=True)

    return conv


def _qwen_call(original: Any) -> Any:
    def call(self: Any, inputs: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        state = _in_slots(cache)
        if state is None:
            result: mx.array = original(self, inputs, mask, cache)
            return result
        refuse(mask=mask, lengths=cache.lengths)
        if getattr(self, "sharding_group", None) is not None:
            raise ValueError("this layer is sharded over machines; states in slots are for whole layers")
        mixed, z, b, a = _qwen_projections(self, inputs)
        mixed = conv_update(mixed, self.conv1d, state, silu=True)
        q, k, v = mx.split(mixed, [self.key_dim, 2 * self.key_dim], axis=-1)
        by_key = (*inputs.shape[:2], self.num_k_heads, self.head_k_dim)
        q, k = normalize_qk(q.reshape(by_key), k.reshape(by_key), inv_scale=self.head_k_dim**-0.5, eps=1e-6)
        v = v.reshape(*inputs.shape[:2], self.num_v_heads, self.head_v_dim)
        y, cache[1] = gated_delta_update(q, k, v, a, b, self.A_log, self.dt_bias, cache[1])
        output: mx.array = self.out_proj(self.norm(y, z).flatten(2))
        return output

    return call


def _qwen_projections(mixer: Any, inputs: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """What the convolution takes (queries, keys, values side by side), the output's gate, and `b` and `a`."""
    if not hasattr(mixer, "in_proj_qkvz"):
        z = mixer.in_proj_z(inputs).reshape(*inputs.shape[:2], mixer.num_v_heads, mixer.head_v_dim)
        return mixer.in_proj_qkv(inputs), z, mixer.in_proj_b(inputs), mixer.in_proj_a(inputs)
    q, k, v, z, b, a = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(inputs), mixer.in_proj_ba(inputs))
    return mx.concatenate([part.flatten(2) for part in (q, k, v)], axis=-1), z, b, a
