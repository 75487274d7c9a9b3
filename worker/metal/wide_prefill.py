"""Prefill tiles of wide heads, of heads whose keys and values differ in width, and of latents.

The simdgroups of a threadgroup divide the elements of a head, not the rows of the tile, so each element of K and V is
read by one of them alone: from the pool into the 8x8 matrices, without a copy in threadgroup memory. What they share
are scores. A tile of keys takes three phases and two barriers:

1. each simdgroup multiplies its elements of the queries and keys, and stores these parts of the scores;
2. a few lanes a row add the parts up, take a step of the online softmax, and store weights;
3. each simdgroup multiplies its elements of the values with the weights of all rows.

Scores are queries x keys, outputs are values x weights, so keys and values both come in with keys as columns: a lane
reads four neighbouring elements, and eight lanes read 32 of them. Latents are keys and values at once: what a
simdgroup read for the first phase it keeps in registers for the third.
"""

from typing import NamedTuple

import mlx.core as mx

from worker.metal import slot_source
from worker.metal.prefill_rows import FIRST_SEEN
from worker.metal.slot_source import TILE, pool_names

MAX_HEAD_DIM = 640
MAX_VALUE_DIM = 512
# Elements that one load of a simdgroup takes of each of its eight keys.
_CHUNK = 32
_MAX_SIMDGROUPS = 8
# By hand count, of queries, outputs, keys and scores; a GPU's compiler adds its own.
_MAX_REGISTERS = 96
# Half of what a threadgroup may have, so that two of them fit on a core.
_THREADGROUP_BYTES = 16 * 1024

HEADER = (
    slot_source.HEADER
    + FIRST_SEEN
    + r"""
// Four elements of two slots; zeros for a slot below 0, which may belong to nobody, and past the last element.
template <typename T, int D, int BITS, int GROUP, typename... Pool>
METAL_FUNC void cidery_read_two(
    thread vec<T, 4> (&to)[2], int64_t slot, int64_t next, int at, Pool... pool) {
  to[0] = vec<T, 4>(T(0.0f));
  to[1] = vec<T, 4>(T(0.0f));
  if (at < D && slot >= 0) {
    to[0] = read_slot<T, D, 4, BITS, GROUP>(slot, at, pool...);
  }
  if (at < D && next >= 0) {
    to[1] = read_slot<T, D, 4, BITS, GROUP>(next, at, pool...);
  }
}

// Where a key lies; -1 if it is not one of [first, last].
template <int BS>
METAL_FUNC int64_t cidery_slot(const device int* table, int at, int first, int last, int num_kv_heads, int kv_head) {
  if (at < first || at > last) {
    return -1;
  }
  return (int64_t(table[at / BS]) * num_kv_heads + kv_head) * BS + at % BS;
}
"""
)

