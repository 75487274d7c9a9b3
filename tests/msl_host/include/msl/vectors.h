// vec<T, N>, as_type, and `float4(a, b)` in the place of a constructor.
#pragma once
namespace metal {
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));

template <class T>
struct msl_parts {
  static constexpr constant bool is_vector = false;
  static constexpr constant int count = 1;
};
template <class T, int N>
struct msl_parts<vec<T, N>> {
  static constexpr constant bool is_vector = true;
  static constexpr constant int count = N;
};

template <class T, int N, class S>
inline void msl_append(thread vec<T, N>& result, thread int& at, S value) {
  result[at++] = T(value);
}
template <class T, int N, class S, int M>
inline void msl_append(thread vec<T, N>& result, thread int& at, vec<S, M> values) {
  for (int i = 0; i < M; i++) result[at++] = T(values[i]);
}
template <class T, int N, class First, class... Rest>
inline vec<T, N> msl_make(First first, Rest... rest) {
  if constexpr (sizeof...(Rest) == 0 && msl_parts<First>::is_vector) {
    static_assert(msl_parts<First>::count == N, "a vector is made of another of the same size");
    return __builtin_convertvector(first, vec<T, N>);
  } else if constexpr (sizeof...(Rest) == 0) {
    return vec<T, N>(T(first));
  } else {
    static_assert(msl_parts<First>::count + (0 + ... + msl_parts<Rest>::count) == N, "wrong number of elements");
    vec<T, N> result;
    int at = 0;
    msl_append<T, N>(result, at, first);
    (msl_append<T, N>(result, at, rest), ...);
    return result;
  }
}
template <class To, class From>
inline To msl_as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of the same size");
  return __builtin_bit_cast(To, value);
}
} // namespace metal
#define as_type metal::msl_as_type

// Function-like macros: they expand only before a parenthesis, so type names elsewhere stay what they are.
#define char2(...) metal::msl_make<char, 2>(__VA_ARGS__)
#define char3(...) metal::msl_make<char, 3>(__VA_ARGS__)
#define char4(...) metal::msl_make<char, 4>(__VA_ARGS__)
#define uchar2(...) metal::msl_make<uchar, 2>(__VA_ARGS__)
#define uchar3(...) metal::msl_make<uchar, 3>(__VA_ARGS__)
#define uchar4(...) metal::msl_make<uchar, 4>(__VA_ARGS__)
#define short2(...) metal::msl_make<short, 2>(__VA_ARGS__)
#define short3(...) metal::msl_make<short, 3>(__VA_ARGS__)
#define short4(...) metal::msl_make<short, 4>(__VA_ARGS__)
#define ushort2(...) metal::msl_make<ushort, 2>(__VA_ARGS__)
#define ushort3(...) metal::msl_make<ushort, 3>(__VA_ARGS__)
#define ushort4(...) metal::msl_make<ushort, 4>(__VA_ARGS__)
#define int2(...) metal::msl_make<int, 2>(__VA_ARGS__)
#define int3(...) metal::msl_make<int, 3>(__VA_ARGS__)
#define int4(...) metal::msl_make<int, 4>(__VA_ARGS__)
#define uint2(...) metal::msl_make<uint, 2>(__VA_ARGS__)
#define uint3(...) metal::msl_make<uint, 3>(__VA_ARGS__)
#define uint4(...) metal::msl_make<uint, 4>(__VA_ARGS__)
#define long2(...) metal::msl_make<long, 2>(__VA_ARGS__)
#define ulong2(...) metal::msl_make<ulong, 2>(__VA_ARGS__)
#define half2(...) metal::msl_make<half, 2>(__VA_ARGS__)
#define half3(...) metal::msl_make<half, 3>(__VA_ARGS__)
#define half4(...) metal::msl_make<half, 4>(__VA_ARGS__)
#define bfloat2(...) metal::msl_make<bfloat, 2>(__VA_ARGS__)
#define bfloat3(...) metal::msl_make<bfloat, 3>(__VA_ARGS__)
#define bfloat4(...) metal::msl_make<bfloat, 4>(__VA_ARGS__)
#define float2(...) metal::msl_make<float, 2>(__VA_ARGS__)
#define float3(...) metal::msl_make<float, 3>(__VA_ARGS__)
#define float4(...) metal::msl_make<float, 4>(__VA_ARGS__)
