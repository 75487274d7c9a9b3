"""/v1/embeddings: OpenAI's request and response, and fields of ours beside them."""

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.embeddings import Embedded, EmbedJob, check_num_inputs
from cluster.errors import InvalidRequest
from cluster.handling import Handling
from cluster.json_fields import integer, is_int, kind_of, typed
from cluster.openai_requests import parse_handling
from cluster.scheduling.request import Pooling

_POOLINGS = {pooling.name.lower(): pooling for pooling in Pooling}
_ENCODINGS = ("float", "base64")


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Checked, its texts not yet in tokens."""

    model: str
    inputs: tuple[str | tuple[int, ...], ...]
    is_base64: bool
    dimensions: int | None
    pooling: Pooling | None
    normalize: bool
    handling: Handling


def parse_embedding(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Raises InvalidRequest."""
    encoding = typed(body, "encoding_format", str, "float or base64") or _ENCODINGS[0]
    if encoding not in _ENCODINGS:
        raise InvalidRequest("encoding_format", f"must be float or base64, got {encoding!r}")
    pooling = typed(body, "pooling", str, "a string")
    if pooling is not None and pooling not in _POOLINGS:
        raise InvalidRequest("pooling", f"must be one of {', '.join(sorted(_POOLINGS))}, got {pooling!r}")
    normalize = typed(body, "normalize", bool, "true or false")
    return EmbeddingRequest(
        model=typed(body, "model", str, "a string") or "",
        inputs=_inputs(body.get("input")),
        is_base64=encoding == "base64",
        dimensions=integer(body, "dimensions"),
        pooling=None if pooling is None else _POOLINGS[pooling],
        normalize=True if normalize is None else normalize,
        handling=parse_handling(body),
    )


def embedding_body(job: EmbedJob, embedded: Sequence[Embedded], *, is_base64: bool) -> dict[str, Any]:
    """OpenAI's list object. Numbers in base64 are float32, little-endian."""
    num_tokens = sum(each.num_prompt_tokens for each in embedded)
    num_cached = sum(each.num_cached_tokens for each in embedded)
    return {
        "object": "list",
        "model": job.model.name,
        "data": [
            {"object": "embedding", "index": index, "embedding": _base64(each.values) if is_base64 else each.values}
            for index, each in enumerate(embedded)
        ],
        "usage": {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        },
        "cidery": {"pooling": job.resolved_pooling.name.lower(), "normalize": job.normalize},
    }


def _base64(values: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def _inputs(given: object) -> tuple[str | tuple[int, ...], ...]:
    """One text, several, one list of token ids, or several."""
    if isinstance(given, str):
        return (given,)
    if given is None:
        raise InvalidRequest("input", "is missing")
    if not isinstance(given, list):
        raise InvalidRequest("input", f"must be a string, or a list of strings or token ids, got {kind_of(given)}")
    if given and all(is_int(item) for item in given):
        return (tuple(given),)
    check_num_inputs("input", len(given))
    return tuple(_input(item, f"input[{index}]") for index, item in enumerate(given))


def _input(item: object, field: str) -> str | tuple[int, ...]:
    if isinstance(item, str):
        return item
    if isinstance(item, list) and all(is_int(token) for token in item):
        return tuple(item)
    raise InvalidRequest(field, f"must be a string or a list of token ids, got {kind_of(item)}")
