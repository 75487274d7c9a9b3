"""What a request would take on one Mac, in seconds by term.

    wait_s      until its prompt has its turn, and what others beside it take of the steps; or until a prompt under way
                has computed what the request shares with it
    prefill_s   its own tokens that are not there, in chunks beside the rows that decode
    decode_s    its answer beside the rows that will decode then, what its row costs those, and how much longer it takes
                as long as other prompts are being prefilled
    stall_s     how long its prefill holds up the rows that decode and the prompt beside it
    pressure_s  what its prefill costs those who come later: they wait for it too, the more the busier the Mac has been
                of late, and it pushes out what may be wanted again, in the part of the memory that is hot

A step has room for several prompts' chunks, so a short prompt does not wait for one long one: with W seconds booked, L
of them one prompt's, and two abreast, a new one of n seconds gets its first token after 2 (W - L) + n + min(n, 2 L - W)
if that prompt is more than half of all, else after W + n. Those are seconds of prefill alone; every step takes the rows
that decode along, and a prompt that runs alone gets but one chunk of a step, so its tokens carry twice as much of them.

What the request shares with a prompt under way (`shared_s`) is taken off the wait, for elsewhere it would have to
compute the same tokens: so siblings stay together until the rest of the queue costs more than prefilling again. All but
the first two terms are weighted: others bear them, or they come after the first token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.routing.config import RoutingConfig
from cluster.routing.speed import StepCosts

# A Mac whose work of late, faded by half in a minute, comes to so many seconds has been busy all the time. Whoever
# comes later waits busy / (1 - busy) seconds for each second of it, as in a queue.
_BUSY_S = 86.6
_MOST_BUSY = 0.85
# What a new prompt finds planned when it comes: the step that runs, half of it on average, and the next one.
_PLANNED_STEPS = 1.5


class Standing(NamedTuple):
    """One Mac as a decision sees it; made anew whenever one of these changes. Terms of the request are left open."""

    # What `base_s` reads of every Mac, side by side: start_s, token_s, context_s, 1 + pressure, stall, stall_tokens,
    # decode_s, decode_context_s.
    line: tuple[float, float, float, float, float, float, float, float]
    # Until all prompts booked there are computed; until the request's prompt gets its share of the steps; what is left
    # of the longest prompt then, rows that decode beside it not counted.
    wait_s: float
    start_s: float
    beside_s: float
    # Seconds of a prefill token, rows that decode beside it included; what these are of it; and for each token of its
    # context.
    token_s: float
    rows_token_s: float
    context_s: float
    # A step that has prefill, and one that only decodes.
    mixed_step_s: float
    decode_step_s: float
    # Weighted: each second of prefill counts so often for those who come later.
    pressure: float
    # Weighted seconds that each second of prefill holds up rows that decode, and their tokens still to come.
    stall: float
    stall_tokens: float
    # Weighted seconds of an answer's token, and of it for each token of the prompt; the weight itself.
    decode_s: float
    decode_context_s: float
    decode_weight: float
    sibling_weight: float
    # Seconds of one more row, and of it for each token of its context.
    row_s: float
    row_context_s: float
    # The bookings.
    num_requests: int
    num_prefill_tokens: int
    num_decoding: int
    context_tokens: int
    token_capacity: int


@dataclass(frozen=True, slots=True)
class Terms:
    """The prediction by term; `total_s` is what Macs are compared by. `shared_s` is a part of `wait_s`."""

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

    @property
    def chunk_tokens(self) -> int:
        """Of one prompt in one step."""
        return min(self.max_chunk_tokens, self.max_num_batched_tokens)

    @property
    def num_lanes(self) -> int:
        """Prompts that one step takes a whole chunk of."""
        return max(1, self.max_num_batched_tokens // self.chunk_tokens)


def standing_of(
    costs: StepCosts,
    bounds: MacBounds,
    config: RoutingConfig,
    *,
    num_prefilling: int,
    num_prefill_tokens: int,
    prefill_work: int,
    num_decoding: int,
    decode_context_tokens: int,
    hot_tokens: int,
    num_output_tokens: float,
    longest: tuple[int, int] = (0, 0),
    recent_work_s: float = 0.0,
) -> Standing:
    """`num_output_tokens` is the usual length of an answer; the other numbers are the Mac's bookings.

    `longest`: tokens and work of the prompt under way that has most to do. `recent_work_s` has faded up to now.
    """
    # Every step with prefill carries the rows that decode; a prompt alone gets but one chunk of it.
    rows_s = costs.step_s + costs.row_s * num_decoding + costs.row_context_s * decode_context_tokens
    chunk, num_lanes = bounds.chunk_tokens, bounds.num_lanes
    rows_token_s = rows_s / (chunk if num_lanes > 1 else bounds.max_num_batched_tokens)
    queue = _in_line(
        (num_prefill_tokens, costs.token_s * num_prefill_tokens + costs.context_s * prefill_work / 2),
        (longest[0], costs.token_s * longest[0] + costs.context_s * longest[1] / 2),
        num_lanes,
        rows_token_s,
    )
    token_s = costs.token_s + rows_token_s
    num_others = num_prefilling + num_decoding
    row_s = costs.step_s + costs.row_s * (num_others + 1) + costs.row_context_s * decode_context_tokens
    seat_s = _seat_wait_s(bounds, num_others, num_output_tokens * row_s)
    start_s, wait_s = queue.start_s + seat_s, queue.wait_s + seat_s
    context = prefill_work / 2 / num_prefill_tokens if num_prefill_tokens else 0.0
    pressure = _pressure(config, recent_work_s, hot_tokens / bounds.token_capacity)
    stall = config.stall_weight * num_decoding
    # Rows that decode end before a long prompt does: a step of it is one token of theirs.
    stall_tokens = num_output_tokens / 2 * chunk
    decode_s = config.decode_weight * (row_s + costs.row_s * num_others)
    decode_context_s = config.decode_weight * costs.row_context_s * (1 + num_others)
    mixed_step_s = chunk * (token_s + costs.context_s * context)
    # Steps that are planned already come first.
    if num_prefilling:
        start_s = max(start_s, min(wait_s, _PLANNED_STEPS * mixed_step_s))
    elif num_decoding:
        start_s = max(start_s, _PLANNED_STEPS * (row_s - costs.row_s))
    return Standing(
        line=(start_s, token_s, costs.context_s, 1.0 + pressure, stall, stall_tokens, decode_s, decode_context_s),
        wait_s=wait_s,
        start_s=start_s,
        beside_s=queue.beside_s,
        token_s=token_s,
        rows_token_s=rows_token_s,
        context_s=costs.context_s,
        mixed_step_s=mixed_step_s,
        decode_step_s=row_s,
        pressure=pressure,
        stall=stall,
        stall_tokens=stall_tokens,
        decode_s=decode_s,
        decode_context_s=decode_context_s,
        decode_weight=config.decode_weight,
        sibling_weight=config.sibling_weight,
        row_s=costs.row_s,
        row_context_s=costs.row_context_s,
        num_requests=num_others,
        num_prefill_tokens=num_prefill_tokens,
        num_decoding=num_decoding,
        context_tokens=decode_context_tokens + num_prefill_tokens,
        token_capacity=bounds.token_capacity,
    )


def _seat_wait_s(bounds: MacBounds, num_others: int, answer_s: float) -> float:
    """Until one of those that run leaves the newcomer its place, where all are taken."""
    num_too_many = num_others + 1 - bounds.max_num_seqs
    return max(0, num_too_many) * answer_s / bounds.max_num_seqs


def _pressure(config: RoutingConfig, recent_work_s: float, hot_share: float) -> float:
    """What a second of work costs those who come later, by how busy the Mac was of late and how full of wanted KV."""
    busy = min(_MOST_BUSY, recent_work_s / _BUSY_S)
    crowd = busy / (1.0 - busy)
    return config.work_weight + config.crowd_weight * crowd + config.pressure_weight * min(1.0, hot_share)


def prefill_s(standing: Standing, num_matched: int, num_tokens: int) -> float:
    """The tokens after the first `num_matched`."""
    return (num_tokens - num_matched) * (standing.token_s + standing.context_s * (num_matched + num_tokens) / 2)


def first_token_s(standing: Standing, num_matched: int, num_tokens: int) -> float:
    """From now to the first token, if nothing is computed for it by others."""
    own_s = prefill_s(standing, num_matched, num_tokens)
    if not standing.wait_s:
        return standing.start_s + own_s
    abreast_s = min(own_s - (num_tokens - num_matched) * standing.rows_token_s, standing.beside_s)
    return standing.start_s + abreast_s + own_s


def terms_of(standing: Standing, num_held: int, num_matched: int, num_tokens: int, num_output: float) -> Terms:
    """All terms of one Mac; they add up to `base_s` and `beside_s`."""
    own_s = prefill_s(standing, num_matched, num_tokens)
    ahead = _ahead(
        standing, own_s - (num_tokens - num_matched) * standing.rows_token_s, num_held, num_matched, num_output
    )
    held_up = min(1.0, standing.stall_tokens / (num_tokens - num_matched)) if num_tokens > num_matched else 0.0
    return Terms(
        wait_s=standing.start_s + ahead.wait_s,
        shared_s=ahead.shared_s * standing.sibling_weight,
        prefill_s=own_s,
        decode_s=num_output * (standing.decode_s + standing.decode_context_s * num_tokens) + ahead.slowed_s,
        stall_s=own_s * held_up * standing.stall + ahead.abreast_s,
        pressure_s=own_s * standing.pressure,
    )


def base_s(
    standings: Sequence[Standing], slots: Sequence[int], num_matched: Sequence[int], num_tokens: int, num_output: float
) -> list[float]:
    """The total on each Mac as if no other prompt were being prefilled there: never more, unless it shares one."""
    return [
        start_s
        + (token_s + context_s * (num_tokens - (new := num_tokens - num_matched[slot]) / 2))
        * (new * factor + stall * (new if new < stall_tokens else stall_tokens))
        + num_output * (decode_s + decode_context_s * num_tokens)
        for slot in slots
        for start_s, token_s, context_s, factor, stall, stall_tokens, decode_s, decode_context_s in (
            standings[slot].line,
        )
    ]


def beside_s(standing: Standing, num_held: int, num_matched: int, num_tokens: int, num_output: float) -> float:
    """What other prompts under way there add to it; below 0 if they compute something for it."""
    own_s = prefill_s(standing, num_matched, num_tokens)
    ahead = _ahead(
        standing, own_s - (num_tokens - num_matched) * standing.rows_token_s, num_held, num_matched, num_output
    )
    return ahead.wait_s - ahead.shared_s * standing.sibling_weight + ahead.abreast_s + ahead.slowed_s


class _Ahead(NamedTuple):
    """More wait than until its turn, of which what it shares; steps shared with another prompt; slower decoding."""

    wait_s: float
    shared_s: float
    abreast_s: float
    slowed_s: float


def _ahead(standing: Standing, own_s: float, num_held: int, num_matched: int, num_output: float) -> _Ahead:
    """`own_s` are the request's seconds of prefill, rows that decode beside it not counted."""
    if not standing.wait_s:
        return _NOBODY_AHEAD
    abreast_s = min(own_s, standing.beside_s)
    wait_s, shared_s = standing.start_s + abreast_s, 0.0
    if num_matched > num_held:
        # It is computed by one of those ahead, whichever.
        shared_s = min(standing.wait_s, prefill_s(standing, num_held, num_matched))
        wait_s = max(wait_s, shared_s)
    # Prompts that are still being prefilled when it decodes.
    num_slow = min(num_output, max(0.0, standing.wait_s - wait_s) / standing.mixed_step_s)
    slower_s = max(0.0, standing.mixed_step_s - standing.decode_step_s)
    return _Ahead(wait_s - standing.start_s, shared_s, abreast_s, standing.decode_weight * num_slow * slower_s)


_NOBODY_AHEAD = _Ahead(0.0, 0.0, 0.0, 0.0)


class _Line(NamedTuple):
    """Until a prompt gets its share of the steps; until all are computed; what is left of the longest in between."""

    start_s: float
    wait_s: float
    beside_s: float


def _in_line(every: tuple[int, float], longest: tuple[int, float], num_lanes: int, rows_token_s: float) -> _Line:
    """Each as (tokens, seconds without rows that decode). As if all but the longest went through the other lanes."""
    num_tokens, seconds = every
    longest_s = min(longest[1], seconds)
    rest_s, others = seconds - longest_s, num_lanes - 1
    if num_lanes < 2 or rest_s >= others * longest_s:
        wait_s = seconds + num_tokens * rows_token_s / num_lanes
        return _Line(wait_s, wait_s, 0.0)
    steps_tokens = (num_tokens - longest[0]) / others
    start_s = rest_s * num_lanes / others + steps_tokens * rows_token_s
    beside_s = longest_s - rest_s / others
    return _Line(start_s, start_s + beside_s + max(0.0, longest[0] - steps_tokens) * rows_token_s, beside_s)
