"""`gated_delta`: the gated delta rule over packed rows, with each sequence's state updated in its slot.

For each value head, with the state S `[value_dim, key_dim]` in float32 and per token a decay g, keys k, queries q,
values v and a rate beta: S = g S; S = S + beta (v - S k) k^T; y = S q. (Gated DeltaNet, arXiv 2412.06464; with a decay
for each key channel it is the rule of Kimi Delta Attention, arXiv 2510.26692.)

The rows of S are independent of each other, so simdgroups share them. `step` reads and writes each state once, 32 lanes
along a row. `chunk` keeps the state in registers while it goes through a sequence's tokens, a few lanes a row, so that
a token costs few shuffles; keys, queries, values and gates come through threadgroup memory, a tile of tokens at a time.
Tokens are taken one by one, so a prefill cut anywhere gives the same bits. Inputs are read by their strides: values are
often a slice of what a convolution returned, and a copy costs more than the kernel's arithmetic.
"""

from typing import Any

import mlx.core as mx

from worker.metal.factory import MetalKernel, dtype_tag
from worker.metal.state_rows import StateRows, token_or_none
from worker.metal.state_source import chunk_prologue, step_prologue

_LANES = 32
_MAX_KEY_DIM = 256
# State rows that a simdgroup of `step` loads before it uses any.
_STEP_ROWS = 8
_MAX_SIMDGROUPS = 4
# State elements that a lane of `chunk` keeps in registers.
_MAX_LANE_ELEMENTS = 32
# Elements of staged keys: with queries and gates of each channel, at most 12 KiB.
_TILE_ELEMENTS = 1024

# Every access to the pool goes through one pointer that may write; a lane loads what it owns before it stores any. As
# y = S q after the change is (S q before it) + change (k q), both sums over S are taken at once.
STEP_SOURCE = (
    r"""
  typedef metal::vec<float, VEC> Vec;
  constexpr int PARTS = DK / (32 * VEC);
"""
    + step_prologue("HV", "DV", "DK")
    + r"""  const int key_head = head / (HV / HK);
  Vec k[PARTS];
  float recalled[ROWS];
  float sums[ROWS];
  float product = 0.0f;
  for (int r = 0; r < ROWS; r++) {
    recalled[r] = 0.0f;
    sums[r] = 0.0f;
  }
  const int64_t gates_at = row * gates_strides[0] + head * gates_strides[1];
  for (int n = 0; n < PARTS; n++) {
    Vec q;
    Vec decay;
    for (int i = 0; i < VEC; i++) {
      const int64_t at = (n * 32 + lane) * VEC + i;
      k[n][i] = float(keys[row * keys_strides[0] + key_head * keys_strides[1] + at * keys_strides[2]]);
      q[i] = float(queries[row * queries_strides[0] + key_head * queries_strides[1] + at * queries_strides[2]]);
      decay[i] = float(gates[VG ? gates_at + at * gates_strides[2] : gates_at]);
    }
    product += metal::dot(k[n], q);
    for (int r = 0; r < ROWS; r++) {
      state[r][n] *= decay;
      recalled[r] += metal::dot(state[r][n], k[n]);
      sums[r] += metal::dot(state[r][n], q);
    }
  }
  const float rate = float(betas[row * betas_strides[0] + head * betas_strides[1]]);
  product = simd_sum(product);
  const int64_t values_at = row * values_strides[0] + head * values_strides[1];
  for (int r = 0; r < ROWS; r++) {
    const float value = float(values[values_at + (top + r) * values_strides[2]]);
    const float change = (value - simd_sum(recalled[r])) * rate;
    const float sum = simd_sum(sums[r]);
    for (int n = 0; n < PARTS; n++) {
      states[r * (DK / VEC) + n * 32] = state[r][n] + k[n] * change;
    }
    if (lane == 0) {
      y[y_at + r] = T(sum + change * product);
    }
  }
"""
)

