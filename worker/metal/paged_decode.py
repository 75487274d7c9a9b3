"""`paged_decode`: one query a sequence over its blocks, split over the context and merged by log-sum-exp.

Pass 1: each simdgroup takes one split of the context for one KV head of one row and keeps running maximum, sum and
output for the query heads that share it, so each K and V byte is read once for all of them. Pass 2: one simdgroup a
query head merges the splits.
"""

import math
from typing import Any

import mlx.core as mx

from worker.batch import DecodeGroup
from worker.metal.factory import MetalKernel, dtype_tag

_LANES = 32
# Simdgroups of a threadgroup, which share the staged queries.
_SIMDGROUPS = 4
# Output elements that a lane holds for its query heads; with K and V of the tile that stays within about 100 registers.
_MAX_OUTPUT_REGISTERS = 32
# K (and V) elements that a lane loads before it uses any.
_TILE_REGISTERS = 16
_MAX_HEAD_DIM = 256
# A shorter split costs more to merge than it gains.
_MIN_SPLIT_TOKENS = 64
# Simdgroups that keep a large GPU busy.
_WANTED_SIMDGROUPS = 1024
_LOG2_E = math.log2(math.e)

# Scores are in log2. -1e30 stands for minus infinity: `fast::exp2` promises nothing for infinities.
PARTIALS_SOURCE = r"""
  constexpr int EPL = D / 32;
  constexpr float LOWEST = -1e30f;
  const int row = threadgroup_position_in_grid.z;
  const int head_group = threadgroup_position_in_grid.y;
  const int simdgroup = simdgroup_index_in_threadgroup;
  const int lane = thread_index_in_simdgroup;
  const int split = threadgroup_position_in_grid.x * NSG + simdgroup;
  const int num_splits = threadgroups_per_grid.x * NSG;
  const int num_heads = threadgroups_per_grid.y * HPT;
  const int num_kv_heads = num_heads / G;
  const int kv_head = head_group * HPT / G;
  const int max_blocks = block_tables_shape[1];
  const int64_t first_head = int64_t(row) * num_heads + head_group * HPT;

  threadgroup float staged[HPT * D];
  for (int i = thread_index_in_threadgroup; i < HPT * D; i += NSG * 32) {
    staged[i] = float(queries[first_head * D + i]) * scale[0];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);

  float out[HPT][EPL];
  float top[HPT];
  float sum[HPT];
  for (int g = 0; g < HPT; g++) {
    top[g] = LOWEST;
    sum[g] = 0.0f;
    for (int i = 0; i < EPL; i++) {
      out[g][i] = 0.0f;
    }
  }

  const int begin = split * split_tokens[0];
  const int end = metal::min(begin + split_tokens[0], context_lens[row]);
  for (int t = begin; t < end; t += TK) {
    float k[TK][EPL];
    float v[TK][EPL];
    for (int j = 0; j < TK; j++) {
      // Past the end the last token is loaded again and then masked: nothing unowned is ever read.
      const int at = metal::min(t + j, end - 1);
      const int64_t block = block_tables[int64_t(row) * max_blocks + at / BS];
      const int64_t from = ((block * num_kv_heads + kv_head) * BS + at % BS) * D + lane * EPL;
      for (int i = 0; i < EPL; i++) {
        k[j][i] = float(key_pool[from + i]);
      }
      for (int i = 0; i < EPL; i++) {
        v[j][i] = float(value_pool[from + i]);
      }
    }
    for (int g = 0; g < HPT; g++) {
      float score[TK];
      float best = top[g];
      for (int j = 0; j < TK; j++) {
        float dot = 0.0f;
        for (int i = 0; i < EPL; i++) {
          dot += staged[g * D + lane * EPL + i] * k[j][i];
        }
        dot = simd_sum(dot);
        score[j] = t + j < end ? dot : LOWEST;
        best = metal::max(best, score[j]);
      }
      const float fade = fast::exp2(top[g] - best);
      sum[g] *= fade;
      for (int i = 0; i < EPL; i++) {
        out[g][i] *= fade;
      }
      for (int j = 0; j < TK; j++) {
        const float weight = fast::exp2(score[j] - best);
        sum[g] += weight;
        for (int i = 0; i < EPL; i++) {
          out[g][i] += weight * v[j][i];
        }
      }
      top[g] = best;
    }
  }

  for (int g = 0; g < HPT; g++) {
    const int64_t place = (first_head + g) * num_splits + split;
    for (int i = 0; i < EPL; i++) {
      partial[place * D + lane * EPL + i] = out[g][i];
    }
    if (lane == 0) {
      stats[place * 2] = top[g];
      stats[place * 2 + 1] = sum[g];
    }
  }
"""

