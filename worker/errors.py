"""Errors of the worker that callers tell apart; everything else is a bug and ends the process's stream."""


class ProtocolError(Exception):
    """The manager sent something that worker.proto does not allow: what, which, got and allowed."""


class UnsupportedModelError(Exception):
    """The model cannot be run exactly; the message names it and says what it has that the worker lacks."""


class AdapterRefused(Exception):
    """An adapter that can't be read, or doesn't fit the model: what, which, got and allowed."""
