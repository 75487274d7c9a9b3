"""Products of few rows with weights cut into strips of columns, for OpenBLAS on CPUs with AVX-512.

OpenBLAS copies both factors of a product into an order that its kernels like. With few rows, copying the weights takes
longer than multiplying them. For small products it has kernels that copy nothing, so a decode step has its linear
layers as many small products: a third of the time with up to 4 rows, half with 16. The strips are a second copy of the
weights; more rows, prompts for one, go on with the first.
"""

from typing import Any

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear

from worker import blas, cpu_math, inspection

# The most multiplications of a product that OpenBLAS 0.3 has small kernels for.
_SMALL = 1_000_000
# Columns of a strip, best first: rows in flight that share a load, and a strip that stays in a core's cache.
_WIDTHS = (64, 32, 16)
# Rows that strips are chosen for. They are faster for so many even where they are too large for small kernels.
_USUAL_ROWS = 16
# More have the weights' copy pay for itself.
_MOST_ROWS = 64


class Strips:
    """Weights `[num_outputs, num_inputs]` as `[num_strips, num_inputs, width]`. Raises ValueError if they can't be."""

    def __init__(self, weights: mx.array) -> None:
        num_outputs, num_inputs = weights.shape
        width = width_of(num_outputs, num_inputs)
        if width is None:
            raise ValueError(f"{num_outputs} outputs are not a multiple of any of {_WIDTHS}")
        self._most_rows = min(_MOST_ROWS, max(_USUAL_ROWS, _SMALL // (width * num_inputs)))
        cut = weights.T.reshape(num_inputs, -1, width).swapaxes(0, 1)
        self.array = mx.contiguous(cut)
        mx.eval(self.array)

    def suit(self, x: mx.array) -> bool:
        """Whether they are faster for so many rows, `x [..., num_inputs]`; never for other types than their own."""
        return x.size <= self._most_rows * x.shape[-1] and x.dtype == mx.float32

    def product(self, x: mx.array) -> mx.array:
        """`x [..., num_inputs]` times the weights."""
        *rows, num_inputs = x.shape
        # [num_strips, rows, width]
        parts = x.reshape(-1, num_inputs) @ self.array
        if parts.shape[1] > 1:
            parts = parts.swapaxes(0, 1)
        return parts.reshape(*rows, -1)


def width_of(num_outputs: int, num_inputs: int) -> int | None:
    """Of the strips; None if the outputs are not a multiple of any."""
    fitting = [width for width in _WIDTHS if num_outputs % width == 0]
    small = [width for width in fitting if _USUAL_ROWS * width * num_inputs <= _SMALL]
    return next(iter(small or fitting[-1:]), None)


def install(model: Any, limit_bytes: int) -> int:
    """Let the plain linear layers of a model use strips for few rows; returns the bytes they take.

    To be done before anything wraps layers; what was done before stays. Nothing is done, and 0 returned, where it gains
    nothing or all strips together are beyond `limit_bytes`.
    """
    known: int | None = getattr(model, "cidery_strip_bytes", None)
    if known is not None:
        return known
    if not cpu_math.is_available() or not blas.has_small_kernels():
        return 0
    layers = _layers(model)
    num_bytes: int = sum(layer.weight.nbytes for layer in layers)
    if num_bytes > limit_bytes:
        return 0
    for layer in layers:
        # Not an array among the layer's own: nobody is to take it for a parameter.
        layer.cidery_strips = Strips(layer.weight)
        layer.__class__ = _CLASSES[type(layer)]
    model.cidery_strip_bytes = num_bytes
    return num_bytes


def _layers(model: Any) -> list[Any]:
    """Those that it pays for: embeddings only if nothing else can be the output projection."""
    found = {id(module): module for module in model.modules() if type(module) in _CLASSES}.values()
    heads = {layer.weight.shape for layer in found if isinstance(layer, Linear)}
    return [
        layer
        for layer in found
        if layer.weight.dtype == mx.float32 and width_of(*layer.weight.shape) is not None
        if isinstance(layer, Linear) or layer.weight.shape not in heads
    ]


def _linear(self: Any, x: mx.array) -> mx.array:
    strips: Strips = self.cidery_strips
    if not strips.suit(x):
        plain: mx.array = Linear.__call__(self, x)
        return plain
    y = strips.product(x)
    return y + self["bias"] if "bias" in self else y


def _projection(self: Any, x: mx.array) -> mx.array:
    """Of an embedding; it looks tokens up as before."""
    strips: Strips = self.cidery_strips
    if not strips.suit(x):
        plain: mx.array = Embedding.as_linear(self, x)  # type: ignore[no-untyped-call]
        return plain
    return strips.product(x)


_CLASSES: dict[type, type] = {
    Linear: inspection.subclass(Linear, __call__=_linear),
    Embedding: inspection.subclass(Embedding, as_linear=_projection),
}
