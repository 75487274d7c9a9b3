"""Loads an mlx-lm model and finds out what running it over paged KV takes: layer shapes, head, vocabulary, limits.

The model's own classes run unmodified. A family is run only if it is in the reviewed registry below, each entry of
which the equality sweep in the tests holds against mlx-lm; anything else is refused by name instead of guessed.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import _download, load_config, load_model

from worker import attention, cpu_math, cpu_rope
from worker.attention import PagedCache, Step
from worker.batch import Batch
from worker.errors import UnsupportedModelError
from worker.kv_shapes import LayerShape

# Modules of mlx_lm.models whose layers all attend fully, through mlx-lm's helper, with keys and values of one shape.
FULL_ATTENTION_MODULES = frozenset(
    {
        "Klear",
        "apertus",
        "bailing_moe",
        "cohere",
        "dbrx",
        "deepseek",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone",
        "gemma",
        "glm",
        "glm4",
        "glm4_moe",
        "gpt2",
        "gpt_neox",
        "gptj",
        "granite",
        "granitemoe",
        "helium",
        "hunyuan",
        "hunyuan_v1_dense",
        "internlm2",
        "internlm3",
        "lille-130m",
        "llama",
        "mimo",
        "minicpm",
        "minimax",
        "mixtral",
        "nanochat",
        "nemotron",
        "olmo2",
        "olmoe",
        "openelm",
        "phi",
        "phi3",
        "phimoe",
        "phixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "stablelm",
        "starcoder2",
        "telechat3",
    }
)

# Where families keep their output projection, as a path from the model; the first that exists is it.
_HEADS = ("lm_head", "output", "embed_out", "model.lm_head", "model.embed_out")
# Where they keep the embedding that serves as projection when there is none.
_EMBEDDINGS = (
    "model.embed_tokens",
    "model.word_embeddings",
    "model.tok_embeddings",
    "model.wte",
    "transformer.wte",
    "transformer.token_embeddings",
    "transformer.tok_embeddings",
)
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_context_length", "seq_length")
_DEFAULT_CONTEXT_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's generation_config asks for where a request is silent."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run over paged KV."""

    model: Module
    family: str
    layers: tuple[LayerShape, ...]
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    weights_bytes: int
    sampling_defaults: SamplingDefaults


class SamplingHead:
    """Stands in for a model's output projection and computes only the rows that sample."""

    def __init__(self, project: Callable[[mx.array], mx.array], step: Step) -> None:
        self.project = project
        self.step = step

    def __call__(self, hidden: mx.array) -> mx.array:
        """`[num_sampled, 1, hidden]`, or `[1, num_sampled, hidden]` in a flat step, to logits of that shape."""
        if not self.step.is_running:
            return self.project(hidden)
        batch = self.step.batch
        if batch.samples_all or not batch.sampled_rows:
            return self.project(hidden)
        if batch.is_flat:
            # A flat step has one sequence, which samples after its last token.
            return self.project(hidden[:, -1:])
        return self.project(hidden[mx.array(batch.sampled_rows, mx.int32)])


class _ProbingCache(KVCache):
    """Remembers what a layer stores in it and asks of it."""

    shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    dtype: mx.Dtype | None = None
    window_size: int | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.shapes, self.dtype = (keys.shape, values.shape), keys.dtype
        return super().update_and_fetch(keys, values)  # type: ignore[no-untyped-call, no-any-return]

    def make_mask(self, *args: Any, window_size: int | None = None, **kwargs: Any) -> Any:
        self.window_size = window_size
        return super().make_mask(*args, window_size=window_size, **kwargs)  # type: ignore[no-untyped-call]


def load(model: str, *, dtype: str) -> LoadedModel:
    """Load weights from a directory or a hub id. `dtype` is "auto" or the name of an MLX float type.

    "auto" is float32 on a CPU, where half precision is emulated, and the model's own type on Metal. Raises
    UnsupportedModelError for a family that is not reviewed, FileNotFoundError if there are no weights.
    """
    path = download(model)
    config = load_config(path)
    loaded, _ = load_model(path, lazy=True)
    if dtype != "auto":
        loaded.set_dtype(getattr(mx, dtype))
    elif mx.default_device() == mx.Device(mx.cpu):
        loaded.set_dtype(mx.float32)
    loaded.eval()
    mx.eval(loaded.parameters())
    return adapt(loaded, config, _sampling_defaults(path))


def download(model: str) -> Path:
    """The directory of `model`, which is one already or a hub id to fetch."""
    path: Path = _download(model)
    return path


