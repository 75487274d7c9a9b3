// Functions of bfloat, which Metal lacks: MLX's preamble adds these in bf16_math.h. Computed in float, rounded once.
#pragma once
namespace metal {
#define MSL_BF1(name) \
  METAL_FUNC bfloat name(bfloat x) { return bfloat(name(float(x))); }
#define MSL_BF2(name) \
  METAL_FUNC bfloat name(bfloat x, bfloat y) { return bfloat(name(float(x), float(y))); }
#define MSL_BF3(name) \
  METAL_FUNC bfloat name(bfloat x, bfloat y, bfloat z) { return bfloat(name(float(x), float(y), float(z))); }
#define MSL_BF_TRANSCENDENTAL \
  MSL_BF1(acos) MSL_BF1(acosh) MSL_BF1(asin) MSL_BF1(asinh) MSL_BF1(atan) MSL_BF1(atanh) MSL_BF1(cos) MSL_BF1(cosh) \
  MSL_BF1(cospi) MSL_BF1(exp) MSL_BF1(exp10) MSL_BF1(exp2) MSL_BF1(log) MSL_BF1(log10) MSL_BF1(log2) MSL_BF1(rsqrt) \
  MSL_BF1(sin) MSL_BF1(sinh) MSL_BF1(sinpi) MSL_BF1(sqrt) MSL_BF1(tan) MSL_BF1(tanh) MSL_BF1(tanpi) MSL_BF2(atan2) \
  MSL_BF2(divide) MSL_BF2(pow) MSL_BF2(powr)
MSL_BF_TRANSCENDENTAL
namespace fast {
MSL_BF_TRANSCENDENTAL
MSL_BF2(min) MSL_BF2(max)
} // namespace fast
namespace precise {
MSL_BF_TRANSCENDENTAL
}
MSL_BF1(abs) MSL_BF1(fabs) MSL_BF1(ceil) MSL_BF1(floor) MSL_BF1(trunc) MSL_BF1(round) MSL_BF1(rint) MSL_BF1(fract)
MSL_BF2(fmod) MSL_BF2(min) MSL_BF2(max) MSL_BF2(fmin) MSL_BF2(fmax) MSL_BF3(max3) MSL_BF3(min3) MSL_BF3(fma)
METAL_FUNC bfloat ldexp(bfloat x, int k) { return bfloat(ldexp(float(x), k)); }
METAL_FUNC bool isnan(bfloat x) { return isnan(float(x)); }
METAL_FUNC bool isinf(bfloat x) { return isinf(float(x)); }
#undef MSL_BF1
#undef MSL_BF2
#undef MSL_BF3
#undef MSL_BF_TRANSCENDENTAL

#define MSL_BF_REDUCTION(name, op) \
  METAL_FUNC bfloat name(bfloat x, MSL_PLACE) { return bfloat(msl_reduce_float(op, float(x), place)); }
MSL_BF_REDUCTION(simd_sum, MSL_SUM)
MSL_BF_REDUCTION(simd_product, MSL_PRODUCT)
MSL_BF_REDUCTION(simd_min, MSL_MIN)
MSL_BF_REDUCTION(simd_max, MSL_MAX)
MSL_BF_REDUCTION(simd_prefix_inclusive_sum, MSL_INCLUSIVE_SUM)
MSL_BF_REDUCTION(simd_prefix_exclusive_sum, MSL_EXCLUSIVE_SUM)
MSL_BF_REDUCTION(simd_prefix_inclusive_product, MSL_INCLUSIVE_PRODUCT)
MSL_BF_REDUCTION(simd_prefix_exclusive_product, MSL_EXCLUSIVE_PRODUCT)
#undef MSL_BF_REDUCTION
} // namespace metal
