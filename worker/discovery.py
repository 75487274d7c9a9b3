"""Finds out what a model keeps, from its own caches and what its code does with them, never from names alone.

The model runs a few tokens over mlx-lm's caches, watched: shapes and types of what is stored, and the masks asked for.
A cache index is not a layer index: layers may share caches, have none, or have several.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from worker.errors import UnsupportedModelError
from worker.kv_shapes import FULL_REACH, CacheShape, LayerShape, Reach, ReachKind, StateShape

# Enough for a window of last inputs to be full: short convolutions and n-grams see fewer.
_NUM_PROBE_TOKENS = 16
_ATTENTION_CACHES = (KVCache, ConcatenateKVCache, RotatingKVCache, ChunkedKVCache)


@dataclass
class _Seen:
    """What the model did with one attention cache."""

    keys: mx.array | None = None
    values: mx.array | None = None
    windows: set[int | None] = field(default_factory=set)


def leaves_of(caches: Any) -> Iterator[Any]:
    """The caches in mlx-lm's order, those in a CacheList one by one."""
    if isinstance(caches, list | tuple):
        for cache in caches:
            yield from leaves_of(cache)
    elif isinstance(caches, CacheList):
        yield from leaves_of(caches.caches)
    else:
        yield caches


def nested(caches: Any, leaves: Iterator[Any]) -> Any:
    """Other caches in the nesting of `caches`."""
    if isinstance(caches, list):
        return [nested(cache, leaves) for cache in caches]
    if isinstance(caches, CacheList):
        return CacheList(*(nested(cache, leaves) for cache in caches.caches))  # type: ignore[no-untyped-call]
    return next(leaves)


def probe(model: Module, family: str, latent_ranks: Sequence[int] = ()) -> tuple[tuple[CacheShape, ...], int]:
    """What each cache keeps, and the size of the vocabulary.

    `latent_ranks` are the widths of the latent vectors that the model's attention has. Raises UnsupportedModelError for
    caches that can't be run exactly.
    """
    caches = make_prompt_cache(model)
    leaves = list(leaves_of(caches))
    foreign = sorted({type(c).__name__ for c in leaves if type(c) not in (*_ATTENTION_CACHES, ArraysCache)})
    if foreign:
        known = ", ".join(cls.__name__ for cls in (*_ATTENTION_CACHES, ArraysCache))
        raise UnsupportedModelError(f"{family}: its caches are {', '.join(foreign)}; supported are {known}")
    seen = [_watch(leaf) for leaf in leaves]
    logits = model(mx.zeros((1, _NUM_PROBE_TOKENS), mx.int32), cache=caches)
    prompt_states = [_arrays(leaf) for leaf in leaves]
    logits = model(mx.zeros((1, 1), mx.int32), cache=caches)
    shapes: list[CacheShape] = []
    for index, (leaf, what, state) in enumerate(zip(leaves, seen, prompt_states, strict=True)):
        try:
            shapes.append(_state_shape(leaf, state) if what is None else _layer_shape(leaf, what, latent_ranks))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{family}: cache {index} {error}") from None
    return tuple(shapes), logits.shape[-1]


def _watch(cache: Any) -> _Seen | None:
    """Note what the model stores in an attention cache and which masks it asks of it."""
    if isinstance(cache, ArraysCache):
        return None
    seen = _Seen()
    fetch = cache.update_and_fetch
    make_mask: Callable[..., Any] | None = getattr(cache, "make_mask", None)

    def update_and_fetch(keys: mx.array, values: mx.array) -> Any:
        seen.keys, seen.values = keys, values
        return fetch(keys, values)

    cache.update_and_fetch = update_and_fetch
    if make_mask is not None:
        cache.make_mask = _noting(make_mask, seen)
    return seen


def _noting(make_mask: Callable[..., Any], seen: _Seen) -> Callable[..., Any]:
    def noted_mask(*args: Any, window_size: int | None = None, **others: Any) -> Any:
        seen.windows.add(window_size)
        return make_mask(*args, window_size=window_size, **others)

    return noted_mask


def _arrays(cache: Any) -> list[mx.array | None]:
    return list(cache.cache) if isinstance(cache, ArraysCache) else []


def _layer_shape(cache: Any, seen: _Seen, latent_ranks: Sequence[int]) -> LayerShape:
    if seen.keys is None or seen.values is None:
        raise UnsupportedModelError("is not used")
    _, num_kv_heads, _, head_dim = seen.keys.shape
    value_head_dim = 0 if seen.values is seen.keys else seen.values.shape[3]
    return LayerShape(
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=seen.keys.dtype,
        value_head_dim=value_head_dim,
        reach=_reach(cache, seen.windows - {None}),
        is_latent=num_kv_heads == 1 and head_dim in latent_ranks and 0 < value_head_dim != head_dim,
    )


def _reach(cache: Any, windows: set[int | None]) -> Reach:
    """What the tokens see; where a mask asks for a window, it must be the one that the cache keeps."""
    if isinstance(cache, ChunkedKVCache):
        reach = Reach(ReachKind.CHUNK, cache.chunk_size)
    elif isinstance(cache, RotatingKVCache):
        if cache.keep:
            raise UnsupportedModelError(f"keeps the first {cache.keep} tokens beside its window")
        reach = Reach(ReachKind.WINDOW, cache.max_size)
    else:
        reach = FULL_REACH
    asked = {window for window in windows if reach.kind is not ReachKind.WINDOW or window != reach.size}
    if asked:
        keeps = "everything" if reach is FULL_REACH else f"a {reach.kind} of {reach.size} tokens"
        raise UnsupportedModelError(f"is masked with a window of {asked.pop()} tokens and keeps {keeps}")
    return reach


def _state_shape(cache: ArraysCache, prompt_state: Sequence[mx.array | None]) -> StateShape:
    """Shapes after a prompt and after one token more, which must not differ."""
    tensors: list[tuple[tuple[int, ...], mx.Dtype]] = []
    for before, after in zip(prompt_state, _arrays(cache), strict=True):
        if before is None or after is None:
            raise UnsupportedModelError("has a state that the model leaves empty")
        if before.shape != after.shape:
            raise UnsupportedModelError(f"has a state that grows from {before.shape} to {after.shape}")
        tensors.append((after.shape[1:], _wider(before.dtype, after.dtype)))
    return StateShape("state", tuple(shape for shape, _ in tensors), tuple(dtype for _, dtype in tensors))


def _wider(one: mx.Dtype, other: mx.Dtype) -> mx.Dtype:
    return one if one.size >= other.size else other