# Scores are in log2. -1e30 stands for minus infinity: `fast::exp2` promises nothing for infinities.
_SOURCE = (
    r"""
  constexpr float LOWEST = -1e30f;
  constexpr int SLICES = NSG / PARTS;  // simdgroups with the same elements take the keys of a tile in turns
  constexpr int KJ = ((D + 31) / 32 + PARTS - 1) / PARTS;
  constexpr int VJ = ((DV + 31) / 32 + NSG - 1) / NSG;
  constexpr int STRIPS = ROWS / 8;
  // Lanes that read scores, and that read weights, in different banks.
  constexpr int SCORES_LD = ROWS + 32 / LANES;
  constexpr int WEIGHTS_LD = ROWS + 8;
  const int id = thread_index_in_threadgroup;
  const int lane = thread_index_in_simdgroup;
  const int simdgroup = simdgroup_index_in_threadgroup;
  const int part = simdgroup % PARTS;
  const int slice = simdgroup / PARTS;
"""
    + TILE
    + r"""
  // LANES lanes for the softmax of a row.
  const bool is_softmax = id < ROWS * LANES;
  const int own_row = id / LANES;
  const int own_key = id % LANES;
  const int position = start + (first_row + own_row) / shared_heads;
  const int oldest = cidery_first_seen(position, window, chunk);
  float top = LOWEST;
  float sum = 0.0f;

  threadgroup float scores[PARTS * BK * SCORES_LD];
  threadgroup T weights[BK * WEIGHTS_LD];
  threadgroup float fades[2 * ROWS];  // of a tile, and at the end of all of them

  // Matrix m of a chunk has its elements m, 4 + m, 8 + m, ...: those that eight lanes read as their m-th.
  simdgroup_matrix<T, 8, 8> query[STRIPS][KJ * 4];
  UNROLL
  for (int s = 0; s < STRIPS; s++) {
    const int row = first_row + s * 8 + matrix_row;
    const int64_t token = tile[2] + row / shared_heads;
    const int64_t head = kv_head * shared_heads + row % shared_heads;
    const int64_t from = token * queries_strides[0] + head * queries_strides[1];
    UNROLL
    for (int j = 0; j < KJ; j++) {
      for (int e = 0; e < 2; e++) {
        const int at = (part + j * PARTS) * 32 + (column + e) * 4;
        UNROLL
        for (int m = 0; m < 4; m++) {
          query[s][j * 4 + m].thread_elements()[e] =
              row < num_rows && at < D ? queries[from + (at + m) * queries_strides[2]] : T(0.0f);
        }
      }
    }
  }
  simdgroup_float8x8 acc[STRIPS][VJ * 4];
  UNROLL
  for (int s = 0; s < STRIPS; s++) {
    UNROLL
    for (int d = 0; d < VJ * 4; d++) {
      acc[s][d] = simdgroup_float8x8(0.0f);
    }
  }

  for (int from = begin / BK * BK; from <= last; from += BK) {
    simdgroup_matrix<T, 8, 8> key[SAME ? BK / 8 : 1][KJ * 4];
    UNROLL
    for (int g = 0; g < BK / 8 / SLICES; g++) {
      const int group = g * SLICES + slice;
      const int at = from + group * 8 + column;
      const int64_t slot = cidery_slot<BS>(table, at, begin, last, num_kv_heads, kv_head);
      const int64_t next = cidery_slot<BS>(table, at + 1, begin, last, num_kv_heads, kv_head);
      constexpr int KEPT = SAME ? 1 : 0;
      UNROLL
      for (int j = 0; j < KJ; j++) {
        vec<T, 4> two[2];
        cidery_read_two<T, D, BITS, GROUP>(two, slot, next, (part + j * PARTS) * 32 + matrix_row * 4, @KEYS@);
        UNROLL
        for (int m = 0; m < 4; m++) {
          key[g * KEPT][j * 4 + m].thread_elements()[0] = two[0][m];
          key[g * KEPT][j * 4 + m].thread_elements()[1] = two[1][m];
        }
      }
      UNROLL
      for (int s = 0; s < STRIPS; s++) {
        simdgroup_float8x8 score = simdgroup_float8x8(0.0f);
        UNROLL
        for (int d = 0; d < KJ * 4; d++) {
          simdgroup_multiply_accumulate(score, query[s][d], key[g * KEPT][d], score);
        }
        for (int e = 0; e < 2; e++) {
          scores[(part * BK + group * 8 + column + e) * SCORES_LD + s * 8 + matrix_row] = score.thread_elements()[e];
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    if (is_softmax) {
      float own[BK / LANES];
      float best = top;
      UNROLL
      for (int i = 0; i < BK / LANES; i++) {
        const int at = i * LANES + own_key;
        float x = 0.0f;
        UNROLL
        for (int p = 0; p < PARTS; p++) {
          x += scores[(p * BK + at) * SCORES_LD + own_row];
        }
        x *= floats[0];
        if (CAP) {
          x = floats[1] * metal::precise::tanh(x / floats[1]);
        }
        own[i] = from + at >= oldest && from + at <= position ? x : LOWEST;
        best = metal::max(best, own[i]);
      }
      UNROLL
      for (int width = LANES / 2; width > 0; width /= 2) {
        best = metal::max(best, simd_shuffle_xor(best, ushort(width)));
      }
      const float fade = fast::exp2(top - best);
      float added = 0.0f;
      UNROLL
      for (int i = 0; i < BK / LANES; i++) {
        // Of a row that has seen nothing yet all weights are 1, and `fade` makes them 0 when it sees something.
        const float weight = fast::exp2(own[i] - best);
        weights[(i * LANES + own_key) * WEIGHTS_LD + own_row] = T(weight);
        added += weight;
      }
      UNROLL
      for (int width = LANES / 2; width > 0; width /= 2) {
        added += simd_shuffle_xor(added, ushort(width));
      }
      sum = metal::fma(sum, fade, added);
      top = best;
      if (own_key == 0) {
        fades[own_row] = fade;
        if (from + BK > last) {
          float share = 1.0f;
          if (SINK) {
            const float sink = float(sinks[kv_head * shared_heads + (first_row + own_row) % shared_heads]) * M_LOG2E_F;
            best = metal::max(top, sink);
            share = fast::exp2(top - best);
            sum = metal::fma(sum, share, fast::exp2(sink - best));
          }
          fades[ROWS + own_row] = sum > 0.0f ? share / sum : 0.0f;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    UNROLL
    for (int s = 0; s < STRIPS; s++) {
      for (int e = 0; e < 2; e++) {
        const float fade = fades[s * 8 + column + e];
        UNROLL
        for (int d = 0; d < VJ * 4; d++) {
          acc[s][d].thread_elements()[e] *= fade;
        }
      }
    }
    UNROLL
    for (int g = 0; g < BK / 8; g++) {
      simdgroup_matrix<T, 8, 8> weight[STRIPS];
      UNROLL
      for (int s = 0; s < STRIPS; s++) {
        simdgroup_load(weight[s], weights + g * 8 * WEIGHTS_LD + s * 8, WEIGHTS_LD);
      }
@VALUES@
    }
  }

  UNROLL
  for (int s = 0; s < STRIPS; s++) {
    for (int e = 0; e < 2; e++) {
      const int in_tile = s * 8 + column + e;
      const int row = first_row + in_tile;
      const float share = fades[ROWS + in_tile];
      const int64_t token = tile[2] + row / shared_heads - ints[3];
      const int64_t head = kv_head * shared_heads + row % shared_heads;
      const int64_t to = (token * num_kv_heads * shared_heads + head) * DV;
      UNROLL
      for (int j = 0; j < VJ; j++) {
        const int at = (simdgroup + j * NSG) * 32 + matrix_row * 4;
        vec<T, 4> four;
        UNROLL
        for (int m = 0; m < 4; m++) {
          four[m] = T(acc[s][j * 4 + m].thread_elements()[e] * share);
        }
        if (row < num_rows && at < DV) {
          *(device vec<T, 4>*)(out + to + at) = four;
        }
      }
    }
  }
"""
)

