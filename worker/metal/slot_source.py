"""MSL that attention kernels share: how elements of a slot are read, plain or packed; whose rows a prefill tile has."""

HEADER = r"""
// Arrays live in registers only if every index is known.
#define UNROLL _Pragma("clang loop unroll(full)")

template <typename T, int V>
METAL_FUNC vec<T, V> read_vector(const device T* from) {
  return *(const device vec<T, V>*)from;
}
template <typename T, int V>
METAL_FUNC vec<T, V> read_vector(const threadgroup T* from) {
  return *(const threadgroup vec<T, V>*)from;
}

// V elements of a slot of D from element `at` on.
template <typename T, int D, int V, int BITS, int GROUP>
METAL_FUNC vec<T, V> read_slot(int64_t slot, int at, const device T* pool) {
  return read_vector<T, V>(pool + slot * D + at);
}

// The same of a packed pool: scale * code + bias, where GROUP elements share both.
template <typename T, int D, int V, int BITS, int GROUP>
METAL_FUNC vec<T, V> read_slot(
    int64_t slot, int at, const device uint* words, const device T* scales, const device T* biases) {
  const int64_t element = slot * D + at;
  uint codes;
  if (V * BITS == 32) {
    codes = words[element / V];
  } else if (V * BITS == 16) {
    codes = ((const device ushort*)words)[element / V];
  } else {
    codes = ((const device uchar*)words)[element / V];
  }
  const float scale = float(scales[element / GROUP]);
  const float bias = float(biases[element / GROUP]);
  vec<T, V> read;
  UNROLL
  for (int i = 0; i < V; i++) {
    read[i] = T(metal::fma(float((codes >> (i * BITS)) & ((1u << BITS) - 1u)), scale, bias));
  }
  return read;
}
"""

# Of a threadgroup that takes one tile of a prefill's rows (`PrefillRows.tiles`) for one KV head.
TILE = r"""
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
  const int begin = cidery_first_seen(start + first_row / shared_heads, window, chunk);
  const int last = start + (metal::min(first_row + ROWS, num_rows) - 1) / shared_heads;

  // A lane holds two neighbouring columns of one row of an 8x8 matrix.
  const int matrix_row = ((lane / 4) & 4) + (lane / 2) % 4;
  const int column = ((lane / 4) & 2) * 2 + lane % 2 * 2;
"""


def pool_names(name: str, is_packed: bool) -> list[str]:
    """Inputs that make up one pool, in the order of `read_slot`."""
    return [f"{name}_packed", f"{name}_scales", f"{name}_biases"] if is_packed else [f"{name}_pool"]