MERGE_SOURCE = r"""
  constexpr int EPL = D / 32;
  const int64_t first = int64_t(threadgroup_position_in_grid.x) * num_splits[0];
  const int lane = thread_index_in_simdgroup;
  float best = -1e30f;
  for (int s = lane; s < num_splits[0]; s += 32) {
    best = metal::max(best, stats[(first + s) * 2]);
  }
  best = simd_max(best);
  float total = 0.0f;
  float acc[EPL];
  for (int i = 0; i < EPL; i++) {
    acc[i] = 0.0f;
  }
  for (int s = 0; s < num_splits[0]; s++) {
    const float weight = fast::exp2(stats[(first + s) * 2] - best);
    total += weight * stats[(first + s) * 2 + 1];
    for (int i = 0; i < EPL; i++) {
      acc[i] += weight * partial[(first + s) * D + lane * EPL + i];
    }
  }
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
  for (int i = 0; i < EPL; i++) {
    out[int64_t(threadgroup_position_in_grid.x) * D + lane * EPL + i] = T(acc[i] * inverse);
  }
"""


class PagedDecode:
    """Launches both passes; same signature as the twin, see README.md for shapes."""

    def __init__(self, metal_kernel: MetalKernel) -> None:
        self._metal_kernel = metal_kernel
        self._by_dtype: dict[str, tuple[Any, Any]] = {}

    @staticmethod
    def supports(head_dim: int) -> bool:
        """Whether a simdgroup's lanes share a head evenly."""
        return head_dim % _LANES == 0 and head_dim <= _MAX_HEAD_DIM

    def __call__(
        self,
        queries: mx.array,
        key_pool: mx.array,
        value_pool: mx.array,
        group: DecodeGroup,
        num_kv_heads: int,
        scale: float,
    ) -> mx.array:
        """Shapes: queries and result `[rows, num_heads, 1, head_dim]`."""
        rows, num_heads, _, head_dim = queries.shape
        shared_heads = num_heads // num_kv_heads
        heads_per_group = _heads_per_group(shared_heads, head_dim)
        num_splits, split_tokens = _splits(int(group.context_lens.max()), rows * num_heads // heads_per_group)
        partials, merge = self._kernels(dtype_tag(key_pool.dtype))
        template = [("T", key_pool.dtype), ("D", head_dim)]
        partial, stats = partials(
            inputs=[
                queries,
                key_pool,
                value_pool,
                group.block_table_array,
                group.context_len_array,
                mx.array([split_tokens], mx.int32),
                mx.array([scale * _LOG2_E], mx.float32),
            ],
            output_shapes=[(rows, num_heads, num_splits, head_dim), (rows, num_heads, num_splits, 2)],
            output_dtypes=[mx.float32, mx.float32],
            grid=(_LANES * num_splits, num_heads // heads_per_group, rows),
            threadgroup=(_LANES * _SIMDGROUPS, 1, 1),
            template=[
                *template,
                ("BS", key_pool.shape[1]),
                ("G", shared_heads),
                ("HPT", heads_per_group),
                ("NSG", _SIMDGROUPS),
                ("TK", max(1, _TILE_REGISTERS * _LANES // head_dim)),
            ],
        )
        out: mx.array
        (out,) = merge(
            inputs=[partial, stats, mx.array([num_splits], mx.int32)],
            output_shapes=[(rows, num_heads, 1, head_dim)],
            output_dtypes=[key_pool.dtype],
            grid=(_LANES * rows * num_heads, 1, 1),
            threadgroup=(_LANES, 1, 1),
            template=template,
        )
        return out

    def _kernels(self, tag: str) -> tuple[Any, Any]:
        if tag not in self._by_dtype:
            names = ["queries", "key_pool", "value_pool", "block_tables", "context_lens", "split_tokens", "scale"]
            partials = self._metal_kernel(
                name=f"cidery_paged_decode_partials_{tag}",
                input_names=names,
                output_names=["partial", "stats"],
                source=PARTIALS_SOURCE,
            )
            merge = self._metal_kernel(
                name=f"cidery_paged_decode_merge_{tag}",
                input_names=["partial", "stats", "num_splits"],
                output_names=["out"],
                source=MERGE_SOURCE,
            )
            self._by_dtype[tag] = partials, merge
        return self._by_dtype[tag]


def _heads_per_group(shared_heads: int, head_dim: int) -> int:
    """The largest part of the heads that share a KV head which fits into a lane's registers."""
    most = max(1, _MAX_OUTPUT_REGISTERS * _LANES // head_dim)
    return next(heads for heads in range(min(shared_heads, most), 0, -1) if shared_heads % heads == 0)


def _splits(max_context_len: int, num_head_groups: int) -> tuple[int, int]:
    """Number of splits, a multiple of the simdgroups of a threadgroup, and tokens of each."""
    useful = -(-max_context_len // _MIN_SPLIT_TOKENS)
    wanted = -(-_WANTED_SIMDGROUPS // num_head_groups)
    num_splits = -(-min(useful, wanted) // _SIMDGROUPS) * _SIMDGROUPS
    return num_splits, -(-max_context_len // num_splits)
