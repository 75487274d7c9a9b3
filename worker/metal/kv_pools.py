"""What kernels accept as the keys, or the values, of one layer."""

from typing import Protocol

import mlx.core as mx


class PackedPool(Protocol):
    """A pool in the format of `mx.quantize`, mode affine: `x = scale * code + bias`, both shared by a group.

    Shapes: `packed [num_blocks, num_kv_heads, block_size, head_dim * bits / 32]` uint32, `scales` and `biases
    [num_blocks, num_kv_heads, block_size, head_dim / group_size]` in the type of the rows.
    """

    @property
    def packed(self) -> mx.array: ...  # noqa: D102
    @property
    def scales(self) -> mx.array: ...  # noqa: D102
    @property
    def biases(self) -> mx.array: ...  # noqa: D102
    @property
    def bits(self) -> int: ...  # noqa: D102
    @property
    def group_size(self) -> int: ...  # noqa: D102


# A plain pool is `[num_blocks, num_kv_heads, block_size, head_dim]`, or the same with the first two axes as one.
KVPool = mx.array | PackedPool


def arrays_of(pool: KVPool) -> list[mx.array]:
    """What a kernel reads of a pool."""
    return [pool] if isinstance(pool, mx.array) else [pool.packed, pool.scales, pool.biases]


def head_dim_of(pool: KVPool) -> int:
    """Elements of a slot."""
    if isinstance(pool, mx.array):
        return int(pool.shape[-1])
    return int(pool.packed.shape[-1]) * 32 // pool.bits


def block_size_of(pool: KVPool) -> int:
    """Slots of a block."""
    return int(arrays_of(pool)[0].shape[-2])


def dtype_of(pool: KVPool) -> mx.Dtype:
    """Type of the rows that went in."""
    return arrays_of(pool)[-1].dtype


def slot_bytes_of(pool: KVPool) -> int:
    """Bytes of a slot, scales and biases included."""
    return sum(array.shape[-1] * array.dtype.size for array in arrays_of(pool))
