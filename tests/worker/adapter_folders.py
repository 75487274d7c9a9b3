"""Adapters made by mlx-lm's own tuner, with random weights, in folders as `mlx_lm.lora` leaves them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.tuner.utils import linear_to_lora_layers

LEAVES = ("lora_a", "lora_b", "m")


def write_adapter(
    folder: Path,
    model: Module,
    *,
    rank: int,
    scale: float = 2.0,
    seed: int = 1,
    is_dora: bool = False,
    keys: list[str] | None = None,
    num_layers: int = 1000,
) -> Path:
    """Of a fresh model of the same shape, which is spent. `keys` None: every layer that the tuner would take."""
    parameters: dict[str, Any] = {"rank": rank, "scale": scale, "dropout": 0.0}
    if keys is not None:
        parameters["keys"] = keys
    linear_to_lora_layers(model, num_layers, parameters, use_dora=is_dora)
    mx.random.seed(seed)
    model.update(tree_map_with_path(_drawn, model.parameters()))
    tensors = {path: array for path, array in tree_flatten(model.parameters()) if path.rpartition(".")[2] in LEAVES}
    assert tensors
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    config = {
        "fine_tune_type": "dora" if is_dora else "lora",
        "num_layers": num_layers,
        "lora_parameters": parameters,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _drawn(path: str, array: mx.array) -> mx.array:
    """Large enough that an adapter that is missing or another's shows in the tokens."""
    leaf = path.rpartition(".")[2]
    if leaf in ("lora_a", "lora_b"):
        return 0.2 * mx.random.normal(array.shape)
    return array * mx.random.uniform(0.5, 1.5, array.shape) if leaf == "m" else array
