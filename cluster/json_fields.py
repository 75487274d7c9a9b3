"""Fields of a JSON object, taken out one by one: of the right type, or an InvalidRequest that names the field."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from cluster.errors import InvalidRequest

_T = TypeVar("_T")
_NUMBER = (int, float)


def number(body: Mapping[str, Any], field: str) -> float | None:
    """A number; None if it is not there. Raises InvalidRequest."""
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, _NUMBER):
        raise InvalidRequest(field, f"must be a number, got {kind_of(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidRequest(field, "is too large a number") from error


def integer(body: Mapping[str, Any], field: str) -> int | None:
    """An integer; None if it is not there. Raises InvalidRequest."""
    value = body.get(field)
    if value is None:
        return None
    if not is_int(value):
        raise InvalidRequest(field, f"must be an integer, got {kind_of(value)}")
    return int(value)


def is_int(value: object) -> bool:
    """Whether JSON would call it an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def typed(body: Mapping[str, Any], field: str, kind: type[_T], wanted: str, within: str = "") -> _T | None:
    """A value of one type; None if it is not there. `within` is the path of the object. Raises InvalidRequest."""
    value = body.get(field)
    if value is None:
        return None
    if not isinstance(value, kind):
        raise InvalidRequest(f"{within}.{field}".lstrip("."), f"must be {wanted}, got {kind_of(value)}")
    return value


def kind_of(value: object) -> str:
    """A short name in JSON's words, with the value where it is short."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    name = names.get(type(value), "a number")
    if isinstance(value, dict | list | type(None)):
        return name
    shown = json.dumps(value, default=str)
    return f"{name} ({shown})" if len(shown) <= 60 else name
