"""LoRA and DoRA adapters over one loaded model, several at a time, each row through its sequence's own.

A layer that some adapter changes goes over to a subclass that runs the layer as it is and then adds, for the rows that
have the adapter, what mlx-lm's own wrapper would (`mlx_lm.tuner`): the same products in the same order, so that a step
with one adapter computes what mlx-lm computes. Rows of different adapters are sorted by adapter and run as one product
each, without padding. Layers go back to their class when the last adapter that changes them leaves; a step without
adapters costs such a layer one look at an attribute.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from worker import adapter_files
from worker.adapter_deltas import EMBEDDING, FOLDED_NAME, SWITCH, Delta, delta_of, folded_deltas, is_folded
from worker.adapter_files import AdapterFiles
from worker.adapter_rows import BASE, Cut, StepAdapters
from worker.attention import Step
from worker.batch import Batch, Span
from worker.errors import AdapterRefused, UnsupportedModelError
from worker.models import SamplingHead

# Modules that sort rows by expert before their switch layers see them, so rows are parted by adapter before that.
_SORTING = (SwitchGLU, SwitchMLP)
_MAX_TOLD = 5


class Adaptation:
    """The adapters of one layer, by digest."""

    def __init__(self, step: Step, cls: type, kind: "_Kind") -> None:
        self.step = step
        # What it was before, and will be again.
        self.cls = cls
        self.kind = kind
        self.deltas: dict[str, Delta] = {}

    def adapted(self, layer: Module, running: StepAdapters, y: mx.array, x: mx.array, *args: Any) -> mx.array:
        """`y` is what the layer itself makes of `x`; both have the step's rows along axis 0."""
        groups = running.groups(x.shape[0])
        if groups.uniform is not None:
            delta = self.deltas.get(groups.uniform)
            return y if delta is None else self.kind.apply(layer, delta, y, x, *args)
        cut = groups.cut(self.deltas)
        if len(cut.parts) == 1 and cut.parts[0][0] == BASE:
            return y
        sorted_x = x[cut.order]
        if any(self.deltas[name].factor is not None for name, _, _ in cut.parts if name != BASE):
            return self._each_applied(layer, cut, y[cut.order], sorted_x, *args)
        # Fewer operations: what adapters add to the rows, put back and added at once.
        added = [
            mx.zeros((last - first, *y.shape[1:]), y.dtype)
            if name == BASE
            else self.kind.added(self.deltas[name], sorted_x[first:last], y.dtype, *args)
            for name, first, last in cut.parts
        ]
        return y + mx.concatenate(added)[cut.back]

    def _each_applied(self, layer: Module, cut: Cut, y: mx.array, x: mx.array, *args: Any) -> mx.array:
        """Of rows that are sorted already."""
        outputs = [
            y[first:last]
            if name == BASE
            else self.kind.apply(layer, self.deltas[name], y[first:last], x[first:last], *args)
            for name, first, last in cut.parts
        ]
        return mx.concatenate(outputs)[cut.back]


class Parting:
    """Of a module that mixes up rows: its layers that have adapters now."""

    def __init__(self, step: Step, cls: type) -> None:
        self.step = step
        self.cls = cls
        self.layers: list[Any] = []


