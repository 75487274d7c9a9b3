"""`write_kv` and `put_blocks`: store K and V rows, or whole blocks, into the pools, in place.

MLX gives a kernel fresh outputs only, so a pool is an input that the kernel writes through. MLX orders kernels by their
arrays and sees no write here. So each kernel's output is a token, one int32: whatever reads or writes the pool
afterwards takes it as the input `after`, or adds it to its indices (`tie`), which is both the order in the graph and
the memory barrier. A kernel never loads from the pool that it writes.
"""

from typing import Any

import mlx.core as mx
import numpy as np

from worker.metal.factory import MetalKernel, dtype_tag

# Elements that one thread copies: 8 bytes of half precision.
VEC = 4
_MAX_THREADS = 256

# `after` is an input for its order alone.
WRITE_SOURCE = r"""
  const uint part = thread_position_in_grid.x;
  const uint head = thread_position_in_grid.y;
  const uint row = thread_position_in_grid.z;
  const uint num_heads = threads_per_grid.y;
  const int64_t slot = slots[row];
  if (slot >= 0) {
    const int64_t place = ((slot / BS) * num_heads + head) * BS + slot % BS;
    if (part < DK / VEC) {
      device T* target = (device T*)key_pool + place * DK + part * VEC;
      const int64_t from = row * keys_strides[0] + head * keys_strides[1] + part * VEC * keys_strides[2];
      for (int i = 0; i < VEC; i++) {
        target[i] = keys[from + i * keys_strides[2]];
      }
    }
    if (part < DV / VEC) {
      device T* target = (device T*)value_pool + place * DV + part * VEC;
      const int64_t from = row * values_strides[0] + head * values_strides[1] + part * VEC * values_strides[2];
      for (int i = 0; i < VEC; i++) {
        target[i] = values[from + i * values_strides[2]];
      }
    }
  }
  if (row == 0 && head == 0 && part == 0) {
    token[0] = 0;
  }
"""

PUT_SOURCE = r"""
  const int64_t part = thread_position_in_grid.x;
  const uint row = thread_position_in_grid.y;
  const int64_t block = block_ids[row];
  const int64_t size = contents_shape[1];
  if (block >= 0) {
    device T* target = (device T*)pool + block * size + part * VEC;
    const int64_t from = row * contents_strides[0] + part * VEC * contents_strides[1];
    for (int i = 0; i < VEC; i++) {
      target[i] = contents[from + i * contents_strides[1]];
    }
  }
  if (row == 0 && part == 0) {
    token[0] = 0;
  }
"""


