"""Calls that replace those of a few mlx-lm classes while a step of handles runs.

Each computes what the original does; the original calculates with the step's position as one number, or attends by
itself.
"""

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from worker import inspection
from worker.attention import Handle, PagedCache
from worker.odd_attention import Extras


def install(cls: type) -> None:
    """Put the override of a class in front of its call. Raises KeyError for a class without one."""
    override, original = _OVERRIDES[inspection.qualified_name(cls)], cls.__call__
    if hasattr(original, "cidery_inner"):
        return

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs["cache"] if "cache" in kwargs else args[-1]
        first = cache[0] if isinstance(cache, list) and cache else cache
        if not isinstance(first, PagedCache) or first.is_dense:
            return original(self, *args, **kwargs)
        return override(self, args[0], cache)

    call.cidery_inner = original  # type: ignore[attr-defined]
    cls.__call__ = call  # type: ignore[method-assign]


def _heads(x: mx.array, num_heads: int) -> mx.array:
    rows, num_tokens, _ = x.shape
    return x.reshape(rows, num_tokens, num_heads, -1).transpose(0, 2, 1, 3)


def _flattened(output: mx.array) -> mx.array:
    rows, _, num_tokens, _ = output.shape
    return output.transpose(0, 2, 1, 3).reshape(rows, num_tokens, -1)


def _gemma2_attention(self: Any, x: mx.array, cache: PagedCache) -> mx.array:
    """Gemma 2 squeezes its scores through a tanh, so it doesn't use the helper."""
    queries = self.rope(_heads(self.q_proj(x), self.n_heads), offset=cache.offset)
    keys = self.rope(_heads(self.k_proj(x), self.n_kv_heads), offset=cache.offset)
    fetched: tuple[Handle, Handle] = cache.update_and_fetch(keys, _heads(self.v_proj(x), self.n_kv_heads))
    output = cache.attend(queries, *fetched, self.scale, Extras(soft_cap=self.attn_logit_softcapping))
    projected: mx.array = self.o_proj(_flattened(output))
    return projected


def _llama4_model(self: Any, inputs: mx.array, cache: list[PagedCache]) -> mx.array:
    """Llama 4 makes the masks of its chunks from one position; handles need none."""
    h = self.embed_tokens(inputs)
    for layer, layer_cache in zip(self.layers, cache, strict=True):
        h = layer(h, None, cache=layer_cache)
    normed: mx.array = self.norm(h)
    return normed


def _llama4_attention(self: Any, x: mx.array, cache: PagedCache) -> mx.array:
    """Llama 4 scales queries of layers without rotary positions by their position."""
    queries = _heads(self.q_proj(x), self.n_heads)
    keys = _heads(self.k_proj(x), self.n_kv_heads)
    if self.use_rope:
        queries, keys = (self.rope(array, offset=cache.offset) for array in (queries, keys))
    if self.use_qk_norm:
        queries, keys = (mx.fast.rms_norm(array, weight=None, eps=1e-6) for array in (queries, keys))
    if self.attn_temperature_tuning and not self.use_rope:
        positions = mx.array(cache.offset).reshape(-1, 1) + mx.arange(1, x.shape[1] + 1)
        scales = mx.log(mx.floor(positions / self.floor_scale) + 1.0) * self.attn_scale + 1.0
        queries = (queries * scales[:, None, :, None]).astype(queries.dtype)
    fetched: tuple[Handle, Handle] = cache.update_and_fetch(keys, _heads(self.v_proj(x), self.n_kv_heads))
    projected: mx.array = self.o_proj(_flattened(cache.attend(queries, *fetched, self.scale)))
    return projected


_OVERRIDES: dict[str, Callable[[Any, mx.array, Any], mx.array]] = {
    "gemma2.Attention": _gemma2_attention,
    "llama4.LlamaModel": _llama4_model,
    "llama4.Attention": _llama4_attention,
}
