"""What one KV cache of a model keeps, shared by pools, kernels and models."""

from dataclasses import dataclass
from enum import StrEnum

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


class ReachKind(StrEnum):
    """Which past tokens a token sees."""

    FULL = "full"
    WINDOW = "window"
    CHUNK = "chunk"


@dataclass(frozen=True, slots=True)
class Reach:
    """A token sees all before it, the last `size` with itself (window), or those of its chunk of `size` tokens."""

    kind: ReachKind = ReachKind.FULL
    size: int = 0

    def __hash__(self) -> int:
        # Looked up several times a layer; a kind alone is seldom what tells two of them apart.
        return self.size

    def first_needed(self, position: int) -> int:
        """The oldest position that the token at `position` sees."""
        if self.kind is ReachKind.WINDOW:
            return max(0, position - self.size + 1)
        if self.kind is ReachKind.CHUNK:
            return position // self.size * self.size
        return 0

    def mask(self, queries: NDArray[np.int32], keys: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which key positions each query position sees: `[num_queries, num_keys]`."""
        queries = queries[:, None]
        seen: NDArray[np.bool_] = keys <= queries
        if self.kind is ReachKind.WINDOW:
            seen &= keys > queries - self.size
        elif self.kind is ReachKind.CHUNK:
            seen &= keys // self.size == queries // self.size
        return seen


FULL_REACH = Reach()


@dataclass(frozen=True, slots=True)
class Quantization:
    """Rows are stored as `mx.quantize` makes them: `bits` an element, a scale and a bias for each `group_size`."""

    bits: int
    group_size: int


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention cache stores for a token: `num_kv_heads` keys and as many values.

    Without values (`value_head_dim` 0) the cache holds keys alone, like those of a sparse indexer. A latent cache is
    given one latent vector as its key and the rotary key beside it as its value, and holds them as one row. `dtype` is
    that of the rows that go in and come out, also where they are stored quantised.
    """

    num_kv_heads: int
    head_dim: int
    dtype: mx.Dtype
    value_head_dim: int = -1
    reach: Reach = FULL_REACH
    is_latent: bool = False
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        if self.value_head_dim < 0:
            object.__setattr__(self, "value_head_dim", self.head_dim)

    @property
    def vector_widths(self) -> tuple[int, ...]:
        """Elements of each vector that is stored for a head: keys and values, keys alone, latents with rotary keys."""
        if self.is_latent:
            return (self.head_dim + self.value_head_dim,)
        return (self.head_dim, self.value_head_dim) if self.value_head_dim else (self.head_dim,)

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V together."""
        num_elements = self.num_kv_heads * (self.head_dim + self.value_head_dim)
        if self.quantization is None:
            return num_elements * self.dtype.size
        bits, group_size = self.quantization.bits, self.quantization.group_size
        return num_elements * bits // 8 + num_elements // group_size * 2 * self.dtype.size


@dataclass(frozen=True, slots=True)
class StateShape:
    """A recurrent state: shapes of its tensors without the batch axis, and their types. `name` is for people."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[mx.Dtype, ...]

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(int(np.prod(shape)) * dtype.size for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


CacheShape = LayerShape | StateShape


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Caches (by index) that share a block table; their blocks lie in `pool`."""

    pool: int
    caches: tuple[int, ...]
