"""Model shapes of the reuse benchmark: what each layer keeps, at which memory sizes, and what vLLM reached there."""

from dataclasses import dataclass

from cluster.kv.spec import FullAttentionSpec, LayerSpec, RecurrentStateSpec, SlidingWindowSpec, StateTensor

GIB = 2**30
REFERENCE = "vLLM 0.33 (its own model dims, see docs)"


@dataclass(frozen=True, slots=True)
class Costs:
    """Bytes that a prefix costs at the least, all layers together, whatever blocks they lie in."""

    full_token_bytes: int
    window_token_bytes: int
    window: int
    state_bytes: int

    @property
    def num_window_tokens(self) -> int:
        """Tokens before a resume point whose window KV must be there."""
        return self.window - 1 if self.window else 0

    def sequence_bytes(self, num_tokens: int) -> int:
        """Of a sequence on its own at a length of `num_tokens` computed tokens."""
        num_window = min(num_tokens, self.num_window_tokens)
        return num_tokens * self.full_token_bytes + num_window * self.window_token_bytes + self.state_bytes


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's layers and memory sizes by workload. `reference`: vLLM's percent at the sizes of "cyclic"."""

    name: str
    specs: tuple[LayerSpec, ...]
    sizes_gib: dict[str, tuple[int, ...]]
    reference: tuple[float, ...]

    def costs(self) -> Costs:
        """Sums over the layers. At most one width of window."""
        full = window_bytes = state = window = 0
        for spec in self.specs:
            if isinstance(spec, FullAttentionSpec):
                full += spec.token_bytes
            elif isinstance(spec, SlidingWindowSpec):
                assert window in (0, spec.window), "windows of two widths"
                window_bytes, window = window_bytes + spec.token_bytes, spec.window
            elif isinstance(spec, RecurrentStateSpec):
                state += spec.state_bytes
            else:
                raise TypeError(f"no costs known of {spec}")
        return Costs(full, window_bytes, window, state)


def _sizes(cyclic: tuple[int, ...], agentic: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {"cyclic": cyclic, "cyclic-long": cyclic, "agentic": agentic}


def _dense() -> Shape:
    specs = (FullAttentionSpec(num_kv_heads=8, head_dim=128),) * 36
    return Shape("dense-8B", specs, _sizes((4, 8, 12, 16), (24, 48, 96, 192)), (50.0, 65.0, 92.1, 99.8))


def _gemma() -> Shape:
    window = SlidingWindowSpec(num_kv_heads=16, head_dim=128, window=1024)
    specs = (*(window,) * 5, FullAttentionSpec(num_kv_heads=16, head_dim=128)) * 10
    sizes = _sizes((8, 12, 16, 20, 24), (16, 32, 64, 128))
    return Shape("gemma-like", specs, sizes, (47.9, 48.9, 53.7, 71.6, 92.1))


def _gpt_oss() -> Shape:
    window = SlidingWindowSpec(num_kv_heads=8, head_dim=64, window=128)
    specs = (window, FullAttentionSpec(num_kv_heads=8, head_dim=64)) * 12
    return Shape("gpt-oss-like", specs, _sizes((1, 2, 3, 4), (4, 8, 16, 32)), (47.9, 54.3, 72.4, 92.1))


def _qwen3_next() -> Shape:
    state = RecurrentStateSpec("gated_delta_net", (StateTensor((32, 128, 128), 4), StateTensor((3, 8192), 2)))
    specs = (*(state,) * 3, FullAttentionSpec(num_kv_heads=2, head_dim=256)) * 12
    sizes = _sizes((2, 3, 4, 6, 8), (4, 8, 16, 32))
    return Shape("qwen3-next-like", specs, sizes, (33.6, 35.9, 44.6, 75.4, 75.4))


SHAPES = {shape.name: shape for shape in (_dense(), _gemma(), _gpt_oss(), _qwen3_next())}
