"""Settings of the router."""

from dataclasses import dataclass

POLICIES = (
    "predicted_seconds",
    "round_robin",
    "least_loaded",
    "prefix_affinity",
    "linear_block_cost",
    "weighted_scores",
)


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Of the whole router. Raises ValueError naming field, value and allowed range."""

    # How a Mac is chosen, see policy.py and rivals.py.
    policy: str = "predicted_seconds"
    # Assumed of a Mac until it has reported and no other has; about an 8B model at 4 bit on a Pro chip.
    default_prefill_tokens_per_s: float = 500.0
    # Answer length until the first ones have ended; a smaller max_tokens counts instead.
    expected_output_tokens: int = 256
    # A booking that nobody releases ends after this; longer than any request should take.
    lease_s: float = 600.0
    # Conversations silent for longer don't count as hot.
    hot_horizon_s: float = 600.0
    # Weights of seconds that others lose, or that are lost later, against those until the request's own first token.
    # Of each second of prefill: what it costs those who come later where a Mac has been busy, and where what it pushes
    # out is hot.
    crowd_weight: float = 0.35
    pressure_weight: float = 0.05
    # Of each second that is waited for a prompt under way to compute what is shared with it: 1 keeps siblings together
    # until the rest of the queue costs more than prefilling again, 0 sends them where their first tokens come soonest.
    sibling_weight: float = 1.0
    # Of each second that a decoding row is held up, and of the answer's own seconds.
    stall_weight: float = 0.1
    decode_weight: float = 0.1
    # Requests that may wait in the router, and the backlog in seconds beyond which a Mac is given nothing more.
    max_waiting: int = 1024
    max_backlog_s: float = 10.0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {self.policy!r}")
        for name in ("default_prefill_tokens_per_s", "lease_s", "hot_horizon_s", "max_backlog_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in (
            *("expected_output_tokens", "max_waiting"),
            *("crowd_weight", "pressure_weight", "stall_weight", "decode_weight"),
            "sibling_weight",
        ):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