CHUNK_SOURCE = (
    r"""
  constexpr int GROUPS = DK / 4;
  constexpr int PARTS = GROUPS / LPR;
  constexpr int ROWS = 32 / LPR;
"""
    + chunk_prologue("HV", "DV", "DK")
    + r"""  const int key_head = head / (HV / HK);
  threadgroup float4 staged_keys[TILE * GROUPS];
  threadgroup float4 staged_queries[TILE * GROUPS];
  threadgroup float4 staged_gates[VG ? TILE * GROUPS : TILE];
  threadgroup float staged_values[TILE * NSG * ROWS];
  threadgroup float staged_betas[TILE];
  threadgroup float staged_products[TILE];

  for (int begin = 0; begin < num_rows; begin += TILE) {
    const int count = metal::min(int(TILE), num_rows - begin);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int t = simdgroup_index_in_threadgroup; t < count; t += NSG) {
      const int64_t row = first + begin + t;
      const int64_t gates_at = row * gates_strides[0] + head * gates_strides[1];
      float product = 0.0f;
      for (int64_t at = lane; at < DK; at += 32) {
        const float k = float(keys[row * keys_strides[0] + key_head * keys_strides[1] + at * keys_strides[2]]);
        const float q =
            float(queries[row * queries_strides[0] + key_head * queries_strides[1] + at * queries_strides[2]]);
        ((threadgroup float*)staged_keys)[t * DK + at] = k;
        ((threadgroup float*)staged_queries)[t * DK + at] = q;
        if (VG) {
          ((threadgroup float*)staged_gates)[t * DK + at] = float(gates[gates_at + at * gates_strides[2]]);
        }
        product += k * q;
      }
      product = simd_sum(product);
      if (lane == 0) {
        staged_products[t] = product;
        staged_betas[t] = float(betas[row * betas_strides[0] + head * betas_strides[1]]);
        if (!VG) {
          staged_gates[t] = float4(float(gates[gates_at]));
        }
      }
    }
    for (int i = thread_index_in_threadgroup; i < count * NSG * ROWS; i += NSG * 32) {
      const int64_t row = first + begin + i / (NSG * ROWS);
      const int64_t at = top + i % (NSG * ROWS);
      staged_values[i] = float(values[row * values_strides[0] + head * values_strides[1] + at * values_strides[2]]);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int t = 0; t < count; t++) {
      float4 recalled = float4(0.0f);
      float4 sums = float4(0.0f);
      float4 k[PARTS];
      for (int n = 0; n < PARTS; n++) {
        const int at = t * GROUPS + n * LPR + part;
        k[n] = staged_keys[at];
        state[n] *= staged_gates[VG ? at : t];
        recalled += state[n] * k[n];
        sums += state[n] * staged_queries[at];
      }
      float2 both = float2(metal::dot(recalled, float4(1.0f)), metal::dot(sums, float4(1.0f)));
      for (ushort lanes = 1; lanes < LPR; lanes *= 2) {
        both += simd_shuffle_xor(both, lanes);
      }
      const float change = (staged_values[t * NSG * ROWS + in_tile] - both.x) * staged_betas[t];
      for (int n = 0; n < PARTS; n++) {
        state[n] += k[n] * change;
      }
      if (part == 0) {
        y[((first + begin + t) * HV + head) * DV + top + in_tile] = T(both.y + change * staged_products[t]);
      }
    }
  }
  for (int n = 0; n < PARTS; n++) {
    states[n * LPR] = state[n];
  }
"""
)

_INPUTS = ["queries", "keys", "values", "gates", "betas", "sequences", "pool", "after"]


