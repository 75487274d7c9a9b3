"""MSL of decode attention: how a simdgroup attends over four tokens, in two kernels, and the merge of partial results.

Both kernels do the same operations in the same order for one query head and one partition of its context, whatever
else shares the launch, so a row's result has the same bits however rows are laid out. Hence explicit fma, sums over
lanes by a fixed tree, and partitions and tiles at absolute positions.

Scores are in log2. -1e30 stands for minus infinity: `fast::exp2` promises nothing for infinities.
"""

from worker.metal import slot_source
from worker.metal.slot_source import pool_names

HEADER = (
    slot_source.HEADER
    + r"""
constexpr constant float LOWEST = -1e30f;
// Tokens whose scores are computed before any is used.
constexpr constant int TILE = 4;

// A lane's part of D elements: V from (32 c + lane) V on, for every c; zeros past D.
template <typename T, int D, int V, int E, typename Pointer>
METAL_FUNC void load_part(thread T (&to)[E], Pointer from, int lane) {
  UNROLL
  for (int c = 0; c < E / V; c++) {
    const int at = (c * 32 + lane) * V;
    vec<T, V> part = vec<T, V>(T(0.0f));
    if (D % (32 * V) == 0 || at < D) {
      part = read_vector<T, V>(from + at);
    }
    UNROLL
    for (int i = 0; i < V; i++) {
      to[c * V + i] = part[i];
    }
  }
}

// A lane's part of the tile's slots; zeros for tokens out of [begin, end), which are not read (IS_WHOLE: none are).
template <bool IS_WHOLE, typename T, int D, int V, int E, int BITS, int GROUP, typename... Pool>
METAL_FUNC void load_tile(
    thread T (&to)[TILE][E], int64_t slot, int token, int begin, int end, int lane, Pool... pool) {
  UNROLL
  for (int j = 0; j < TILE; j++) {
    UNROLL
    for (int c = 0; c < E / V; c++) {
      const int at = (c * 32 + lane) * V;
      vec<T, V> part = vec<T, V>(T(0.0f));
      if ((D % (32 * V) == 0 || at < D) && (IS_WHOLE || (token + j >= begin && token + j < end))) {
        part = read_slot<T, D, V, BITS, GROUP>(slot + j, at, pool...);
      }
      UNROLL
      for (int i = 0; i < V; i++) {
        to[j][c * V + i] = part[i];
      }
    }
  }
}

// Copies slots [slot, slot + COUNT) to threadgroup memory, zeros for tokens out of [begin, end), which are not read.
template <typename T, int D, int V, int COUNT, int THREADS, int BITS, int GROUP, typename... Pool>
METAL_FUNC void stage_slots(
    threadgroup T* to, int64_t slot, int token, int begin, int end, int thread_index, Pool... pool) {
  for (int i = thread_index; i < COUNT * D / V; i += THREADS) {
    const int j = i * V / D;
    vec<T, V> part = vec<T, V>(T(0.0f));
    if (token + j >= begin && token + j < end) {
      part = read_slot<T, D, V, BITS, GROUP>(slot + j, i * V % D, pool...);
    }
    *(threadgroup vec<T, V>*)(to + i * V) = part;
  }
}

// This lane's part of the products of one key with all queries, for token `j` of the tile.
template <typename T, int H, int E, int N>
METAL_FUNC void multiply(thread float (&parts)[N], thread T (&queries)[H][E], thread T (&key)[E], int j) {
  UNROLL
  for (int h = 0; h < H; h++) {
    float dot = 0.0f;
    UNROLL
    for (int i = 0; i < E; i++) {
      dot = metal::fma(float(queries[h][i]), float(key[i]), dot);
    }
    parts[h * TILE + j] = dot;
  }
}

// Sums N numbers over the lanes in N - 1 shuffles and log2(32 / N) more: lane l gets number l / (32 / N).
template <int N>
METAL_FUNC float sum_over_lanes(thread float (&parts)[N], int lane) {
  UNROLL
  for (int left = N / 2, width = 16; left > 0; left /= 2, width /= 2) {
    UNROLL
    for (int i = 0; i < left; i++) {
      const float kept = (lane & width) ? parts[i + left] : parts[i];
      const float given = (lane & width) ? parts[i] : parts[i + left];
      parts[i] = kept + simd_shuffle_xor(given, ushort(width));
    }
  }
  float sum = parts[0];
  UNROLL
  for (int width = 16 / N; width > 0; width /= 2) {
    sum += simd_shuffle_xor(sum, ushort(width));
  }
  return sum;
}

// One tile of online softmax. `top` and `sum` are those of the lane's head, `score` that of its head and token.
template <typename T, int H, int E, int STEP>
METAL_FUNC void fold_tile(
    float score, bool is_seen, thread float& top, thread float& sum, thread float (&out)[H][E],
    thread T (&values)[TILE][E]) {
  score = is_seen ? score : LOWEST;
  float best = metal::max(score, simd_shuffle_xor(score, ushort(STEP)));
  best = metal::max(best, simd_shuffle_xor(best, ushort(2 * STEP)));
  best = metal::max(best, top);
  const float weight = is_seen ? fast::exp2(score - best) : 0.0f;
  // A tile that the head does not see must change no bit.
  const float fade = best > top ? fast::exp2(top - best) : 1.0f;
  float weights = weight + simd_shuffle_xor(weight, ushort(STEP));
  weights += simd_shuffle_xor(weights, ushort(2 * STEP));
  sum = metal::fma(sum, fade, weights);
  top = best;
  UNROLL
  for (int h = 0; h < H; h++) {
    const float head_fade = simd_shuffle(fade, ushort(h * TILE * STEP));
    UNROLL
    for (int i = 0; i < E; i++) {
      out[h][i] *= head_fade;
    }
    UNROLL
    for (int j = 0; j < TILE; j++) {
      const float head_weight = simd_shuffle(weight, ushort((h * TILE + j) * STEP));
      UNROLL
      for (int i = 0; i < E; i++) {
        out[h][i] = metal::fma(head_weight, float(values[j][i]), out[h][i]);
      }
    }
  }
}
"""
)