_VALUES = r"""
      const int at = from + g * 8 + column;
      const int64_t slot = cidery_slot<BS>(table, at, begin, last, num_kv_heads, kv_head);
      const int64_t next = cidery_slot<BS>(table, at + 1, begin, last, num_kv_heads, kv_head);
      UNROLL
      for (int j = 0; j < VJ; j++) {
        vec<T, 4> two[2];
        cidery_read_two<T, DV, BITS, GROUP>(two, slot, next, (simdgroup + j * NSG) * 32 + matrix_row * 4, @POOL@);
        UNROLL
        for (int m = 0; m < 4; m++) {
          simdgroup_matrix<T, 8, 8> value;
          value.thread_elements()[0] = two[0][m];
          value.thread_elements()[1] = two[1][m];
          UNROLL
          for (int s = 0; s < STRIPS; s++) {
            simdgroup_multiply_accumulate(acc[s][j * 4 + m], value, weight[s], acc[s][j * 4 + m]);
          }
        }
      }
"""

# Values are the front of the keys, and each simdgroup has read its own already.
_KEPT_VALUES = r"""
      UNROLL
      for (int d = 0; d < VJ * 4; d++) {
        UNROLL
        for (int s = 0; s < STRIPS; s++) {
          simdgroup_multiply_accumulate(acc[s][d], key[g][d], weight[s], acc[s][d]);
        }
      }
"""


