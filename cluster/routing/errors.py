"""What the router refuses, and why."""

from collections.abc import Iterable, Mapping


class RoutingError(Exception):
    """Base of every refusal; the message is meant for the caller."""


class UnknownModel(RoutingError):
    """No Mac has joined with this model."""

    def __init__(self, model: str, served: Iterable[str]) -> None:
        self.model = model
        self.served = tuple(sorted(served))
        super().__init__(f"model {model!r} is not served; served: {', '.join(self.served) or 'none'}")


class NoMacAvailable(RoutingError):
    """Macs with this model exist, but none can take the request now.

    `reasons` says why by Mac. `is_permanent`: the prompt is too long for every one of them, so trying again is useless.
    """

    def __init__(self, model: str, reasons: Mapping[str, str], *, is_permanent: bool) -> None:
        self.model = model
        self.reasons = dict(reasons)
        self.is_permanent = is_permanent
        why = "; ".join(f"{mac}: {reason}" for mac, reason in self.reasons.items())
        super().__init__(f"no Mac can take a request for {model!r}: {why}")


class QueueFull(RoutingError):
    """Too many requests wait already; worth trying again after `retry_after_s`, when those will have been placed."""

    def __init__(self, model: str, num_waiting: int, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(
            f"{num_waiting} requests for {model!r} are waiting, which is the most; they take {retry_after_s:.1f} s"
        )


class DeadlineUnmet(RoutingError):
    """No Mac can give the first token in time; `retry_after_s` is by how much it would be late."""

    def __init__(self, model: str, predicted_s: float, deadline_s: float) -> None:
        self.retry_after_s = max(1.0, predicted_s - deadline_s)
        in_time = f"{predicted_s:.1f} s, its deadline is {deadline_s:.1f} s"
        super().__init__(f"the first token of a request for {model!r} would take {in_time}")


class UnknownMac(RoutingError):
    """No Mac of this name has joined."""

    def __init__(self, mac: str, known: Iterable[str]) -> None:
        self.mac = mac
        super().__init__(f"no Mac is named {mac!r}; known: {', '.join(sorted(known)) or 'none'}")


class UnknownRequest(RoutingError):
    """The request was never routed, or so long ago that its decision is no longer kept."""

    def __init__(self, request_id: str, num_kept: int) -> None:
        self.request_id = request_id
        super().__init__(f"request {request_id!r} is not among the last {num_kept} decisions")


class IncompatibleMac(RoutingError):
    """The Mac's KV blocks can't be exchanged for those of the other Macs with its model."""

    def __init__(self, mac: str, reason: str) -> None:
        self.mac = mac
        super().__init__(f"{mac} can't join: {reason}")
