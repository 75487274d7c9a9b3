"""What decode kernels accept as the keys, or the values, of one layer."""

import mlx.core as mx

from worker.metal.quantized import QuantizedPool

# A plain pool is `[num_blocks, num_kv_heads, block_size, head_dim]`, or the same with the first two axes as one.
KVPool = mx.array | QuantizedPool


def arrays_of(pool: KVPool) -> list[mx.array]:
    """What a kernel reads of a pool."""
    return [pool.packed, pool.scales, pool.biases] if isinstance(pool, QuantizedPool) else [pool]


def slot_bytes_of(pool: KVPool) -> int:
    """Bytes of a slot of one KV head, scales and biases included."""
    return sum(array.shape[-1] * array.dtype.size for array in arrays_of(pool))
