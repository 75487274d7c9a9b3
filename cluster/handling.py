"""How a client wants its request treated among others: whose share it takes, how urgent it is, what is kept of it."""

import math
from dataclasses import dataclass

from cluster.errors import InvalidRequest
from cluster.tokenizer import checked_text
from protos.cidery.v1 import handling_pb2

# Of a header or of gRPC metadata.
SESSION_HEADER = "x-session-id"
MAX_TENANT_CHARACTERS = 128
MAX_PRIORITY = 100
MAX_RETENTION_PRIORITY = 8
MAX_PIN_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Handling:
    """Checked when made: raises InvalidRequest naming field, value and range. See handling.proto."""

    tenant: str = ""
    priority: int = 0
    retention_priority: int = 0
    pin_s: float = 0.0
    session: str = ""
    cache_salt: str = ""

    def __post_init__(self) -> None:
        for field in ("tenant", "session", "cache_salt"):
            text = checked_text(getattr(self, field), field)
            if len(text) > MAX_TENANT_CHARACTERS:
                limit = f"may have at most {MAX_TENANT_CHARACTERS} characters"
                raise InvalidRequest(field, f"{limit}, got {len(text)}")
        for field, most in (("priority", MAX_PRIORITY), ("retention_priority", MAX_RETENTION_PRIORITY)):
            if not -most <= getattr(self, field) <= most:
                raise InvalidRequest(field, f"must be from -{most} to {most}, got {getattr(self, field)}")
        if not (math.isfinite(self.pin_s) and 0.0 <= self.pin_s <= MAX_PIN_S):
            raise InvalidRequest("pin_s", f"must be from 0 to {MAX_PIN_S:.0f} seconds, got {self.pin_s}")

    @classmethod
    def from_proto(cls, message: handling_pb2.Handling) -> "Handling":
        """Raises InvalidRequest."""
        return cls(
            message.tenant,
            message.priority,
            message.retention_priority,
            message.pin_s,
            message.session,
            message.cache_salt,
        )
