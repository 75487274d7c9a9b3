"""Models of the speculation benchmark: the bundled one in the body of a larger one, and one that guesses its tokens.

How fast guessing is depends on what the weights say, and no large model may be fetched. So the bundled model's weights
are laid into a model of 39 M parameters, with zeros around them: it computes the same answers at the price of its size.
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from mlx_lm.utils import load_config

_WIDTH = 512
_INNER = 1536
_LAYERS = 12
# Heads are the bundled model's, as many as fill the width.
_HEADS = 16
_KV_HEADS = 8


def make_small(folder: Path, noise: float = 0.0) -> tuple[Module, dict[str, Any]]:
    """The bundled model in float32; with `noise` in its matrices, relative to their spread, so that it errs."""
    config = load_config(folder)
    weights = dict(mx.load(str(folder / "model.safetensors")))
    mx.random.seed(1)
    for name, array in weights.items():
        array = array.astype(mx.float32)
        if noise and array.ndim == 2:
            array += noise * array.std() * mx.random.normal(array.shape)
        weights[name] = array
    return _built(config, weights), config


def make_large(folder: Path) -> tuple[Module, dict[str, Any]]:
    """The bundled model's answers from 39 M parameters."""
    config = load_config(folder)
    small = {name: array.astype(mx.float32) for name, array in mx.load(str(folder / "model.safetensors")).items()}
    spread = _WIDTH / config["hidden_size"]
    large = dict(config) | {
        "hidden_size": _WIDTH,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        # The mean square over the zeros too is so much smaller.
        "rms_norm_eps": config["rms_norm_eps"] / spread,
    }
    shapes = dict(tree_flatten(_model(large).parameters()))
    mx.random.seed(0)
    weights = {}
    for name, blank in shapes.items():
        source = small.get(name)
        if source is None:
            # A layer beyond the bundled model's: it computes something, and adds nothing.
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            ones = mx.ones(blank.shape) if blank.ndim == 1 else 0.02 * mx.random.normal(blank.shape)
            weights[name] = mx.zeros(blank.shape) if adds else ones
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            weights[name] = source
        elif blank.ndim == 1:
            weights[name] = _laid_in(source / spread**0.5, blank.shape)
        else:
            weights[name] = _laid_in(source, blank.shape)
    return _built(large, weights), large


def _laid_in(source: mx.array, shape: tuple[int, ...]) -> mx.array:
    return mx.pad(source, [(0, whole - has) for whole, has in zip(shape, source.shape, strict=True)])


def _model(config: dict[str, Any]) -> Module:
    model: Module = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    return model


def _built(config: dict[str, Any], weights: dict[str, mx.array]) -> Module:
    model = _model(config)
    model.load_weights(list(weights.items()))
    model.eval()
    mx.eval(model.parameters())
    return model
