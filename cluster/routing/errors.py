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
