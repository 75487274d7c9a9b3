"""Settings of each process: frozen dataclasses, built once from the command line, passed down as the smallest part."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Self

# Sampling an answer must never need more memory than this for its request; ~1M tokens as JSON text.
MAX_BODY_BYTES = 8 * 1024 * 1024
# A node message carries one whole prompt: 4 bytes a token and its hashes, so well above the public limit.
MAX_NODE_MESSAGE_BYTES = 64 * 1024 * 1024

# A Mac sends something on each gateway's stream at least this often; silence of five times that means it hangs.
LINK_HEARTBEAT_S = 1.0
LINK_SILENCE_S = 5.0

SPECULATION_METHODS = ("off", "ngram", "draft", "auto")
# A step's lookahead stays within a block or two.
MAX_SPECULATIVE_TOKENS = 15
# Keys and values may be quantised to so many bits, in groups of so many elements: what the worker's kernels read.
KV_BITS = (4, 8)
KV_GROUP_SIZES = (32, 64)

NAMESPACE = "cidery"
ROUTER_NAME = "router"


def bundled_model() -> str:
    """Folder of the model that comes with the package."""
    return str(Path(str(resources.files("cluster"))) / "bundled" / "cidery-tiny")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, under which name, with how much context."""

    # A folder or a hub id that mlx-lm can load.
    path: str
    # What clients call it.
    name: str
    # None: what the model was made for.
    max_model_len: int | None = None
    # auto: the model's own on a GPU, float32 on a CPU, where narrower types are slower.
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2 tokens, got {self.max_model_len}")
        if self.dtype not in ("auto", "float32", "float16", "bfloat16"):
            raise ValueError(f"dtype must be auto, float32, float16 or bfloat16, got {self.dtype!r}")


def check_quantization(kv_bits: int | None, kv_group_size: int | None) -> None:
    """Raises ValueError for a way to store keys and values that there is not."""
    for name, value, known in (("kv_bits", kv_bits, KV_BITS), ("kv_group_size", kv_group_size, KV_GROUP_SIZES)):
        if value is not None and value not in known:
            raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {value}")
    if kv_group_size is not None and kv_bits is None:
        raise ValueError(f"kv_group_size {kv_group_size} says how keys and values are quantised; it needs kv_bits")


@dataclass(frozen=True, slots=True)
class KVConfig:
    """How much memory the KV cache of one Mac may take."""

    block_size_tokens: int = 16
    # None: memory_utilization decides.
    cache_memory_bytes: int | None = None
    # Share of the working set that weights, activations and KV cache may reach together.
    memory_utilization: float = 0.92
    enable_prefix_caching: bool = True
    # What is forgotten first: a name in cluster.kv.policies.POLICIES.
    retention: str = "value"
    # False: layers with a window keep everything, as full attention does.
    enable_hybrid: bool = True
    # None: keys and values are stored in the model's type.
    kv_bits: int | None = None
    # None: the largest that the model's heads allow.
    kv_group_size: int | None = None
    # Kept free beside the KV cache, for adapters.
    adapter_memory_bytes: int = 256 * 1024 * 1024

    def __post_init__(self) -> None:
        check_quantization(self.kv_bits, self.kv_group_size)
        check_block_size(self.block_size_tokens)
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ValueError(f"memory_utilization must be in (0, 1], got {self.memory_utilization}")
        if self.cache_memory_bytes is not None and self.cache_memory_bytes < 1:
            raise ValueError(f"cache_memory_bytes must be positive, got {self.cache_memory_bytes}")
        if self.adapter_memory_bytes < 0:
            raise ValueError(f"adapter_memory_bytes must be at least 0, got {self.adapter_memory_bytes}")


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Bounds of one step and of the queue of one Mac."""

    max_num_seqs: int = 64
    # Rows of one step: decodes first, then prefill up to this sum.
    max_num_batched_tokens: int = 512
    max_waiting: int = 1024

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_num_seqs ({self.max_num_seqs}), a token for each running "
                f"request; got {self.max_num_batched_tokens}"
            )
        for name, least in (("max_num_seqs", 1), ("max_num_batched_tokens", 1), ("max_waiting", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """How tokens are guessed for requests that don't say; see protos/cidery/v1/sampling.proto."""

    method: str = "off"
    # Guessed tokens of one sequence in a step, at most.
    num_tokens: int = 8
    # A folder or hub id of a smaller model with the same tokens.
    draft_model: str | None = None

    def __post_init__(self) -> None:
        if self.method not in SPECULATION_METHODS:
            raise ValueError(f"speculative method must be {', '.join(SPECULATION_METHODS)}, got {self.method!r}")
        if not 1 <= self.num_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(
                f"num_speculative_tokens must be from 1 to {MAX_SPECULATIVE_TOKENS}, got {self.num_tokens}"
            )
        if self.method == "draft" and self.draft_model is None:
            raise ValueError("speculative method draft needs a draft model")
        if self.method in ("off", "ngram") and self.draft_model is not None:
            raise ValueError(f"speculative method {self.method} has no use for a draft model; leave one of them out")

    @property
    def max_drafts(self) -> int:
        """Guessed tokens of one sequence in a step; 0 if nothing is guessed."""
        return 0 if self.method == "off" else self.num_tokens


@dataclass(frozen=True, slots=True)
class MacConfig:
    """One KVManager and its worker."""

    model: ModelConfig
    kv: KVConfig = field(default_factory=KVConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what travels to the actor, and what tells whether a running actor has the same settings."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Inverse of `to_dict`."""
        return cls(
            ModelConfig(**values["model"]),
            KVConfig(**values["kv"]),
            BatchConfig(**values["batch"]),
            SpeculationConfig(**values["speculation"]),
        )


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Where the gateway listens."""

    host: str = "127.0.0.1"
    grpc_port: int = 50051
    http_port: int = 8000
    # Shares of a busy Mac in proportion; a tenant without one has 1.
    tenant_weights: Mapping[str, float] = field(default_factory=dict)
    # None: no log of requests is kept; see cluster/request_log.py.
    request_log: str | None = None

    def __post_init__(self) -> None:
        for tenant, weight in self.tenant_weights.items():
            if not 1e-6 <= weight <= 1e6:
                raise ValueError(f"the weight of tenant {tenant!r} must be from 1e-6 to 1e6, got {weight}")
        for name in ("grpc_port", "http_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name} must be 0 (any free one) to 65535, got {getattr(self, name)}")


def check_block_size(num_tokens: int) -> None:
    """Raises ValueError for blocks that the kernels don't know."""
    if num_tokens not in (16, 32):
        raise ValueError(f"block_size must be 16 or 32 tokens, got {num_tokens}")


def default_model_name(path: str) -> str:
    """What clients call a model that was given no name: the hub id, or the folder's last part."""
    return Path(path).resolve().name if Path(path).is_dir() else path
