"""What a client asked of the sampler, checked and completed by the model's defaults."""

import math
import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from cluster.errors import InvalidRequest
from cluster.model_files import read_json
from cluster.scheduling.request import SamplingParams

_T = TypeVar("_T")

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class SamplingRequest:
    """As it came in by gRPC or HTTP; None where the client said nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    num_top_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the model's generation_config.json asks for when the client doesn't."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of_model(cls, folder: Path) -> "Defaults":
        """`do_sample: false` means greedy, as in transformers."""
        config = read_json(folder / "generation_config.json")
        if config.get("do_sample") is False:
            return cls(temperature=0.0)
        known = {
            name: config[name] for name in ("temperature", "top_k", "top_p", "min_p") if config.get(name) is not None
        }
        return replace(cls(), **known)


def resolve(asked: SamplingRequest, defaults: Defaults) -> SamplingParams:
    """Every field given a value and checked. Raises InvalidRequest naming field, value and range."""
    temperature = _in_range("temperature", _or(asked.temperature, defaults.temperature), 0.0, 100.0)
    top_p = _in_range("top_p", _or(asked.top_p, defaults.top_p), 0.0, 1.0)
    if top_p == 0.0:
        raise InvalidRequest("top_p", "must be greater than 0 and at most 1, got 0")
    min_p = _in_range("min_p", _or(asked.min_p, defaults.min_p), 0.0, 1.0)
    top_k = _or(asked.top_k, defaults.top_k)
    if not 0 <= top_k < 2**31:
        raise InvalidRequest("top_k", f"must be 0 (all) or the number of tokens to keep, got {top_k}")
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    if not 0 <= seed < 2**64:
        raise InvalidRequest("seed", f"must be from 0 to 2^64 - 1, got {seed}")
    logprobs = asked.num_top_logprobs
    if logprobs is not None and not 0 <= logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest("top_logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}, got {logprobs}")
    if asked.max_tokens is not None and asked.max_tokens < 1:
        raise InvalidRequest("max_tokens", f"must be at least 1, got {asked.max_tokens}")
    _check_stops(asked.stop)
    return SamplingParams(temperature, top_k, top_p, min_p, seed, logprobs)


def check_token_ids(field: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises InvalidRequest naming the first token that the vocabulary doesn't hold."""
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{field}[{index}]", f"must be a token id from 0 to {vocab_size - 1}, got {token_id}")


def _check_stops(stops: tuple[str, ...]) -> None:
    if len(stops) > MAX_STOPS:
        raise InvalidRequest("stop", f"at most {MAX_STOPS} stop strings are allowed, got {len(stops)}")
    for index, stop in enumerate(stops):
        if not stop:
            raise InvalidRequest(f"stop[{index}]", "is empty; it would end every answer at once")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(f"stop[{index}]", f"at most {MAX_STOP_CHARACTERS} characters, got {len(stop)}")


def _in_range(field: str, value: float, least: float, most: float) -> float:
    if not math.isfinite(value) or not least <= value <= most:
        raise InvalidRequest(field, f"must be a number from {least:g} to {most:g}, got {value}")
    return float(value)


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value
