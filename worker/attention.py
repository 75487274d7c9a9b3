"""How unmodified mlx-lm models read and write paged KV.

A model is given one `PagedCache` a layer, which speaks mlx-lm's cache protocol. `update_and_fetch` writes the new K
and V into the pool and returns handles instead of arrays; the dispatcher installed for `scaled_dot_product_attention`
knows a handle and attends over the pool, whatever the layout of the step.
"""

import sys
from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.models import base

from worker.batch import Batch
from worker.cascade import cascade_attention
from worker.errors import UnsupportedModelError
from worker.kv_tensors import KVTensors
from worker.metal.dispatch import Kernels

_mlx_attention = base.scaled_dot_product_attention


class Step:
    """The step that the model is running: what caches and head look up while its graph is built."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self._batch: Batch | None = None
        self._tensors: KVTensors | None = None

    @property
    def batch(self) -> Batch:
        """Raises RuntimeError outside of a step."""
        if self._batch is None:
            raise RuntimeError("the model ran outside of a step")
        return self._batch

    @property
    def is_running(self) -> bool:
        """Between `begin` and `end`."""
        return self._batch is not None

    @property
    def tensors(self) -> KVTensors:
        """Raises RuntimeError outside of a step."""
        if self._tensors is None:
            raise RuntimeError("the model ran outside of a step")
        return self._tensors

    def begin(self, batch: Batch, tensors: KVTensors) -> None:
        """Build the next graph from `batch` over `tensors`."""
        self._batch, self._tensors = batch, tensors

    def end(self) -> None:
        """Let go of the step's arrays."""
        self._batch = self._tensors = None


@dataclass(frozen=True, slots=True)
class Handle:
    """Stands for all keys, or all values, of one layer for the whole step.

    `fresh` is what the step itself computed, in the layout of the step. `dtype` and `astype` are there because some
    models cast what they fetch.
    """

    cache: "PagedCache"
    fresh: mx.array
    dtype: mx.Dtype

    def astype(self, dtype: mx.Dtype) -> "Handle":
        """The same keys, to be read as `dtype`."""
        return Handle(self.cache, self.fresh.astype(dtype), dtype)


class PagedCache:
    """One layer's cache in mlx-lm's protocol; holds no state of its own."""

    def __init__(self, step: Step, layer: int) -> None:
        self._step = step
        self._layer = layer

    @property
    def offset(self) -> int | mx.array:
        """Position of the first token of each batch row."""
        return self._step.batch.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Handle, Handle]:
        """Write before read: the handles see the new tokens too."""
        self._step.tensors.write(self._layer, keys, values, self._step.batch)
        return Handle(self, keys, keys.dtype), Handle(self, values, values.dtype)

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> None:
        """No mask: attention over handles is causal by itself. Raises UnsupportedModelError for a window."""
        if window_size is not None:
            raise UnsupportedModelError(f"a layer attends through a sliding window of {window_size} tokens")

    def attend(self, queries: mx.array, keys: Handle, values: Handle, scale: float) -> mx.array:
        """Attention of the step's queries over the layer's pool; shapes as the queries'."""
        batch, tensors = self._step.batch, self._step.tensors
        key_pool, value_pool = tensors.keys[self._layer], tensors.values[self._layer]
        num_kv_heads = tensors.layers[self._layer].num_kv_heads
        kernels = self._step.kernels
        if batch.shared is not None:
            return cascade_attention(queries, key_pool, value_pool, batch, num_kv_heads, scale)
        outputs = []
        for group in batch.decode_groups:
            rows = queries if batch.num_tokens == group.last - group.first else queries[group.first : group.last]
            outputs.append(kernels.paged_decode(rows, key_pool, value_pool, group, num_kv_heads, scale))
        for span in batch.prefills:
            if batch.is_flat and span.start == 0:
                # A prompt's first chunk is its own whole context.
                return kernels.causal(queries, keys.fresh, values.fresh, scale)
            rows = queries if batch.is_flat else queries[span.first : span.last].transpose(2, 1, 0, 3)
            output = kernels.paged_prefill(rows, key_pool, value_pool, span, num_kv_heads, scale)
            outputs.append(output if batch.is_flat else output.transpose(2, 1, 0, 3))
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs)


def install() -> None:
    """Put the dispatcher in front of mlx-lm's attention helper, in every model module imported so far."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, _NAME, None) is _mlx_attention:
            setattr(module, _NAME, scaled_dot_product_attention)


def scaled_dot_product_attention(
    queries: mx.array,
    keys: "mx.array | Handle",
    values: "mx.array | Handle",
    cache: object,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's helper of this name, which also takes handles. Raises UnsupportedModelError for a mask over handles."""
    if not (isinstance(keys, Handle) and isinstance(values, Handle)):
        return _mlx_attention(queries, keys, values, cache, scale, mask, sinks=sinks)
    if mask is not None or sinks is not None:
        raise UnsupportedModelError("a layer attends with a mask of its own or with attention sinks")
    return keys.cache.attend(queries, keys, values, scale)


_NAME = scaled_dot_product_attention.__name__
