"""Which Mac: the one with the least predicted seconds for the request.

    wait_s      prefill booked there ahead of the request, at the Mac's speed
    prefill_s   the request's own tokens that are not cached there
    decode_s    how much the requests running there slow its decoding down

What the request shares with a prompt that is being prefilled there is not counted as waiting: elsewhere it would have
to compute the same tokens. So siblings stay together until the rest of the queue costs more than prefilling again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.routing.load import MacLoad

# A difference below this share of the best total, or below what a person notices, is noise of the learnt speeds and no
# reason to pile up work on one Mac.
_TIE = 0.05
_TIE_S = 0.02


@dataclass(frozen=True, slots=True)
class RoutingConfig:
    """Of the whole router."""

    # Assumed of a Mac until it has reported; about an 8B model at 4 bit on a Pro chip.
    default_prefill_tokens_per_s: float = 500.0
    # What one more row adds to a decode step.
    decode_slowdown_s: float = 0.0005
    # Assumed answer length; a smaller max_tokens counts instead.
    expected_output_tokens: int = 256
    # A booking that nobody releases ends after this; longer than any request should take.
    lease_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("default_prefill_tokens_per_s", "lease_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        for name in ("decode_slowdown_s", "expected_output_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")


# Tuples, because one of each is made for every Mac at every decision.
class Standing(NamedTuple):
    """One Mac as the policy sees it for one request.

    `num_matched_tokens` are held or expected there, `num_expected_tokens` of them only expected. `last_booking` numbers
    bookings of the fleet, 0: none yet. A Mac with an `excluded` reason is shown but never chosen.
    """

    mac: str
    num_matched_tokens: int
    num_expected_tokens: int
    load: MacLoad
    prefill_tokens_per_s: float
    last_booking: int
    excluded: str = ""


class Candidate(NamedTuple):
    """One Mac's numbers for a request; `excluded` is empty if it could have been chosen."""

    mac: str
    num_matched_tokens: int
    num_prefill_tokens: int
    wait_s: float
    prefill_s: float
    decode_s: float
    total_s: float
    excluded: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen Mac (None: all are excluded), every Mac's numbers in the order given, and a sentence for people."""

    mac: str | None
    candidates: tuple[Candidate, ...]
    reason: str


def choose(standings: Sequence[Standing], num_tokens: int, max_tokens: int, config: RoutingConfig) -> Choice:
    """Least total_s. Among equals the Mac with the most cached, then the least recently booked; names never decide."""
    num_output_tokens = min(max_tokens, config.expected_output_tokens)
    candidates = tuple(_predict(each, num_tokens, num_output_tokens, config) for each in standings)
    eligible = [
        (candidate, standing.last_booking)
        for candidate, standing in zip(candidates, standings, strict=True)
        if not candidate.excluded
    ]
    if not eligible:
        return Choice(None, candidates, "every Mac is excluded")
    least_s = min(candidate.total_s for candidate, _ in eligible)
    equal = [(candidate, booked) for candidate, booked in eligible if _is_tie(candidate.total_s, least_s)]
    chosen, _ = min(equal, key=lambda pair: (pair[0].num_prefill_tokens, pair[1]))
    others = [candidate for candidate, _ in eligible if candidate is not chosen]
    return Choice(chosen.mac, candidates, _reason(chosen, others, num_tokens))


def _predict(standing: Standing, num_tokens: int, num_output_tokens: int, config: RoutingConfig) -> Candidate:
    num_prefill_tokens = num_tokens - standing.num_matched_tokens
    num_ahead_tokens = max(0, standing.load.num_prefill_tokens - standing.num_expected_tokens)
    wait_s = num_ahead_tokens / standing.prefill_tokens_per_s
    prefill_s = num_prefill_tokens / standing.prefill_tokens_per_s
    decode_s = standing.load.num_requests * num_output_tokens * config.decode_slowdown_s
    return Candidate(
        mac=standing.mac,
        num_matched_tokens=standing.num_matched_tokens,
        num_prefill_tokens=num_prefill_tokens,
        wait_s=wait_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
        total_s=wait_s + prefill_s + decode_s,
        excluded=standing.excluded,
    )


def _is_tie(one_s: float, other_s: float) -> bool:
    return abs(one_s - other_s) <= max(_TIE * min(one_s, other_s), _TIE_S)


def _reason(chosen: Candidate, others: Sequence[Candidate], num_tokens: int) -> str:
    held = f"{chosen.mac} holds {chosen.num_matched_tokens} of {num_tokens} prompt tokens"
    if not others:
        return f"{held} and is the only Mac that can take the request"
    best = min(others, key=lambda each: each.total_s)
    costs = f"{chosen.total_s:.3f} s there, {best.total_s:.3f} s on {best.mac}"
    most = max(others, key=lambda each: each.num_matched_tokens)
    if most.num_matched_tokens > chosen.num_matched_tokens:
        busy_s = most.wait_s + most.decode_s
        return f"{held}; {most.mac} holds {most.num_matched_tokens} but its queue costs {busy_s:.3f} s: {costs}"
    if chosen.num_matched_tokens > most.num_matched_tokens:
        return f"{held}, more than any other: {costs}"
    if _is_tie(chosen.total_s, best.total_s):
        return f"{held}, as much as the best of the others, and was booked least recently: {costs}"
    return f"{held}, as much as the best of the others, and is less busy or faster: {costs}"