def source(*, is_packed: bool, is_latent: bool) -> str:
    """The kernel over plain or packed pools; latent: over one pool, whose values are the front of its keys."""
    values = _KEPT_VALUES if is_latent else _VALUES.replace("@POOL@", ", ".join(pool_names("value", is_packed)))
    return _SOURCE.replace("@VALUES@", values).replace("@KEYS@", ", ".join(pool_names("key", is_packed)))


class WideShape(NamedTuple):
    """A tile's rows and keys; simdgroups of a threadgroup, and parts that they cut the elements of a key into."""

    rows: int
    keys: int
    simdgroups: int
    parts: int

    @property
    def softmax_lanes(self) -> int:
        """Lanes that take the softmax of a row: a power of two."""
        return 1 << min(self.simdgroups * 32 // self.rows, self.keys, 32).bit_length() - 1

    def threadgroup_bytes(self, itemsize: int) -> int:
        """Of scores, weights and what fades."""
        scores = self.parts * self.keys * (self.rows + 32 // self.softmax_lanes) * 4
        return scores + self.keys * (self.rows + 8) * itemsize + 2 * self.rows * 4


def wide_shape(head_dim: int, value_dim: int, dtype: mx.Dtype, *, is_latent: bool = False) -> WideShape:
    """The tile for heads of such size: most rows, then least idle simdgroups, then most keys.

    Raises ValueError for heads that have none.
    """
    fits = 0 < head_dim <= MAX_HEAD_DIM and 0 < value_dim <= MAX_VALUE_DIM
    if not fits or head_dim % 4 or value_dim % 4:
        raise ValueError(
            f"heads of {head_dim}, values of {value_dim}: multiples of 4 up to {MAX_HEAD_DIM} and {MAX_VALUE_DIM}"
        )
    shapes = [
        WideShape(rows, keys, simdgroups, parts)
        for rows in (32, 16, 8)
        for keys in (32, 16)
        for simdgroups in range(2, _MAX_SIMDGROUPS + 1)
        for parts in range(1, simdgroups + 1)
        if simdgroups % parts == 0
        and keys % (8 * (simdgroups // parts)) == 0
        and (parts == simdgroups or not is_latent)
    ]
    key_chunks, value_chunks = (-(-dim // _CHUNK) for dim in (head_dim, value_dim))

    def registers(shape: WideShape) -> float:
        own_keys, own_values = -(-key_chunks // shape.parts), -(-value_chunks // shape.simdgroups)
        queries = shape.rows * own_keys * dtype.size / 4
        loaded = (shape.keys if is_latent else 8) * own_keys * dtype.size / 4
        return queries + loaded + shape.rows * own_values + shape.rows / 4

    def busy(shape: WideShape) -> float:
        own_keys, own_values = -(-key_chunks // shape.parts), -(-value_chunks // shape.simdgroups)
        return shape.parts * own_keys + shape.simdgroups * own_values

    fitting = [
        shape
        for shape in shapes
        if registers(shape) <= _MAX_REGISTERS and shape.threadgroup_bytes(dtype.size) <= _THREADGROUP_BYTES
    ]
    return min(fitting, key=lambda shape: (-shape.rows, busy(shape), -shape.keys, shape.simdgroups))
