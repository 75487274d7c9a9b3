"""Macs that fail at given moments, as one writes them: mac-3@600 for good, mac-3@600+120 for two minutes."""

import re
from dataclasses import dataclass

_FORM = re.compile(r"(?P<mac>[^@\s]+)@(?P<at>\d+(\.\d+)?)(\+(?P<lasts>\d+(\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class Failure:
    """A Mac that vanishes with all it holds, and comes back empty `lasts_s` later; None: never."""

    mac: str
    at_s: float
    lasts_s: float | None = None


def parse_failure(text: str) -> Failure:
    """Raises ValueError."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no failure; write mac-3@600, or mac-3@600+120 if it comes back after 120 s")
    lasts = match["lasts"]
    return Failure(match["mac"], float(match["at"]), None if lasts is None else float(lasts))
