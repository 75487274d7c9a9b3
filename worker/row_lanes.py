"""Modules that treat each row by itself, of unmodified mlx-lm models, and how they run some rows in each lane."""

import inspect
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm, RMSNorm
from mlx.nn.layers.quantized import QuantizedLinear
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from worker import inspection
from worker.lanes import Lanes

_LINEAR = (Linear, QuantizedLinear)
# What else a module may be made of.
_LEAVES = (*_LINEAR, SwitchLinear, QuantizedSwitchLinear, RMSNorm, LayerNorm)
_NUM_TRIED_TOKENS = 16
# Of the largest element: products of fewer rows round differently.
_TOLERANCE = 1e-4

# What one module was given in a trial.
_Tried = dict[type, tuple[Any, mx.array]]


def install(model: Module, lanes: Lanes, treated: Collection[type], vocab_size: int) -> set[type]:
    """Let modules of a model part their rows when `lanes.has_rows`; returns their classes.

    The outermost modules with linear layers that take nothing but rows are tried on some tokens: one that does not
    treat them by themselves is left alone, and what is in it is tried. `treated` are the classes that have caches.
    """
    tokens = mx.arange(_NUM_TRIED_TOKENS)[None] % vocab_size
    refused: set[type] = set()
    while True:
        # Layers may share a module.
        found = list({id(module): module for module in _candidates(model, tuple(treated), refused)}.values())
        tried: _Tried = {}
        for module in found:
            module.__class__ = _recording(type(module), tried)
        try:
            mx.eval(model(tokens, cache=make_prompt_cache(model)))
        finally:
            for module in found:
                module.__class__ = type(module).__bases__[0]
        wrong = {cls for cls, (module, x) in tried.items() if not _treats_rows_alone(module, x)}
        if not wrong:
            break
        refused |= wrong
    by_class = {cls: _laned(cls, lanes) for cls in tried}
    for module in found:
        module.__class__ = by_class.get(type(module), type(module))
    return set(by_class)


def _candidates(module: Module, treated: tuple[type, ...], refused: Collection[type]) -> Iterator[Any]:
    for child in inspection.children_of(module):
        if type(child) not in refused and _may_treat_rows_alone(child, treated):
            yield child
        else:
            yield from _candidates(child, treated, refused)


def _may_treat_rows_alone(module: Module, treated: tuple[type, ...]) -> bool:
    leaves = list(_leaves(module))
    return (
        len(inspect.signature(type(module).__call__).parameters) == 2  # itself and the rows
        and not isinstance(module, treated)
        and any(isinstance(leaf, _LINEAR) for leaf in leaves)
        and all(isinstance(leaf, _LEAVES) for leaf in leaves)
    )


def _leaves(module: Module) -> Iterator[Module]:
    """It and what is in it, as far as they have weights of their own."""
    if any(isinstance(value, mx.array) for value in module.values()):
        yield module
    for child in inspection.children_of(module):
        yield from _leaves(child)


def _recording(cls: type, tried: _Tried) -> type:
    run = _call_of(cls)

    def call(self: Any, x: mx.array) -> mx.array:
        tried.setdefault(cls, (self, x))
        return run(self, x)

    return inspection.subclass(cls, __call__=call)


def _treats_rows_alone(module: Any, x: mx.array) -> bool:
    """Whether it makes the same of the rows in two parts, along the first axis as along the second."""
    run = _call_of(type(module))
    if x.ndim < 2 or x.shape[0] * x.shape[1] != _NUM_TRIED_TOKENS:
        return False
    for rows, axis in ((x, 1), (x.swapaxes(0, 1), 0)):
        whole = run(module, rows)
        parts = [run(module, part) for part in mx.split(rows, 2, axis=axis)]
        together = mx.concatenate(parts, axis=axis) if parts[0].ndim > axis else parts[0]
        if together.shape != whole.shape:
            return False
        # Not "differs by more", which a NaN would pass.
        if not mx.all(mx.abs(together - whole) <= _TOLERANCE * mx.abs(whole).max()).item():
            return False
    return True


def _laned(cls: type, lanes: Lanes) -> type:
    run = _call_of(cls)

    def call(self: Any, x: mx.array) -> mx.array:
        if not lanes.has_rows:
            return run(self, x)
        axis = 1 if x.shape[0] == 1 and x.ndim > 2 else 0
        num_rows, num_lanes = x.shape[axis], lanes.num
        if num_rows < 2 * num_lanes:
            return run(self, x)
        parts = mx.split(x, [num_rows * lane // num_lanes for lane in range(1, num_lanes)], axis=axis)
        return mx.concatenate(lanes.each([partial(run, self, part) for part in parts], [1] * num_lanes), axis)

    return inspection.subclass(cls, __call__=call)


def _call_of(cls: type) -> Callable[[Any, mx.array], mx.array]:
    run: Callable[[Any, mx.array], mx.array] = cls.__call__
    return run
