"""Arrays on their way into a launch and out of it."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

# MLX's dtype, Metal's name for it as MLX writes it, and NumPy's type of the same bits.
_TYPES: list[tuple[mx.Dtype, str, type]] = [
    (mx.bool_, "bool", np.bool_),
    (mx.uint8, "uint8_t", np.uint8),
    (mx.uint16, "uint16_t", np.uint16),
    (mx.uint32, "uint32_t", np.uint32),
    (mx.uint64, "uint64_t", np.uint64),
    (mx.int8, "int8_t", np.int8),
    (mx.int16, "int16_t", np.int16),
    (mx.int32, "int32_t", np.int32),
    (mx.int64, "int64_t", np.int64),
    (mx.float16, "float16_t", np.float16),
    (mx.bfloat16, "bfloat16_t", np.uint16),
    (mx.float32, "float", np.float32),
]
_METAL_NAMES = {dtype: name for dtype, name, _ in _TYPES}
_NUMPY_TYPES = {dtype: np.dtype(numpy) for dtype, _, numpy in _TYPES}
_MLX_TYPES = {np.dtype(numpy): dtype for dtype, _, numpy in _TYPES if dtype != mx.bfloat16}


def mlx_dtype(dtype: Any) -> mx.Dtype:
    """MLX's dtype for one of MLX's or NumPy's. NumPy has no bfloat16."""
    if isinstance(dtype, mx.Dtype):
        if dtype not in _METAL_NAMES:
            raise ValueError(f"dtype {dtype} has no Metal type here: use one of {', '.join(map(str, _METAL_NAMES))}")
        return dtype
    if np.dtype(dtype) not in _MLX_TYPES:
        raise ValueError(f"dtype {dtype} has no Metal type: use one of {', '.join(map(str, _MLX_TYPES))}")
    return _MLX_TYPES[np.dtype(dtype)]


def metal_type(dtype: mx.Dtype) -> str:
    """Its name in the text that MLX generates."""
    return _METAL_NAMES[dtype]


class SparsePool:
    """An input of any size that holds only some rows of its first axis; reading another row is an error.

    `rows` maps an index to the row's content. A row that a kernel writes in place is updated or added. For offsets that
    do not fit 32 bits: a pool of more than 2^31 elements costs the memory of its rows.
    """

    def __init__(self, shape: Sequence[int], dtype: Any, rows: dict[int, Any]) -> None:
        self.shape = tuple(shape)
        self.dtype = mlx_dtype(dtype)
        self.rows = rows
        self.ndim = len(self.shape)
        self.size = int(np.prod(self.shape, dtype=np.int64))


class Input:
    """One input of a launch: its bytes and what MLX tells a kernel about it."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.value = value
        self.pool = value if isinstance(value, SparsePool) else None
        if self.pool is not None:
            self.dtype, self.shape = self.pool.dtype, self.pool.shape
            counts = [int(np.prod(self.shape[axis + 1 :], dtype=np.int64)) for axis in range(self.pool.ndim)]
            self.strides, self.is_contiguous = tuple(counts), True
            self.nbytes = self.pool.size * _NUMPY_TYPES[self.dtype].itemsize
            return
        self.dtype, self.bits = _bits(value)
        self._take(self.bits)

    def _take(self, bits: np.ndarray) -> None:
        self.bits = bits
        self.shape = bits.shape
        self.strides = tuple(step // bits.itemsize for step in bits.strides)
        self.is_contiguous = bits.flags.c_contiguous
        reach = sum((size - 1) * step for size, step in zip(bits.shape, bits.strides, strict=True)) + bits.itemsize
        if any(step < 0 for step in bits.strides):
            raise ValueError(f"input '{self.name}' has a negative stride, which no kernel here supports")
        self.nbytes = bits.nbytes if self.is_contiguous else reach

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def shares_memory(self, other: "Input") -> bool:
        """Whether their ranges of addresses overlap."""
        return self.pool is None and other.pool is None and bool(np.may_share_memory(self.bits, other.bits))

    @property
    def bits_type(self) -> np.dtype:
        """NumPy's type of the same bits."""
        return _NUMPY_TYPES[self.dtype]

    def make_contiguous(self) -> None:
        """What `ensure_row_contiguous` does: a copy, if it is not."""
        if not self.is_contiguous:
            self._take(np.ascontiguousarray(self.bits))

    def row_bytes(self, row: int) -> np.ndarray:
        """Content of one row of a sparse pool."""
        assert self.pool is not None
        dtype, bits = _bits(self.pool.rows[row])
        if dtype != self.dtype or bits.shape != self.shape[1:]:
            raise ValueError(
                f"row {row} of pool '{self.name}' is {dtype} {bits.shape}, not {self.dtype} {self.shape[1:]}"
            )
        return np.ascontiguousarray(bits)

    def set_row(self, row: int, bits: np.ndarray) -> None:
        """What a kernel wrote into a row of a sparse pool."""
        assert self.pool is not None
        self.pool.rows[row] = from_bytes(bits.tobytes(), bits.shape, self.dtype)


def _bits(value: Any) -> tuple[mx.Dtype, np.ndarray]:
    """Dtype and bits of an array or a number; shares memory with an array of MLX or NumPy."""
    if isinstance(value, bool | int | float):
        value = mx.array(value)
    if isinstance(value, mx.array):
        dtype = mlx_dtype(value.dtype)
        mx.eval(value)
        return dtype, np.array(value.view(mx.uint16) if dtype == mx.bfloat16 else value, copy=False)
    if isinstance(value, np.ndarray):
        return mlx_dtype(value.dtype), value
    raise TypeError(f"an input is an mx.array, a NumPy array, a number or a SparsePool, not {type(value).__name__}")


def filled(shape: Sequence[int], dtype: mx.Dtype, value: float) -> np.ndarray:
    """Bits of an output that starts with `value` everywhere."""
    _, bits = _bits(mx.full(tuple(shape), value, dtype=dtype))
    return bits


def from_bytes(data: bytes, shape: Sequence[int], dtype: Any) -> Any:
    """An output: an mx.array if MLX's dtype was asked for, else NumPy's."""
    own = mlx_dtype(dtype)
    bits = np.frombuffer(data, _NUMPY_TYPES[own]).reshape(tuple(shape))
    if not isinstance(dtype, mx.Dtype):
        return bits.copy()
    array = mx.array(bits)
    return array.view(mx.bfloat16) if own == mx.bfloat16 else array


def itemsize(dtype: mx.Dtype) -> int:
    return _NUMPY_TYPES[dtype].itemsize