# What both kernels begin with, after `item` and `first_head` (of the M heads of R rows that share a KV head).
_BEGIN = r"""
  constexpr int M = R * G;
  constexpr int HB = H > 4 ? 8 : H > 2 ? 4 : H;
  constexpr int STEP = 32 / (TILE * HB);
  constexpr int EK = (D + 32 * VK - 1) / (32 * VK) * VK;
  constexpr int EV = (DV + 32 * VV - 1) / (32 * VV) * VV;
  const int partition_tokens = sizes[1];
  const int num_kv_heads = sizes[2];
  const int num_heads = num_kv_heads * G;
  const int sequence = items[item * 2];
  const int kv_head = threadgroup_position_in_grid.y / SPLIT;
  const int64_t table = int64_t(sequence) * block_tables_shape[1];

  // All tokens that any of the rows sees, cut to the partition.
  int begin = ranges[sequence * R * 2];
  int end = ranges[sequence * R * 2 + 1];
  for (int r = 1; r < R; r++) {
    begin = metal::min(begin, ranges[(sequence * R + r) * 2]);
    end = metal::max(end, ranges[(sequence * R + r) * 2 + 1]);
  }
  begin = metal::max(begin, items[item * 2 + 1] * partition_tokens);
  end = metal::min(end, items[item * 2 + 1] * partition_tokens + partition_tokens);

  // The lane's own score within a tile: one head and one token.
  const int own_index = lane / (TILE * STEP);
  const int own_head = metal::min(first_head + own_index, M - 1);
  const int own_row = sequence * R + own_head / G;
  const int own_token = lane / STEP % TILE;
  const int own_begin = own_index < H ? ranges[own_row * 2] : 0;
  const int own_end = own_index < H ? ranges[own_row * 2 + 1] : 0;

  T q[H][EK];
  float out[H][EV];
  UNROLL
  for (int h = 0; h < H; h++) {
    const int head = metal::min(first_head + h, M - 1);
    const int64_t query = int64_t(sequence * R + head / G) * num_heads + kv_head * G + head % G;
    load_part<T, D, VK, EK>(q[h], queries + query * D, lane);
    UNROLL
    for (int i = 0; i < EV; i++) {
      out[h][i] = 0.0f;
    }
  }
  float top = LOWEST;
  float sum = 0.0f;
"""

