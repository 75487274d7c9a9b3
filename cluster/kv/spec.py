"""What one layer keeps of a sequence: the only thing that the layout planner knows of a model.

Each spec also says which tokens must be there for a sequence to go on at a position: that is all that tells the kinds
apart afterwards.
"""

from collections.abc import Iterable
from dataclasses import dataclass


def _check_at_least_one(**fields: int) -> None:
    pairs: Iterable[tuple[str, int]] = fields.items()
    for name, value in pairs:
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How one element is stored: `bits` each, and `scale_bytes` more for every `group_size` elements if quantised."""

    bits: int = 16
    group_size: int = 0
    scale_bytes: int = 0

    def __post_init__(self) -> None:
        _check_at_least_one(bits=self.bits)
        if self.group_size < 0 or self.scale_bytes < 0 or (self.scale_bytes and not self.group_size):
            raise ValueError(
                f"a quantised format needs a group_size of at least 1 and scale_bytes of at least 0, got "
                f"group_size {self.group_size}, scale_bytes {self.scale_bytes}"
            )

    def bytes_for(self, num_elements: int) -> int:
        """Bytes of a vector of `num_elements`, its scales included."""
        num_groups = -(-num_elements // self.group_size) if self.group_size else 0
        return -(-num_elements * self.bits // 8) + num_groups * self.scale_bytes


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """Keys and values of every past token, for as long as the sequence lives."""

    num_kv_heads: int
    head_dim: int
    format: KVFormat = KVFormat()
    # Where values are narrower or wider than keys.
    value_head_dim: int | None = None

    def __post_init__(self) -> None:
        _check_attention(self.num_kv_heads, self.head_dim, self.value_head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer: its key and its value."""
        return _attention_bytes(self.num_kv_heads, self.head_dim, self.value_head_dim, self.format)


@dataclass(frozen=True, slots=True)
class MLASpec:
    """One latent vector and one rotary key of every past token; no values. Lives as long as full attention's keys.

    `index_dim` elements more where a sparse indexer keeps a key of its own (DeepSeek V3.2).
    """

    latent_dim: int
    rope_dim: int
    format: KVFormat = KVFormat()
    index_dim: int = 0

    def __post_init__(self) -> None:
        _check_at_least_one(latent_dim=self.latent_dim)
        if self.rope_dim < 0 or self.index_dim < 0:
            raise ValueError(f"rope_dim and index_dim must be at least 0, got {self.rope_dim} and {self.index_dim}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer."""
        return sum(map(self.format.bytes_for, (self.latent_dim, self.rope_dim, self.index_dim)))


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec:
    """Keys and values of the last `window` tokens, the newest included, and of the first `num_sink_tokens`."""

    num_kv_heads: int
    head_dim: int
    window: int
    format: KVFormat = KVFormat()
    value_head_dim: int | None = None
    num_sink_tokens: int = 0

    def __post_init__(self) -> None:
        _check_attention(self.num_kv_heads, self.head_dim, self.value_head_dim)
        _check_at_least_one(window=self.window)
        if self.num_sink_tokens < 0:
            raise ValueError(f"num_sink_tokens must be at least 0, got {self.num_sink_tokens}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer: its key and its value."""
        return _attention_bytes(self.num_kv_heads, self.head_dim, self.value_head_dim, self.format)

    def first_needed_token(self, num_tokens: int) -> int:
        """The oldest token that the token at position `num_tokens` sees; sinks apart."""
        return max(0, num_tokens - self.window + 1)


@dataclass(frozen=True, slots=True)
class ChunkedLocalSpec:
    """Keys and values of the tokens of the present chunk of `chunk` tokens (Llama 4)."""

    num_kv_heads: int
    head_dim: int
    chunk: int
    format: KVFormat = KVFormat()
    value_head_dim: int | None = None

    def __post_init__(self) -> None:
        _check_attention(self.num_kv_heads, self.head_dim, self.value_head_dim)
        _check_at_least_one(chunk=self.chunk)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer: its key and its value."""
        return _attention_bytes(self.num_kv_heads, self.head_dim, self.value_head_dim, self.format)

    def first_needed_token(self, num_tokens: int) -> int:
        """The oldest token that the token at position `num_tokens` sees."""
        return num_tokens // self.chunk * self.chunk


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a recurrent state."""

    shape: tuple[int, ...]
    dtype_bytes: int

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1 or self.dtype_bytes < 1:
            raise ValueError(
                f"a state tensor needs dimensions and dtype_bytes of at least 1, got {self.shape} of {self.dtype_bytes}"
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        num_bytes = self.dtype_bytes
        for dimension in self.shape:
            num_bytes *= dimension
        return num_bytes


@dataclass(frozen=True, slots=True)
class RecurrentStateSpec:
    """A state of fixed size that every token overwrites: Mamba, gated delta net, short convolution, RWKV.

    `kind` names the recurrence for people and keeps different ones in different groups.
    """

    kind: str
    tensors: tuple[StateTensor, ...]

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError(f"a recurrent state ({self.kind}) needs at least one tensor, got none")

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence in one layer."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class SharedKVSpec:
    """Reads the keys and values that layer `source` keeps, and keeps none."""

    source: int


AttentionSpec = FullAttentionSpec | MLASpec | SlidingWindowSpec | ChunkedLocalSpec
KVSpec = AttentionSpec | RecurrentStateSpec
LayerSpec = KVSpec | SharedKVSpec


def _attention_bytes(num_kv_heads: int, head_dim: int, value_head_dim: int | None, kv_format: KVFormat) -> int:
    value_dim = head_dim if value_head_dim is None else value_head_dim
    return num_kv_heads * (kv_format.bytes_for(head_dim) + kv_format.bytes_for(value_dim))


def _check_attention(num_kv_heads: int, head_dim: int, value_head_dim: int | None) -> None:
    value_dim = head_dim if value_head_dim is None else value_head_dim
    _check_at_least_one(num_kv_heads=num_kv_heads, head_dim=head_dim, value_head_dim=value_dim)
