"""Small questions to mlx-lm's modules."""

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

_PREFIX = "mlx_lm.models."
_READS = re.compile(r"\bnp\.array\(|\.tolist\(|\.item\(|\bmx\.(async_)?eval\(")


def family_of(model: Module) -> str:
    """The module of mlx_lm.models that defines it."""
    return type(model).__module__.removeprefix(_PREFIX)


def qualified_name(cls: type) -> str:
    """Module and class, `llama.Attention`."""
    return f"{cls.__module__.removeprefix(_PREFIX)}.{cls.__name__}"


def takes_cache(cls: type) -> bool:
    """Whether it is a class of mlx-lm whose call has a parameter `cache`."""
    return cls.__module__.startswith(_PREFIX) and "cache" in inspect.signature(cls.__call__).parameters


def reads_values(model: Module) -> bool:
    """Whether the model may look at numbers while its graph is built, as a mixture in Python does at who goes where.

    By the source of the modules that its classes are from; one whose source can't be had is taken to.
    """
    modules = {type(module).__module__ for module in model.modules()}  # type: ignore[no-untyped-call]
    return any(_reads_values(name) for name in modules if not name.startswith("mlx.nn."))


def subclass(cls: type, **methods: Callable[..., Any]) -> type:
    """With other methods and the old name, by which errors, tables and `reads_values` know it."""
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {**methods, **names})


def _reads_values(module: str) -> bool:
    try:
        source = inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):
        return True
    return _READS.search(source) is not None


def arrays_of(model: Module) -> list[mx.array]:
    """All that it holds: its parameters, and what it keeps under names that begin with an underscore."""
    leaves: list[tuple[str, object]] = tree_flatten(model)  # type: ignore[assignment]
    return [leaf for _, leaf in leaves if isinstance(leaf, mx.array)]


def children_of(module: Module) -> Iterator[Module]:
    """Direct submodules, those in lists too."""
    for value in module.values():
        yield from _modules_in(value)


def _modules_in(value: object) -> Iterator[Module]:
    if isinstance(value, Module):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _modules_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _modules_in(item)
