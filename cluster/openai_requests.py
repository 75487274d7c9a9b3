"""OpenAI's request bodies, checked field by field; what would change the answer but isn't supported is refused."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cluster.errors import InvalidRequest
from cluster.handling import Handling
from cluster.sampling import SamplingRequest
from cluster.tokenizer import Message

_T = TypeVar("_T")
_NUMBER = (int, float)

# Accepted only with the value that means "off".
_OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """What both endpoints share."""

    model: str
    sampling: SamplingRequest
    stream: bool
    include_usage: bool
    handling: Handling


def parse_body(body: bytes) -> Mapping[str, Any]:
    """Raises InvalidRequest unless the body is a JSON object in UTF-8."""
    try:
        value = json.loads(body.decode())
    except UnicodeDecodeError as error:
        raise InvalidRequest("body", f"is not valid UTF-8: byte {error.start} is {body[error.start]:#04x}") from error
    except json.JSONDecodeError as error:
        raise InvalidRequest("body", f"is not JSON: {error.msg} at line {error.lineno} column {error.colno}") from error
    except ValueError as error:  # a number of thousands of digits
        raise InvalidRequest("body", f"can't be read: {error}") from error
    except RecursionError as error:
        raise InvalidRequest("body", "is nested too deeply") from error
    if not isinstance(value, dict):
        raise InvalidRequest("body", f"must be a JSON object, got {_kind(value)}")
    return value


def parse_common(body: Mapping[str, Any], *, is_chat: bool) -> OpenAIRequest:
    """Model, sampling and streaming options of either endpoint."""
    for field, off_values in _OFF_VALUES.items():
        value = body.get(field)
        if value is not None and value not in off_values:
            raise InvalidRequest(field, f"is not supported; leave it out or give {off_values[0]!r}, got {value!r}")
    options = _typed(body, "stream_options", dict, "an object") or {}
    return OpenAIRequest(
        model=_typed(body, "model", str, "a string") or "",
        sampling=_sampling(body, is_chat=is_chat),
        stream=_typed(body, "stream", bool, "true or false") or False,
        include_usage=_typed(options, "include_usage", bool, "true or false") or False,
        handling=_handling(body),
    )


def parse_messages(body: Mapping[str, Any]) -> list[Message]:
    """`messages`, with content parts joined."""
    messages = _typed(body, "messages", list, "a list of messages")
    if messages is None:
        raise InvalidRequest("messages", "is missing")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def parse_prompt(body: Mapping[str, Any]) -> str | tuple[int, ...]:
    """`prompt`: text, or token ids; a list with one of either counts as that one."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and all(_is_int(item) for item in prompt):
        return tuple(prompt)
    if prompt is None:
        raise InvalidRequest("prompt", "is missing")
    raise InvalidRequest("prompt", f"must be one string or one list of token ids, got {_kind(prompt)}")


def _sampling(body: Mapping[str, Any], *, is_chat: bool) -> SamplingRequest:
    return SamplingRequest(
        temperature=_number(body, "temperature"),
        top_k=_integer(body, "top_k"),
        top_p=_number(body, "top_p"),
        min_p=_number(body, "min_p"),
        seed=_integer(body, "seed"),
        max_tokens=_max_tokens(body),
        stop=_stop(body),
        stop_token_ids=_stop_token_ids(body),
        ignore_eos=_typed(body, "ignore_eos", bool, "true or false") or False,
        num_top_logprobs=_chat_logprobs(body) if is_chat else _integer(body, "logprobs"),
    )


def _handling(body: Mapping[str, Any]) -> Handling:
    """Fields of ours beside OpenAI's, named as in handling.proto."""
    return Handling(
        tenant=_typed(body, "tenant", str, "a string") or "",
        priority=_integer(body, "priority") or 0,
        retention_priority=_integer(body, "retention_priority") or 0,
        pin_s=_number(body, "pin_s") or 0.0,
        session=_typed(body, "session", str, "a string") or "",
    )


def _max_tokens(body: Mapping[str, Any]) -> int | None:
    newer = _integer(body, "max_completion_tokens")
    return newer if newer is not None else _integer(body, "max_tokens")


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    top = _integer(body, "top_logprobs")
    if _typed(body, "logprobs", bool, "true or false"):
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
    raise InvalidRequest("stop", f"must be a string or a list of strings, got {_kind(stop)}")


def _stop_token_ids(body: Mapping[str, Any]) -> tuple[int, ...]:
    ids = _typed(body, "stop_token_ids", list, "a list of token ids") or []
    if not all(_is_int(item) for item in ids):
        raise InvalidRequest("stop_token_ids", "must be a list of token ids")
    return tuple(ids)


def _message(message: object, field: str) -> Message:
    if not isinstance(message, dict):
        raise InvalidRequest(field, f"must be an object with role and content, got {_kind(message)}")
    role = _typed(message, "role", str, "a string", field)
    if not role:
        raise InvalidRequest(f"{field}.role", "is missing")
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) != len(parts):
            raise InvalidRequest(f"{field}.content", "may hold text parts only")
        content = "".join(texts)
    if not isinstance(content, str):
        raise InvalidRequest(f"{field}.content", f"must be a string or a list of text parts, got {_kind(content)}")
    return {"role": role, "content": content}


def _number(body: Mapping[str, Any], field: str) -> float | None:
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, _NUMBER):
        raise InvalidRequest(field, f"must be a number, got {_kind(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidRequest(field, "is too large a number") from error


def _integer(body: Mapping[str, Any], field: str) -> int | None:
    value = body.get(field)
    if value is None:
        return None
    if not _is_int(value):
        raise InvalidRequest(field, f"must be an integer, got {_kind(value)}")
    return int(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _typed(body: Mapping[str, Any], field: str, kind: type[_T], wanted: str, within: str = "") -> _T | None:
    value = body.get(field)
    if value is None:
        return None
    if not isinstance(value, kind):
        raise InvalidRequest(f"{within}.{field}".lstrip("."), f"must be {wanted}, got {_kind(value)}")
    return value


def _kind(value: object) -> str:
    """A short name in JSON's words, with the value where it is short."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    name = names.get(type(value), "a number")
    shown = json.dumps(value, default=str)
    return f"{name} ({shown})" if len(shown) <= 60 and not isinstance(value, dict | list | type(None)) else name