class GatedDelta:
    """Launches `step` for decode rows of even key_dim / 32, else `chunk`; see README.md for what they read."""

    def __init__(self, metal_kernel: MetalKernel) -> None:
        self._metal_kernel = metal_kernel
        self._by_name: dict[str, Any] = {}

    @staticmethod
    def supports(key_dim: int, value_dim: int) -> bool:
        """Whether simdgroups share a state of these dimensions evenly."""
        return key_dim % _LANES == 0 and 0 < key_dim <= _MAX_KEY_DIM and value_dim % 8 == 0 and value_dim > 0

    def __call__(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        gates: mx.array,
        betas: mx.array,
        pool: mx.array,
        rows: StateRows,
        after: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        """The outputs `[num_rows, value_heads, value_dim]` in the queries' type, and the token of this launch.

        Shapes: `queries`, `keys [num_rows, key_heads, key_dim]` as mlx-lm's `normalize_qk` leaves them, scale included;
        `values [num_rows, value_heads, value_dim]`; `gates [num_rows, value_heads]`, or with a decay for each channel
        `[num_rows, value_heads, key_dim]`; `betas [num_rows, value_heads]`.

        `pool [num_slots, value_heads, value_dim, key_dim]` float32, evaluated and contiguous, is written in place.
        `after` is the token of the last launch that read or wrote the pool: it alone is the order between the two.
        Raises ValueError for shapes that don't fit and dimensions that aren't supported.
        """
        num_rows, key_heads, key_dim = queries.shape
        _, value_heads, value_dim = values.shape
        check_inputs(queries, keys, values, gates, betas, pool, rows)
        if not self.supports(key_dim, value_dim):
            raise ValueError(f"gated_delta runs key_dim 32 to 256 by 32 and value_dim by 8, not {key_dim}, {value_dim}")
        template: list[tuple[str, Any]] = [
            ("T", queries.dtype),
            ("HK", key_heads),
            ("HV", value_heads),
            ("DK", key_dim),
            ("DV", value_dim),
            ("VG", gates.ndim == 3),
        ]
        if rows.is_decode and key_dim % (2 * _LANES) == 0:
            name, rows_a_simdgroup = "step", _STEP_ROWS
            template += [("ROWS", _STEP_ROWS), ("VEC", 4 if key_dim % (4 * _LANES) == 0 else 2)]
        else:
            lanes_a_row = 4 if key_dim <= 4 * _MAX_LANE_ELEMENTS else 8
            name, rows_a_simdgroup = "chunk", _LANES // lanes_a_row
            template += [("LPR", lanes_a_row), ("TILE", _TILE_ELEMENTS // key_dim)]
        num_simdgroups = value_dim // rows_a_simdgroup
        together = simdgroups_together(num_simdgroups)
        y, token = self._kernel(name, dtype_tag(queries.dtype))(
            inputs=[queries, keys, values, gates, betas, rows.sequence_array, pool, token_or_none(after)],
            output_shapes=[(num_rows, value_heads, value_dim), (1,)],
            output_dtypes=[queries.dtype, mx.int32],
            grid=(_LANES * num_simdgroups, value_heads, rows.num_sequences),
            threadgroup=(_LANES * together, 1, 1),
            template=[*template, ("NSG", together)],
        )
        return y, token

    def _kernel(self, name: str, tag: str) -> Any:
        full_name = f"cidery_gated_delta_{name}_{tag}"
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


def simdgroups_together(num_simdgroups: int) -> int:
    """Simdgroups of a threadgroup: they divide all."""
    return next(size for size in range(_MAX_SIMDGROUPS, 0, -1) if num_simdgroups % size == 0)


def check_inputs(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    gates: mx.array,
    betas: mx.array,
    pool: mx.array,
    rows: StateRows,
) -> None:
    """That the shapes and types fit each other; raises ValueError."""
    num_rows, key_heads, key_dim = queries.shape
    value_heads, value_dim = values.shape[1:]
    if value_heads % key_heads:
        raise ValueError(f"{value_heads} value heads can't be shared evenly by {key_heads} key heads")
    by_head = (num_rows, value_heads)
    for name, shape, allowed in (
        ("keys", keys.shape, (queries.shape,)),
        ("values", values.shape, ((*by_head, value_dim),)),
        ("gates", gates.shape, (by_head, (*by_head, key_dim))),
        ("betas", betas.shape, (by_head,)),
    ):
        if shape not in allowed:
            raise ValueError(f"{name} have shape {shape}; allowed: {' or '.join(map(str, allowed))}")
    if pool.dtype != mx.float32:
        raise ValueError(f"the pool is {pool.dtype}; states are float32")
    rows.check(num_rows, pool, (value_heads, value_dim, key_dim))
