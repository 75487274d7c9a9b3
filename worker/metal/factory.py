"""What the kernels need of `mx.fast.metal_kernel`, so that tests can hand in another implementation of it."""

from typing import Any, Protocol

import mlx.core as mx

_TAGS = {mx.float32: "f32", mx.float16: "f16", mx.bfloat16: "bf16", mx.uint32: "u32", mx.int32: "i32"}


class MetalKernel(Protocol):
    """Signature of `mx.fast.metal_kernel` as far as it is used here."""

    def __call__(
        self,
        *,
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
    ) -> Any:
        """A callable that launches the kernel."""
        ...


def dtype_tag(dtype: mx.Dtype) -> str:
    """Part of a kernel's name: MLX caches compiled kernels by name."""
    return _TAGS.get(dtype) or str(dtype).rsplit(".", 1)[-1]
