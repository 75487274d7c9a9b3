"""Attention and sigmoid for MLX's CPU build, whose `exp` is scalar and takes most of the time of a prefill.

Both run over a polynomial made of operations that MLX does vectorise, several times faster for as many numbers as a
prefill has. For a few numbers the count of operations decides, and MLX's own functions are better.
"""

import functools
import math
from typing import Any, NamedTuple

import mlx.core as mx

LOG2_E = math.log2(math.e)
# 2**f on (-1, 0], highest power first: a Chebyshev fit of degree 5 with a relative error of 1e-7.
_POWERS = (9.475536e-4, 9.2108756e-3, 5.5299607e-2, 0.24017949, 0.6931432, 0.99999995)
# Below this a float32 has no exponent left; it stands for zero.
_LOWEST = -125.0
_MASKED = -1e30
_MANTISSA_BITS = 23
# So many numbers pay for the additional operations.
MIN_SCORES = 8_192
_MIN_SIGMOIDS = 16_384

_mlx_sigmoid = mx.sigmoid


@functools.cache
def is_available() -> bool:
    """Whether this process computes on a CPU."""
    return mx.default_device() == mx.Device(mx.cpu)


class Part(NamedTuple):
    """Attention over some of the keys, not yet divided by its sum, so that parts over other keys can be merged in.

    `top` is the largest score in base 2, `total` the sum of the weights relative to it; both end in an axis of one.
    """

    output: mx.array
    top: mx.array
    total: mx.array


def attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None) -> mx.array:
    """What `mx.fast.scaled_dot_product_attention` computes, in float32. Shapes as `attend_part`."""
    part = attend_part(queries, keys, values, scale, mask)
    return part.output / part.total


def merge(one: Part, other: Part) -> mx.array:
    """Attention over the keys of both parts, which have the same shapes."""
    top = mx.maximum(one.top, other.top)
    one_share, other_share = exp2(one.top - top), exp2(other.top - top)
    total = one.total * one_share + other.total * other_share
    return (one.output * one_share + other.output * other_share) / total


def attend_part(queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | str | None) -> Part:
    """Attention that can be merged with attention over other keys.

    Shapes: queries `[rows, heads, num_queries, head_dim]`, keys and values `[rows, num_kv_heads, num_keys, head_dim]`.
    `mask` is "causal", queries aligned with the last keys, or boolean, broadcast to `[rows, heads, queries, keys]`.
    """
    rows, num_heads, num_queries, head_dim = queries.shape
    num_kv_heads, num_keys = keys.shape[1:3]
    # The query heads of one KV head are the rows of one product.
    grouped = (queries * (scale * LOG2_E)).reshape(rows, num_kv_heads, -1, head_dim)
    scores = grouped @ keys.swapaxes(-1, -2)
    if mask is not None:
        by_head = scores.reshape(rows, num_heads, num_queries, num_keys)
        if isinstance(mask, str):
            masked = by_head + _causal_bias(num_queries, num_keys)
        else:
            masked = mx.where(mask, by_head, _MASKED)
        scores = masked.reshape(scores.shape)
    top = scores.max(axis=-1, keepdims=True)
    weights = exp2(scores - top)
    by_query = (*queries.shape[:3], 1)
    return Part(
        (weights @ values).reshape(queries.shape),
        top.reshape(by_query),
        weights.sum(axis=-1, keepdims=True).reshape(by_query),
    )


def exp2(exponents: mx.array) -> mx.array:
    """2 to non-positive float32 exponents, relative error 2e-7; what underflows becomes 2**-125."""
    exponents = mx.maximum(exponents, _LOWEST)
    whole = exponents.astype(mx.int32)
    part = exponents - whole.astype(mx.float32)
    power = part * _POWERS[0] + _POWERS[1]
    for coefficient in _POWERS[2:]:
        power = power * part + coefficient
    # Multiplying by 2**whole is adding `whole` to the exponent field.
    return (power.view(mx.int32) + (whole << _MANTISSA_BITS)).view(mx.float32)


def sigmoid(x: mx.array, **others: Any) -> mx.array:
    """`mx.sigmoid`, which SiLU is made of; absolute error 2e-7."""
    if x.dtype != mx.float32 or x.size < _MIN_SIGMOIDS:
        return _mlx_sigmoid(x, **others)
    # Towards zero on both sides, where exponents are negative: nothing overflows.
    small = exp2(mx.abs(x) * -LOG2_E)
    return mx.where(x < 0, small, 1.0) / (small + 1.0)


def install() -> None:
    """Put `sigmoid` where models look `mx.sigmoid` up. Only for a CPU."""
    mx.sigmoid = sigmoid


def _causal_bias(num_queries: int, num_keys: int) -> mx.array:
    hidden = mx.arange(num_keys) > mx.arange(num_keys - num_queries, num_keys)[:, None]
    return hidden.astype(mx.float32) * _MASKED