class Adapters:
    """All adapters of a loaded model. Owns what they change in it."""

    def __init__(self, model: Module, step: Step, *, mixes_rows: bool = True) -> None:
        """`mixes_rows` false: no forward has rows of several sequences."""
        self._model = model
        self._mixes_rows = mixes_rows
        self._step = step
        # Layers that each adapter changes, and the modules around them that mix up rows.
        self._layers: dict[str, list[tuple[Any, Any]]] = {}

    def __contains__(self, digest: str) -> bool:
        return digest in self._layers

    def load(self, digest: str, folder: Path) -> int:
        """Read an adapter and put it in; returns its bytes. Raises AdapterRefused, with nothing changed."""
        found = self._fit(adapter_files.read(folder))
        mx.eval([each.delta.arrays for each in found])
        self._layers[digest] = []
        for each in found:
            self._put(digest, each)
        try:
            self._try(digest)
        except UnsupportedModelError as error:
            self.unload(digest)
            raise AdapterRefused(f"can't be run beside other adapters: {error}") from error
        return sum(array.nbytes for each in found for array in each.delta.arrays)

    def unload(self, digest: str) -> None:
        """Take it out; its memory is free once nothing refers to the last step. No effect if it is not there."""
        for layer, owner in self._layers.pop(digest, ()):
            adaptation: Adaptation = layer.cidery_adaptation
            del adaptation.deltas[digest]
            if adaptation.deltas:
                continue
            layer.__class__ = adaptation.cls
            del layer.cidery_adaptation
            if owner is not None:
                parting: Parting = owner.cidery_parting
                parting.layers = [each for each in parting.layers if each is not layer]
                if not parting.layers:
                    owner.__class__ = parting.cls
                    del owner.cidery_parting

    def clear(self) -> None:
        """Take all out."""
        for digest in list(self._layers):
            self.unload(digest)

    def _fit(self, files: AdapterFiles) -> list["_Found"]:
        """Each layer of the adapter, and what it does to it; all misfits are told."""
        found, problems = [], []
        for path, tensors in sorted(files.tensors.items()):
            try:
                found += _found(self._model, path, tensors, files)
            except AdapterRefused as error:
                problems.append(str(error))
        if problems:
            more = f"; and {len(problems) - _MAX_TOLD} more" if len(problems) > _MAX_TOLD else ""
            raise AdapterRefused("; ".join(problems[:_MAX_TOLD]) + more)
        return found

    def _put(self, digest: str, found: "_Found") -> None:
        layer, owner = found.layer, found.owner
        is_new = not hasattr(layer, "cidery_adaptation")
        if is_new:
            cls: type = type(layer)
            layer.cidery_adaptation = Adaptation(self._step, cls, _kind_of(layer))
            layer.__class__ = _adapted_class(cls)
        layer.cidery_adaptation.deltas[digest] = found.delta
        if owner is not None:
            if not hasattr(owner, "cidery_parting"):
                mixing: type = type(owner)
                owner.cidery_parting = Parting(self._step, mixing)
                owner.__class__ = _parting_class(mixing)
            if is_new:
                owner.cidery_parting.layers.append(layer)
        self._layers[digest].append((layer, owner))

    def _try(self, digest: str) -> None:
        """Build the graph of a step of three rows, of which one has the adapter; nothing of it is evaluated.

        Finds layers that see rows in an arrangement that is not known. Raises UnsupportedModelError.
        """
        if not self._mixes_rows:
            return
        names = (BASE, digest, BASE)
        batch = Batch([Span([0], 0, [0], True, ([0],), adapter=name) for name in names], block_size=1)
        self._step.adapters = StepAdapters.of(batch)
        try:
            self._model(batch.tokens, cache=make_prompt_cache(self._model))
        finally:
            self._step.adapters = None


@dataclass(frozen=True, slots=True)
class _Found:
    """A layer, what is to be done to it, and the module around it that mixes up rows, if one does."""

    layer: Any
    owner: Any
    delta: Delta


@functools.cache
def _adapted_class(cls: type) -> type:
    """A subclass of a layer's class that minds adapters."""
    layer: Any = cls

    def call(self: Any, x: mx.array, *args: Any, **named: Any) -> mx.array:
        y: mx.array = layer.__call__(self, x, *args, **named)
        running = self.cidery_adaptation.step.adapters
        if running is None:
            return y
        adapted: mx.array = self.cidery_adaptation.adapted(self, running, y, x, *args, *named.values())
        return adapted

    def as_linear(self: Any, x: mx.array) -> mx.array:
        y: mx.array = layer.as_linear(self, x)
        running = self.cidery_adaptation.step.adapters
        if running is None:
            return y
        adapted: mx.array = self.cidery_adaptation.adapted(self, running, y, x, _AS_LINEAR)
        return adapted

    body: dict[str, Any] = {"__call__": call, "__module__": cls.__module__}
    if issubclass(cls, EMBEDDING):
        body["as_linear"] = as_linear
    return type(f"Adapted{cls.__name__}", (cls,), body)


@functools.cache
def _parting_class(cls: type) -> type:
    """A subclass of a module that mixes up rows: it runs each adapter's rows by themselves."""
    owner: Any = cls

    def call(self: Any, x: mx.array, *others: mx.array) -> mx.array:
        running = self.cidery_parting.step.adapters
        if running is None or running.groups(x.shape[0]).uniform is not None:
            whole: mx.array = owner.__call__(self, x, *others)
            return whole
        known = {digest for layer in self.cidery_parting.layers for digest in layer.cidery_adaptation.deltas}
        cut = running.groups(x.shape[0]).cut(known)
        inputs = [each[cut.order] for each in (x, *others)]
        outputs = []
        for name, first, last in cut.parts:
            with running.only(name):
                outputs.append(owner.__call__(self, *(each[first:last] for each in inputs)))
        return mx.concatenate(outputs)[cut.back]

    return type(f"Parting{cls.__name__}", (cls,), {"__call__": call, "__module__": cls.__module__})


