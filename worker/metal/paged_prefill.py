"""`paged_prefill`: many queries of many sequences over their blocks, by tiles of 8x8 matrix products.

A threadgroup takes a tile of rows of one sequence and one KV head. A row is one query token of one of the heads that
share that KV head, so a few tokens with many shared heads still fill a tile. Each 8 rows belong to one simdgroup, or to
`PARTS` of them that share the head's elements: then no lane ever holds more than 128 elements of output. Keys go by in
tiles that are staged in threadgroup memory; running maximum and sum follow the online softmax.
"""

from typing import Any, NamedTuple

import mlx.core as mx

from worker.metal.factory import MetalKernel, dtype_tag
from worker.metal.prefill_rows import TILE_FIELDS, PrefillOptions, PrefillRows
from worker.metal.quantized import QuantizedPool
from worker.metal.write_kv import nothing_if

_MAX_HEAD_DIM = 512
# Elements of a head in one simdgroup: as many floats a lane as elements / 4, for output and for queries.
_MAX_PART = 128
# Half of what a threadgroup may have, so that two of them fit on a core.
_THREADGROUP_BYTES = 16 * 1024
_LOG2_E = 1.4426950408889634

HEADER = r"""
// Oldest key that the query at `position` sees.
METAL_FUNC int cidery_first_seen(int position, int window, int chunk) {
  return window > 0 ? metal::max(0, position - window + 1) : chunk > 0 ? position / chunk * chunk : 0;
}

// Keys [first, last] of a tile that begins at `start`; zeros for the others, whose slots may belong to nobody.
template <typename T, int D, int BS, int BK, int LD, int THREADS>
METAL_FUNC void cidery_stage(
    threadgroup T* tile, const device T* pool, const device int* table, int num_kv_heads, int kv_head, int start,
    int first, int last, int id) {
  for (int i = id; i < BK * (D / 4); i += THREADS) {
    const int row = i / (D / 4);
    const int column = i % (D / 4) * 4;
    const int at = start + row;
    threadgroup metal::vec<T, 4>* target = (threadgroup metal::vec<T, 4>*)(tile + row * LD + column);
    if (at >= first && at <= last) {
      const int64_t place = (int64_t(table[at / BS]) * num_kv_heads + kv_head) * BS + at % BS;
      *target = *(const device metal::vec<T, 4>*)(pool + place * D + column);
    } else {
      *target = metal::vec<T, 4>(T(0));
    }
  }
}

template <typename T, int D, int BS, int BK, int LD, int THREADS, int BITS, int GROUP>
METAL_FUNC void cidery_stage_quantized(
    threadgroup T* tile, const device uint* packed, const device T* scales, const device T* biases,
    const device int* table, int num_kv_heads, int kv_head, int start, int first, int last, int id) {
  for (int i = id; i < BK * (D / 4); i += THREADS) {
    const int row = i / (D / 4);
    const int column = i % (D / 4) * 4;
    const int at = start + row;
    threadgroup T* target = tile + row * LD + column;
    float scale = 0.0f;
    float bias = 0.0f;
    uint word = 0;
    if (at >= first && at <= last) {
      const int64_t place = (int64_t(table[at / BS]) * num_kv_heads + kv_head) * BS + at % BS;
      scale = float(scales[place * (D / GROUP) + column / GROUP]);
      bias = float(biases[place * (D / GROUP) + column / GROUP]);
      // With 8 bits a word is these four elements, with 4 bits half a word is.
      const int64_t four = (place * D + column) / 4;
      if (BITS == 8) {
        word = packed[four];
      } else {
        word = ((const device ushort*)packed)[four];
      }
    }
    for (int e = 0; e < 4; e++) {
      target[e] = T(scale * float((word >> (e * BITS)) & ((1u << BITS) - 1u)) + bias);
    }
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

# Scores are in log2. -1e30 stands for minus infinity: `fast::exp2` promises nothing for infinities.
_SOURCE = r"""
  constexpr int LD = D + 16 / sizeof(T);  // rows of a staged tile start in different banks
  constexpr int PART = D / PARTS;
  constexpr int ROWS = NSG / PARTS * 8;
  constexpr int THREADS = NSG * 32;
  constexpr float LOWEST = -1e30f;
  const int id = thread_index_in_threadgroup;
  const int lane = thread_index_in_simdgroup;
  const int strip = simdgroup_index_in_threadgroup / PARTS;
  const int part = simdgroup_index_in_threadgroup % PARTS;
  const int kv_head = threadgroup_position_in_grid.y;
  const int num_kv_heads = threadgroups_per_grid.y;
  const int shared_heads = ints[0];
  const int window = ints[1];
  const int chunk = ints[2];
  const device int* tile = tiles + threadgroup_position_in_grid.x * 8;
  const device int* table = block_tables + int64_t(tile[0]) * block_tables_shape[1];
  const int first_row = tile[1];
  const int num_rows = tile[3] * shared_heads;
  const int start = tile[4] - tile[3];

  // A lane holds two neighbouring columns of one row of an 8x8 matrix.
  const int matrix_row = ((lane / 4) & 4) + (lane / 2) % 4;
  const int column = ((lane / 4) & 2) * 2 + lane % 2 * 2;
  const int row = first_row + strip * 8 + matrix_row;
  const bool is_row = row < num_rows;
  const int head = kv_head * shared_heads + row % shared_heads;
  const int64_t token = tile[2] + row / shared_heads;
  const int position = start + row / shared_heads;
  const int oldest = cidery_first_seen(position, window, chunk);
  const int begin = cidery_first_seen(start + first_row / shared_heads, window, chunk);
  const int last = start + (metal::min(first_row + ROWS, num_rows) - 1) / shared_heads;

  threadgroup metal::vec<T, 4> staged[(ONE ? 1 : 2) * BK * LD / 4];
  threadgroup float exchange[PARTS > 1 ? NSG * 8 * BK : 1];
  threadgroup T* keys = (threadgroup T*)staged;
  threadgroup T* values = keys + (ONE ? 0 : BK * LD);

  simdgroup_matrix<T, 8, 8> query[PART / 8];
  simdgroup_float8x8 acc[PART / 8];
  UNROLL
  for (int d = 0; d < PART / 8; d++) {
    acc[d] = simdgroup_float8x8(0.0f);
    for (int e = 0; e < 2; e++) {
      const int64_t from = token * queries_strides[0] + head * queries_strides[1];
      const int64_t element = (part * PART + d * 8 + column + e) * queries_strides[2];
      query[d].thread_elements()[e] = is_row ? queries[from + element] : T(0);
    }
  }
  float top = LOWEST;
  float sum = 0.0f;

  for (int from = begin / BK * BK; from <= last; from += BK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    STAGE_KEYS
    if (!ONE) {
      STAGE_VALUES
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    simdgroup_float8x8 score[BK / 8];
    UNROLL
    for (int j = 0; j < BK / 8; j++) {
      score[j] = simdgroup_float8x8(0.0f);
    }
    UNROLL
    for (int d = 0; d < PART / 8; d++) {
      UNROLL
      for (int j = 0; j < BK / 8; j++) {
        simdgroup_matrix<T, 8, 8> key;
        simdgroup_load(key, keys + j * 8 * LD + part * PART + d * 8, LD, ulong2(0), true);
        simdgroup_multiply_accumulate(score[j], query[d], key, score[j]);
      }
    }
    if (PARTS > 1) {
      UNROLL
      for (int j = 0; j < BK / 8; j++) {
        simdgroup_store(score[j], exchange + (strip * PARTS + part) * 8 * BK + j * 8, BK);
      }
    }
    if (PARTS > 1 || ONE) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (ONE) {
      STAGE_VALUES
    }

    float best = top;
    UNROLL
    for (int j = 0; j < BK / 8; j++) {
      for (int e = 0; e < 2; e++) {
        float x = score[j].thread_elements()[e];
        if (PARTS > 1) {
          x = 0.0f;
          for (int p = 0; p < PARTS; p++) {
            x += exchange[((strip * PARTS + p) * 8 + matrix_row) * BK + j * 8 + column + e];
          }
        }
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
    if (ONE) {
      threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    UNROLL
    for (int d = 0; d < PART / 8; d++) {
      acc[d].thread_elements()[0] *= fade;
      acc[d].thread_elements()[1] *= fade;
      UNROLL
      for (int j = 0; j < BK / 8; j++) {
        simdgroup_matrix<T, 8, 8> value;
        simdgroup_load(value, values + j * 8 * LD + part * PART + d * 8, LD);
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
    const int64_t to = ((token - ints[3]) * num_kv_heads * shared_heads + head) * D + part * PART + column;
    UNROLL
    for (int d = 0; d < PART / 8; d++) {
      for (int e = 0; e < 2; e++) {
        out[to + d * 8 + e] = T(acc[d].thread_elements()[e] * weight);
      }
    }
  }
"""


def _source(stage: str) -> str:
    lines = {"STAGE_KEYS": ("keys", "key_"), "STAGE_VALUES": ("values", "value_")}
    # Matrices that are indexed by a loop that is one still would live in memory.
    source = _SOURCE.replace("UNROLL", '_Pragma("clang loop unroll(full)")')
    for mark, (tile, prefix) in lines.items():
        source = source.replace(mark, stage.format(tile=tile, prefix=prefix))
    return source


_PLACE = "table, num_kv_heads, kv_head, from, begin, last, id"
SOURCE = _source("cidery_stage<T, D, BS, BK, LD, THREADS>({tile}, {prefix}pool, " + _PLACE + ");")
QUANTIZED_SOURCE = _source(
    "cidery_stage_quantized<T, D, BS, BK, LD, THREADS, BITS, GROUP>"
    "({tile}, {prefix}packed, {prefix}scales, {prefix}biases, " + _PLACE + ");"
)


class TileShape(NamedTuple):
    """A tile's rows and keys; simdgroups of a threadgroup, and how many of them share a row's head elements.

    With `one_buffer` keys and values take turns in threadgroup memory, for two more barriers a tile.
    """

    rows: int
    keys: int
    simdgroups: int
    parts: int
    one_buffer: bool


def tile_shape(head_dim: int, dtype: mx.Dtype) -> TileShape:
    """The tile for heads of such size. Raises ValueError for heads that have none."""
    if head_dim % 8 or not 0 < head_dim <= _MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim}: a multiple of 8 up to {_MAX_HEAD_DIM} is needed")
    parts = next((parts for parts in (1, 2, 4) if head_dim % (8 * parts) == 0 and head_dim <= _MAX_PART * parts), None)
    if parts is None:
        raise ValueError(f"head_dim {head_dim} can't be shared by 2 or 4 simdgroups")
    simdgroups = 4 if parts == 1 else 8
    row_bytes = head_dim * dtype.size + 16
    exchange_bytes = 0 if parts == 1 else simdgroups * 8 * 4
    sizes = [(keys, one_buffer) for keys in (32, 16, 8) for one_buffer in (False, True)]
    if parts == 1:
        # Two barriers for 16 keys are no more than four for 32, and simpler.
        sizes.sort(key=lambda size: size[1])
    keys, one_buffer = next(
        (keys, one_buffer)
        for keys, one_buffer in sizes
        if keys * (row_bytes * (1 if one_buffer else 2) + exchange_bytes) <= _THREADGROUP_BYTES
        # The smallest tile of D 512 in float32 is beyond that.
        or (keys, one_buffer) == sizes[-1]
    )
    return TileShape(simdgroups // parts * 8, keys, simdgroups, parts, one_buffer)


class PagedPrefill:
    """Launches the kernel, over pools in full precision and over quantised ones."""

    def __init__(self, metal_kernel: MetalKernel) -> None:
        self._metal_kernel = metal_kernel
        self._by_name: dict[str, Any] = {}

    def __call__(
        self,
        queries: mx.array,
        key_pool: "mx.array | QuantizedPool",
        value_pool: "mx.array | QuantizedPool",
        rows: PrefillRows,
        options: PrefillOptions,
        after: mx.array | None = None,
    ) -> mx.array:
        """Attention of the rows of `queries [all rows, num_heads, head_dim]` that `rows` names, over their blocks.

        Pools: `[num_blocks, num_kv_heads, block_size, head_dim]` of the queries' type, or quantised. `queries` may be
        strided. The result is `[rows.num_rows, num_heads, head_dim]`. `after`: the token of the last write. Raises
        ValueError.
        """
        is_quantized = isinstance(key_pool, QuantizedPool)
        shape = key_pool.shape
        num_kv_heads, block_size, head_dim = shape[1:]
        num_heads = queries.shape[1]
        _check(queries, key_pool, value_pool, rows)
        tile = tile_shape(head_dim, queries.dtype)
        shared_heads = num_heads // num_kv_heads
        tiles = rows.tiles(tile.rows, shared_heads)
        sinks = mx.zeros((1,), mx.float32) if options.sinks is None else options.sinks
        template = [("T", queries.dtype), ("D", head_dim), ("BS", block_size), ("BK", tile.keys)]
        template += [("NSG", tile.simdgroups), ("PARTS", tile.parts), ("ONE", tile.one_buffer)]
        template += [("CAP", options.softcap > 0), ("SINK", options.sinks is not None)]
        pools: list[mx.array] = []
        for pool in (key_pool, value_pool):
            pools += [pool.packed, pool.scales, pool.biases] if isinstance(pool, QuantizedPool) else [pool]
        if isinstance(key_pool, QuantizedPool):
            template += [("BITS", key_pool.bits), ("GROUP", key_pool.group_size)]
        out: mx.array
        (out,) = self._kernel(dtype_tag(queries.dtype), is_quantized)(
            inputs=[
                queries,
                *pools,
                rows.block_table_array,
                tiles,
                mx.array([shared_heads, options.window, options.chunk, rows.first_row], mx.int32),
                mx.array([options.scale * _LOG2_E, options.softcap * _LOG2_E], mx.float32),
                sinks,
                nothing_if(after),
            ],
            output_shapes=[(rows.num_rows, num_heads, head_dim)],
            output_dtypes=[queries.dtype],
            grid=(tile.simdgroups * 32 * tiles.shape[0], num_kv_heads, 1),
            threadgroup=(tile.simdgroups * 32, 1, 1),
            template=template,
        )
        return out

    def _kernel(self, tag: str, is_quantized: bool) -> Any:
        name = f"cidery_paged_prefill_{'quantized_' if is_quantized else ''}{tag}"
        if name not in self._by_name:
            parts = ["packed", "scales", "biases"] if is_quantized else ["pool"]
            pools = [f"{side}_{part}" for side in ("key", "value") for part in parts]
            self._by_name[name] = self._metal_kernel(
                name=name,
                input_names=["queries", *pools, "block_tables", "tiles", "ints", "floats", "sinks", "after"],
                output_names=["out"],
                source=QUANTIZED_SOURCE if is_quantized else SOURCE,
                header=HEADER,
                ensure_row_contiguous=False,
            )
        return self._by_name[name]


def _check(
    queries: mx.array, key_pool: "mx.array | QuantizedPool", value_pool: "mx.array | QuantizedPool", rows: PrefillRows
) -> None:
    shape = key_pool.shape
    if len(shape) != 4 or value_pool.shape != shape or type(value_pool) is not type(key_pool):
        raise ValueError(f"pools {shape} and {value_pool.shape}: two of [num_blocks, kv_heads, block_size, head_dim]")
    if queries.ndim != 3 or queries.shape[2] != shape[3] or queries.shape[1] % shape[1]:
        raise ValueError(f"queries {queries.shape} do not go with pools {shape}")
    if not queries.dtype == key_pool.dtype == value_pool.dtype:
        raise ValueError(f"queries are {queries.dtype}, pools {key_pool.dtype} and {value_pool.dtype}")
    if queries.shape[0] < rows.last_row:
        raise ValueError(f"{queries.shape[0]} rows of queries, and {rows.last_row} are needed")
    rows.check_tables(shape[2])


# The record of a tile is read as 8 numbers.
assert TILE_FIELDS == 8
