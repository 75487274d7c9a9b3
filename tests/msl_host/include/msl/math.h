// <metal_math>, <metal_common>, <metal_integer>, <metal_relational>, <metal_geometric>.
#pragma once
namespace metal {
// `fast` and `precise` compute the same here: how exact `fast` is on a GPU is for tolerances to absorb.
#define MSL_UNARY(name, expression)                                                   \
  inline float name(float x) { return expression; }                                   \
  inline half name(half h) {                                                          \
    float x = float(h);                                                               \
    return half(expression);                                                          \
  }                                                                                   \
  template <int N>                                                                    \
  inline vec<float, N> name(vec<float, N> v) {                                        \
    vec<float, N> r;                                                                  \
    for (int i = 0; i < N; i++) r[i] = name(float(v[i]));                             \
    return r;                                                                         \
  }                                                                                   \
  template <int N>                                                                    \
  inline vec<half, N> name(vec<half, N> v) {                                          \
    vec<half, N> r;                                                                   \
    for (int i = 0; i < N; i++) r[i] = name(half(v[i]));                              \
    return r;                                                                         \
  }
#define MSL_BINARY(name, expression)                                                  \
  inline float name(float x, float y) { return expression; }                          \
  inline half name(half a, half b) {                                                  \
    float x = float(a), y = float(b);                                                 \
    return half(expression);                                                          \
  }                                                                                   \
  template <int N>                                                                    \
  inline vec<float, N> name(vec<float, N> a, vec<float, N> b) {                       \
    vec<float, N> r;                                                                  \
    for (int i = 0; i < N; i++) r[i] = name(float(a[i]), float(b[i]));                \
    return r;                                                                         \
  }                                                                                   \
  template <int N>                                                                    \
  inline vec<half, N> name(vec<half, N> a, vec<half, N> b) {                          \
    vec<half, N> r;                                                                   \
    for (int i = 0; i < N; i++) r[i] = name(half(a[i]), half(b[i]));                  \
    return r;                                                                         \
  }
#define MSL_TRANSCENDENTAL                            \
  MSL_UNARY(acos, __builtin_acosf(x))                 \
  MSL_UNARY(acosh, __builtin_acoshf(x))               \
  MSL_UNARY(asin, __builtin_asinf(x))                 \
  MSL_UNARY(asinh, __builtin_asinhf(x))               \
  MSL_UNARY(atan, __builtin_atanf(x))                 \
  MSL_UNARY(atanh, __builtin_atanhf(x))               \
  MSL_UNARY(cos, __builtin_cosf(x))                   \
  MSL_UNARY(cosh, __builtin_coshf(x))                 \
  MSL_UNARY(cospi, __builtin_cosf(M_PI_F * x))        \
  MSL_UNARY(exp, __builtin_expf(x))                   \
  MSL_UNARY(exp10, __builtin_powf(10.0f, x))          \
  MSL_UNARY(exp2, __builtin_exp2f(x))                 \
  MSL_UNARY(log, __builtin_logf(x))                   \
  MSL_UNARY(log10, __builtin_log10f(x))               \
  MSL_UNARY(log2, __builtin_log2f(x))                 \
  MSL_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))         \
  MSL_UNARY(sin, __builtin_sinf(x))                   \
  MSL_UNARY(sinh, __builtin_sinhf(x))                 \
  MSL_UNARY(sinpi, __builtin_sinf(M_PI_F * x))        \
  MSL_UNARY(sqrt, __builtin_sqrtf(x))                 \
  MSL_UNARY(tan, __builtin_tanf(x))                   \
  MSL_UNARY(tanh, __builtin_tanhf(x))                 \
  MSL_UNARY(tanpi, __builtin_tanf(M_PI_F * x))        \
  MSL_BINARY(atan2, __builtin_atan2f(x, y))           \
  MSL_BINARY(divide, x / y)                           \
  MSL_BINARY(pow, __builtin_powf(x, y))               \
  MSL_BINARY(powr, __builtin_powf(x, y))
