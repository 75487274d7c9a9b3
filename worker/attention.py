"""How unmodified mlx-lm models read and write paged KV.

A model is given one `PagedCache` for each attention cache it wants, which speaks mlx-lm's cache protocol.
`update_and_fetch` writes the new K and V into the pool and returns handles instead of arrays; the dispatcher installed
for `scaled_dot_product_attention` knows a handle and attends over the pool, whatever the layout of the step.

In a dense step, for models whose code does more with keys than hand them to attention, a cache returns what mlx-lm's
own would: the keys themselves, of one sequence.
"""

import functools
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models import base

from worker import pool_attention
from worker.adapter_rows import StepAdapters
from worker.batch import Batch
from worker.errors import UnsupportedModelError
from worker.group_rows import GroupRows
from worker.kv_shapes import LayerShape, ReachKind
from worker.kv_tensors import KVTensors
from worker.metal import twins
from worker.metal.dispatch import Kernels
from worker.metal.write_kv import tie
from worker.odd_attention import PLAIN, Extras
from worker.pool_attention import LayerCall

_mlx_attention = base.scaled_dot_product_attention
_fast_attention = mx.fast.scaled_dot_product_attention


class Step:
    """The step that the model is running: what caches and head look up while its graph is built."""

    # One graph is built at a time, though several models may have steps.
    _now: ClassVar["Step | None"] = None

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.is_dense = False
        # What goes into the model's head, for all rows: its last layer's normed output.
        self.hidden: mx.array | None = None
        # None as long as no row has an adapter.
        self.adapters: StepAdapters | None = None
        # Whether kernels update recurrent states in their slots, rather than that they are taken and put back.
        self.updates_states_in_place = False
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

    def begin(self, batch: Batch, tensors: KVTensors, *, is_dense: bool = False) -> None:
        """Build the next graph from `batch` over `tensors`; dense only for a flat batch."""
        Step._now = self
        self._batch, self._tensors, self.is_dense = batch, tensors, is_dense
        if tensors.mirrors is not None:
            tensors.mirrors.begin()
        self.hidden, self.adapters = None, StepAdapters.of(batch)
        # A state that sees drafts must be left as it was until it is known which are right.
        self.updates_states_in_place = self.kernels.updates_states_in_place and not batch.has_drafts

    def end(self) -> None:
        """Let go of the step's arrays."""
        self._batch = self._tensors = self.hidden = self.adapters = None
        Step._now = None

    @staticmethod
    def now() -> "Step | None":
        """The step whose graph is being built, of whatever model."""
        return Step._now


@dataclass(slots=True)
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


@dataclass(slots=True)
class Turning:
    """Stands for queries `x` that are turned together with their keys: see `worker.fused_rope`."""

    x: mx.array
    turned: mx.array | None = None

    def array(self) -> mx.array:
        """The queries. Raises UnsupportedModelError if no keys came."""
        if self.turned is None:
            raise UnsupportedModelError("a layer attends with queries whose keys were not turned")
        return self.turned


@dataclass(frozen=True, slots=True)
class RotaryHandle:
    """Stands for the rotary keys beside all latent vectors of one layer.

    Latent attention multiplies its rotary queries with these keys and passes the scores to the helper as a mask. Here
    it multiplies them with one, so that what arrives as the mask are the queries themselves.
    """

    dim: int
    dtype: mx.Dtype

    def swapaxes(self, one: int, other: int) -> mx.array:
        """The identity."""
        return mx.eye(self.dim, dtype=self.dtype)


