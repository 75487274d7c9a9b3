"""What a client asked of the sampler, checked and completed by the model's defaults."""

import math
import secrets
import struct
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

from cluster.config import SpeculationConfig
from cluster.errors import InvalidRequest
from cluster.grammars import Grammar
from cluster.model_files import read_json
from cluster.scheduling.request import XTC_THRESHOLD, LogitRules, SamplingParams, Speculation

_T = TypeVar("_T")

MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_ANSWERS = 16
MAX_BIASES = 1024
MAX_BANNED_TOKENS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MIN_REPETITION_PENALTY = 0.01


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
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int | None = None
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    grammar: Grammar | None = None
    speculation: Speculation = Speculation.DEFAULT
    num_prompt_logprobs: int | None = None
    # Something else than an answer is wanted of the prompt, so max_tokens may be 0.
    may_draw_none: bool = False
    # Of bad_words, once the tokenizer has been asked; the grammar has been compiled by then.
    banned_sequences: tuple[tuple[int, ...], ...] | None = None

    @property
    def needs_tokenizer(self) -> bool:
        """Whether `ServedModels.prepare` has something to do."""
        return self.banned_sequences is None and bool(self.bad_words or self.grammar)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the model's generation_config.json asks for when the client doesn't."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of_model(cls, folder: Path) -> "Defaults":
        """`do_sample: false` means greedy, as in transformers."""
        config = read_json(folder / "generation_config.json")
        names = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"]
        if config.get("do_sample") is False:
            config["temperature"] = 0.0
            names = ["temperature", "repetition_penalty"]
        known = {name: config[name] for name in names if config.get(name) is not None}
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
    seed = fixed_seed(asked)
    logprobs = asked.num_top_logprobs
    if logprobs is not None and not 0 <= logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest("top_logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}, got {logprobs}")
    prompt_logprobs = asked.num_prompt_logprobs
    if prompt_logprobs is not None and not 0 <= prompt_logprobs <= MAX_TOP_LOGPROBS:
        raise InvalidRequest("prompt_logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}, got {prompt_logprobs}")
    least = 0 if asked.may_draw_none or prompt_logprobs is not None else 1
    if asked.max_tokens is not None and asked.max_tokens < least:
        why = "" if least == 0 else "; 0 is for prompts that are scored or echoed"
        raise InvalidRequest("max_tokens", f"must be at least {least}, got {asked.max_tokens}{why}")
    _check_stops(asked.stop)
    xtc_probability = _in_range("xtc_probability", _or(asked.xtc_probability, 0.0), 0.0, 1.0)
    xtc_threshold = _in_range("xtc_threshold", _or(asked.xtc_threshold, XTC_THRESHOLD), 0.0, 0.5)
    if xtc_threshold == 0.0:
        raise InvalidRequest("xtc_threshold", "must be greater than 0 and at most 0.5, got 0")
    rules = _rules(asked, defaults)
    return SamplingParams(
        *(temperature, top_k, top_p, min_p, seed, logprobs, xtc_probability, xtc_threshold, rules), asked.speculation
    )


def _rules(asked: SamplingRequest, defaults: Defaults) -> LogitRules:
    assert not asked.needs_tokenizer, "ServedModels.prepare comes first"
    repetition = _in_range("repetition_penalty", _or(asked.repetition_penalty, defaults.repetition_penalty), 0.0, 10.0)
    if repetition < MIN_REPETITION_PENALTY:
        limits = f"must be a number from {MIN_REPETITION_PENALTY} to 10"
        raise InvalidRequest("repetition_penalty", f"{limits}, got {repetition}")
    for name, items, most in (
        ("logit_bias", asked.logit_bias, MAX_BIASES),
        ("banned_token_ids", asked.banned_token_ids, MAX_BANNED_TOKENS),
    ):
        if len(items) > most:
            raise InvalidRequest(name, f"at most {most} tokens are allowed, got {len(items)}")
    biases = tuple(sorted((id_, _in_range(f"logit_bias.{id_}", bias, -100.0, 100.0)) for id_, bias in asked.logit_bias))
    if asked.min_tokens is not None and asked.min_tokens < 0:
        raise InvalidRequest("min_tokens", f"must be at least 0, got {asked.min_tokens}")
    if asked.grammar is not None:
        _check_grammar(asked)
    return LogitRules(
        frequency_penalty=_in_range("frequency_penalty", _or(asked.frequency_penalty, 0.0), -2.0, 2.0),
        presence_penalty=_in_range("presence_penalty", _or(asked.presence_penalty, 0.0), -2.0, 2.0),
        repetition_penalty=repetition,
        logit_bias=biases,
        min_tokens=asked.min_tokens or 0,
        banned_sequences=(*((token,) for token in asked.banned_token_ids), *(asked.banned_sequences or ())),
        grammar=asked.grammar.source if asked.grammar is not None else "",
    )


def _check_grammar(asked: SamplingRequest) -> None:
    """What could leave a grammar without a token that it allows."""
    assert asked.grammar is not None
    for name, value in (
        ("banned_token_ids", asked.banned_token_ids),
        ("bad_words", asked.bad_words),
        ("ignore_eos", asked.ignore_eos),
    ):
        if value:
            raise InvalidRequest(name, f"can't be combined with {asked.grammar.field}")


def with_speculation(params: SamplingParams, config: SpeculationConfig) -> SamplingParams:
    """What a Mac that was started so makes of a request. Raises InvalidRequest for a way to guess that it hasn't."""
    asked = params.speculation
    if asked is Speculation.DEFAULT:
        return replace(params, speculation=Speculation(config.method))
    has = {Speculation.NGRAM: config.method != "off", Speculation.DRAFT: config.draft_model is not None}
    if not has.get(asked, True):
        known = ", ".join(["off", "auto", *(each for each in has if has[each])])
        raise InvalidRequest("speculation", f"this model is served with {known}, got {asked}")
    return replace(params, speculation=Speculation.OFF if config.method == "off" else asked)


def check_num_answers(n: int | None) -> int:
    """How many answers to one request; absent: one. Raises InvalidRequest."""
    if n is not None and not 1 <= n <= MAX_ANSWERS:
        raise InvalidRequest("n", f"must be from 1 to {MAX_ANSWERS}, got {n}")
    return n or 1


def fixed_seed(asked: SamplingRequest) -> int:
    """The request's seed, or one drawn for it. Raises InvalidRequest."""
    seed = secrets.randbits(63) if asked.seed is None else asked.seed
    if not 0 <= seed < 2**64:
        raise InvalidRequest("seed", f"must be from 0 to 2^64 - 1, got {seed}")
    return seed


def seed_of_answer(seed: int, index: int) -> int:
    """Seeds of the answers to one request: the first has the request's own, the others hashes of it.

    So each can be had again alone, with the seed that its answer reports. Below 2^63, as JSON readers like it.
    """
    if index == 0:
        return seed
    digest = blake2b(struct.pack("<QQ", seed, index), digest_size=8, person=b"cidery-answer-v1").digest()
    return int.from_bytes(digest, "little") >> 1


def check_bad_words(words: tuple[str, ...]) -> None:
    """Raises InvalidRequest."""
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequest("bad_words", f"at most {MAX_BAD_WORDS} are allowed, got {len(words)}")
    for index, word in enumerate(words):
        if not word.strip():
            raise InvalidRequest(f"bad_words[{index}]", "is empty or blank")
        if len(word) > MAX_BAD_WORD_CHARACTERS:
            limit = f"at most {MAX_BAD_WORD_CHARACTERS} characters"
            raise InvalidRequest(f"bad_words[{index}]", f"{limit}, got {len(word)}")


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
