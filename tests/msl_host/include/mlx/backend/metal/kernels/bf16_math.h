// In the place of MLX's header of this name, which calls built-ins of Apple's compiler: see msl/bf16.h.
#pragma once
#include "msl/all.h"
