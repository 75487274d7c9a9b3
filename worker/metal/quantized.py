"""Quantised pools, and `write_quantized`, which quantises new rows into them in place.

The format is that of `mx.quantize` in mode affine, element by element: packed 32-bit words, and for each group of
elements a scale and a bias, `x = scale * q + bias`.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from worker.metal.factory import MetalKernel, dtype_tag
from worker.metal.write_kv import largest_divisor, nothing_if

BITS = (4, 8)
GROUP_SIZES = (32, 64)
_MAX_GROUPS = 8


@dataclass(frozen=True, slots=True)
class QuantizedPool:
    """Keys, or values, of one layer.

    Shapes: `packed [num_blocks, num_kv_heads, block_size, head_dim * bits / 32]` uint32; `scales` and `biases
    [num_blocks, num_kv_heads, block_size, head_dim / group_size]` in the type of the rows.
    """

    packed: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int

    def __post_init__(self) -> None:
        check_format(self.head_dim, self.bits, self.group_size)
        groups = (*self.packed.shape[:3], self.head_dim // self.group_size)
        if self.scales.shape != groups or self.biases.shape != groups or self.scales.dtype != self.biases.dtype:
            raise ValueError(
                f"scales {self.scales.dtype} {self.scales.shape} and biases {self.biases.dtype} {self.biases.shape}: "
                f"packed {self.packed.shape} of {self.bits} bits in groups of {self.group_size} needs {groups}"
            )

    @property
    def head_dim(self) -> int:
        """Elements of a row."""
        return self.packed.shape[3] * 32 // self.bits

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the pool that it stands for."""
        return (*self.packed.shape[:3], self.head_dim)

    @property
    def dtype(self) -> mx.Dtype:
        """Type of the rows that go in and come out."""
        return self.scales.dtype

    def dequantize(self, index: mx.array) -> mx.array:
        """Whole blocks by their ids `[n]`: `[n, num_kv_heads, block_size, head_dim]`."""
        return mx.dequantize(
            self.packed[index], self.scales[index], self.biases[index], group_size=self.group_size, bits=self.bits
        )