MSL_TRANSCENDENTAL
namespace fast {
MSL_TRANSCENDENTAL
}
namespace precise {
MSL_TRANSCENDENTAL
}
MSL_UNARY(fabs, __builtin_fabsf(x))
MSL_UNARY(abs, __builtin_fabsf(x))
MSL_UNARY(ceil, __builtin_ceilf(x))
MSL_UNARY(floor, __builtin_floorf(x))
MSL_UNARY(trunc, __builtin_truncf(x))
MSL_UNARY(round, __builtin_roundf(x))
MSL_UNARY(rint, __builtin_rintf(x))
MSL_UNARY(fract, x - __builtin_floorf(x))
MSL_UNARY(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f)
MSL_UNARY(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
MSL_BINARY(fmod, __builtin_fmodf(x, y))
MSL_BINARY(copysign, __builtin_copysignf(x, y))
MSL_BINARY(step, y < x ? 0.0f : 1.0f)
// As in Metal, a NaN loses against a number.
MSL_BINARY(min, __builtin_fminf(x, y))
MSL_BINARY(max, __builtin_fmaxf(x, y))
MSL_BINARY(fmin, __builtin_fminf(x, y))
MSL_BINARY(fmax, __builtin_fmaxf(x, y))
namespace fast {
MSL_BINARY(min, __builtin_fminf(x, y))
MSL_BINARY(max, __builtin_fmaxf(x, y))
} // namespace fast
#undef MSL_UNARY
#undef MSL_BINARY
#undef MSL_TRANSCENDENTAL

#define MSL_INTEGER(T)                                                      \
  inline T min(T a, T b) { return b < a ? b : a; }                          \
  inline T max(T a, T b) { return a < b ? b : a; }                          \
  template <int N>                                                          \
  inline vec<T, N> min(vec<T, N> a, vec<T, N> b) {                          \
    vec<T, N> r;                                                            \
    for (int i = 0; i < N; i++) r[i] = min(T(a[i]), T(b[i]));               \
    return r;                                                               \
  }                                                                         \
  template <int N>                                                          \
  inline vec<T, N> max(vec<T, N> a, vec<T, N> b) {                          \
    vec<T, N> r;                                                            \
    for (int i = 0; i < N; i++) r[i] = max(T(a[i]), T(b[i]));               \
    return r;                                                               \
  }                                                                         \
  inline T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }           \
  inline T abs(T x) { return x < T(0) ? T(-x) : x; }
MSL_INTEGER(char)
MSL_INTEGER(int8_t)
MSL_INTEGER(uchar)
MSL_INTEGER(short)
MSL_INTEGER(ushort)
MSL_INTEGER(int)
MSL_INTEGER(uint)
MSL_INTEGER(long)
MSL_INTEGER(ulong)
#undef MSL_INTEGER
inline float clamp(float x, float lo, float hi) { return min(max(x, lo), hi); }
inline half clamp(half x, half lo, half hi) { return min(max(x, lo), hi); }
template <int N>
inline vec<float, N> clamp(vec<float, N> x, vec<float, N> lo, vec<float, N> hi) { return min(max(x, lo), hi); }
inline float max3(float a, float b, float c) { return max(a, max(b, c)); }
inline float min3(float a, float b, float c) { return min(a, min(b, c)); }
inline float mix(float x, float y, float a) { return x + (y - x) * a; }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return half(__builtin_fmaf(float(a), float(b), float(c))); }
template <int N>
inline vec<float, N> fma(vec<float, N> a, vec<float, N> b, vec<float, N> c) {
  vec<float, N> r;
  for (int i = 0; i < N; i++) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
}
inline float ldexp(float x, int k) { return __builtin_ldexpf(x, k); }
inline bool isnan(float x) { return x != x; }
inline bool isnan(half x) { return x != x; }
inline bool isinf(float x) { return __builtin_fabsf(x) == INFINITY; }
inline bool isinf(half x) { return __builtin_fabsf(float(x)) == INFINITY; }
inline bool isfinite(float x) { return __builtin_fabsf(x) < INFINITY; }
inline bool isfinite(half x) { return __builtin_fabsf(float(x)) < INFINITY; }

template <class T>
inline T select(T a, T b, bool c) {
  return c ? b : a;
}
template <class T, class C, int N>
inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<C, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = c[i] ? b[i] : a[i];
  return r;
}
// A comparison of vectors gives a vector of integers here, of bools in Metal; both go into any, all and select.
template <class C, int N>
inline bool any(vec<C, N> c) {
  bool r = false;
  for (int i = 0; i < N; i++) r = r || c[i];
  return r;
}
template <class C, int N>
inline bool all(vec<C, N> c) {
  bool r = true;
  for (int i = 0; i < N; i++) r = r && c[i];
  return r;
}
template <class T, int N>
inline T dot(vec<T, N> a, vec<T, N> b) {
  T r = T(0);
  for (int i = 0; i < N; i++) r = T(r + a[i] * b[i]);
  return r;
}
inline uint popcount(uint x) { return uint(__builtin_popcount(x)); }
inline uint clz(uint x) { return x ? uint(__builtin_clz(x)) : 32u; }
inline uint ctz(uint x) { return x ? uint(__builtin_ctz(x)) : 32u; }
inline uint extract_bits(uint x, uint offset, uint bits) {
  return bits == 0 ? 0u : (x >> offset) & (0xffffffffu >> (32u - bits));
}
} // namespace metal
