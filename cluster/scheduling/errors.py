"""What the scheduler raises; asserts beside these mean a bug of its own."""


class Refused(Exception):
    """A request that was not taken; nothing has changed."""


class InvalidRequest(Refused):
    """The request contradicts itself."""


class DuplicateRequest(Refused):
    """A live request has the same id."""


class RequestTooLong(Refused):
    """The request could never run here, however idle the Mac."""


class QueueFull(Refused):
    """Too many requests are waiting; another Mac, or a try after `retry_after_s`, may take it."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ProtocolError(Exception):
    """The worker's result does not fit the plan: its state and ours have parted, and it must be restarted."""
