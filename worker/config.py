"""The worker's settings, built once from the command line and passed down."""

from dataclasses import dataclass

DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One worker process.

    `model` is a directory or a hub id. `dtype` "auto" is float32 on a CPU and the model's own type on Metal.
    `max_num_seqs` and `max_num_batched_tokens` say how large steps will be, if that is known: then the largest is
    measured. `kv_bits` and `kv_group_size` as of `worker.kv_quantization`. `block_size` is what kernels are tested for.
    With `exits_with_stdin` the process ends when its standard input does, which happens when the parent dies, however
    it dies. `max_tokens` and `temperature` belong to `prompt`. A sequence may guess up to `num_speculative_tokens` a
    step, by a `draft_model` too if there is one.
    """

    model: str
    socket_path: str | None = None
    dtype: str = "auto"
    kv_bits: int | None = None
    kv_group_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int = 16
    exits_with_stdin: bool = False
    prompt: str | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    num_speculative_tokens: int = 0
    draft_model: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if self.kv_group_size is not None and self.kv_bits is None:
            raise ValueError(f"kv_group_size is {self.kv_group_size}, which needs kv_bits")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")
        if self.num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens is {self.num_speculative_tokens}; it must be at least 0")
        if (self.socket_path is None) == (self.prompt is None):
            raise ValueError("exactly one of socket_path (serve the manager) and prompt (answer it and end) is needed")