class PagedCache:
    """One attention cache in mlx-lm's protocol; holds no state of its own beyond a step."""

    def __init__(self, step: Step, index: int, shape: LayerShape) -> None:
        self._step = step
        self._index = index
        self._shape = shape
        self._is_even = shape.head_dim == shape.value_head_dim
        # What a dense step fetched, and what a step wrote, for layers that share it.
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self._fetched: Any = None

    @property
    def shape(self) -> LayerShape:
        """What it keeps."""
        return self._shape

    @property
    def is_dense(self) -> bool:
        """Whether it returns keys instead of handles."""
        return self._step.is_dense

    @property
    def offset(self) -> int | mx.array:
        """Position of the first token of each batch row."""
        return self._step.batch.offset

    @property
    def start_position(self) -> int:
        """Of a dense step, the position of the first key fetched."""
        return self._shape.reach.first_needed(self._step.batch.spans[0].start)

    def maybe_trim_front(self) -> None:
        """Nothing: what is out of reach is not fetched."""

    def empty(self) -> bool:
        """A cache is always there."""
        return False

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Write before read: the handles see the new tokens too."""
        step, shape = self._step, self._shape
        # What the pool makes of them, if it rounds: a prompt's first chunk must not see more than later ones.
        keys, values = step.tensors.write(self._index, keys, values, step.batch)
        if step.is_dense:
            self._fetched = self.keys, self.values = self._gathered(values)
        elif shape.is_latent:
            self._fetched = Handle(self, keys, keys.dtype), RotaryHandle(shape.value_head_dim, values.dtype)
        else:
            self._fetched = Handle(self, keys, keys.dtype), Handle(self, values, values.dtype)
        return self._fetched

    def keys_and_values(self) -> Any:
        """What this step's `update_and_fetch` returned, for layers that share it."""
        return self._fetched

    def forget(self) -> None:
        """Let go of the step's arrays."""
        self.keys = self.values = self._fetched = None

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """No mask for handles: attention over them minds reach by itself. In a dense step, as mlx-lm's caches."""
        if not self._step.is_dense:
            return None
        start, reach = self._step.batch.spans[0].start, self._shape.reach
        num_before = start - reach.first_needed(start)
        if reach.kind is ReachKind.WINDOW:
            return None if num_tokens == 1 else base.create_causal_mask(num_tokens, num_before, reach.size)
        if num_tokens == 1:
            return None
        return base.create_causal_mask(num_tokens, num_before) if return_array else "causal"

    def attend(self, queries: mx.array, keys: Handle, values: Handle, scale: float, extras: Extras = PLAIN) -> mx.array:
        """Attention of the step's queries over the pool; shape of the queries, with the values' last dimension."""
        call = self._call(scale, extras, is_plain=extras is PLAIN and self._is_even)
        if pool_attention.attends_to_fresh_keys(call):
            return pool_attention.fresh(call, queries, keys.fresh, values.fresh)
        return self._step.tensors.read(self._index, functools.partial(pool_attention.attend, call, queries))

    def attend_latent(self, queries: mx.array, rotary_queries: mx.array, scale: float) -> mx.array:
        """Latent attention: queries `[rows, heads, 1, latent_dim]`, rotary ones scaled already; result alike."""
        call = self._call(scale, PLAIN, is_plain=False)
        reader = functools.partial(pool_attention.attend_latent, call, queries, rotary_queries)
        return self._step.tensors.read(self._index, reader)

    def _call(self, scale: float, extras: Extras, *, is_plain: bool) -> LayerCall:
        step = self._step
        rows = self._rows(may_share=is_plain)
        return LayerCall(
            self._shape,
            step.batch,
            rows,
            step.kernels,
            scale,
            extras,
            is_plain,
            has_states=step.tensors.has_states,
            mirror=step.tensors.mirror_of(self._index),
        )

    def _rows(self, *, may_share: bool) -> GroupRows:
        group = self._step.tensors.group_of[self._index]
        return self._step.batch.view(group, self._shape.reach, may_share=may_share)

    def _gathered(self, values: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values that a flat batch sees, `[1, heads, num_keys, dim]`, from the first one within reach."""
        (span,) = self._step.batch.spans
        first = self._shape.reach.first_needed(span.start)
        rows = self._rows(may_share=False)
        if rows.prefills:
            index = rows.prefills[0].gather_index(self._shape.num_kv_heads)
            first_key = rows.prefills[0].first_key
        else:
            index = rows.decode_groups[0].gather_index(self._shape.num_kv_heads)
            first_key = first // rows.block_size * rows.block_size
        kept = slice(first - first_key, span.end - first_key)

        def reader(*pools: mx.array, after: mx.array | None) -> tuple[mx.array, ...]:
            at = index if after is None else tie(index, after)
            return tuple(twins.gather(pool, at)[:, :, kept] for pool in pools)

        gathered = self._step.tensors.read(self._index, reader)
        if self._shape.is_latent:
            keys, others = mx.split(gathered[0], [self._shape.head_dim], axis=-1)
            return keys, others
        # Where keys alone were kept, nobody reads the values.
        return gathered[0], gathered[-1][..., : values.shape[-1]]


def install() -> None:
    """Put the dispatcher in front of mlx-lm's attention helper, in every model module imported so far."""
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, _NAME, None) is _mlx_attention:
            setattr(module, _NAME, scaled_dot_product_attention)
    mx.fast.scaled_dot_product_attention = _fast_dispatcher


def scaled_dot_product_attention(
    queries: "mx.array | Turning",
    keys: "mx.array | Handle",
    values: "mx.array | Handle",
    cache: object,
    scale: float,
    mask: mx.array | None,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's helper of this name, which also takes handles. Raises UnsupportedModelError for a mask over handles."""
    if isinstance(queries, Turning):
        queries = queries.array()
    if not (isinstance(keys, Handle) and isinstance(values, Handle)):
        return _mlx_attention(queries, keys, values, cache, scale, mask, sinks=sinks)
    paged = keys.cache
    if paged.shape.is_latent and mask is not None and sinks is None:
        return paged.attend_latent(queries, mask, scale)
    if mask is not None:
        raise UnsupportedModelError("a layer attends with a mask of its own")
    return paged.attend(queries, keys, values, scale, PLAIN if sinks is None else Extras(sinks=sinks))


def _fast_dispatcher(q: Any, k: Any, v: Any, *, scale: float, **others: Any) -> mx.array:
    """MLX's own function, for models that call it past mlx-lm's helper."""
    if isinstance(k, Handle):
        return scaled_dot_product_attention(q, k, v, None, scale, others.get("mask"), others.get("sinks"))
    return _fast_attention(q, k, v, scale=scale, **others)


_NAME = scaled_dot_product_attention.__name__
