"""`short_conv`: depthwise causal convolution over packed rows, with each sequence's last inputs kept in its slot.

The convolution of LFM2's layers, and of gated delta net and Mamba before the recurrence (there with SiLU). A thread has
a few channels of one tile of tokens. Whoever has a sequence's first tile reads the state and replaces it, so nothing
orders threadgroups; later tiles read the inputs before them again. Inputs are read by their strides: they are often a
slice of a projection.
"""

from typing import Any

import mlx.core as mx

from worker.metal.factory import MetalKernel, dtype_tag
from worker.metal.state_rows import StateRows, token_or_none

MAX_KERNEL_WIDTH = 8
# Tokens of a tile: the inputs before a tile are read twice, 3 for 32 at kernel width 4.
_TILE_ROWS = 32
# Threads of a threadgroup; the last one of a row of channels may be smaller.
_MAX_THREADS = 64

SOURCE = r"""
  const int channel = thread_position_in_grid.x * VEC;
  const int tile = thread_position_in_grid.y;
  const int sequence = tiles[tile * 2];
  const int begin = tiles[tile * 2 + 1];
  const int64_t first = sequences[sequence * 4];
  const int num_rows = sequences[sequence * 4 + 1];
  const int64_t slot = sequences[sequence * 4 + 2];
  const bool fresh = sequences[sequence * 4 + 3] != 0;
  const int end = metal::min(begin + int(TILE), num_rows);
  if (tile == 0 && channel == 0) {
    token[0] = 0;
  }
  if (slot < 0) {
    for (int t = begin; t < end; t++) {
      for (int c = 0; c < VEC; c++) {
        y[(first + t) * C + channel + c] = T(0.0f);
      }
    }
    return;
  }
  device S* states = (device S*)pool;

  float weight[K][VEC];
  float start[VEC];
  for (int c = 0; c < VEC; c++) {
    for (int j = 0; j < K; j++) {
      weight[j][c] = float(weights[(channel + c) * weights_strides[0] + j * weights_strides[1]]);
    }
    start[c] = BIAS ? float(bias[(channel + c) * bias_strides[0]]) : 0.0f;
  }
  float window[K][VEC];
  for (int j = 0; j < K - 1; j++) {
    for (int c = 0; c < VEC; c++) {
      if (begin > 0) {
        const int64_t row = first + begin - (K - 1) + j;
        window[j][c] = float(inputs[row * inputs_strides[0] + (channel + c) * inputs_strides[1]]);
      } else {
        window[j][c] = fresh ? 0.0f : float(states[(slot * (K - 1) + j) * C + channel + c]);
      }
    }
  }
  for (int t = begin; t < end; t++) {
    for (int c = 0; c < VEC; c++) {
      window[K - 1][c] = float(inputs[(first + t) * inputs_strides[0] + (channel + c) * inputs_strides[1]]);
      float sum = start[c];
      for (int j = 0; j < K; j++) {
        sum += weight[j][c] * window[j][c];
      }
      // The convolution's result is rounded before SiLU sees it, as when they are two operations.
      sum = float(T(sum));
      y[(first + t) * C + channel + c] = T(SILU ? sum / (1.0f + metal::exp(-sum)) : sum);
      for (int j = 0; j < K - 1; j++) {
        window[j][c] = window[j + 1][c];
      }
    }
  }
  if (begin == 0) {
    for (int j = 0; j < K - 1; j++) {
      for (int c = 0; c < VEC; c++) {
        // The window holds a short sequence's last inputs, older ones from the state included.
        const int64_t row = first + num_rows - (K - 1) + j;
        const float last = end < num_rows
            ? float(inputs[row * inputs_strides[0] + (channel + c) * inputs_strides[1]])
            : window[j][c];
        states[(slot * (K - 1) + j) * C + channel + c] = S(last);
      }
    }
  }
"""


