// Barriers and <metal_simdgroup>.
#pragma once
namespace metal {
enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
inline constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
METAL_FUNC void threadgroup_barrier(mem_flags flags, MSL_PLACE) { __msl_threadgroup_barrier(uint(flags), place); }
METAL_FUNC void simdgroup_barrier(mem_flags flags, MSL_PLACE) { __msl_simdgroup_barrier(uint(flags), place); }

METAL_FUNC float msl_reduce_float(uint op, float x, uint place) {
  return __builtin_bit_cast(float, __msl_reduce(op, MSL_FLOAT, __builtin_bit_cast(uint, x), place));
}
METAL_FUNC int msl_reduce_int(uint op, int x, uint place) { return int(__msl_reduce(op, MSL_INT, uint(x), place)); }
#define MSL_REDUCTION_INTEGER(name, op)                                                                 \
  METAL_FUNC int name(int x, MSL_PLACE) { return msl_reduce_int(op, x, place); }                        \
  METAL_FUNC short name(short x, MSL_PLACE) { return short(msl_reduce_int(op, x, place)); }             \
  METAL_FUNC uint name(uint x, MSL_PLACE) { return __msl_reduce(op, MSL_UINT, x, place); }              \
  METAL_FUNC ushort name(ushort x, MSL_PLACE) { return ushort(__msl_reduce(op, MSL_UINT, x, place)); }
#define MSL_REDUCTION(name, op)                                                                         \
  MSL_REDUCTION_INTEGER(name, op)                                                                       \
  METAL_FUNC float name(float x, MSL_PLACE) { return msl_reduce_float(op, x, place); }                  \
  METAL_FUNC half name(half x, MSL_PLACE) { return half(msl_reduce_float(op, float(x), place)); }       \
  template <int N>                                                                                      \
  METAL_FUNC vec<float, N> name(vec<float, N> x, MSL_PLACE) {                                           \
    vec<float, N> r;                                                                                    \
    for (int i = 0; i < N; i++) r[i] = msl_reduce_float(op, x[i], place);                               \
    return r;                                                                                           \
  }
MSL_REDUCTION(simd_sum, MSL_SUM)
MSL_REDUCTION(simd_product, MSL_PRODUCT)
MSL_REDUCTION(simd_min, MSL_MIN)
MSL_REDUCTION(simd_max, MSL_MAX)
MSL_REDUCTION(simd_prefix_inclusive_sum, MSL_INCLUSIVE_SUM)
MSL_REDUCTION(simd_prefix_exclusive_sum, MSL_EXCLUSIVE_SUM)
MSL_REDUCTION(simd_prefix_inclusive_product, MSL_INCLUSIVE_PRODUCT)
MSL_REDUCTION(simd_prefix_exclusive_product, MSL_EXCLUSIVE_PRODUCT)
MSL_REDUCTION_INTEGER(simd_and, MSL_AND)
MSL_REDUCTION_INTEGER(simd_or, MSL_OR)
MSL_REDUCTION_INTEGER(simd_xor, MSL_XOR)
#undef MSL_REDUCTION
#undef MSL_REDUCTION_INTEGER
METAL_FUNC bool simd_all(bool x, MSL_PLACE) { return __msl_reduce(MSL_AND, MSL_UINT, x, place) != 0; }
METAL_FUNC bool simd_any(bool x, MSL_PLACE) { return __msl_reduce(MSL_OR, MSL_UINT, x, place) != 0; }

template <class T>
METAL_FUNC T msl_shuffle_value(uint op, T value, T fill, uint arg, uint place) {
  if constexpr (sizeof(T) == 4) {
    return __builtin_bit_cast(
        T, __msl_shuffle(op, __builtin_bit_cast(uint, value), __builtin_bit_cast(uint, fill), arg, place));
  } else if constexpr (sizeof(T) == 2) {
    return __builtin_bit_cast(
        T, ushort(__msl_shuffle(op, __builtin_bit_cast(ushort, value), __builtin_bit_cast(ushort, fill), arg, place)));
  } else if constexpr (sizeof(T) == 1) {
    return __builtin_bit_cast(
        T, uchar(__msl_shuffle(op, __builtin_bit_cast(uchar, value), __builtin_bit_cast(uchar, fill), arg, place)));
  } else {
    static_assert(sizeof(T) % 4 == 0 && sizeof(T) <= 16, "no shuffle of this type");
    typedef vec<uint, sizeof(T) / 4> words;
    words from = __builtin_bit_cast(words, value), other = __builtin_bit_cast(words, fill), r;
    for (uint i = 0; i < sizeof(T) / 4; i++) r[i] = __msl_shuffle(op, from[i], other[i], arg, place);
    return __builtin_bit_cast(T, r);
  }
}
#define MSL_SHUFFLES(name, op)                                   \
  template <class T>                                             \
  METAL_FUNC T name(T value, ushort arg, MSL_PLACE) {            \
    return msl_shuffle_value<T>(op, value, value, arg, place);   \
  }
MSL_SHUFFLES(simd_broadcast, MSL_BROADCAST)
MSL_SHUFFLES(simd_shuffle, MSL_SHUFFLE)
MSL_SHUFFLES(simd_shuffle_xor, MSL_SHUFFLE_XOR)
MSL_SHUFFLES(simd_shuffle_up, MSL_SHUFFLE_UP)
MSL_SHUFFLES(simd_shuffle_down, MSL_SHUFFLE_DOWN)
MSL_SHUFFLES(simd_shuffle_rotate_up, MSL_ROTATE_UP)
MSL_SHUFFLES(simd_shuffle_rotate_down, MSL_ROTATE_DOWN)
#undef MSL_SHUFFLES
template <class T>
METAL_FUNC T simd_broadcast_first(T value, MSL_PLACE) {
  return msl_shuffle_value<T>(MSL_BROADCAST_FIRST, value, value, 0, place);
}
template <class T>
METAL_FUNC T simd_shuffle_and_fill_up(T value, T fill, ushort delta, MSL_PLACE) {
  return msl_shuffle_value<T>(MSL_FILL_UP, value, fill, delta, place);
}
template <class T>
METAL_FUNC T simd_shuffle_and_fill_down(T value, T fill, ushort delta, MSL_PLACE) {
  return msl_shuffle_value<T>(MSL_FILL_DOWN, value, fill, delta, place);
}
struct simd_vote {
  ulong bits;
  explicit operator ulong() const { return bits; }
};
METAL_FUNC simd_vote simd_ballot(bool predicate, MSL_PLACE) {
  simd_vote vote;
  vote.bits = __msl_ballot(predicate, place);
  return vote;
}
METAL_FUNC bool simd_is_first(MSL_PLACE) {
  const uint active = uint(__msl_ballot(1, place));
  return uint(__builtin_ctz(active)) == __msl_lane();
}
} // namespace metal
