"""Indices into the pools, whose first axis is block_id * num_kv_heads + head: see `worker.kv_tensors`."""

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


def pool_rows(block_tables: NDArray[np.int32], num_kv_heads: int) -> mx.array:
    """Pool rows of every block of `block_tables [rows, blocks]`: `[rows, num_kv_heads, blocks]`."""
    heads = np.arange(num_kv_heads, dtype=np.int32)[:, None]
    return mx.array(block_tables[:, None, :] * num_kv_heads + heads)