class ShortConv:
    """Launches the kernel: one token a tile for decode rows, else `_TILE_ROWS`. See README.md for what it reads."""

    def __init__(self, metal_kernel: MetalKernel) -> None:
        self._metal_kernel = metal_kernel
        self._by_tag: dict[str, Any] = {}
        self._no_bias = mx.zeros(1)

    @staticmethod
    def supports(kernel_width: int) -> bool:
        """Whether the window fits into registers."""
        return 2 <= kernel_width <= MAX_KERNEL_WIDTH

    def __call__(
        self,
        inputs: mx.array,
        weights: mx.array,
        bias: mx.array | None,
        pool: mx.array,
        rows: StateRows,
        after: mx.array | None = None,
        *,
        silu: bool,
    ) -> tuple[mx.array, mx.array]:
        """The outputs `[num_rows, channels]` in the inputs' type, and the token of this launch.

        Shapes: `inputs [num_rows, channels]`; `weights [channels, kernel_width, 1]`, as `nn.Conv1d` has them, the last
        one for the current token; `bias [channels]`. `silu` applies SiLU to the result.

        `pool [num_slots, kernel_width - 1, channels]`, oldest input first, evaluated and contiguous, of the inputs'
        type or float32, is written in place. `after` is the token of the last launch that read or wrote the pool: it is
        the order between the two. Raises ValueError for shapes that don't fit and widths that aren't supported.
        """
        _, channels = inputs.shape
        check_inputs(inputs, weights, bias, pool, rows)
        kernel_width = weights.shape[1]
        if not self.supports(kernel_width):
            raise ValueError(f"short_conv runs kernel widths from 2 to {MAX_KERNEL_WIDTH}, not {kernel_width}")
        tile_rows = 1 if rows.is_decode else _TILE_ROWS
        tiles = rows.tile_array(tile_rows)
        vec = next(size for size in (4, 2, 1) if channels % size == 0)
        num_threads = channels // vec
        y, token = self._kernel(f"{dtype_tag(inputs.dtype)}_{dtype_tag(pool.dtype)}")(
            inputs=[
                inputs,
                weights,
                self._no_bias if bias is None else bias,
                rows.sequence_array,
                tiles,
                pool,
                token_or_none(after),
            ],
            output_shapes=[inputs.shape, (1,)],
            output_dtypes=[inputs.dtype, mx.int32],
            grid=(num_threads, tiles.shape[0], 1),
            threadgroup=(min(num_threads, _MAX_THREADS), 1, 1),
            template=[
                ("T", inputs.dtype),
                ("S", pool.dtype),
                ("C", channels),
                ("K", kernel_width),
                ("TILE", tile_rows),
                ("VEC", vec),
                ("BIAS", bias is not None),
                ("SILU", silu),
            ],
        )
        return y, token

    def _kernel(self, tag: str) -> Any:
        if tag not in self._by_tag:
            self._by_tag[tag] = self._metal_kernel(
                name=f"cidery_short_conv_{tag}",
                input_names=["inputs", "weights", "bias", "sequences", "tiles", "pool", "after"],
                output_names=["y", "token"],
                source=SOURCE,
                # A silent copy of the pool would swallow the writes.
                ensure_row_contiguous=False,
            )
        return self._by_tag[tag]


def check_inputs(inputs: mx.array, weights: mx.array, bias: mx.array | None, pool: mx.array, rows: StateRows) -> None:
    """That the shapes and types fit each other; raises ValueError."""
    num_rows, channels = inputs.shape
    if weights.ndim != 3 or (weights.shape[0], weights.shape[2]) != (channels, 1):
        raise ValueError(f"weights have shape {weights.shape}; ({channels}, kernel_width, 1) is needed")
    if bias is not None and bias.shape != (channels,):
        raise ValueError(f"bias has shape {bias.shape}; ({channels},) is needed")
    if pool.dtype not in (inputs.dtype, mx.float32):
        raise ValueError(f"the pool is {pool.dtype}; {inputs.dtype} or float32 is needed")
    rows.check(num_rows, pool, (weights.shape[1] - 1, channels))
