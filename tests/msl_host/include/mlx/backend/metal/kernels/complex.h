// In the place of MLX's header of this name: only what other headers of MLX name. No kernel here computes with it.
#pragma once
#include "msl/all.h"
template <typename T>
struct complex_t {
  T real;
  T imag;
  constexpr complex_t(T r, T i) : real(r), imag(i) {}
  constexpr complex_t(T r) : real(r), imag(0) {}
  constexpr complex_t() : real(0), imag(0) {}
};
typedef complex_t<float> complex64_t;
