"""What a request would take on one Mac, in seconds by term.

    wait_s      prefill booked there ahead of it, decoding on beside it, and a free row if all are taken
    prefill_s   its own tokens that are not there, in chunks beside the rows that decode
    decode_s    its answer beside the rows that will decode then, and what its row costs those
    stall_s     how long its prefill holds up the rows that decode
    pressure_s  what it pushes out and will be wanted again: as much as it brings, in the part of the memory that is hot

The last three are weighted, because others bear them, or nobody if things go well. What the request shares with a
prompt that is being prefilled there is not counted as waiting (`shared_s`): elsewhere it would have to compute the same
tokens. So siblings stay together until the rest of the queue costs more than prefilling again.
"""

from dataclasses import dataclass
from typing import NamedTuple

from cluster.routing.config import RoutingConfig
from cluster.routing.speed import StepCosts


class Standing(NamedTuple):
    """One Mac as a decision sees it; made anew whenever one of these changes. Terms of the request are left open."""

    wait_s: float
    # Seconds until the request's prompt gets its share of the steps, and until another one no longer takes half of them.
    start_s: float
    beside_s: float
    # Seconds of a prefill token, and of it for each token of its context.
    token_s: float
    context_s: float
    # Prefill seconds count so often: once, and as stall and pressure.
    factor: float
    # Weighted seconds of an answer's token, and of it for each token of the prompt.
    decode_s: float
    decode_context_s: float
    row_s: float
    row_context_s: float
    # For those who want to know more: what the factor is made of, and the bookings.
    stall: float
    pressure: float
    num_requests: int
    num_prefill_tokens: int
    num_decoding: int
    context_tokens: int
    token_capacity: int


@dataclass(frozen=True, slots=True)
class Terms:
    """The prediction by term; `total_s` is what Macs are compared by."""

    wait_s: float
    shared_s: float
    prefill_s: float
    decode_s: float
    stall_s: float
    pressure_s: float

    @property
    def total_s(self) -> float:
        """Weights are in the terms already."""
        return self.wait_s - self.shared_s + self.prefill_s + self.decode_s + self.stall_s + self.pressure_s

    @property
    def first_token_s(self) -> float:
        """From now to the first token."""
        return self.wait_s + self.prefill_s


@dataclass(frozen=True, slots=True)
class MacBounds:
    """What of a Mac doesn't change while it is there."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_tokens: int
    token_capacity: int


def standing_of(
    costs: StepCosts,
    bounds: MacBounds,
    config: RoutingConfig,
    *,
    num_prefilling: int,
    num_prefill_tokens: int,
    prefill_work: int,
    longest: tuple[int, int],
    num_decoding: int,
    decode_context_tokens: int,
    hot_tokens: int,
    num_output_tokens: float,
    recent_work_s: float,
) -> Standing:
    """`num_output_tokens` is the usual length of an answer; the other numbers are the Mac's bookings."""
    # A chunk's step carries every row that decodes.
    rows_s = costs.step_s + costs.row_s * num_decoding + costs.row_context_s * decode_context_tokens
    token_s = costs.token_s + rows_s / bounds.max_num_batched_tokens
    wait_s = token_s * num_prefill_tokens + costs.context_s * prefill_work / 2
    num_others = num_prefilling + num_decoding
    row_s = costs.step_s + costs.row_s * (num_others + 1) + costs.row_context_s * decode_context_tokens
    num_too_many = num_others + 1 - bounds.max_num_seqs
    if num_too_many > 0:
        wait_s += num_too_many * num_output_tokens * row_s / bounds.max_num_seqs
    start_s, beside_s = wait_s, 0.0
    num_abreast = bounds.max_num_batched_tokens // bounds.max_chunk_tokens
    longest_s = min(wait_s, token_s * longest[0] + costs.context_s * longest[1] / 2)
    rest_s = wait_s - longest_s
    if num_abreast > 1 and rest_s < (num_abreast - 1) * longest_s:
        start_s = rest_s * num_abreast / (num_abreast - 1)
        beside_s = longest_s - rest_s / (num_abreast - 1)
    stall = config.stall_weight * num_decoding
    pressure = config.pressure_weight * min(1.0, hot_tokens / bounds.token_capacity)
    return Standing(
        wait_s=wait_s,
        start_s=start_s,
        beside_s=beside_s,
        token_s=token_s,
        context_s=costs.context_s,
        factor=config.work_weight + stall + pressure + config.crowd_weight * min(2.0, recent_work_s / 86.6),
        decode_s=config.decode_weight * (row_s + costs.row_s * num_others),
        decode_context_s=config.decode_weight * costs.row_context_s * (1 + num_others),
        row_s=costs.row_s,
        row_context_s=costs.row_context_s,
        stall=stall,
        pressure=pressure,
        num_requests=num_others,
        num_prefill_tokens=num_prefill_tokens,
        num_decoding=num_decoding,
        context_tokens=decode_context_tokens + num_prefill_tokens,
        token_capacity=bounds.token_capacity,
    )


def prefill_s(standing: Standing, num_matched: int, num_tokens: int) -> float:
    """The tokens after the first `num_matched`."""
    return (num_tokens - num_matched) * (standing.token_s + standing.context_s * (num_matched + num_tokens) / 2)


def shared_s(standing: Standing, num_held: int, num_matched: int) -> float:
    """Of the wait, the part that computes what the request shares: from what the Mac holds to what it will."""
    return min(standing.wait_s, prefill_s(standing, num_held, num_matched))


def terms_of(standing: Standing, num_held: int, num_matched: int, num_tokens: int, num_output: float) -> Terms:
    """All terms of one Mac."""
    own_s = prefill_s(standing, num_matched, num_tokens)
    return Terms(
        wait_s=standing.wait_s,
        shared_s=shared_s(standing, num_held, num_matched),
        prefill_s=own_s,
        decode_s=num_output * (standing.decode_s + standing.decode_context_s * num_tokens),
        stall_s=own_s * standing.stall,
        pressure_s=own_s * standing.pressure,
    )
