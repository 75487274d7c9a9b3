"""What one layer keeps per token: the only thing that the layout planner knows of a model."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """Keys and values of every past token, for as long as the sequence lives.

    Raises ValueError unless every field is at least 1.
    """

    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    def __post_init__(self) -> None:
        for name, value in (
            ("num_kv_heads", self.num_kv_heads),
            ("head_dim", self.head_dim),
            ("dtype_bytes", self.dtype_bytes),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer: its key and its value."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype_bytes
