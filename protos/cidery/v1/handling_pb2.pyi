from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Handling(_message.Message):
    __slots__ = ("tenant", "priority", "retention_priority", "pin_s", "session", "cache_salt")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    RETENTION_PRIORITY_FIELD_NUMBER: _ClassVar[int]
    PIN_S_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    priority: int
    retention_priority: int
    pin_s: float
    session: str
    cache_salt: str
    def __init__(self, tenant: _Optional[str] = ..., priority: _Optional[int] = ..., retention_priority: _Optional[int] = ..., pin_s: _Optional[float] = ..., session: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...
