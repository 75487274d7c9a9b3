"""Reads traces. The format is told from the first line.

    Mooncake        a request a line: timestamp (ms), input_length, output_length, hash_ids (512 tokens a block)
    agent sessions  a session a line: id, block_size, tool_tokens, system_tokens, requests [t, in, out, api, lane, h]
    request log     what `cidery serve --request-log FILE` writes, see cluster/request_log.py

Every reader refuses a line that it does not understand, by its number.
"""

import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.simulation.errors import BadInput
from cluster.simulation.trace import Trace

_GZIP = b"\x1f\x8b"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a trace: a JSON object, and where it stands."""

    path: Path
    number: int
    fields: Mapping[str, Any]

    def error(self, problem: str) -> BadInput:
        """To be raised."""
        return BadInput(self.path, self.number, problem)

    def number_of(self, name: str, *, least: float = 0, of: Mapping[str, Any] | None = None) -> float:
        """A field that holds a number."""
        value = self.get(name, of)
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value < float("inf"):
            raise self.error(f"{name} must be a number of at least {least}, got {value!r}")
        return value

    def int_of(self, name: str, *, least: int = 0, of: Mapping[str, Any] | None = None) -> int:
        """A field that holds a whole number."""
        value = self.number_of(name, least=least, of=of)
        if not isinstance(value, int):
            raise self.error(f"{name} must be a whole number, got {value!r}")
        return value

    def list_of(self, name: str, of: Mapping[str, Any] | None = None) -> list[Any]:
        """A field that holds a list."""
        value = self.get(name, of)
        if not isinstance(value, list):
            raise self.error(f"{name} must be a list, got {value!r:.80}")
        return value

    def get(self, name: str, of: Mapping[str, Any] | None = None) -> Any:
        """A field that must be there."""
        fields = self.fields if of is None else of
        if name not in fields:
            raise self.error(f"lacks the field {name!r}; it has {', '.join(fields) or 'none'}")
        return fields[name]


def read_trace(path: Path) -> Trace:
    """Any of the formats, plain or gzip. Raises BadInput."""
    from cluster.simulation.trace_agents import read_agents
    from cluster.simulation.trace_log import read_log
    from cluster.simulation.trace_mooncake import read_mooncake

    readers: dict[str, Callable[[str, Iterator[Line]], Trace]] = {
        "hash_ids": read_mooncake,
        "requests": read_agents,
        "cidery": read_log,
    }
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        raise BadInput(path, None, "holds no line")
    for mark, reader in readers.items():
        if mark in first.fields:
            name = path.name.removesuffix(".gz").removesuffix(".jsonl")
            return reader(name, _chained(first, lines))
    raise first.error(
        "is of no known format: a Mooncake trace has hash_ids, agent sessions have requests, a request log has cidery; "
        f"this has {', '.join(first.fields)}"
    )


def _chained(first: Line, rest: Iterator[Line]) -> Iterator[Line]:
    yield first
    yield from rest


def _lines(path: Path) -> Iterator[Line]:
    number = 0
    try:
        with path.open("rb") as probe:
            is_packed = probe.read(2) == _GZIP
        with gzip.open(path, "rt", encoding="utf-8") if is_packed else path.open("rt", encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                if not text.strip():
                    continue
                fields = json.loads(text)
                if not isinstance(fields, dict):
                    raise BadInput(path, number, f"expected a JSON object, got {type(fields).__name__}")
                yield Line(path, number, fields)
    except json.JSONDecodeError as error:
        raise BadInput(path, number, f"is no JSON: {error.msg} at column {error.colno}") from error
    except OSError as error:
        raise BadInput(path, None, error.strerror or str(error)) from error
    except (UnicodeDecodeError, EOFError, zlib.error) as error:
        raise BadInput(path, number + 1, f"can't be read: {error}") from error