_SCORE = r"""
      float score = sum_over_lanes<TILE * HB>(parts, lane) * scale[0];
      if (CAPPED) {
        score = metal::precise::tanh(score) * scale[1];
      }
      const bool is_seen = t + own_token >= own_begin && t + own_token < own_end;
      fold_tile<T, H, EV, STEP>(score, is_seen, top, sum, out, v);
"""

_END = r"""
  UNROLL
  for (int h = 0; h < H; h++) {
    const int head = first_head + h;
    if (head < M) {
      const int64_t place = (int64_t(item) * R + head / G) * num_heads + kv_head * G + head % G;
      UNROLL
      for (int c = 0; c < EV / VV; c++) {
        const int at = (c * 32 + lane) * VV;
        if (DV % (32 * VV) == 0 || at < DV) {
          vec<float, VV> part;
          UNROLL
          for (int i = 0; i < VV; i++) {
            part[i] = out[h][c * VV + i];
          }
          *(device vec<float, VV>*)(partial + place * DV + at) = part;
        }
      }
    }
  }
  if (lane % (TILE * STEP) == 0 && own_index < H && first_head + own_index < M) {
    const int64_t place = (int64_t(item) * R + own_head / G) * num_heads + kv_head * G + own_head % G;
    stats[place * 2] = top;
    stats[place * 2 + 1] = sum;
  }
"""

_DIRECT = r"""
  const int lane = thread_index_in_simdgroup;
  const int item = threadgroup_position_in_grid.x * NSG + simdgroup_index_in_threadgroup;
  if (item >= sizes[0]) {
    return;
  }
  const int first_head = threadgroup_position_in_grid.y % SPLIT * H;
@BEGIN@
  for (int t = begin - begin % TILE; t < end; t += TILE) {
    const int64_t block = block_tables[table + t / BS];
    const int64_t slot = (block * num_kv_heads + kv_head) * BS + t % BS;
    T k[TILE][EK];
    T v[TILE][EV];
    if (t >= begin && t + TILE <= end) {
      load_tile<true, T, D, VK, EK, BITS, GROUP>(k, slot, t, begin, end, lane, @KEYS@);
      load_tile<true, T, DV, VV, EV, BITS, GROUP>(v, slot, t, begin, end, lane, @VALUES@);
    } else {
      load_tile<false, T, D, VK, EK, BITS, GROUP>(k, slot, t, begin, end, lane, @KEYS@);
      load_tile<false, T, DV, VV, EV, BITS, GROUP>(v, slot, t, begin, end, lane, @VALUES@);
    }
    {
      float parts[TILE * HB];
      UNROLL
      for (int i = TILE * H; i < TILE * HB; i++) {
        parts[i] = 0.0f;
      }
      UNROLL
      for (int j = 0; j < TILE; j++) {
        multiply<T, H, EK>(parts, q, k[j], j);
      }
@SCORE@
    }
  }
@END@
"""

