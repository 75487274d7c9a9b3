"""How far a kernel may be from the truth: float32 on the CPU, of the very values that it reads.

A twin in half precision would add its own rounding to the kernel's, and MLX's on the GPU its fast functions.
"""

from dataclasses import replace
from typing import TypeVar

import mlx.core as mx
import numpy as np

from worker.metal.quantized import QuantizedPool

# Distance of two neighbours at 1, for half types; for float32 what a GPU's fast functions may take.
ULP = {mx.float32: 5e-5, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}
# Of a row's largest element. What is read out of a packed pool is rounded, and so are weights and the result: each by
# half an ULP at most. Correct kernels are off by 1.0 at most in the harness, for all that `cidery worker selftest` has.
_MAX_ULPS = 2.0

Pool = TypeVar("Pool", mx.array, QuantizedPool, mx.array | QuantizedPool)


def exact(pool: Pool) -> Pool:
    """The same values in float32; those of a packed pool come out without a rounding."""
    if isinstance(pool, QuantizedPool):
        return replace(pool, scales=exact(pool.scales), biases=exact(pool.biases))
    return pool.astype(mx.float32)


def differs(ours: mx.array, truth: mx.array, slack: float = 0.0) -> str | None:
    """None if each element is near `truth` float32, measured by the row (last axis) that it is in; else what is wrong.

    `slack`: the least that is allowed, as a share of the row's largest element. A row of zeros must be zeros.
    """
    share = max(_MAX_ULPS * ULP[ours.dtype], slack)
    got, want = (np.array(array.astype(mx.float32)) for array in (ours, truth))
    errors = np.abs(got - want).max(axis=-1)
    allowed = share * np.abs(want).max(axis=-1)
    # Not "errors > allowed", which a NaN would pass.
    wrong = np.flatnonzero(~(errors <= allowed))
    if not wrong.size:
        return None
    worst = wrong[np.argmax((errors - allowed).flat[wrong])]
    return f"it differs from its twin by {errors.flat[worst]:.2g} where {allowed.flat[worst]:.2g} is allowed"
