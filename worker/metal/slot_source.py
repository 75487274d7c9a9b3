"""MSL that attention kernels share: how the elements of a slot are read, plain or packed."""

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


def pool_names(name: str, is_packed: bool) -> list[str]:
    """Inputs that make up one pool, in the order of `read_slot`."""
    return [f"{name}_packed", f"{name}_scales", f"{name}_biases"] if is_packed else [f"{name}_pool"]
