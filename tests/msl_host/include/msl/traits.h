// <metal_type_traits> and <metal_limits>.
#pragma once
namespace metal {
template <class T, T V>
struct integral_constant {
  static constexpr constant T value = V;
  typedef T value_type;
  typedef integral_constant type;
  constexpr operator T() const { return V; }
};
typedef integral_constant<bool, true> true_type;
typedef integral_constant<bool, false> false_type;
template <bool B>
using bool_constant = integral_constant<bool, B>;

#define MSL_TRAIT(name, ...)                            \
  template <class T>                                    \
  static constexpr constant bool name##_v = __VA_ARGS__; \
  template <class T>                                    \
  struct name : bool_constant<__VA_ARGS__> {};
MSL_TRAIT(is_integral, __is_integral(T))
MSL_TRAIT(is_floating_point, __is_floating_point(T))
MSL_TRAIT(is_arithmetic, __is_arithmetic(T))
MSL_TRAIT(is_pointer, __is_pointer(T))
MSL_TRAIT(is_signed, (T(-1) < T(0)))
MSL_TRAIT(is_unsigned, (!(T(-1) < T(0))))
#undef MSL_TRAIT
template <class A, class B>
static constexpr constant bool is_same_v = __is_same(A, B);
template <class A, class B>
struct is_same : bool_constant<__is_same(A, B)> {};
template <class A, class B>
static constexpr constant bool is_convertible_v = __is_convertible_to(A, B);
template <class A, class B>
struct is_convertible : bool_constant<__is_convertible_to(A, B)> {};

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F>
struct conditional {
  typedef T type;
};
template <class T, class F>
struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;
template <class T>
struct remove_cv {
  typedef __remove_cv(T) type;
};
template <class T>
using remove_cv_t = __remove_cv(T);
template <class T>
struct remove_reference {
  typedef __remove_reference_t(T) type;
};
template <class T>
using remove_reference_t = __remove_reference_t(T);
template <class T>
struct msl_same {
  typedef T type;
};

template <class T>
struct numeric_limits {};
#define MSL_INT_LIMITS(T, lo, hi)                    \
  template <>                                        \
  struct numeric_limits<T> {                         \
    static constexpr T max() { return hi; }          \
    static constexpr T min() { return lo; }          \
    static constexpr T lowest() { return lo; }       \
  };
MSL_INT_LIMITS(char, -128, 127)
MSL_INT_LIMITS(int8_t, -128, 127)
MSL_INT_LIMITS(uint8_t, 0, 255)
MSL_INT_LIMITS(int16_t, -32768, 32767)
MSL_INT_LIMITS(uint16_t, 0, 65535)
MSL_INT_LIMITS(int, INT_MIN, INT_MAX)
MSL_INT_LIMITS(uint, 0u, UINT_MAX)
MSL_INT_LIMITS(long, -9223372036854775807L - 1, 9223372036854775807L)
MSL_INT_LIMITS(ulong, 0ul, 18446744073709551615ul)
#undef MSL_INT_LIMITS
#define MSL_FLOAT_LIMITS(T, hi, lo, eps)                        \
  template <>                                                   \
  struct numeric_limits<T> {                                    \
    static constexpr T max() { return T(hi); }                  \
    static constexpr T min() { return T(lo); }                  \
    static constexpr T lowest() { return T(-(hi)); }            \
    static constexpr T epsilon() { return T(eps); }             \
    static constexpr T infinity() { return T(INFINITY); }       \
    static constexpr T quiet_NaN() { return T(NAN); }           \
  };
MSL_FLOAT_LIMITS(float, FLT_MAX, FLT_MIN, FLT_EPSILON)
MSL_FLOAT_LIMITS(half, 65504.0f, 6.103515625e-05f, 9.765625e-4f)
MSL_FLOAT_LIMITS(bfloat, 3.3895313892515355e38f, 1.175494351e-38f, 7.8125e-3f)
#undef MSL_FLOAT_LIMITS
} // namespace metal