def zero_pool(shape: tuple[int, ...], dtype: mx.Dtype, bits: int, group_size: int) -> QuantizedPool:
    """A quantised pool for `[num_blocks, num_kv_heads, block_size, head_dim]`, all zero. Raises ValueError."""
    check_format(shape[3], bits, group_size)
    groups = (*shape[:3], shape[3] // group_size)
    packed = mx.zeros((*shape[:3], shape[3] * bits // 32), mx.uint32)
    return QuantizedPool(packed, mx.zeros(groups, dtype), mx.zeros(groups, dtype), bits, group_size)


def check_format(head_dim: int, bits: int, group_size: int) -> None:
    """Raises ValueError for a format that no kernel here writes or reads."""
    if bits not in BITS or group_size not in GROUP_SIZES:
        raise ValueError(f"{bits} bits in groups of {group_size}: bits are {BITS}, groups {GROUP_SIZES}")
    if head_dim % group_size:
        raise ValueError(f"head_dim {head_dim} is no multiple of the group of {group_size}")


def write_twin(rows: mx.array, slots: mx.array, pool: QuantizedPool) -> None:
    """`WriteQuantized` in plain MLX: `mx.quantize` and three scatters, in place while nobody else holds the arrays."""
    _check_rows(rows, pool)
    kept = mx.array(np.flatnonzero(np.array(slots) >= 0).astype(np.int32))
    blocks, offsets = slots[kept] // pool.shape[2], slots[kept] % pool.shape[2]
    parts = mx.quantize(rows[kept], group_size=pool.group_size, bits=pool.bits)
    index = blocks[:, None], mx.arange(pool.shape[1]), offsets[:, None]
    for array, part in zip((pool.packed, pool.scales, pool.biases), parts, strict=True):
        array[index] = part


def _check_rows(rows: mx.array, pool: QuantizedPool) -> None:
    if rows.dtype != pool.dtype or rows.shape[1:] != (pool.shape[1], pool.shape[3]):
        raise ValueError(f"rows {rows.dtype} {rows.shape} do not fit a {pool.dtype} pool {pool.shape}")


# A simdgroup quantises one group. The lanes of a word join their parts by shuffles.
SOURCE = r"""
  constexpr int EPL = GROUP / 32;
  constexpr int LANES = 32 / BITS / EPL;
  constexpr float LEVELS = float((1 << BITS) - 1);
  const int lane = thread_position_in_grid.x;
  const uint group = thread_position_in_grid.y;
  const uint row = thread_position_in_grid.z;
  const uint num_heads = threads_per_grid.y / (D / GROUP);
  const uint head = group / (D / GROUP);
  const uint part = group % (D / GROUP);
  const int64_t slot = slots[row];
  if (slot >= 0) {
    float x[EPL];
    float low = 0.0f;
    float high = 0.0f;
    for (int i = 0; i < EPL; i++) {
      const int64_t from = row * rows_strides[0] + head * rows_strides[1];
      x[i] = float(rows[from + (part * GROUP + lane * EPL + i) * rows_strides[2]]);
      low = i == 0 ? x[i] : metal::min(low, x[i]);
      high = i == 0 ? x[i] : metal::max(high, x[i]);
    }
    low = simd_min(low);
    high = simd_max(high);
    // The end of the range that is further from zero falls on a level, and zero on another. MLX on Metal takes
    // zero for the upper end where all are negative; this keeps to the range, as MLX on a CPU does.
    float scale = metal::max((high - low) / LEVELS, 1e-7f);
    const bool is_low = metal::abs(low) > metal::abs(high);
    scale = is_low ? scale : -scale;
    const float edge = is_low ? low : high;
    const float level = metal::rint(edge / scale);
    scale = level == 0.0f ? scale : edge / level;
    const float bias = level == 0.0f ? 0.0f : edge;
    uint word = 0;
    for (int i = 0; i < EPL; i++) {
      const float q = metal::min(metal::rint((x[i] - bias) / scale), LEVELS);
      word |= uint(metal::max(q, 0.0f)) << (BITS * (lane % LANES * EPL + i));
    }
    for (int step = 1; step < LANES; step *= 2) {
      word |= simd_shuffle_xor(word, ushort(step));
    }
    const int64_t place = ((slot / BS) * num_heads + head) * BS + slot % BS;
    if (lane % LANES == 0) {
      ((device uint*)packed)[place * (D * BITS / 32) + part * (GROUP * BITS / 32) + lane / LANES] = word;
    }
    if (lane == 0) {
      ((device T*)scales)[place * (D / GROUP) + part] = T(scale);
      ((device T*)biases)[place * (D / GROUP) + part] = T(bias);
    }
  }
  if (row == 0 && group == 0 && lane == 0) {
    token[0] = 0;
  }
"""


class WriteQuantized:
    """Launches `write_quantized`."""

    def __init__(self, metal_kernel: MetalKernel) -> None:
        self._metal_kernel = metal_kernel
        self._by_dtype: dict[str, Any] = {}

    def __call__(self, rows: mx.array, slots: mx.array, pool: QuantizedPool, after: mx.array | None = None) -> mx.array:
        """Quantise `rows [n, num_kv_heads, head_dim]` into `slots [n or more]` int32; -1 skips a row. The token.

        The arrays of the pool are written in place, like those of `WriteKV`; `rows` may be strided. Raises ValueError.
        """
        _check_rows(rows, pool)
        num_rows, num_kv_heads, head_dim = rows.shape
        groups = num_kv_heads * head_dim // pool.group_size
        token: mx.array
        (token,) = self._kernel(dtype_tag(rows.dtype))(
            inputs=[rows, slots, pool.packed, pool.scales, pool.biases, nothing_if(after)],
            output_shapes=[(1,)],
            output_dtypes=[mx.int32],
            grid=(32, groups, num_rows),
            threadgroup=(32, largest_divisor(groups, _MAX_GROUPS), 1),
            template=[
                ("T", rows.dtype),
                ("D", head_dim),
                ("BS", pool.shape[2]),
                ("BITS", pool.bits),
                ("GROUP", pool.group_size),
            ],
        )
        return token

    def _kernel(self, tag: str) -> Any:
        if tag not in self._by_dtype:
            self._by_dtype[tag] = self._metal_kernel(
                name=f"cidery_write_quantized_{tag}",
                input_names=["rows", "slots", "packed", "scales", "biases", "after"],
                output_names=["token"],
                source=SOURCE,
                ensure_row_contiguous=False,
            )
        return self._by_dtype[tag]
