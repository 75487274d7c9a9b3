"""What is wrong with the input of a simulation."""

from pathlib import Path


class SimulationError(Exception):
    """Base; the message is meant for the caller."""


class BadInput(SimulationError):
    """A file can't be used; the message names it and, where there is one, the line."""

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        self.path = path
        self.line = line
        super().__init__(f"{path}:{line}: {problem}" if line else f"{path}: {problem}")