def adapt(model: Module, config: Mapping[str, Any], defaults: SamplingDefaults | None = None) -> LoadedModel:
    """Inspect a model whose weights are loaded. Raises UnsupportedModelError if it cannot be run exactly."""
    while hasattr(model, "language_model"):
        # A vision wrapper without its vision part; it may hide what kind of cache the text model wants.
        model = model.language_model
    family = type(model).__module__.removeprefix("mlx_lm.models.")
    if family not in FULL_ATTENTION_MODULES:
        known = ", ".join(sorted(FULL_ATTENTION_MODULES))
        raise UnsupportedModelError(f"model family {family!r} is not supported; supported are: {known}")
    layers, vocab_size = _probe(model, family)
    text_config = {**config, **config.get("text_config", {})}
    return LoadedModel(
        model=model,
        family=family,
        layers=layers,
        vocab_size=vocab_size,
        max_model_len=next((int(text_config[k]) for k in _CONTEXT_KEYS if text_config.get(k)), _DEFAULT_CONTEXT_TOKENS),
        eos_token_ids=_token_ids(config.get("eos_token_id", text_config.get("eos_token_id"))),
        weights_bytes=sum(weight.nbytes for _, weight in _weights(model)),
        sampling_defaults=defaults or SamplingDefaults(),
    )


def attach(loaded: LoadedModel, step: Step) -> list[PagedCache]:
    """Put the sampling head and the attention dispatcher into place; the result goes to the model as its cache."""
    attention.install()
    if cpu_math.is_available():
        cpu_math.install()
        cpu_rope.install(step)
    _attach_head(loaded.model, step)
    return [PagedCache(step, layer) for layer in range(len(loaded.layers))]


def sampled_logits(logits: mx.array, batch: Batch) -> mx.array:
    """What the model returned for `batch`, as `[num_sampled, vocab]`."""
    rows = logits.reshape(-1, logits.shape[-1])
    if rows.shape[0] == len(batch.sampled_rows):
        return rows
    # A family that multiplies by its embedding's weight directly, past the head: it computed every row.
    return rows[mx.array(batch.sampled_rows, mx.int32)]


def _probe(model: Module, family: str) -> tuple[tuple[LayerShape, ...], int]:
    """Run one token to see what each layer stores, and how many logits come out."""
    caches = make_prompt_cache(model)
    foreign = sorted({type(cache).__name__ for cache in caches} - {KVCache.__name__})
    if foreign:
        raise UnsupportedModelError(f"{family}: its caches are {', '.join(foreign)}; supported is KVCache alone")
    probes = [_ProbingCache() for _ in caches]  # type: ignore[no-untyped-call]
    logits = model(mx.array([[0]], mx.int32), cache=probes)
    layers = []
    for index, probe in enumerate(probes):
        if probe.shapes is None or probe.dtype is None:
            raise UnsupportedModelError(f"{family}: layer {index} does not use its cache")
        if probe.window_size is not None:
            raise UnsupportedModelError(
                f"{family}: layer {index} attends through a window of {probe.window_size} tokens"
            )
        key_shape, value_shape = probe.shapes
        if key_shape != value_shape:
            raise UnsupportedModelError(f"{family}: layer {index} has keys {key_shape} but values {value_shape}")
        layers.append(LayerShape(num_kv_heads=key_shape[1], head_dim=key_shape[3], dtype=probe.dtype))
    return tuple(layers), logits.shape[-1]


def _attach_head(model: Module, step: Step) -> None:
    for path in _HEADS:
        owner, name = _owner(model, path)
        head = getattr(owner, name, None)
        if isinstance(head, SamplingHead):
            head = head.project
        if isinstance(head, Module):
            setattr(owner, name, SamplingHead(head, step))
            return
    for path in _EMBEDDINGS:
        owner, name = _owner(model, path)
        embedding = getattr(owner, name, None)
        if isinstance(embedding, Module):
            embedding.as_linear = SamplingHead(functools.partial(type(embedding).as_linear, embedding), step)  # type: ignore[attr-defined]
            return
    raise UnsupportedModelError(f"{type(model).__module__}: its output projection was not found")


def _owner(model: Module, path: str) -> tuple[Module | None, str]:
    *parents, name = path.split(".")
    owner: Module | None = model
    for parent in parents:
        owner = getattr(owner, parent, None)
    return owner, name


def _weights(model: Module) -> list[tuple[str, mx.array]]:
    return tree_flatten(model.parameters())  # type: ignore[no-untyped-call, return-value]


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _sampling_defaults(path: Path) -> SamplingDefaults:
    file = path / "generation_config.json"
    if not file.exists():
        return SamplingDefaults()
    given = json.loads(file.read_text())
    # "do_sample": false is how that file spells greedy.
    temperature = 0.0 if given.get("do_sample") is False else given.get("temperature")
    known = {"temperature": temperature, "top_k": given.get("top_k"), "top_p": given.get("top_p")}
    return SamplingDefaults(**{name: value for name, value in known.items() if value is not None})
