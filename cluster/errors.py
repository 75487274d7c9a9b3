"""What can go wrong, as clients see it: each error knows its gRPC code, its HTTP status and a machine-readable reason.

Raised where the fault is known; turned into a status at the gRPC face and at the HTTP face, and nowhere else.
"""

from enum import Enum
from typing import ClassVar


class Code(Enum):
    """The gRPC codes in use, by their number; kept apart from grpc so that the pure core may name them."""

    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    INTERNAL = 13
    UNAVAILABLE = 14


class CideryError(Exception):
    """Base of all errors that reach a client. The message says what, which, got and allowed."""

    reason: ClassVar[str] = "INTERNAL"
    code: ClassVar[Code] = Code.INTERNAL
    http_status: ClassVar[int] = 500


class InvalidRequest(CideryError):
    """A field is wrong; `field` names it as the API spells it."""

    reason = "INVALID_REQUEST"
    code = Code.INVALID_ARGUMENT
    http_status = 400

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.detail = message

    def __reduce__(self) -> tuple[type["InvalidRequest"], tuple[str, ...]]:
        return (InvalidRequest, (self.field, self.detail))


class RequestTooLong(InvalidRequest):
    """Prompt plus max_tokens doesn't fit into the model's context, or into the Mac's KV memory."""

    reason = "CONTEXT_TOO_LONG"

    def __init__(self, message: str) -> None:
        super().__init__("prompt", message)

    def __reduce__(self) -> tuple[type[InvalidRequest], tuple[str, ...]]:
        return (RequestTooLong, (self.detail,))


class BodyTooLarge(CideryError):
    """The request's bytes exceed what one request may bring."""

    reason = "BODY_TOO_LARGE"
    code = Code.RESOURCE_EXHAUSTED
    http_status = 413


class ModelNotFound(CideryError):
    """No Mac serves this model."""

    reason = "MODEL_NOT_FOUND"
    code = Code.NOT_FOUND
    http_status = 404


class NotFound(CideryError):
    """An admin call names a Mac or a request that is not known."""

    reason = "NOT_FOUND"
    code = Code.NOT_FOUND
    http_status = 404


class AdapterNotLoaded(CideryError):
    """The adapter was unloaded, or hasn't been loaded yet, where the request came to run."""

    reason = "ADAPTER_NOT_LOADED"
    code = Code.NOT_FOUND
    http_status = 404


class Overloaded(CideryError):
    """Every queue is full; come back after `retry_after_s`."""

    reason = "OVERLOADED"
    code = Code.RESOURCE_EXHAUSTED
    http_status = 429

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoMacReady(CideryError):
    """The model is known but no Mac can take the request now."""

    reason = "NO_MAC_READY"
    code = Code.UNAVAILABLE
    http_status = 503


class MacsAway(NoMacReady):
    """Macs of the model are starting or were lost, and may be back in seconds."""


class ActorAway(CideryError):
    """The router, or a Mac's manager, doesn't answer: it is being restarted, or its machine is gone."""

    reason = "ACTOR_AWAY"
    code = Code.UNAVAILABLE
    http_status = 503


class MacLost(CideryError):
    """The Mac that ran the request is gone; clients see this only when the gateway has no tries left."""

    reason = "MAC_LOST"
    code = Code.UNAVAILABLE
    http_status = 503


class StartupFailed(CideryError):
    """The fleet, a Mac or a worker could not be started; for the person at the terminal."""

    reason = "STARTUP_FAILED"
    code = Code.FAILED_PRECONDITION
    http_status = 503


# Failures that cross the node stream by name.
BY_REASON: dict[str, type[CideryError]] = {
    error.reason: error
    for error in (InvalidRequest, RequestTooLong, AdapterNotLoaded, Overloaded, MacLost, NoMacReady, CideryError)
}
