"""Which Macs are simulated, with which model: built in code or read from a fleet file.

    {"model": "Qwen3-8B/config.json", "max_model_len": 131072,
     "classes": {"studio": {"prefill_tokens_per_s": 2000, "kv_memory": "88GiB"},
                 "mini": {"prefill_tokens_per_s": 800, "step_s": 0.04, "kv_memory": "12GiB"}},
     "macs": [{"class": "studio", "count": 12}, {"class": "mini", "count": 4}]}

A class must say `prefill_tokens_per_s` and `kv_memory`; its other fields are those of CostModel and of Limits. `model`
is a config.json or its folder, beside the fleet file; without it, a dense 8B model.
"""

import json
import json.decoder
import json.scanner
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import click

from cluster.cli_types import Bytes
from cluster.kv.spec import FullAttentionSpec, LayerSpec
from cluster.model_kv import specs_from_config
from cluster.simulation.cost_model import CostModel
from cluster.simulation.errors import BadInput

DENSE_8B: tuple[LayerSpec, ...] = (FullAttentionSpec(num_kv_heads=8, head_dim=128),) * 36
DEFAULT_MAX_MODEL_LEN = 262_144
# 600,000 tokens of the dense 8B model.
DEFAULT_KV_BYTES = 600_000 * 36 * 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one Mac's scheduler; the defaults are those of `cidery serve`."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_chunk_tokens: int = 256
    max_waiting: int = 1024


@dataclass(frozen=True, slots=True)
class MacSpec:
    """One simulated Mac."""

    name: str
    costs: CostModel = field(default_factory=CostModel)
    kv_bytes: int = DEFAULT_KV_BYTES
    limits: Limits = field(default_factory=Limits)
    # The router hears of step times so many times as long, without and with prefill: what if it were wrong?
    told_factor: float = 1.0
    told_prefill_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """All Macs, and the layers of the model that they serve."""

    macs: tuple[MacSpec, ...]
    layers: tuple[LayerSpec, ...] = DENSE_8B
    max_model_len: int = DEFAULT_MAX_MODEL_LEN


def uniform_fleet(num_macs: int, mac: MacSpec | None = None, **model: Any) -> FleetSpec:
    """So many equal Macs, mac-1 to mac-n; `model`: the other fields of FleetSpec."""
    kind = mac or MacSpec("mac")
    return FleetSpec(tuple(replace(kind, name=f"{kind.name}-{i}") for i in range(1, num_macs + 1)), **model)


