"""`short_conv`: depthwise causal convolution over packed rows, with each sequence's last inputs kept in its slot.

The convolution of LFM2's layers, and of gated delta net and Mamba before the recurrence (there with SiLU). A thread has
one channel of one tile of tokens. Whoever has a sequence's first tile reads the state and replaces it, so nothing
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
_MAX_THREADS = 256

# A store may change what a later load reads, as far as the compiler knows: so the inputs of several tokens are loaded
# before any output is stored.
SOURCE = r"""
  constexpr int AHEAD = TILE < 8 ? TILE : 8;
  const int channel = thread_position_in_grid.x;
  const int tile = thread_position_in_grid.y;
  const int sequence = tiles[tile * 2];
  const int begin = tiles[tile * 2 + 1];
  const int64_t first = sequences[sequence * 4];
  const int num_rows = sequences[sequence * 4 + 1];
  const int64_t slot = sequences[sequence * 4 + 2];
  const bool fresh = sequences[sequence * 4 + 3] != 0;
  const int end = metal::min(begin + int(TILE), num_rows);
  const int64_t step = inputs_strides[0];
  const int64_t inputs_at = channel * inputs_strides[1];
  const int64_t state_at = slot * (K - 1) * C + channel;
  if (tile == 0 && channel == 0) {
    token[0] = 0;
  }
  if (slot < 0) {
    for (int t = begin; t < end; t++) {
      y[(first + t) * C + channel] = T(0.0f);
    }
    return;
  }
  device S* states = (device S*)pool;

  float weight[K];
  for (int j = 0; j < K; j++) {
    weight[j] = float(weights[channel * weights_strides[0] + j * weights_strides[1]]);
  }
  const float start = BIAS ? float(bias[channel * bias_strides[0]]) : 0.0f;
  float window[K - 1 + AHEAD];
  for (int j = 0; j < K - 1; j++) {
    if (begin > 0) {
      window[j] = float(inputs[(first + begin - (K - 1) + j) * step + inputs_at]);
    } else {
      window[j] = fresh ? 0.0f : float(states[state_at + j * C]);
    }
  }
  for (int t = begin; t < end; t += AHEAD) {
    const int count = metal::min(AHEAD, end - t);
    for (int j = 0; j < K - 1; j++) {
      window[j] = t > begin ? window[AHEAD + j] : window[j];
    }
    for (int u = 0; u < AHEAD; u++) {
      window[K - 1 + u] = u < count ? float(inputs[(first + t + u) * step + inputs_at]) : 0.0f;
    }
    for (int u = 0; u < AHEAD; u++) {
      float sum = start;
      for (int j = 0; j < K; j++) {
        sum += weight[j] * window[u + j];
      }
      if (u < count) {
        y[(first + t + u) * C + channel] = T(SILU ? sum / (1.0f + metal::exp(-sum)) : sum);
      }
    }
  }
  if (begin == 0) {
    // The last inputs are the window's, older ones from the state included, if the sequence ends in its first tile.
    const int last = (end - begin - 1) % AHEAD + 1;
    for (int j = 0; j < K - 1; j++) {
      float value = 0.0f;
      if (end < num_rows) {
        value = float(inputs[(first + num_rows - (K - 1) + j) * step + inputs_at]);
      } else {
        for (int u = 1; u <= AHEAD; u++) {
          value = u == last ? window[u + j] : value;
        }
      }
      states[state_at + j * C] = S(value);
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
        y, token = self._kernel(f"{dtype_tag(inputs.dtype)}_{dtype_tag(pool.dtype)}")(
            inputs=[
                inputs,
                weights,
                self._no_bias if bias is None else bias,
                rows.sequence_array,
                rows.tile_array(tile_rows),
                pool,
                token_or_none(after),
            ],
            output_shapes=[inputs.shape, (1,)],
            output_dtypes=[inputs.dtype, mx.int32],
            grid=(channels, rows.num_tiles(tile_rows), 1),
            threadgroup=(min(channels, _MAX_THREADS), 1, 1),
            template=[
                ("T", inputs.dtype),
                ("S", pool.dtype),
                ("C", channels),
                ("K", kernel_width),
                ("TILE", tile_rows),
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
