"""The shape of what one layer stores, shared by pools, kernels and models."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer stores for a token: `num_kv_heads` keys and as many values of `head_dim` elements."""

    num_kv_heads: int
    head_dim: int
    dtype: mx.Dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V together."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.size
