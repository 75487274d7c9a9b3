"""What OpenAI's and vLLM's request bodies ask of the sampler."""

from collections.abc import Callable, Mapping
from typing import Any

from cluster import grammars
from cluster.errors import InvalidRequest
from cluster.grammars import Grammar
from cluster.json_fields import integer, is_int, kind_of, number, typed
from cluster.sampling import SamplingRequest
from cluster.scheduling.request import Speculation

_MAX_ID_DIGITS = 10


def parse_sampling(body: Mapping[str, Any], *, is_chat: bool) -> SamplingRequest:
    """What the client asked of the sampler; ranges are checked later. Raises InvalidRequest."""
    return SamplingRequest(
        temperature=number(body, "temperature"),
        top_k=integer(body, "top_k"),
        top_p=number(body, "top_p"),
        min_p=number(body, "min_p"),
        seed=integer(body, "seed"),
        max_tokens=_max_tokens(body),
        stop=_stop(body),
        stop_token_ids=_token_ids(body, "stop_token_ids"),
        ignore_eos=typed(body, "ignore_eos", bool, "true or false") or False,
        num_top_logprobs=_chat_logprobs(body) if is_chat else integer(body, "logprobs"),
        frequency_penalty=number(body, "frequency_penalty"),
        presence_penalty=number(body, "presence_penalty"),
        repetition_penalty=number(body, "repetition_penalty"),
        logit_bias=_logit_bias(body),
        min_tokens=integer(body, "min_tokens"),
        banned_token_ids=_token_ids(body, "banned_token_ids"),
        bad_words=_texts(body, "bad_words"),
        xtc_probability=number(body, "xtc_probability"),
        xtc_threshold=number(body, "xtc_threshold"),
        grammar=_grammar(body),
        speculation=_speculation(body),
        num_prompt_logprobs=_prompt_logprobs(body, is_chat=is_chat),
        may_draw_none=not is_chat and wants_echo(body),
    )


def wants_echo(body: Mapping[str, Any]) -> bool:
    """Whether the prompt is to be part of the answer."""
    return typed(body, "echo", bool, "true or false") or False


def _prompt_logprobs(body: Mapping[str, Any], *, is_chat: bool) -> int | None:
    """vLLM's field; and OpenAI's echo, with which logprobs are those of the prompt too."""
    asked = integer(body, "prompt_logprobs")
    echoed = integer(body, "logprobs") if not is_chat and wants_echo(body) else None
    if asked is not None and echoed not in (None, asked):
        raise InvalidRequest("prompt_logprobs", f"must equal logprobs, which is {echoed}, with echo; got {asked}")
    return asked if echoed is None else echoed


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    newer = integer(body, "max_completion_tokens")
    return newer if newer is not None else integer(body, "max_tokens")


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    top = integer(body, "top_logprobs")
    if typed(body, "logprobs", bool, "true or false"):
        return top or 0
    if top:
        raise InvalidRequest("top_logprobs", "needs logprobs: true")
    return None


