"""Attention and sigmoid for MLX's CPU build, whose `exp` is scalar and takes most of the time of a prefill.

Both run over a polynomial made of operations that MLX does vectorise, several times faster for as many numbers as a
prefill has. For a few numbers the count of operations decides, and MLX's own functions are better.
"""

import functools
import math
from typing import Any, NamedTuple

import mlx.core as mx

LOG2_E = math.log2(math.e)
# 2**f on [-0.5, 0.5], highest power first: a Chebyshev fit of degree 5 with a relative error of 1.5e-7.
_POWERS = (1.3267e-3, 9.67546e-3, 5.550743e-2, 0.24022122, 0.69314695, 1.00000007)
# Beyond these a float32 has no exponent left; below, it stands for zero.
_LOWEST, _HIGHEST = -125.0, 126.0
_MASKED = -1e30
_MANTISSA_BITS = 23
# Added to a number of less than 2**22, it leaves no bits behind the point: what is rounded to are the lowest bits.
_ROUNDING = 1.5 * 2**_MANTISSA_BITS
# So many numbers pay for the additional operations.
MIN_SCORES = 8_192
_MIN_SIGMOIDS = 8_192
# So many at a time, and what they become on the way, stay in a core's cache.
_CHUNK = 1 << 17

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
        # Adding is several times faster than choosing.
        bias = _causal_bias(num_queries, num_keys) if isinstance(mask, str) else mx.where(mask, 0.0, _MASKED)
        scores = (scores.reshape(rows, num_heads, num_queries, num_keys) + bias).reshape(scores.shape)
    top = scores.max(axis=-1, keepdims=True)
    weights = exp2(scores - top)
    by_query = (*queries.shape[:3], 1)
    return Part(
        (weights @ values).reshape(queries.shape),
        top.reshape(by_query),
        weights.sum(axis=-1, keepdims=True).reshape(by_query),
    )


def exp2(exponents: mx.array) -> mx.array:
    """2 to non-positive float32 exponents, relative error 3e-7; what underflows becomes 2**-125."""
    return _exp2(mx.maximum(exponents, _LOWEST))


def _exp2(exponents: mx.array) -> mx.array:
    """Of exponents that a float32 has."""
    rounded: mx.array = exponents + _ROUNDING
    part: mx.array = exponents - (rounded - _ROUNDING)
    power = part * _POWERS[0] + _POWERS[1]
    for coefficient in _POWERS[2:]:
        power = power * part + coefficient
    # Multiplying by 2**n is adding n to the exponent field; all but the lowest bits of `rounded` fall out of the word.
    return (power.view(mx.int32) + (rounded.view(mx.int32) << _MANTISSA_BITS)).view(mx.float32)


def sigmoid(x: mx.array, **others: Any) -> mx.array:
    """`mx.sigmoid`, which SiLU is made of; as exact: relative error 1e-6 down to x = -16, 4e-6 at -86."""
    if x.dtype != mx.float32 or x.size < _MIN_SIGMOIDS:
        return _mlx_sigmoid(x, **others)
    num_chunks = -(-x.size // _CHUNK)
    if num_chunks == 1:
        return _sigmoid(x)
    chunks = mx.split(x.reshape(-1), [x.size * i // num_chunks for i in range(1, num_chunks)])
    return mx.concatenate([_sigmoid(chunk) for chunk in chunks]).reshape(x.shape)


def _sigmoid(x: mx.array) -> mx.array:
    return 1.0 / (_exp2(mx.clip(x * -LOG2_E, _LOWEST, _HIGHEST)) + 1.0)


def install() -> None:
    """Put `sigmoid` where models look `mx.sigmoid` up. Only for a CPU."""
    mx.sigmoid = sigmoid


def _causal_bias(num_queries: int, num_keys: int) -> mx.array:
    hidden = mx.arange(num_keys) > mx.arange(num_keys - num_queries, num_keys)[:, None]
    return hidden.astype(mx.float32) * _MASKED