_STAGED = r"""
  constexpr int VALUES_AT = SAME ? 0 : STAGE * D;
  constexpr int VALUE_STRIDE = SAME ? D : DV;
  threadgroup vec<T, 4> staged[(STAGE * D + (SAME ? 0 : STAGE * DV)) / 4];
  threadgroup T* keys = (threadgroup T*)staged;
  threadgroup T* values = keys + VALUES_AT;
  const int lane = thread_index_in_simdgroup;
  const int thread_index = thread_index_in_threadgroup;
  const int item = threadgroup_position_in_grid.x;
  const int first_head = (threadgroup_position_in_grid.y % SPLIT * NSG + simdgroup_index_in_threadgroup) * H;
@BEGIN@
  for (int base = begin - begin % STAGE; base < end; base += STAGE) {
    const int64_t block = block_tables[table + base / BS];
    const int64_t first = (block * num_kv_heads + kv_head) * BS + base % BS;
    stage_slots<T, D, VK, STAGE, NSG * 32, BITS, GROUP>(keys, first, base, begin, end, thread_index, @KEYS@);
@STAGE_VALUES@
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int t = metal::max(base, begin - begin % TILE); t < metal::min(base + STAGE, end); t += TILE) {
      float parts[TILE * HB];
      UNROLL
      for (int i = TILE * H; i < TILE * HB; i++) {
        parts[i] = 0.0f;
      }
      UNROLL
      for (int j = 0; j < TILE; j++) {
        T k[EK];
        load_part<T, D, VK, EK>(k, keys + (t - base + j) * D, lane);
        multiply<T, H, EK>(parts, q, k, j);
      }
      T v[TILE][EV];
      UNROLL
      for (int j = 0; j < TILE; j++) {
        load_part<T, DV, VV, EV>(v[j], values + (t - base + j) * VALUE_STRIDE, lane);
      }
@SCORE@
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
@END@
"""

_STAGE_VALUES = (
    "    stage_slots<T, DV, VV, STAGE, NSG * 32, BITS, GROUP>(values, first, base, begin, end, thread_index, @VALUES@);"
)

# One thread an element of a head of a row: partial results in the order of the context, whatever their number.
_MERGE = r"""
  const int lane = thread_index_in_simdgroup;
  const int at = thread_position_in_grid.x;
  const int head = threadgroup_position_in_grid.y;
  const int row = threadgroup_position_in_grid.z;
  const int num_heads = threadgroups_per_grid.y;
  const int begin = item_starts[row / R];
  const int end = item_starts[row / R + 1];
  const int64_t step = int64_t(R) * num_heads;
  const int64_t first = int64_t(row % R) * num_heads + head;
  float best = LOWEST;
  for (int item = begin + lane; item < end; item += 32) {
    best = metal::max(best, stats[(item * step + first) * 2]);
  }
  best = simd_max(best);
  float total = 0.0f;
@SINK@
  float merged = 0.0f;
  for (int base = begin; base < end; base += 32) {
    float weight = 0.0f;
    float mass = 0.0f;
    if (base + lane < end) {
      const int64_t place = ((base + lane) * step + first) * 2;
      weight = fast::exp2(stats[place] - best);
      mass = weight * stats[place + 1];
    }
    for (int i = 0; i < metal::min(32, end - base); i++) {
      const float item_weight = simd_shuffle(weight, ushort(i));
      total += simd_shuffle(mass, ushort(i));
      if (at < DV) {
        merged = metal::fma(item_weight, partial[((base + i) * step + first) * DV + at], merged);
      }
    }
  }
  if (at < DV) {
    out[(int64_t(row) * num_heads + head) * DV + at] = T(total > 0.0f ? merged / total : 0.0f);
  }
"""

# A sink is one more score, of no value.
_SINK = r"""
  const float sink = float(sinks[head]) * 1.44269504f;
  best = metal::max(best, sink);
  total = fast::exp2(sink - best);
"""


def partials_source(*, is_staged: bool, is_packed: bool, values_in_keys: bool) -> str:
    """The kernel that attends over partitions. Staged: simdgroups of a threadgroup share what is read once."""
    keys = ", ".join(pool_names("key", is_packed))
    values = keys if values_in_keys else ", ".join(pool_names("value", is_packed))
    source = _STAGED if is_staged else _DIRECT
    parts = {
        "@BEGIN@": _BEGIN,
        "@SCORE@": _SCORE,
        "@END@": _END,
        "@STAGE_VALUES@": "" if values_in_keys else _STAGE_VALUES,
        "@KEYS@": keys,
        "@VALUES@": values,
    }
    for mark, text in parts.items():
        source = source.replace(mark, text)
    return source


def merge_source(*, has_sinks: bool) -> str:
    """The kernel that joins the partitions of each row and head."""
    return _MERGE.replace("@SINK@", _SINK if has_sinks else "")
