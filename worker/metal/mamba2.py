"""`mamba2`: the selective scan of Mamba-2 over packed rows, with each sequence's state updated in its slot.

For each head, with the state S `[head_dim, state_dim]` in float32 and per token an input x, a step
dt = softplus(dt + bias) within limits, and B and C that the heads of a group share:
S = exp(-exp(A_log) dt) S + dt x B^T; y = S C + D x. (State space duality, arXiv 2405.21060.)

Laid out like `gated_delta`: the rows of S are independent. `step` reads and writes each state once, `chunk` keeps it in
registers through a sequence's tokens; a prefill cut anywhere gives the same bits. Inputs are read by their strides.
"""

from typing import Any

import mlx.core as mx

from worker.metal.factory import MetalKernel, dtype_tag
from worker.metal.gated_delta import simdgroups_together
from worker.metal.state_rows import StateRows, token_or_none
from worker.metal.state_source import chunk_prologue, step_prologue

_LANES = 32
_MAX_STATE_DIM = 256
# State rows that a simdgroup of `step` loads before it uses any.
_STEP_ROWS = 8
# State elements that a lane of `chunk` keeps in registers.
_MAX_LANE_ELEMENTS = 32
# Elements of staged B, and of C: 8 KiB together.
_TILE_ELEMENTS = 1024

# Every access to the pool goes through one pointer that may write; a lane loads what it owns before it stores any. As
# y = S C after the change is (S C before it) + dt x (B C), the sum over S does not wait for the change.
STEP_SOURCE = (
    r"""
  typedef metal::vec<float, VEC> Vec;
  constexpr int PARTS = DS / (32 * VEC);
"""
    + step_prologue("H", "DH", "DS")
    + r"""  const int group = head / (H / G);
  const float raw = float(dt_rows[row * dt_rows_strides[0] + head * dt_rows_strides[1]]) +
      float(dt_bias[head * dt_bias_strides[0]]);
  const float softplus = metal::max(raw, 0.0f) + log1p(metal::exp(-metal::abs(raw)));
  const float dt = metal::min(metal::max(softplus, limits[0]), limits[1]);
  const float decay = metal::exp(-metal::exp(float(a_log[head * a_log_strides[0]])) * dt);
  const float skip = float(d_skip[head * d_skip_strides[0]]);

  Vec b[PARTS];
  float sums[ROWS];
  float product = 0.0f;
  for (int r = 0; r < ROWS; r++) {
    sums[r] = 0.0f;
  }
  for (int n = 0; n < PARTS; n++) {
    Vec c;
    for (int i = 0; i < VEC; i++) {
      const int64_t at = (n * 32 + lane) * VEC + i;
      b[n][i] = float(b_rows[row * b_rows_strides[0] + group * b_rows_strides[1] + at * b_rows_strides[2]]);
      c[i] = float(c_rows[row * c_rows_strides[0] + group * c_rows_strides[1] + at * c_rows_strides[2]]);
    }
    product += metal::dot(b[n], c);
    for (int r = 0; r < ROWS; r++) {
      state[r][n] *= decay;
      sums[r] += metal::dot(state[r][n], c);
    }
  }
  product = simd_sum(product);
  for (int r = 0; r < ROWS; r++) {
    const float x = float(x_rows[row * x_rows_strides[0] + head * x_rows_strides[1] + (top + r) * x_rows_strides[2]]);
    const float change = x * dt;
    const float sum = simd_sum(sums[r]);
    for (int n = 0; n < PARTS; n++) {
      states[r * (DS / VEC) + n * 32] = state[r][n] + b[n] * change;
    }
    if (lane == 0) {
      y[y_at + r] = T(sum + change * product + skip * x);
    }
  }
"""
)

