// Scalars, vectors, address spaces and the constants that Metal predefines.
#pragma once
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define __METAL__ 1
#define __METAL_VERSION__ 310

typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef unsigned char uchar;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef unsigned short ushort;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef unsigned int uint;
typedef long int64_t;
typedef unsigned long uint64_t;
typedef unsigned long ulong;
typedef unsigned long size_t;
typedef long ptrdiff_t;
typedef unsigned long uintptr_t;
typedef __bf16 bfloat;

#define device __global
#define constant __constant
#define threadgroup __local
#define thread __private
#define METAL_FUNC inline __attribute__((always_inline))

#define INFINITY __builtin_inff()
#define HUGE_VALF __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 3.402823466e+38f
#define MAXFLOAT FLT_MAX
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.19209290e-07f
#define HALF_MAX 65504.0h
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LOG10E_F 0.43429448190325182765f
#define M_LN2_F 0.69314718055994530942f
#define M_LN10_F 2.30258509299404568402f
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.31830988618379067154f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f

#define MSL_VECTORS(T)                                   \
  typedef T T##2 __attribute__((ext_vector_type(2)));    \
  typedef T T##3 __attribute__((ext_vector_type(3)));    \
  typedef T T##4 __attribute__((ext_vector_type(4)));
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(half)
MSL_VECTORS(float)
MSL_VECTORS(bfloat)
#undef MSL_VECTORS

// Packed vectors are aligned like their elements. Three elements would take the room of four here, so there are none.
#define MSL_PACKED(T)                                                                    \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(__alignof__(T))));  \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(__alignof__(T))));
MSL_PACKED(char)
MSL_PACKED(uchar)
MSL_PACKED(short)
MSL_PACKED(ushort)
MSL_PACKED(int)
MSL_PACKED(uint)
MSL_PACKED(half)
MSL_PACKED(float)
MSL_PACKED(bfloat)
#undef MSL_PACKED