def _stop(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop")
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if isinstance(stop, list) and all(isinstance(item, str) for item in stop):
        return tuple(stop)
    raise InvalidRequest("stop", f"must be a string or a list of strings, got {kind_of(stop)}")


def _token_ids(body: Mapping[str, Any], field: str) -> tuple[int, ...]:
    ids = typed(body, field, list, "a list of token ids") or []
    if not all(is_int(item) for item in ids):
        raise InvalidRequest(field, "must be a list of token ids")
    return tuple(ids)


def _texts(body: Mapping[str, Any], field: str) -> tuple[str, ...]:
    texts = typed(body, field, list, "a list of strings") or []
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(field, "must be a list of strings")
    return tuple(texts)


def _logit_bias(body: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """Keys are token ids written as strings, JSON having no others."""
    biases = typed(body, "logit_bias", dict, "an object of token ids and numbers") or {}
    pairs = []
    for key in biases:
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_ID_DIGITS):
            raise InvalidRequest("logit_bias", f"keys must be token ids, got {key[:60]!r}")
        try:
            bias = number(biases, key)
        except InvalidRequest as error:
            raise InvalidRequest(f"logit_bias.{key}", error.detail) from error
        if bias is None:
            raise InvalidRequest(f"logit_bias.{key}", "must be a number, got null")
        pairs.append((int(key), bias))
    return tuple(pairs)


def _speculation(body: Mapping[str, Any]) -> Speculation:
    name = typed(body, "speculation", str, "a string")
    if name is None:
        return Speculation.DEFAULT
    allowed = [each for each in Speculation if each is not Speculation.DEFAULT]
    if name not in allowed:
        raise InvalidRequest("speculation", f"must be {', '.join(allowed[:-1])} or {allowed[-1]}, got {kind_of(name)}")
    return Speculation(name)


def _grammar(body: Mapping[str, Any]) -> Grammar | None:
    """Of `response_format`, `structured_outputs` or one of the guided_ fields; at most one of all these."""
    found = [grammar for grammar in (_response_format(body), _structured(body), *_guided(body)) if grammar is not None]
    if len(found) > 1:
        raise InvalidRequest(found[1].field, f"can't be combined with {found[0].field}: one grammar is allowed")
    return found[0] if found else None


def _response_format(body: Mapping[str, Any]) -> Grammar | None:
    """OpenAI's. `strict` and `name` change nothing: the schema is always kept to."""
    asked = typed(body, "response_format", dict, "an object")
    if asked is None or asked.get("type") == "text":
        return None
    if asked.get("type") == "json_object":
        return grammars.json_object("response_format")
    if asked.get("type") != "json_schema":
        wanted = "text, json_object or json_schema"
        raise InvalidRequest("response_format.type", f"must be {wanted}, got {kind_of(asked.get('type'))}")
    described = typed(asked, "json_schema", dict, "an object with a schema", "response_format")
    if described is None or described.get("schema") is None:
        raise InvalidRequest("response_format.json_schema.schema", "is missing")
    return grammars.json_schema("response_format.json_schema.schema", described["schema"])


def _structured(body: Mapping[str, Any]) -> Grammar | None:
    """vLLM's `structured_outputs`: exactly one of its kinds."""
    asked = typed(body, "structured_outputs", dict, "an object")
    if asked is None:
        return None
    given = [name for name, value in asked.items() if value is not None and value is not False]
    if len(given) != 1 or given[0] not in _KINDS:
        one_of, got = ", ".join(_KINDS), ", ".join(given) or "none"
        raise InvalidRequest("structured_outputs", f"must have exactly one of {one_of}, got {got}")
    return _KINDS[given[0]](f"structured_outputs.{given[0]}", asked[given[0]])


def _guided(body: Mapping[str, Any]) -> list[Grammar]:
    """The names that older vLLM servers have for the same."""
    names = [name for name in _KINDS if body.get(f"guided_{name}") not in (None, False)]
    return [_KINDS[name](f"guided_{name}", body[f"guided_{name}"]) for name in names]


def _json(field: str, value: object) -> Grammar:
    return grammars.json_schema_text(field, value) if isinstance(value, str) else grammars.json_schema(field, value)


def _json_object(field: str, value: object) -> Grammar:
    if value is not True:
        raise InvalidRequest(field, f"must be true or false, got {kind_of(value)}")
    return grammars.json_object(field)


def _choice(field: str, value: object) -> Grammar:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise InvalidRequest(field, "must be a list of strings")
    return grammars.choice(field, value)


def _regex(field: str, value: object) -> Grammar:
    return grammars.regex(field, _string(field, value))


def _lark(field: str, value: object) -> Grammar:
    return grammars.lark(field, _string(field, value))


def _string(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(field, f"must be a string, got {kind_of(value)}")
    return value


_KINDS: dict[str, Callable[[str, object], Grammar]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
}