CHUNK_SOURCE = (
    r"""
  constexpr int GROUPS = DS / 4;
  constexpr int PARTS = GROUPS / LPR;
  constexpr int ROWS = 32 / LPR;
"""
    + chunk_prologue("H", "DH", "DS")
    + r"""  const int group = head / (H / G);
  threadgroup float4 staged_b[TILE * GROUPS];
  threadgroup float4 staged_c[TILE * GROUPS];
  threadgroup float staged_x[TILE * NSG * ROWS];
  threadgroup float staged_dt[TILE];
  threadgroup float staged_decay[TILE];
  threadgroup float staged_products[TILE];
  const float rate = -metal::exp(float(a_log[head * a_log_strides[0]]));
  const float bias = float(dt_bias[head * dt_bias_strides[0]]);
  const float skip = float(d_skip[head * d_skip_strides[0]]);

  for (int begin = 0; begin < num_rows; begin += TILE) {
    const int count = metal::min(int(TILE), num_rows - begin);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int t = simdgroup_index_in_threadgroup; t < count; t += NSG) {
      const int64_t row = first + begin + t;
      float product = 0.0f;
      for (int64_t at = lane; at < DS; at += 32) {
        const float b = float(b_rows[row * b_rows_strides[0] + group * b_rows_strides[1] + at * b_rows_strides[2]]);
        const float c = float(c_rows[row * c_rows_strides[0] + group * c_rows_strides[1] + at * c_rows_strides[2]]);
        ((threadgroup float*)staged_b)[t * DS + at] = b;
        ((threadgroup float*)staged_c)[t * DS + at] = c;
        product += b * c;
      }
      product = simd_sum(product);
      if (lane == 0) {
        const float raw = float(dt_rows[row * dt_rows_strides[0] + head * dt_rows_strides[1]]) + bias;
        const float softplus = metal::max(raw, 0.0f) + log1p(metal::exp(-metal::abs(raw)));
        const float dt = metal::min(metal::max(softplus, limits[0]), limits[1]);
        staged_products[t] = product;
        staged_dt[t] = dt;
        staged_decay[t] = metal::exp(rate * dt);
      }
    }
    for (int i = thread_index_in_threadgroup; i < count * NSG * ROWS; i += NSG * 32) {
      const int64_t row = first + begin + i / (NSG * ROWS);
      const int64_t at = top + i % (NSG * ROWS);
      staged_x[i] = float(x_rows[row * x_rows_strides[0] + head * x_rows_strides[1] + at * x_rows_strides[2]]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int t = 0; t < count; t++) {
      const float x = staged_x[t * NSG * ROWS + in_tile];
      const float decay = staged_decay[t];
      const float change = x * staged_dt[t];
      float4 sums = float4(0.0f);
      for (int n = 0; n < PARTS; n++) {
        const int at = t * GROUPS + n * LPR + part;
        state[n] *= decay;
        sums += state[n] * staged_c[at];
        state[n] += staged_b[at] * change;
      }
      float sum = metal::dot(sums, float4(1.0f));
      for (ushort lanes = 1; lanes < LPR; lanes *= 2) {
        sum += simd_shuffle_xor(sum, lanes);
      }
      if (part == 0) {
        y[((first + begin + t) * H + head) * DH + top + in_tile] = T(sum + change * staged_products[t] + skip * x);
      }
    }
  }
  for (int n = 0; n < PARTS; n++) {
    states[n * LPR] = state[n];
  }
"""
)

_INPUTS = [
    "x_rows",
    "a_log",
    "b_rows",
    "c_rows",
    "d_skip",
    "dt_rows",
    "dt_bias",
    "limits",
    "sequences",
    "pool",
    "after",
]


