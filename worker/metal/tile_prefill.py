"""Prefill tiles of heads up to 128, whose keys and values are of one width.

Each 8 rows of a tile belong to one simdgroup, with all elements of their head: 32 floats of output a lane at most. Keys
and values go by in tiles that are staged in threadgroup memory for all simdgroups; running maximum and sum follow the
online softmax.
"""

from typing import NamedTuple

import mlx.core as mx

from worker.metal import slot_source
from worker.metal.prefill_rows import FIRST_SEEN
from worker.metal.slot_source import TILE, pool_names

MAX_HEAD_DIM = 128
_SIMDGROUPS = 4
# Half of what a threadgroup may have, so that two of them fit on a core.
_THREADGROUP_BYTES = 16 * 1024

HEADER = (
    slot_source.HEADER
    + FIRST_SEEN
    + r"""
// Keys [first, last] of a tile that begins at `start`; zeros for the others, whose slots may belong to nobody.
template <typename T, int D, int BS, int BK, int LD, int THREADS, int BITS, int GROUP, typename... Pool>
METAL_FUNC void cidery_stage(
    threadgroup T* tile, const device int* table, int num_kv_heads, int kv_head, int start, int first, int last, int id,
    Pool... pool) {
  for (int i = id; i < BK * (D / 4); i += THREADS) {
    const int row = i / (D / 4);
    const int column = i % (D / 4) * 4;
    const int at = start + row;
    vec<T, 4> four = vec<T, 4>(T(0.0f));
    if (at >= first && at <= last) {
      const int64_t slot = (int64_t(table[at / BS]) * num_kv_heads + kv_head) * BS + at % BS;
      four = read_slot<T, D, 4, BITS, GROUP>(slot, column, pool...);
    }
    *(threadgroup vec<T, 4>*)(tile + row * LD + column) = four;
  }
}

METAL_FUNC float cidery_row_max(float x) {
  x = metal::max(x, simd_shuffle_xor(x, ushort(1)));
  return metal::max(x, simd_shuffle_xor(x, ushort(8)));
}

METAL_FUNC float cidery_row_sum(float x) {
  x += simd_shuffle_xor(x, ushort(1));
  return x + simd_shuffle_xor(x, ushort(8));
}
"""
)

