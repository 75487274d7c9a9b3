"""`rope`: rotary embedding of packed queries and keys in one launch, each row at its own position."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from worker.metal.factory import MetalKernel, dtype_tag
from worker.metal.write_kv import largest_divisor

_MAX_THREADS = 256
# Models are given another one.
_mlx_rope = mx.fast.rope


@dataclass(frozen=True, slots=True)
class RopeOptions:
    """As those of `mx.fast.rope`: the first `dims` elements of a head turn, the others stay.

    `traditional`: neighbours turn together, else elements half of `dims` apart. The angle of pair i at a position is
    `position * scale / period`, the period `freqs[i]`, or `base ** (2 i / dims)` without `freqs [dims / 2]`.
    """

    dims: int
    traditional: bool = False
    base: float | None = 10000.0
    scale: float = 1.0
    freqs: mx.array | None = None

    def __post_init__(self) -> None:
        if self.dims <= 0 or self.dims % 2:
            raise ValueError(f"dims {self.dims}: an even number above 0 is needed")
        if (self.base is None) == (self.freqs is None):
            raise ValueError("one of base and freqs is needed, and not both")
        if self.freqs is not None and self.freqs.shape != (self.dims // 2,):
            raise ValueError(f"freqs {self.freqs.shape}: one for each of {self.dims // 2} pairs is needed")


# A thread turns one pair; those beyond the last pair copy two elements.
SOURCE = r"""
  const int pair = thread_position_in_grid.x;
  const int row = thread_position_in_grid.z;
  const int num_queries = queries_shape[1];
  const int num_keys = keys_shape[1];
  const bool is_query = int(thread_position_in_grid.y) < num_queries;
  const int head = is_query ? int(thread_position_in_grid.y) : int(thread_position_in_grid.y) - num_queries;
  const bool turns = pair < DIMS / 2;
  const int first = turns && !TRADITIONAL ? pair : 2 * pair;
  const int second = turns && !TRADITIONAL ? pair + DIMS / 2 : 2 * pair + 1;
  float x = 0.0f;
  float y = 0.0f;
  if (is_query) {
    const int64_t from = row * queries_strides[0] + head * queries_strides[1];
    x = float(queries[from + first * queries_strides[2]]);
    y = float(queries[from + second * queries_strides[2]]);
  } else {
    const int64_t from = row * keys_strides[0] + head * keys_strides[1];
    x = float(keys[from + first * keys_strides[2]]);
    y = float(keys[from + second * keys_strides[2]]);
  }
  if (turns) {
    const float rate = FREQS ? 1.0f / freqs[pair] : metal::exp2(-float(pair) / float(DIMS / 2) * floats[1]);
    const float angle = float(positions[row]) * floats[0] * rate;
    const float cosine = metal::precise::cos(angle);
    const float sine = metal::precise::sin(angle);
    const float turned = x * cosine - y * sine;
    y = x * sine + y * cosine;
    x = turned;
  }
  device T* target = is_query ? turned_queries + (int64_t(row) * num_queries + head) * D
                              : turned_keys + (int64_t(row) * num_keys + head) * D;
  target[first] = T(x);
  target[second] = T(y);
"""


class Rope:
    """Launches the kernel."""

    def __init__(self, metal_kernel: MetalKernel) -> None:
        self._metal_kernel = metal_kernel
        self._by_dtype: dict[str, Any] = {}
        self._floats: dict[tuple[float, float | None], mx.array] = {}

    def __call__(
        self, queries: mx.array, keys: mx.array, positions: mx.array, options: RopeOptions
    ) -> tuple[mx.array, mx.array]:
        """`queries [rows, num_heads, head_dim]` and `keys [rows, num_kv_heads, head_dim]` turned by `positions [rows]`.

        Positions are int32. Both inputs may be strided; the results are not. Raises ValueError.
        """
        check(queries, keys, positions, options)
        rows, num_heads, head_dim = queries.shape
        num_kv_heads = keys.shape[1]
        freqs = mx.zeros((1,), mx.float32) if options.freqs is None else options.freqs.astype(mx.float32)
        turned: tuple[mx.array, mx.array] = self._kernel(dtype_tag(queries.dtype))(
            inputs=[queries, keys, positions, freqs, self._float_input(options)],
            output_shapes=[queries.shape, keys.shape],
            output_dtypes=[queries.dtype, keys.dtype],
            grid=(head_dim // 2, num_heads + num_kv_heads, rows),
            threadgroup=(head_dim // 2, largest_divisor(num_heads + num_kv_heads, _MAX_THREADS // (head_dim // 2)), 1),
            template=[
                ("T", queries.dtype),
                ("D", head_dim),
                ("DIMS", options.dims),
                ("TRADITIONAL", options.traditional),
                ("FREQS", options.freqs is not None),
            ],
        )
        return turned[0], turned[1]

    def _float_input(self, options: RopeOptions) -> mx.array:
        key = options.scale, options.base
        if key not in self._floats:
            log_base = 0.0 if options.base is None else mx.log2(mx.array(options.base, mx.float32)).item()
            self._floats[key] = mx.array([options.scale, log_base], mx.float32)
        return self._floats[key]

    def _kernel(self, tag: str) -> Any:
        if tag not in self._by_dtype:
            self._by_dtype[tag] = self._metal_kernel(
                name=f"cidery_rope_{tag}",
                input_names=["queries", "keys", "positions", "freqs", "floats"],
                output_names=["turned_queries", "turned_keys"],
                source=SOURCE,
                ensure_row_contiguous=False,
            )
        return self._by_dtype[tag]


def twin(queries: mx.array, keys: mx.array, positions: mx.array, options: RopeOptions) -> tuple[mx.array, mx.array]:
    """`Rope` in plain MLX: each row a batch row of one token."""
    check(queries, keys, positions, options)
    queries, keys = (
        _mlx_rope(
            rows[:, :, None, :],
            options.dims,
            traditional=options.traditional,
            base=options.base,
            scale=options.scale,
            offset=positions,
            freqs=options.freqs,
        )[:, :, 0, :]
        for rows in (queries, keys)
    )
    return queries, keys


def check(queries: mx.array, keys: mx.array, positions: mx.array, options: RopeOptions) -> None:
    """Raises ValueError if they do not go together."""
    rows, _, head_dim = queries.shape
    if keys.shape[0] != rows or keys.shape[2] != head_dim or keys.dtype != queries.dtype:
        raise ValueError(f"keys {keys.dtype} {keys.shape} do not go with queries {queries.dtype} {queries.shape}")
    if positions.shape != (rows,) or positions.dtype != mx.int32:
        raise ValueError(f"positions {positions.dtype} {positions.shape}: int32 [{rows}] is needed")
    if options.dims > head_dim or head_dim % 2:
        raise ValueError(f"dims {options.dims} of heads of {head_dim} elements, which must be even and not fewer")
