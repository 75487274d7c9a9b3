// <metal_simdgroup_matrix>: 8x8, two neighbouring columns of one row in each lane, in the order that Apple's GPUs have.
#pragma once
namespace metal {
METAL_FUNC int msl_matrix_row() {
  const uint lane = __msl_lane();
  return int((lane / 4 & 4) + lane / 2 % 4);
}
METAL_FUNC int msl_matrix_column() {
  const uint lane = __msl_lane();
  return int((lane / 4 & 2) * 2 + lane % 2 * 2);
}

template <class T, int R, int C>
struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "simdgroup matrices are 8x8");
  vec<T, 2> elements;
  simdgroup_matrix() {}
  explicit simdgroup_matrix(T value) { elements = vec<T, 2>(value); }
  thread vec<T, 2>& thread_elements() thread { return elements; }
  const thread vec<T, 2>& thread_elements() const thread { return elements; }
};

#define MSL_MATRIX_MEMORY(space)                                                                              \
  template <class T, int R, int C>                                                                            \
  METAL_FUNC void simdgroup_load(                                                                             \
      thread simdgroup_matrix<T, R, C>& m, const space T* source, ulong stride = C, ulong2 origin = ulong2(0), \
      bool transpose = false, MSL_PLACE) {                                                                    \
    __msl_matrix(MSL_MATRIX_LOAD, place);                                                                     \
    const ulong row = ulong(msl_matrix_row()), column = ulong(msl_matrix_column());                           \
    for (ulong j = 0; j < 2; j++)                                                                             \
      m.elements[j] = transpose ? source[(origin.y + column + j) * stride + origin.x + row]                   \
                                : source[(origin.y + row) * stride + origin.x + column + j];                  \
  }                                                                                                           \
  template <class T, int R, int C>                                                                            \
  METAL_FUNC void simdgroup_store(                                                                            \
      simdgroup_matrix<T, R, C> m, space T* target, ulong stride = C, ulong2 origin = ulong2(0),              \
      bool transpose = false, MSL_PLACE) {                                                                    \
    __msl_matrix(MSL_MATRIX_STORE, place);                                                                    \
    const ulong row = ulong(msl_matrix_row()), column = ulong(msl_matrix_column());                           \
    for (ulong j = 0; j < 2; j++) {                                                                           \
      if (transpose)                                                                                          \
        target[(origin.y + column + j) * stride + origin.x + row] = m.elements[j];                            \
      else                                                                                                    \
        target[(origin.y + row) * stride + origin.x + column + j] = m.elements[j];                            \
    }                                                                                                         \
  }
MSL_MATRIX_MEMORY(device)
MSL_MATRIX_MEMORY(threadgroup)
#undef MSL_MATRIX_MEMORY

template <class D, class A, class B, class C>
METAL_FUNC void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, 8, 8>& d, thread simdgroup_matrix<A, 8, 8>& a, thread simdgroup_matrix<B, 8, 8>& b,
    thread simdgroup_matrix<C, 8, 8>& c, MSL_PLACE) {
  float2 left = {float(a.elements.x), float(a.elements.y)}, right = {float(b.elements.x), float(b.elements.y)};
  float2 sum = {float(c.elements.x), float(c.elements.y)};
  sum = __msl_multiply(left, right, sum, place);
  d.elements.x = D(sum.x);
  d.elements.y = D(sum.y);
}
template <class D, class A, class B>
METAL_FUNC void simdgroup_multiply(
    thread simdgroup_matrix<D, 8, 8>& d, thread simdgroup_matrix<A, 8, 8>& a, thread simdgroup_matrix<B, 8, 8>& b,
    MSL_PLACE) {
  simdgroup_matrix<float, 8, 8> zero(0.0f);
  simdgroup_multiply_accumulate(d, a, b, zero, place);
}
template <class T, int R, int C>
METAL_FUNC simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
  return simdgroup_matrix<T, R, C>(value);
}
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
} // namespace metal
