"""Reads an adapter in mlx-lm's format: adapter_config.json and adapters.safetensors, as `mlx_lm.lora` writes them."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from worker.errors import AdapterRefused

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapters.safetensors"
_KINDS = ("lora", "dora")
_LEAVES = {"lora": ("lora_a", "lora_b"), "dora": ("lora_a", "lora_b", "m")}


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """What the files say. `tensors` by path of the layer, then by name: lora_a, lora_b and, of DoRA, m."""

    is_dora: bool
    rank: int
    scale: float
    tensors: dict[str, dict[str, mx.array]]


def read(folder: Path) -> AdapterFiles:
    """Raises AdapterRefused for whatever is missing, unknown or contradicts itself; the model is not looked at."""
    config = _read_config(folder)
    kind = config.get("fine_tune_type", "lora")
    if kind == "full":
        raise AdapterRefused("fine_tune_type is full: that is a model of its own weights, to be served as one")
    if kind not in _KINDS:
        raise AdapterRefused(f"fine_tune_type is {kind!r}; supported are {', '.join(_KINDS)}")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        peft = "; it looks like PEFT's format, mlx-lm's is wanted" if "peft_type" in config else ""
        raise AdapterRefused(f"{CONFIG_FILE} has no lora_parameters{peft}")
    rank, scale = parameters.get("rank"), parameters.get("scale")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterRefused(f"lora_parameters.rank must be a positive integer, got {rank!r}")
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise AdapterRefused(f"lora_parameters.scale must be a number, got {scale!r}")
    return AdapterFiles(kind == "dora", rank, float(scale), _read_tensors(folder, kind))


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise AdapterRefused(f"{folder} is not a folder on this machine")
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise AdapterRefused(f"{folder} has no {name}")
    try:
        config = json.loads((folder / CONFIG_FILE).read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise AdapterRefused(f"{folder / CONFIG_FILE} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise AdapterRefused(f"{folder / CONFIG_FILE} must hold an object, got {type(config).__name__}")
    return config


def _read_tensors(folder: Path, kind: str) -> dict[str, dict[str, mx.array]]:
    try:
        flat: dict[str, mx.array] = mx.load(str(folder / WEIGHTS_FILE))  # type: ignore[assignment]
    except (RuntimeError, ValueError) as error:
        raise AdapterRefused(f"{folder / WEIGHTS_FILE} can't be read: {error}") from error
    tensors: dict[str, dict[str, mx.array]] = {}
    for name, tensor in flat.items():
        path, _, leaf = name.rpartition(".")
        if leaf not in _LEAVES[kind] or not path:
            raise AdapterRefused(
                f"{WEIGHTS_FILE}: {name} is no tensor of a {kind} adapter ({', '.join(_LEAVES[kind])})"
            )
        if not mx.issubdtype(tensor.dtype, mx.floating):
            raise AdapterRefused(f"{WEIGHTS_FILE}: {name} is {tensor.dtype}; floating point is wanted")
        tensors.setdefault(path, {})[leaf] = tensor
    if not tensors:
        raise AdapterRefused(f"{folder / WEIGHTS_FILE} holds no tensor")
    for path, leaves in tensors.items():
        missing = [leaf for leaf in _LEAVES[kind] if leaf not in leaves]
        if missing:
            raise AdapterRefused(f"{WEIGHTS_FILE}: {path} lacks {', '.join(missing)}")
    return tensors
