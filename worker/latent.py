"""Latent attention where mlx-lm caches the keys and values that latents expand to, and products of rows.

Some classes expand each latent vector before they cache it, so that what is kept is as wide as without latents. Here
their expanding product is folded into the query and the output (as DeepSeek V3's classes in mlx-lm have it), and the
latent itself is what goes into the cache.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models import base, mla

from worker.attention import Handle


def fold(model: Module, classes: Iterable[type]) -> None:
    """Make these attention classes keep latents, in every module of the model that is one of them."""
    classes = tuple(classes)
    for module in model.modules():  # type: ignore[no-untyped-call]
        if type(module) in classes and "kv_b_proj" in module:
            _fold(module)
    for cls in classes:
        _install(cls, _attend)


def multiply_by_heads() -> None:
    """Let the per-head products of latent attention take all rows at once, instead of a product for each row."""
    for cls in (mla.MultiLinear, mla.QuantizedMultiLinear):
        original = cls.__call__
        if not hasattr(original, "cidery_inner"):
            cls.__call__ = _by_heads(original)  # type: ignore[method-assign]


def _by_heads(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(original)
    def call(self: Any, x: mx.array, transpose: bool = True) -> mx.array:
        if x.ndim != 4 or x.shape[0] == 1 or x.shape[2] != 1:
            return original(self, x, transpose)
        return original(self, x.transpose(2, 1, 0, 3), transpose).transpose(2, 1, 0, 3)

    call.cidery_inner = original  # type: ignore[attr-defined]
    return call


def _install(cls: type, call: Callable[..., mx.array]) -> None:
    original = cls.__call__
    if hasattr(original, "cidery_inner"):
        return

    @functools.wraps(original)
    def folded(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        return original(self, x, mask, cache) if "kv_b_proj" in self else call(self, x, mask, cache)

    folded.cidery_inner = original  # type: ignore[attr-defined]
    cls.__call__ = folded  # type: ignore[method-assign]


def _fold(attention: Any) -> None:
    """`kv_b_proj [heads * (nope + value), latent]` becomes one product for the query and one for the output."""
    projection = attention.kv_b_proj
    weight = projection.weight
    if isinstance(projection, QuantizedLinear):
        weight = mx.dequantize(
            weight,
            projection.scales,
            projection.get("biases"),
            group_size=projection.group_size,
            bits=projection.bits,
            mode=projection.mode,
        )
    by_head = weight.reshape(attention.num_heads, -1, weight.shape[-1])
    num_nope = attention.qk_nope_head_dim
    attention.embed_q = _multi_linear(by_head[:, :num_nope].swapaxes(-1, -2))
    attention.unembed_out = _multi_linear(by_head[:, num_nope:])
    attention.pop("kv_b_proj")


def _multi_linear(weight: mx.array) -> Module:
    """`weight [heads, outputs, inputs]`, not quantised again: twice rounded it would be another model."""
    num_heads, num_outputs, num_inputs = weight.shape
    linear: Any = mla.MultiLinear(num_inputs, num_outputs, num_heads)
    linear.weight = mx.contiguous(weight)
    mx.eval(linear.parameters())
    module: Module = linear
    return module


def _attend(attention: Any, x: mx.array, mask: Any, cache: Any) -> mx.array:
    """The class's own computation, by way of the latents. Over handles in token rows, over keys otherwise."""
    rows, num_tokens, _ = x.shape
    offset = cache.offset if cache is not None else 0
    scale = attention.scale if hasattr(attention, "scale") else attention.softmax_scale
    if attention.q_lora_rank is None:
        q = attention.q_proj(x)
    else:
        q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x)))
    q = q.reshape(rows, num_tokens, attention.num_heads, -1).transpose(0, 2, 1, 3)
    q_nope, q_rope = mx.split(q, [attention.qk_nope_head_dim], axis=-1)
    latent, k_rope = mx.split(attention.kv_a_proj_with_mqa(x), [attention.kv_lora_rank], axis=-1)
    latent = attention.kv_a_layernorm(latent)[:, None]
    q_rope, k_rope = attention.rope(q_rope, offset), attention.rope(k_rope[:, None], offset)
    fetched: tuple[Any, Any] = (latent, k_rope) if cache is None else cache.update_and_fetch(latent, k_rope)
    queries = attention.embed_q(q_nope)
    if isinstance(fetched[0], Handle):
        output = fetched[0].cache.attend_latent(queries, q_rope * scale, scale)
    else:
        latents, ropes = fetched
        scores = (q_rope * scale) @ ropes.swapaxes(-1, -2)
        if isinstance(mask, str):
            num_before = latents.shape[2] - num_tokens
            mask = base.create_causal_mask(num_tokens, num_before)
        if mask is not None:
            scores = mx.where(mask, scores, mx.array(mx.finfo(scores.dtype).min, scores.dtype))
        output = mx.fast.scaled_dot_product_attention(queries, latents, latents, scale=scale, mask=scores)
    output = attention.unembed_out(output).transpose(0, 2, 1, 3).reshape(rows, num_tokens, -1)
    projected: mx.array = attention.o_proj(output)
    return projected