# Stands beside the input of an embedding that serves as the output projection.
_AS_LINEAR = object()


class _Kind:
    """How an adapter changes a kind of layer: what it adds, and, of DoRA, how the sum is scaled."""

    def apply(self, layer: Any, delta: Delta, y: mx.array, x: mx.array, *args: Any) -> mx.array:
        """`y` changed by one adapter."""
        out = y + self.added(delta, x, y.dtype, *args)
        return out if delta.factor is None else self.scaled(layer, delta, out, x, *args)

    def added(self, delta: Delta, x: mx.array, dtype: mx.Dtype, *args: Any) -> mx.array:
        """Of a linear layer."""
        return (delta.scale * ((x @ delta.lora_a) @ delta.lora_b)).astype(dtype)

    def scaled(self, layer: Any, delta: Delta, out: mx.array, x: mx.array, *args: Any) -> mx.array:
        """Of a linear layer: all but the bias."""
        assert delta.factor is not None
        factor = delta.factor.astype(out.dtype)
        return factor * (out - layer.bias) + layer.bias if "bias" in layer else factor * out


class _SwitchKind(_Kind):
    def added(self, delta: Delta, x: mx.array, dtype: mx.Dtype, *args: Any) -> mx.array:
        indices, *others = args
        is_sorted = bool(others and others[0])
        z = mx.gather_mm(x, delta.lora_a.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=is_sorted)
        z = mx.gather_mm(z, delta.lora_b.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=is_sorted)
        return (delta.scale * z).astype(dtype)


class _EmbeddingKind(_Kind):
    def added(self, delta: Delta, x: mx.array, dtype: mx.Dtype, *args: Any) -> mx.array:
        as_linear = args == (_AS_LINEAR,)
        z = x @ delta.lora_b.T @ delta.lora_a.T if as_linear else delta.lora_a[x] @ delta.lora_b
        return (delta.scale * z).astype(dtype)

    def scaled(self, layer: Any, delta: Delta, out: mx.array, x: mx.array, *args: Any) -> mx.array:
        assert delta.m is not None
        assert delta.factor is not None
        if args == (_AS_LINEAR,):
            return delta.factor * out
        return (delta.m[x] / mx.linalg.norm(out, axis=-1))[..., None] * out


def _kind_of(layer: Module) -> _Kind:
    if isinstance(layer, SWITCH):
        return _SwitchKind()
    return _EmbeddingKind() if isinstance(layer, EMBEDDING) else _Kind()


def _found(model: Module, path: str, tensors: dict[str, mx.array], files: AdapterFiles) -> list[_Found]:
    """The layer at a path, or those that stand for it, and what is done to each. Raises AdapterRefused."""
    # Of a model with vision, the text model alone is loaded; paths in adapters start from the outermost.
    inner = path
    nodes = _walk(model, inner)
    while nodes is None and inner.startswith("language_model."):
        inner = inner.removeprefix("language_model.")
        nodes = _walk(model, inner)
    parent, _, name = inner.rpartition(".")
    if nodes is None and name == FOLDED_NAME and (around := _walk(model, parent)) and is_folded(around[-1]):
        return [_Found(layer, None, delta) for layer, delta in folded_deltas(path, around[-1], tensors, files)]
    layer = nodes[-1] if nodes else None
    if isinstance(layer, SamplingHead):
        layer = layer.project
    if nodes is None or not isinstance(layer, Module):
        raise AdapterRefused(f"the model, as it is run, has no layer {path}")
    return [_Found(layer, _mixing_owner(path, inner.split("."), nodes), delta_of(path, layer, tensors, files))]


def _mixing_owner(path: str, names: list[str], nodes: list[Any]) -> Any:
    """The module around a layer that mixes up rows before the layer sees them; None if none does."""
    if isinstance(nodes[-1], SWITCH):
        if not isinstance(nodes[-2], _SORTING):
            kinds = f"{type(nodes[-1]).__name__} in a {type(nodes[-2]).__name__}"
            raise AdapterRefused(f"{path} is a {kinds}, which is not supported")
        return nodes[-2]
    # A list of experts, each of which sees rows that were picked for it.
    return nodes[names.index("experts")] if "experts" in names[:-1] else None


def _walk(model: Module, path: str) -> list[Any] | None:
    """What lies on a path of names and indices, the model first; None if it leads nowhere."""
    nodes: list[Any] = [model]
    for name in path.split("."):
        node = nodes[-1]
        if isinstance(node, list):
            found = node[int(name)] if name.isdigit() and int(name) < len(node) else None
        else:
            found = node.get(name) if isinstance(node, Module) else None
        if found is None:
            return None
        nodes.append(found)
    return nodes
