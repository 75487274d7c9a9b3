"""Loads an mlx-lm model and finds out what running it over paged KV takes: layer shapes, head, vocabulary, limits.

The model's own classes run unmodified, as the reviewed registry says (`worker.registry`), which the equality sweep in
the tests holds against mlx-lm. A class that nobody has reviewed is run one sequence at a time, in mlx-lm's own layout.
"""

import functools
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _download, load_config, load_model

from worker import (
    attention,
    cpu_math,
    cpu_rope,
    cpu_states,
    discovery,
    fused_rope,
    inspection,
    latent,
    mixers,
    overrides,
    row_lanes,
)
from worker.attention import PagedCache, Step
from worker.batch import Batch
from worker.kv_shapes import CacheShape, StateShape
from worker.lanes import Lanes
from worker.mixers import StateCache
from worker.registry import Treatment, runs_over_slots, treatments_of, turns_queries_with_keys

logger = logging.getLogger(__name__)

# Where families keep their output projection, as a path from the model; the first that exists is it.
_HEADS = ("lm_head", "output", "embed_out", "model.lm_head", "model.embed_out", "language_model.lm_head")
# Where they keep the embedding that serves as projection when there is none.
_EMBEDDINGS = (
    "model.embed_tokens",
    "model.word_embeddings",
    "model.tok_embeddings",
    "model.wte",
    "model.embeddings",
    "model.embedding",
    "model.language_model.embed_tokens",
    "backbone.embeddings",
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


class Layout(StrEnum):
    """How a step of the model is laid out.

    Token rows, which a single sequence may take flat (`FLAT`) or not (`ROWS`), or one forward for each sequence, over
    keys in mlx-lm's own layout (`DENSE`): slow, and right for whatever mlx-lm itself can generate with.
    """

    FLAT = "flat"
    ROWS = "rows"
    DENSE = "dense"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run over paged KV."""

    model: Module
    family: str
    layout: Layout
    # Classes that are given caches and that nobody has reviewed.
    unreviewed: tuple[str, ...]
    caches: tuple[CacheShape, ...]
    # Whether kernels may update all of its recurrent states in their slots.
    runs_over_slots: bool
    # Whether queries may be turned by the launch that turns their keys.
    fuses_rope: bool
    # Whether its graph may depend on the tokens' values.
    reads_values: bool
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    weights_bytes: int
    sampling_defaults: SamplingDefaults

    @property
    def has_states(self) -> bool:
        """Whether it has recurrent layers."""
        return any(isinstance(shape, StateShape) for shape in self.caches)


@dataclass(frozen=True, slots=True)
class AttachedCaches:
    """What goes to the model as its cache, and the same caches one by one, by index."""

    nested: Any
    leaves: Sequence[PagedCache | StateCache]

    @property
    def states(self) -> list[StateCache]:
        """The recurrent ones."""
        return [leaf for leaf in self.leaves if isinstance(leaf, StateCache)]

    def forget(self) -> None:
        """Let go of a step's arrays."""
        for leaf in self.leaves:
            leaf.forget()


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
        self.step.hidden = hidden
        if batch.samples_all or not batch.sampled_rows:
            return self.project(hidden)
        if batch.is_flat:
            # A flat step has one sequence, which samples after its last tokens.
            return self.project(hidden[:, -len(batch.sampled_rows) :])
        return self.project(hidden[mx.array(batch.sampled_rows, mx.int32)])


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
    model = _text_model(model)
    family = inspection.family_of(model)
    treatments = treatments_of(model)
    unknown = sorted(inspection.qualified_name(cls) for cls, treatment in treatments.items() if treatment is None)
    if unknown:
        logger.warning(
            "model family %s: %s not reviewed; runs one sequence at a time, which is slow", family, ", ".join(unknown)
        )
    latent.fold(model, [cls for cls, treatment in treatments.items() if treatment is Treatment.FOLDED])
    caches, vocab_size = discovery.probe(model, family, _latent_ranks(model))
    text_config = {**config, **config.get("text_config", {})}
    return LoadedModel(
        model=model,
        family=family,
        layout=_layout(treatments),
        unreviewed=tuple(unknown),
        caches=caches,
        runs_over_slots=all(runs_over_slots(cls) for cls, how in treatments.items() if how is Treatment.SPLIT),
        fuses_rope=_fuses_rope(treatments),
        reads_values=inspection.reads_values(model),
        vocab_size=vocab_size,
        max_model_len=next((int(text_config[k]) for k in _CONTEXT_KEYS if text_config.get(k)), _DEFAULT_CONTEXT_TOKENS),
        eos_token_ids=_token_ids(config.get("eos_token_id", text_config.get("eos_token_id"))),
        weights_bytes=sum(weight.nbytes for _, weight in _weights(model)),
        sampling_defaults=defaults or SamplingDefaults(),
    )


def attach(loaded: LoadedModel, step: Step) -> AttachedCaches:
    """Put the sampling head, the attention dispatcher and the mixers' wrappers into place."""
    attention.install()
    if cpu_math.is_available():
        cpu_math.install()
        cpu_rope.install()
        cpu_states.install()
    if step.kernels.rope is not None:
        fused_rope.install(step, step.kernels.rope)
    _attach_head(loaded.model, step)
    if loaded.layout is Layout.ROWS:
        latent.multiply_by_heads()
    for cls, treatment in treatments_of(loaded.model).items():
        if treatment is Treatment.SPLIT:
            if step.kernels.updates_states_in_place:
                mixers.install_over_slots(cls)
            mixers.install(cls)
        elif treatment is Treatment.OVERRIDE:
            overrides.install(cls)
    leaves: list[PagedCache | StateCache] = []
    for index, shape in enumerate(loaded.caches):
        leaves.append(
            StateCache(step, index, shape) if isinstance(shape, StateShape) else PagedCache(step, index, shape)
        )
    return AttachedCaches(discovery.nested(make_prompt_cache(loaded.model), iter(leaves)), leaves)


def part_rows(loaded: LoadedModel, lanes: Lanes) -> bool:
    """Let modules of an attached model run their rows in lanes, on a CPU; whether any of them does.

    Not where nobody has read what the model's code does with rows, or where it looks at numbers on the way.
    """
    if loaded.layout is Layout.DENSE or loaded.reads_values or not cpu_math.is_available():
        return False
    return bool(row_lanes.install(loaded.model, lanes, treatments_of(loaded.model), loaded.vocab_size))


def sampled_logits(logits: mx.array, batch: Batch) -> mx.array:
    """What the model returned for `batch`, as `[num_sampled, vocab]`."""
    rows = logits.reshape(-1, logits.shape[-1])
    if rows.shape[0] == len(batch.sampled_rows):
        return rows
    # A family that multiplies by its embedding's weight directly, past the head: it computed every row.
    return rows[mx.array(batch.sampled_rows, mx.int32)]


def _text_model(model: Module) -> Module:
    """Inside of a vision wrapper, which may hide what kind of cache its text model wants."""
    inner = getattr(model, "language_model", None)
    while isinstance(inner, Module) and (hasattr(inner, "make_cache") or hasattr(inner, "layers")):
        model, inner = inner, getattr(inner, "language_model", None)
    return model


def _latent_ranks(model: Module) -> list[int]:
    modules = model.modules()  # type: ignore[no-untyped-call]
    return sorted({module.kv_lora_rank for module in modules if hasattr(module, "kv_lora_rank")})


def _layout(treatments: Mapping[type, Treatment | None]) -> Layout:
    kinds = set(treatments.values())
    if None in kinds or Treatment.DENSE in kinds:
        return Layout.DENSE
    return Layout.ROWS if kinds & {Treatment.LATENT, Treatment.FOLDED} else Layout.FLAT


def _fuses_rope(treatments: Mapping[type, Treatment | None]) -> bool:
    attention = [cls for cls, how in treatments.items() if how is not Treatment.SPLIT]
    return bool(attention) and all(turns_queries_with_keys(cls) for cls in attention)


def _attach_head(model: Module, step: Step) -> None:
    """To the output projection and to the embedding: a few families have both and use either."""
    found = False
    for path in _HEADS:
        owner, name = _owner(model, path)
        head = getattr(owner, name, None)
        if isinstance(head, SamplingHead):
            head = head.project
        if isinstance(owner, Module) and isinstance(head, Module):
            # Into the module's own dictionary: some families ask whether the head is in it.
            owner.pop(name, None)
            owner[name] = SamplingHead(head, step)
            found = True
            break
    for path in _EMBEDDINGS:
        owner, name = _owner(model, path)
        embedding = getattr(owner, name, None)
        if isinstance(embedding, Module):
            embedding.as_linear = SamplingHead(functools.partial(_as_linear, embedding), step)
            found = True
            break
    if not found:
        name = inspection.family_of(model)
        logger.warning("%s: its output projection was not found; it will compute logits of every row", name)


def _as_linear(embedding: Any, hidden: mx.array) -> mx.array:
    """By the class that the embedding has now: it changes when an adapter comes or goes."""
    logits: mx.array = type(embedding).as_linear(embedding, hidden)
    return logits


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