def read_layers(path: Path) -> tuple[LayerSpec, ...]:
    """What the layers of a model keep, from its config.json or the folder of it. Raises BadInput."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise BadInput(file, None, f"expected a JSON object, got {type(config).__name__}")
        return tuple(specs_from_config(config))
    except OSError as error:
        raise BadInput(file, None, error.strerror or str(error)) from error
    except ValueError as error:
        raise BadInput(file, None, str(error)) from error


def read_fleet(path: Path) -> FleetSpec:
    """Raises BadInput, with the line."""
    return _Reader(path).read()


class _Located(dict[str, Any]):
    """A JSON object that knows its line."""

    line = 0


class _Decoder(json.JSONDecoder):
    """Makes every object a _Located."""

    def __init__(self) -> None:
        super().__init__()
        self.parse_object = self._located
        self.scan_once = json.scanner.py_make_scanner(self)  # type: ignore[attr-defined]

    def _located(self, where: tuple[str, int], *rest: Any) -> tuple[_Located, int]:
        values, end = json.decoder.JSONObject(where, *rest)  # type: ignore[attr-defined]
        located = _Located(values)
        located.line = where[0].count("\n", 0, where[1]) + 1
        return located, end


class _Reader:
    """Reads one fleet file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> FleetSpec:
        fleet = self._parse()
        self._refuse_unknown(fleet, "the fleet", ("model", "max_model_len", "classes", "macs"))
        classes = self._get(fleet, "classes", dict, "the fleet")
        macs: list[MacSpec] = []
        for entry in self._get(fleet, "macs", list, "the fleet"):
            if not isinstance(entry, _Located):
                raise self._error(fleet, f"macs must be objects such as {{'class': 'studio'}}, got {entry!r}")
            macs += self._macs(entry, classes, len(macs))
        names = [mac.name for mac in macs]
        if not macs or len(set(names)) < len(names):
            raise self._error(fleet, "macs must be at least one, with names of their own")
        layers = DENSE_8B
        if "model" in fleet:
            layers = read_layers(self._path.parent / self._get(fleet, "model", str, "the fleet"))
        max_model_len = self._whole(fleet, "max_model_len", DEFAULT_MAX_MODEL_LEN, 2, "the fleet")
        return FleetSpec(tuple(macs), layers, max_model_len)

    def _parse(self) -> _Located:
        try:
            parsed = _Decoder().decode(self._path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BadInput(self._path, None, error.strerror or str(error)) from error
        except json.JSONDecodeError as error:
            raise BadInput(self._path, error.lineno, f"is no JSON: {error.msg} at column {error.colno}") from error
        except UnicodeDecodeError as error:
            raise BadInput(self._path, None, f"is no text: {error}") from error
        if not isinstance(parsed, _Located):
            raise BadInput(self._path, 1, f"expected an object with classes and macs, got {type(parsed).__name__}")
        return parsed

    def _macs(self, entry: _Located, classes: Mapping[str, Any], num_before: int) -> list[MacSpec]:
        what = f"Mac {num_before + 1}"
        self._refuse_unknown(entry, what, ("class", "count", "name"))
        kind = self._get(entry, "class", str, what)
        if not isinstance(classes.get(kind), _Located):
            raise self._error(entry, f"{what} is of class {kind!r}; known are {', '.join(classes) or 'none'}")
        spec = self._class(kind, classes[kind])
        count, name = self._whole(entry, "count", 1, 1, what), entry.get("name", kind)
        if count == 1 and "name" in entry:
            return [replace(spec, name=str(name))]
        return [replace(spec, name=f"{name}-{i}") for i in range(num_before + 1, num_before + count + 1)]

    def _class(self, kind: str, values: _Located) -> MacSpec:
        what = f"class {kind!r}"
        costs, limits = ([each.name for each in fields(of)] for of in (CostModel, Limits))
        self._refuse_unknown(values, what, (*costs, *limits, "kv_memory"))
        self._get(values, "prefill_tokens_per_s", (int, float), what)
        memory = self._get(values, "kv_memory", (int, str), what)
        for name in costs:
            if name in values and (isinstance(values[name], bool) or not isinstance(values[name], int | float)):
                raise self._error(values, f"{what}: {name} must be a number, got {values[name]!r}")
        try:
            model = CostModel(**{name: float(values[name]) for name in costs if name in values})
            num_bytes = Bytes().convert(memory, None, None)
        except ValueError as error:
            raise self._error(values, f"{what}: {error}") from error
        except click.BadParameter as error:
            raise self._error(values, f"{what}: kv_memory: {error.message}") from error
        least = Limits()
        whole = {name: self._whole(values, name, getattr(least, name), 1, what) for name in limits}
        return MacSpec(kind, model, num_bytes, Limits(**whole))

    def _get(self, values: _Located, name: str, kind: Any, what: str) -> Any:
        if name not in values:
            raise self._error(values, f"{what} lacks {name!r}; it has {', '.join(values) or 'nothing'}")
        if not isinstance(values[name], kind) or isinstance(values[name], bool):
            raise self._error(values, f"{what}: {name} is of the wrong type: {values[name]!r:.60}")
        return values[name]

    def _whole(self, values: _Located, name: str, default: int, least: int, what: str) -> int:
        value = values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self._error(values, f"{what}: {name} must be a whole number of at least {least}, got {value!r}")
        return value

    def _refuse_unknown(self, values: _Located, what: str, known: Sequence[str]) -> None:
        unknown = [name for name in values if name not in known]
        if unknown:
            raise self._error(values, f"{what} has {', '.join(unknown)}; known are {', '.join(known)}")

    def _error(self, values: _Located, problem: str) -> BadInput:
        return BadInput(self._path, values.line, problem)