class WriteKV:
    """Launches `write_kv`."""

    def __init__(self, metal_kernel: MetalKernel) -> None:
        self._metal_kernel = metal_kernel
        self._by_dtype: dict[str, Any] = {}

    def __call__(
        self,
        keys: mx.array,
        values: mx.array,
        slots: mx.array,
        key_pool: mx.array,
        value_pool: mx.array,
        after: mx.array | None = None,
    ) -> mx.array:
        """Write `keys [rows, num_kv_heads, head_dim]` and `values` at `slots [rows]` int32; -1 skips a row.

        Further slots are not looked at: with 8 at least, all numbers of rows are one kernel to compile.
        Pools are `[num_blocks, num_kv_heads, block_size, head_dim]`, or the same with the first two axes as one; they
        are evaluated, contiguous arrays of at least 8 elements. Rows may be strided. No two rows name the same slot.
        `after` is a token, or any array to wait for. Returns the token. Raises ValueError.
        """
        rows, num_kv_heads, head_dim = keys.shape
        value_dim = values.shape[2]
        _check_rows("keys", keys, key_pool)
        _check_rows("values", values, value_pool)
        block_size = key_pool.shape[-2]
        if values.shape[:2] != (rows, num_kv_heads) or value_pool.shape[-2] != block_size:
            raise ValueError(
                f"values {values.shape} and their pool {value_pool.shape} do not go with keys {keys.shape} and their "
                f"pool {key_pool.shape}"
            )
        parts = max(head_dim, value_dim) // VEC
        token: mx.array
        (token,) = self._kernel(dtype_tag(key_pool.dtype))(
            inputs=[keys, values, slots, key_pool, value_pool, nothing_if(after)],
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
            grid=(parts, num_kv_heads, rows),
            threadgroup=(parts, largest_divisor(num_kv_heads, _MAX_THREADS // parts), 1),
            template=[("T", key_pool.dtype), ("DK", head_dim), ("DV", value_dim), ("BS", block_size), ("VEC", VEC)],
        )
        return token

    def _kernel(self, tag: str) -> Any:
        if tag not in self._by_dtype:
            self._by_dtype[tag] = self._metal_kernel(
                name=f"cidery_write_kv_{tag}",
                input_names=["keys", "values", "slots", "key_pool", "value_pool", "after"],
                output_names=["token"],
                source=WRITE_SOURCE,
                # A silent copy of a pool would swallow the writes.
                ensure_row_contiguous=False,
            )
        return self._by_dtype[tag]


class PutBlocks:
    """Launches `put_blocks`, for pools of any kind: K, V, packed K, states."""

    def __init__(self, metal_kernel: MetalKernel) -> None:
        self._metal_kernel = metal_kernel
        self._by_dtype: dict[str, Any] = {}

    def __call__(
        self,
        contents: mx.array,
        block_ids: mx.array,
        pool: mx.array,
        after: mx.array | None = None,
    ) -> mx.array:
        """Write `contents [rows, ...]` to the blocks `block_ids [rows]` int32 of `pool [num_blocks, ...]`; -1 skips.

        Further ids are not looked at, as of `WriteKV`. A block has any size. `contents` may be a broadcast scalar: that
        fills blocks. No two rows name the same block.
        `after` is a token, or any array to wait for. Returns the token. Raises ValueError.
        """
        rows = contents.shape[0]
        if contents.dtype != pool.dtype or contents.shape[1:] != pool.shape[1:]:
            raise ValueError(f"{contents.dtype} {contents.shape} are no blocks of a {pool.dtype} pool {pool.shape}")
        size = int(np.prod(pool.shape[1:]))
        vec = next(width for width in (VEC, 2, 1) if size % width == 0)
        token: mx.array
        (token,) = self._kernel(dtype_tag(pool.dtype))(
            inputs=[contents.reshape(rows, size), block_ids, pool, nothing_if(after)],
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
            grid=(size // vec, rows, 1),
            threadgroup=(min(size // vec, _MAX_THREADS), 1, 1),
            template=[("T", pool.dtype), ("VEC", vec)],
        )
        return token

    def _kernel(self, tag: str) -> Any:
        if tag not in self._by_dtype:
            self._by_dtype[tag] = self._metal_kernel(
                name=f"cidery_put_blocks_{tag}",
                input_names=["contents", "block_ids", "pool", "after"],
                output_names=["token"],
                source=PUT_SOURCE,
                ensure_row_contiguous=False,
            )
        return self._by_dtype[tag]


def move_blocks(
    put: PutBlocks, pool: mx.array, sources: mx.array, targets: mx.array, after: mx.array | None = None
) -> mx.array:
    """Copy blocks `sources [n]` of a pool to `targets [n or more]`, both int32, behind the token `after`; the token.

    All sources are read before any target is written, so the copies of one call may chain or swap.
    """
    contents = pool[sources if after is None else tie(sources, after)]
    return put(contents, targets, pool, after)


def tie(index: mx.array, token: mx.array) -> mx.array:
    """`index` for a reader that takes no token itself: not to be had before the kernel that gave the token has run."""
    return index + token[:1] * 0


def nothing_if(after: mx.array | None) -> mx.array:
    """What a kernel takes as `after` where there is nothing to wait for."""
    return mx.zeros((1,), mx.int32) if after is None else after


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of a number within a bound, at least 1."""
    return next(size for size in range(max(1, min(number, at_most)), 0, -1) if number % size == 0)


def _check_rows(name: str, rows: mx.array, pool: mx.array) -> None:
    if rows.dtype != pool.dtype or rows.shape[2] != pool.shape[-1]:
        raise ValueError(f"{name} {rows.dtype} {rows.shape} do not fit a {pool.dtype} pool {pool.shape}")
    if pool.shape[-1] % VEC:
        raise ValueError(f"{name} have {pool.shape[-1]} elements: a multiple of {VEC} is needed")
