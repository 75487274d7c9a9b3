// <metal_atomic>: 32 bits, relaxed, as in Metal.
#pragma once
namespace metal {
enum memory_order { memory_order_relaxed };
template <class T>
struct atomic {
  T value;
};
// Clang has types of these names in OpenCL.
#define atomic_uint msl_atomic_uint
#define atomic_int msl_atomic_int
#define atomic_float msl_atomic_float
typedef atomic<uint> atomic_uint;
typedef atomic<int> atomic_int;
typedef atomic<float> atomic_float;

template <class T>
METAL_FUNC T msl_atomic_value(uint op, ulong address, T value, T expected, uint place) {
  static_assert(sizeof(T) == 4, "atomics have 32 bits");
  const uint type = is_same_v<T, float> ? MSL_FLOAT : is_same_v<T, int> ? MSL_INT : MSL_UINT;
  return __builtin_bit_cast(
      T, __msl_atomic(op, type, address, __builtin_bit_cast(uint, value), __builtin_bit_cast(uint, expected), place));
}
#define MSL_ATOMIC(space, name, op)                                                                               \
  template <class T>                                                                                              \
  METAL_FUNC T name(volatile space atomic<T>* p, typename msl_same<T>::type value, memory_order, MSL_PLACE) {     \
    return msl_atomic_value<T>(op, (ulong)p, value, value, place);                                                \
  }
#define MSL_ATOMICS(space)                                                                                        \
  MSL_ATOMIC(space, atomic_exchange_explicit, MSL_ATOMIC_EXCHANGE)                                                \
  MSL_ATOMIC(space, atomic_fetch_add_explicit, MSL_ATOMIC_ADD)                                                    \
  MSL_ATOMIC(space, atomic_fetch_sub_explicit, MSL_ATOMIC_SUB)                                                    \
  MSL_ATOMIC(space, atomic_fetch_min_explicit, MSL_ATOMIC_MIN)                                                    \
  MSL_ATOMIC(space, atomic_fetch_max_explicit, MSL_ATOMIC_MAX)                                                    \
  MSL_ATOMIC(space, atomic_fetch_and_explicit, MSL_ATOMIC_AND)                                                    \
  MSL_ATOMIC(space, atomic_fetch_or_explicit, MSL_ATOMIC_OR)                                                      \
  MSL_ATOMIC(space, atomic_fetch_xor_explicit, MSL_ATOMIC_XOR)                                                    \
  template <class T>                                                                                              \
  METAL_FUNC void atomic_store_explicit(                                                                          \
      volatile space atomic<T>* p, typename msl_same<T>::type value, memory_order, MSL_PLACE) {                   \
    msl_atomic_value<T>(MSL_ATOMIC_STORE, (ulong)p, value, value, place);                                         \
  }                                                                                                               \
  template <class T>                                                                                              \
  METAL_FUNC T atomic_load_explicit(const volatile space atomic<T>* p, memory_order, MSL_PLACE) {                 \
    return msl_atomic_value<T>(MSL_ATOMIC_LOAD, (ulong)p, T(0), T(0), place);                                     \
  }                                                                                                               \
  template <class T>                                                                                              \
  METAL_FUNC bool atomic_compare_exchange_weak_explicit(                                                          \
      volatile space atomic<T>* p, thread T* expected, typename msl_same<T>::type value, memory_order,            \
      memory_order, MSL_PLACE) {                                                                                  \
    const T old = msl_atomic_value<T>(MSL_ATOMIC_COMPARE, (ulong)p, value, *expected, place);                     \
    const bool same = __builtin_bit_cast(uint, old) == __builtin_bit_cast(uint, *expected);                       \
    *expected = old;                                                                                              \
    return same;                                                                                                  \
  }
MSL_ATOMICS(device)
MSL_ATOMICS(threadgroup)
#undef MSL_ATOMICS
#undef MSL_ATOMIC
} // namespace metal
using metal::atomic;
