"""OpenAI's request bodies, checked field by field; what would change the answer but isn't supported is refused."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import InvalidRequest
from cluster.handling import Handling
from cluster.json_fields import integer, is_int, kind_of, number, typed
from cluster.openai_sampling import parse_sampling, wants_echo
from cluster.sampling import SamplingRequest, check_num_answers
from cluster.tokenizer import Message

# Accepted only with the value that means "off".
_OFF_VALUES: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
}
# More than any model's context.
MAX_PROMPT_IDS = 1 << 20


@dataclass(frozen=True, slots=True)
class OpenAIRequest:
    """What both endpoints share."""

    model: str
    sampling: SamplingRequest
    stream: bool
    include_usage: bool
    handling: Handling
    num_answers: int
    # The prompt is part of the text, and its log-probabilities of those.
    echo: bool = False
    # Log-probabilities of the prompt have a field of their own.
    tells_prompt: bool = False


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
        raise InvalidRequest("body", f"must be a JSON object, got {kind_of(value)}")
    return value


def parse_common(body: Mapping[str, Any], *, is_chat: bool) -> OpenAIRequest:
    """Model, sampling and streaming options of either endpoint."""
    if is_chat and wants_echo(body):
        raise InvalidRequest("echo", "is of /v1/completions; here prompt_logprobs says how likely the prompt is")
    for field, off_values in _OFF_VALUES.items():
        value = body.get(field)
        if value is not None and value not in off_values:
            raise InvalidRequest(field, f"is not supported; {_advice(off_values)}, got {kind_of(value)}")
    options = typed(body, "stream_options", dict, "an object") or {}
    return OpenAIRequest(
        model=typed(body, "model", str, "a string") or "",
        sampling=parse_sampling(body, is_chat=is_chat),
        stream=typed(body, "stream", bool, "true or false") or False,
        include_usage=typed(options, "include_usage", bool, "true or false") or False,
        handling=parse_handling(body),
        num_answers=check_num_answers(integer(body, "n")),
        echo=not is_chat and wants_echo(body),
        tells_prompt=integer(body, "prompt_logprobs") is not None,
    )


def _advice(off_values: tuple[Any, ...]) -> str:
    return f"leave it out or give {off_values[0]!r}" if off_values else "leave it out"


def parse_messages(body: Mapping[str, Any]) -> list[Message]:
    """`messages`, with content parts joined."""
    messages = typed(body, "messages", list, "a list of messages")
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
    if prompt is None:
        raise InvalidRequest("prompt", "is missing")
    if not isinstance(prompt, list):
        raise InvalidRequest("prompt", f"must be one string or one list of token ids, got {kind_of(prompt)}")
    if len(prompt) > MAX_PROMPT_IDS:
        # Before each is looked at: others' streams wait meanwhile.
        raise InvalidRequest("prompt", f"may have at most {MAX_PROMPT_IDS} token ids, got {len(prompt)}")
    if all(is_int(item) for item in prompt):
        return tuple(prompt)
    if all(isinstance(item, str | list) for item in prompt):
        raise InvalidRequest("prompt", f"is one prompt a request, not a batch; got {len(prompt)}")
    raise InvalidRequest("prompt", "must be one string or one list of token ids, got a list of something else")


def parse_handling(body: Mapping[str, Any]) -> Handling:
    """Fields of ours beside OpenAI's, named as in handling.proto."""
    return Handling(
        tenant=typed(body, "tenant", str, "a string") or "",
        priority=integer(body, "priority") or 0,
        retention_priority=integer(body, "retention_priority") or 0,
        pin_s=number(body, "pin_s") or 0.0,
        session=typed(body, "session", str, "a string") or "",
        cache_salt=typed(body, "cache_salt", str, "a string") or "",
    )


def _message(message: object, field: str) -> Message:
    if not isinstance(message, dict):
        raise InvalidRequest(field, f"must be an object with role and content, got {kind_of(message)}")
    role = typed(message, "role", str, "a string", field)
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
        raise InvalidRequest(f"{field}.content", f"must be a string or a list of text parts, got {kind_of(content)}")
    return {"role": role, "content": content}