class Mamba2:
    """Launches `step` for decode rows of even state_dim / 32, else `chunk`; see README.md for what they read."""

    def __init__(self, metal_kernel: MetalKernel) -> None:
        self._metal_kernel = metal_kernel
        self._by_name: dict[str, Any] = {}
        self._limits: dict[tuple[float, float], mx.array] = {}

    @staticmethod
    def supports(head_dim: int, state_dim: int) -> bool:
        """Whether simdgroups share a state of these dimensions evenly."""
        return state_dim % _LANES == 0 and 0 < state_dim <= _MAX_STATE_DIM and head_dim % 8 == 0 and head_dim > 0

    def __call__(
        self,
        x: mx.array,
        a_log: mx.array,
        b: mx.array,
        c: mx.array,
        d: mx.array,
        dt: mx.array,
        dt_bias: mx.array,
        pool: mx.array,
        rows: StateRows,
        after: mx.array | None = None,
        *,
        time_step_limit: tuple[float, float],
    ) -> tuple[mx.array, mx.array]:
        """The outputs `[num_rows, heads, head_dim]` in the type of `x`, and the token of this launch.

        The arguments of mlx-lm's `ssm_update`, for packed rows: `x [num_rows, heads, head_dim]`; `b` and
        `c [num_rows, groups, state_dim]`; `dt [num_rows, heads]` before bias and softplus; `a_log`, `d` and
        `dt_bias [heads]`.

        `pool [num_slots, heads, head_dim, state_dim]` float32, evaluated and contiguous, is written in place. `after`
        is the token of the last launch that read or wrote the pool: it is the order between the two. Raises ValueError
        for shapes that don't fit and dimensions that aren't supported.
        """
        _, heads, head_dim = x.shape
        _, groups, state_dim = b.shape
        check_inputs(x, a_log, b, c, d, dt, dt_bias, pool, rows)
        if not self.supports(head_dim, state_dim):
            raise ValueError(f"mamba2 runs state_dim 32 to 256 by 32 and head_dim by 8, not {state_dim}, {head_dim}")
        template: list[tuple[str, Any]] = [
            ("T", x.dtype),
            ("H", heads),
            ("G", groups),
            ("DH", head_dim),
            ("DS", state_dim),
        ]
        if rows.is_decode and state_dim % (2 * _LANES) == 0:
            name, rows_a_simdgroup = "step", _STEP_ROWS
            template += [("ROWS", _STEP_ROWS), ("VEC", 4 if state_dim % (4 * _LANES) == 0 else 2)]
        else:
            lanes_a_row = 4 if state_dim <= 4 * _MAX_LANE_ELEMENTS else 8
            name, rows_a_simdgroup = "chunk", _LANES // lanes_a_row
            template += [("LPR", lanes_a_row), ("TILE", _TILE_ELEMENTS // state_dim)]
        num_simdgroups = head_dim // rows_a_simdgroup
        together = simdgroups_together(num_simdgroups)
        limits = self._limit_array(time_step_limit)
        y, token = self._kernel(name, dtype_tag(x.dtype))(
            inputs=[x, a_log, b, c, d, dt, dt_bias, limits, rows.sequence_array, pool, token_or_none(after)],
            output_shapes=[x.shape, (1,)],
            output_dtypes=[x.dtype, mx.int32],
            grid=(_LANES * num_simdgroups, heads, rows.num_sequences),
            threadgroup=(_LANES * together, 1, 1),
            template=[*template, ("NSG", together)],
        )
        return y, token

    def _limit_array(self, limits: tuple[float, float]) -> mx.array:
        if limits not in self._limits:
            self._limits[limits] = mx.array(limits, mx.float32)
        return self._limits[limits]

    def _kernel(self, name: str, tag: str) -> Any:
        full_name = f"cidery_mamba2_{name}_{tag}"
        if full_name not in self._by_name:
            self._by_name[full_name] = self._metal_kernel(
                name=full_name,
                input_names=_INPUTS,
                output_names=["y", "token"],
                source=STEP_SOURCE if name == "step" else CHUNK_SOURCE,
                # A silent copy of the pool would swallow the writes.
                ensure_row_contiguous=False,
            )
        return self._by_name[full_name]


def check_inputs(
    x: mx.array,
    a_log: mx.array,
    b: mx.array,
    c: mx.array,
    d: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    pool: mx.array,
    rows: StateRows,
) -> None:
    """That the shapes and types fit each other; raises ValueError."""
    num_rows, heads, head_dim = x.shape
    groups, state_dim = b.shape[1:]
    if heads % groups:
        raise ValueError(f"{heads} heads can't be shared evenly by {groups} groups")
    by_head, mix = (num_rows, heads), (num_rows, groups, state_dim)
    for name, shape, needed in (
        ("a_log", a_log.shape, (heads,)),
        ("b", b.shape, mix),
        ("c", c.shape, mix),
        ("d", d.shape, (heads,)),
        ("dt", dt.shape, by_head),
        ("dt_bias", dt_bias.shape, (heads,)),
    ):
        if shape != needed:
            raise ValueError(f"{name} has shape {shape}; {needed} is needed")
    if pool.dtype != mx.float32:
        raise ValueError(f"the pool is {pool.dtype}; states are float32")
    rows.check(num_rows, pool, (heads, head_dim, state_dim))
