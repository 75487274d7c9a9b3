// All that MLX puts before a kernel.
#pragma once
#include "mlx/backend/metal/kernels/utils.h"
