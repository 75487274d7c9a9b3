"""`write_kv`: stores new K and V rows into the pools, in place.

MLX gives a kernel fresh outputs only, so the pools are inputs that it writes through, and its output is a token:
whatever reads the pools afterwards must take the token as an input, which is both the order in the graph and the memory
barrier.
"""

from typing import Any

import mlx.core as mx

from worker.metal.factory import MetalKernel, dtype_tag

# Elements that one thread copies: 8 bytes of half precision.
_VEC = 4

SOURCE = r"""
  const uint part = thread_position_in_grid.x;
  const uint head = thread_position_in_grid.y;
  const uint row = thread_position_in_grid.z;
  const uint num_heads = threads_per_grid.y;
  const int64_t slot = slots[row];
  if (slot >= 0) {
    const int64_t source = (int64_t(row) * num_heads + head) * D + part * VEC;
    const int64_t target = (((slot / BS) * num_heads + head) * BS + slot % BS) * D + part * VEC;
    device T* to_keys = (device T*)key_pool;
    device T* to_values = (device T*)value_pool;
    for (int i = 0; i < VEC; i++) {
      to_keys[target + i] = keys[source + i];
      to_values[target + i] = values[source + i];
    }
  }
  if (part == 0 && head == 0) {
    token[row] = 1;
  }
"""


class WriteKV:
    """Launches the kernel; see README.md for shapes."""

    def __init__(self, metal_kernel: MetalKernel) -> None:
        self._metal_kernel = metal_kernel
        self._by_dtype: dict[str, Any] = {}

    def __call__(
        self, keys: mx.array, values: mx.array, slots: mx.array, key_pool: mx.array, value_pool: mx.array
    ) -> mx.array:
        """Write `keys` and `values [rows, num_kv_heads, head_dim]` at `slots [rows]`; -1 skips a row. The token."""
        rows, num_kv_heads, head_dim = keys.shape
        kernel = self._kernel(dtype_tag(key_pool.dtype))
        token: mx.array
        (token,) = kernel(
            inputs=[keys, values, slots, key_pool, value_pool],
            output_shapes=[(rows,)],
            output_dtypes=[mx.uint32],
            grid=(head_dim // _VEC, num_kv_heads, rows),
            threadgroup=(head_dim // _VEC, 1, 1),
            template=[("T", key_pool.dtype), ("D", head_dim), ("BS", key_pool.shape[1]), ("VEC", _VEC)],
        )
        return token

    def _kernel(self, tag: str) -> Any:
        if tag not in self._by_dtype:
            self._by_dtype[tag] = self._metal_kernel(
                name=f"cidery_write_kv_{tag}",
                input_names=["keys", "values", "slots", "key_pool", "value_pool"],
                output_names=["token"],
                source=SOURCE,
                # A silent copy of a pool would swallow the writes. Pools are contiguous, and so are the rows.
                ensure_row_contiguous=False,
            )
        return self._by_dtype[tag]
