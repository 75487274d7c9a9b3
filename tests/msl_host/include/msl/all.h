// Metal's standard library for clang's "C++ for OpenCL", as far as kernels here use it. What is missing does not compile.
#pragma once
#include "msl/types.h"
#include "msl/abi.h"
#include "msl/traits.h"
#include "msl/vectors.h"
#include "msl/math.h"
#include "msl/simdgroup.h"
#include "msl/matrix.h"
#include "msl/atomic.h"
#include "msl/bf16.h"