# Scores are in log2. -1e30 stands for minus infinity: `fast::exp2` promises nothing for infinities.
_SOURCE = (
    r"""
  constexpr int LD = D + 16 / sizeof(T);  // rows of a staged tile start in different banks
  constexpr int ROWS = NSG * 8;
  constexpr int THREADS = NSG * 32;
  constexpr float LOWEST = -1e30f;
  const int id = thread_index_in_threadgroup;
  const int lane = thread_index_in_simdgroup;
  const int strip = simdgroup_index_in_threadgroup;
"""
    + TILE
    + r"""
  const int row = first_row + strip * 8 + matrix_row;
  const bool is_row = row < num_rows;
  const int head = kv_head * shared_heads + row % shared_heads;
  const int64_t token = tile[2] + row / shared_heads;
  const int position = start + row / shared_heads;
  const int oldest = cidery_first_seen(position, window, chunk);

  threadgroup metal::vec<T, 4> staged[2 * BK * LD / 4];
  threadgroup T* keys = (threadgroup T*)staged;
  threadgroup T* values = keys + BK * LD;

  simdgroup_matrix<T, 8, 8> query[D / 8];
  simdgroup_float8x8 acc[D / 8];
  UNROLL
  for (int d = 0; d < D / 8; d++) {
    acc[d] = simdgroup_float8x8(0.0f);
    for (int e = 0; e < 2; e++) {
      const int64_t from = token * queries_strides[0] + head * queries_strides[1];
      const int64_t element = (d * 8 + column + e) * queries_strides[2];
      query[d].thread_elements()[e] = is_row ? queries[from + element] : T(0);
    }
  }
  float top = LOWEST;
  float sum = 0.0f;

  for (int from = begin / BK * BK; from <= last; from += BK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    @STAGE_KEYS@
    @STAGE_VALUES@
    threadgroup_barrier(mem_flags::mem_threadgroup);

    simdgroup_float8x8 score[BK / 8];
    UNROLL
    for (int j = 0; j < BK / 8; j++) {
      score[j] = simdgroup_float8x8(0.0f);
    }
    UNROLL
    for (int d = 0; d < D / 8; d++) {
      UNROLL
      for (int j = 0; j < BK / 8; j++) {
        simdgroup_matrix<T, 8, 8> key;
        simdgroup_load(key, keys + j * 8 * LD + d * 8, LD, ulong2(0), true);
        simdgroup_multiply_accumulate(score[j], query[d], key, score[j]);
      }
    }
    float best = top;
    UNROLL
    for (int j = 0; j < BK / 8; j++) {
      for (int e = 0; e < 2; e++) {
        float x = score[j].thread_elements()[e];
        x *= floats[0];
        if (CAP) {
          x = floats[1] * metal::precise::tanh(x / floats[1]);
        }
        const int at = from + j * 8 + column + e;
        x = at >= oldest && at <= position ? x : LOWEST;
        score[j].thread_elements()[e] = x;
        best = metal::max(best, x);
      }
    }
    best = cidery_row_max(best);
    const float fade = fast::exp2(top - best);
    float added = 0.0f;
    simdgroup_matrix<T, 8, 8> weights[BK / 8];
    UNROLL
    for (int j = 0; j < BK / 8; j++) {
      for (int e = 0; e < 2; e++) {
        const float x = score[j].thread_elements()[e];
        // Of a row that has seen nothing yet all weights are 1, and `fade` makes them 0 when it sees something.
        const float weight = fast::exp2(x - best);
        weights[j].thread_elements()[e] = T(weight);
        added += weight;
      }
    }
    sum = sum * fade + cidery_row_sum(added);
    top = best;
    UNROLL
    for (int d = 0; d < D / 8; d++) {
      acc[d].thread_elements()[0] *= fade;
      acc[d].thread_elements()[1] *= fade;
      UNROLL
      for (int j = 0; j < BK / 8; j++) {
        simdgroup_matrix<T, 8, 8> value;
        simdgroup_load(value, values + j * 8 * LD + d * 8, LD);
        simdgroup_multiply_accumulate(acc[d], weights[j], value, acc[d]);
      }
    }
  }

  if (is_row) {
    float weight = 1.0f;
    if (SINK) {
      const float sink = float(sinks[head]) * M_LOG2E_F;
      const float best = metal::max(top, sink);
      weight = fast::exp2(top - best);
      sum = sum * weight + fast::exp2(sink - best);
    }
    weight = sum > 0.0f ? weight / sum : 0.0f;
    const int64_t to = ((token - ints[3]) * num_kv_heads * shared_heads + head) * D + column;
    UNROLL
    for (int d = 0; d < D / 8; d++) {
      for (int e = 0; e < 2; e++) {
        out[to + d * 8 + e] = T(acc[d].thread_elements()[e] * weight);
      }
    }
  }
"""
)


def source(*, is_packed: bool) -> str:
    """The kernel over plain pools, or over packed ones."""
    text = _SOURCE
    for mark, tile, side in (("@STAGE_KEYS@", "keys", "key"), ("@STAGE_VALUES@", "values", "value")):
        arguments = [tile, "table, num_kv_heads, kv_head, from, begin, last, id", *pool_names(side, is_packed)]
        stage = f"cidery_stage<T, D, BS, BK, LD, THREADS, BITS, GROUP>({', '.join(arguments)});"
        text = text.replace(mark, stage)
    return text


class TileShape(NamedTuple):
    """A tile's rows and keys; simdgroups of a threadgroup."""

    rows: int
    keys: int
    simdgroups: int


def tile_shape(head_dim: int, dtype: mx.Dtype) -> TileShape:
    """The tile for heads of such size. Raises ValueError for heads that have none."""
    if head_dim % 8 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim}: a multiple of 8 up to {MAX_HEAD_DIM} is needed")
    row_bytes = head_dim * dtype.size + 16
    keys = next(keys for keys in (32, 16, 8) if 2 * keys * row_bytes <= _THREADGROUP_BYTES)
    return TileShape(_SIMDGROUPS * 8, keys, _SIMDGROUPS)
