"""What a request would take on one Mac, in seconds by term.

    wait_s      until its prompt has its turn, or until a prompt under way has computed what the request shares with it
    prefill_s   its own tokens that are not there, in chunks beside the rows that decode
    decode_s    its answer beside the rows that will decode then, what its row costs those, and how much longer it takes
                as long as other prompts are being prefilled
    stall_s     how long its prefill holds up the rows that decode, and the prompts that it overtakes
    pressure_s  what its prefill costs those who come later: they wait for it too, the more the busier the Mac has been
                of late, and it pushes out what may be wanted again, in the part of the memory that is hot

A Mac's scheduler gives each prompt its turn by when it came and how much it has to compute (see step_planner.py): all
that have less left than a newcomer go before it, and it goes before the others, each of which waits for all of it.

What the request shares with a prompt under way (`shared_s`) is taken off the wait, for elsewhere it would have to
compute the same tokens: so siblings stay together until the rest of the queue costs more than prefilling again. All but
the first two terms are weighted (others bear them, or they come after the first token); only what those wait that it
overtakes counts in full, for theirs are first tokens too.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cluster.routing.config import RoutingConfig
from cluster.routing.speed import StepCosts

# A Mac whose work of late, faded by half in a minute, comes to so many seconds has been busy all the time. Whoever
# comes later waits busy / (1 - busy) seconds for each second of it, as in a queue.
_BUSY_S = 86.6
_MOST_BUSY = 0.85
# What a new prompt finds planned when it comes: the step that runs, half of it on average, and the next one. Others'
# chunks fill up its own last step, half of it on average.
_PLANNED_STEPS = 1.5
_SHARED_STEPS = 0.5


# One that is being prefilled: its turn, the tokens left, and their work: the sum of tokens times twice their mean
# context, as an integer; that is what attention over the past costs, in pairs of tokens.
Prompt = tuple[int, int, int]


class Standing(NamedTuple):
    """One Mac as a decision sees it; made anew whenever one of these changes. Terms of the request are left open."""

    # What `base_s` reads of every Mac, side by side: start_s, token_s, context_s, 1 + pressure, stall, stall_tokens,
    # decode_s, decode_context_s, turns, done_s.
    line: tuple[float, float, float, float, float, float, float, float, Sequence[int], Sequence[float]]
    # Until all prompts booked there are computed, and until the next one may begin.
    wait_s: float
    start_s: float
    # Prompts under way in their turns: a newcomer with so many tokens or more goes after it, and the seconds until it
    # is computed then.
    turns: Sequence[int]
    done_s: Sequence[float]
    # Seconds of a prefill token, rows that decode beside it included; and for each token of its context.
    token_s: float
    context_s: float
    # A step that has prefill; weighted, how much longer it takes than one that only decodes.
    mixed_step_s: float
    slower_s: float
    # Weighted: each second of prefill counts so often for those who come later.
    pressure: float
    # Weighted seconds that each second of prefill holds up rows that decode, and their tokens still to come.
    stall: float
    stall_tokens: float
    # Weighted seconds of an answer's token, and of it for each token of the prompt.
    decode_s: float
    decode_context_s: float
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


def standing_of(
    costs: StepCosts,
    bounds: MacBounds,
    config: RoutingConfig,
    *,
    prompts: Sequence[Prompt],
    num_decoding: int,
    decode_context_tokens: int,
    hot_tokens: int,
    num_output_tokens: float,
    recent_work_s: float = 0.0,
) -> Standing:
    """`num_output_tokens` is the usual length of an answer; the other numbers are the Mac's bookings.

    `prompts` are in their turns. `recent_work_s` has faded up to now.
    """
    # Every step carries the rows that decode beside one chunk of prompts.
    rows_s = costs.row_s * num_decoding + costs.row_context_s * decode_context_tokens
    chunk = bounds.chunk_tokens
    token_s = max(costs.token_s, costs.step_s / chunk) + rows_s / chunk
    num_others = len(prompts) + num_decoding
    row_s = costs.step_s + costs.row_s * (num_others + 1) + costs.row_context_s * decode_context_tokens
    seat_s = _seat_wait_s(bounds, num_others, num_output_tokens * row_s)
    turns, done_s, num_prefill_tokens = _in_turns(prompts, seat_s, token_s, costs.context_s)
    wait_s = done_s[-1] if done_s else seat_s
    pressure = _pressure(config, recent_work_s, hot_tokens / bounds.token_capacity)
    stall = config.stall_weight * num_decoding
    # Rows that decode end before a long prompt does: a step of it is one token of theirs.
    stall_tokens = num_output_tokens / 2 * chunk
    decode_s = config.decode_weight * (row_s + costs.row_s * num_others)
    decode_context_s = config.decode_weight * costs.row_context_s * (1 + num_others)
    mixed_step_s = chunk * (wait_s - seat_s) / num_prefill_tokens if prompts else chunk * token_s
    planned_s = min(wait_s, (_PLANNED_STEPS + _SHARED_STEPS) * mixed_step_s) if prompts else 0.0
    if num_decoding and not prompts:
        planned_s = _PLANNED_STEPS * (row_s - costs.row_s)
    start_s = max(seat_s, planned_s)
    return Standing(
        line=(
            *(start_s, token_s, costs.context_s, 1.0 + pressure),
            *(stall, stall_tokens, decode_s, decode_context_s, turns, done_s),
        ),
        wait_s=wait_s,
        start_s=start_s,
        turns=turns,
        done_s=done_s,
        token_s=token_s,
        context_s=costs.context_s,
        mixed_step_s=mixed_step_s,
        slower_s=config.decode_weight * max(0.0, mixed_step_s - row_s),
        pressure=pressure,
        stall=stall,
        stall_tokens=stall_tokens,
        decode_s=decode_s,
        decode_context_s=decode_context_s,
        sibling_weight=config.sibling_weight,
        row_s=costs.row_s,
        row_context_s=costs.row_context_s,
        num_requests=num_others,
        num_prefill_tokens=num_prefill_tokens,
        num_decoding=num_decoding,
        context_tokens=decode_context_tokens + num_prefill_tokens,
        token_capacity=bounds.token_capacity,
    )


def _in_turns(
    prompts: Sequence[Prompt], start_s: float, token_s: float, context_s: float
) -> tuple[list[int], list[float], int]:
    """The prompts' turns, when each is computed if the first one begins at `start_s`, and their tokens."""
    turns, done_s, num_prefill_tokens = [], [], 0
    for turn, num_tokens, work in prompts:
        num_prefill_tokens += num_tokens
        start_s += token_s * num_tokens + context_s / 2 * work
        turns.append(turn)
        done_s.append(start_s)
    return turns, done_s, num_prefill_tokens


def _seat_wait_s(bounds: MacBounds, num_others: int, answer_s: float) -> float:
    """Until one of those that run leaves the newcomer its place, where all are taken."""
    num_too_many = num_others + 1 - bounds.max_num_seqs
    return max(0, num_too_many) * answer_s / bounds.max_num_seqs


def _pressure(config: RoutingConfig, recent_work_s: float, hot_share: float) -> float:
    """What a second of work costs those who come later, by how busy the Mac was of late and how full of wanted KV."""
    busy = min(_MOST_BUSY, recent_work_s / _BUSY_S)
    crowd = busy / (1.0 - busy)
    return config.crowd_weight * crowd + config.pressure_weight * min(1.0, hot_share)


def prefill_s(standing: Standing, num_matched: int, num_tokens: int) -> float:
    """The tokens after the first `num_matched`."""
    return (num_tokens - num_matched) * (standing.token_s + standing.context_s * (num_matched + num_tokens) / 2)


def first_token_s(standing: Standing, num_matched: int, num_tokens: int) -> float:
    """From now to the first token, if nothing is computed for it by others."""
    return _turn_s(standing, num_tokens - num_matched) + prefill_s(standing, num_matched, num_tokens)


def terms_of(standing: Standing, num_held: int, num_matched: int, num_tokens: int, num_output: float) -> Terms:
    """All terms of one Mac; they add up to `base_s` and `beside_s`."""
    own_s, num_new = prefill_s(standing, num_matched, num_tokens), num_tokens - num_matched
    held_up = min(1.0, standing.stall_tokens / num_new) if num_new else 0.0
    # What others compute for it counts as its own here, or it would overtake them.
    num_own = num_tokens - num_held
    num_overtaken = len(standing.turns) - bisect_right(standing.turns, num_own)
    shared_s = _shared_s(standing, num_held, num_matched)
    wait_s = max(_turn_s(standing, num_own), shared_s)
    return Terms(
        wait_s=wait_s,
        shared_s=shared_s * standing.sibling_weight,
        prefill_s=own_s,
        decode_s=num_output * (standing.decode_s + standing.decode_context_s * num_tokens)
        + _slowed_s(standing, wait_s, num_output),
        stall_s=own_s * (held_up * standing.stall + num_overtaken),
        pressure_s=own_s * standing.pressure,
    )


def base_s(
    standings: Sequence[Standing],
    slots: Sequence[int],
    num_held: Sequence[int],
    num_matched: Sequence[int],
    num_tokens: int,
    num_output: float,
) -> list[tuple[float, int, float]]:
    """The total on each Mac but for `beside_s`, its slot, and when the prompt has its turn there.

    Never more than the total, unless others compute something for the request. It is what a decision spends its time
    on, so it is written out.
    """
    totals = []
    for slot in slots:
        start_s, token_s, context_s, factor, stall, stall_tokens, decode_s, decode_context_s, turns, done_s = standings[
            slot
        ].line
        new = num_tokens - num_matched[slot]
        if turns:
            num_before = bisect_right(turns, num_tokens - num_held[slot])
            factor += len(turns) - num_before
            if num_before and done_s[num_before - 1] > start_s:
                start_s = done_s[num_before - 1]
        total_s = (
            start_s
            + (token_s + context_s * (num_tokens - new / 2))
            * (new * factor + stall * (new if new < stall_tokens else stall_tokens))
            + num_output * (decode_s + decode_context_s * num_tokens)
        )
        totals.append((total_s, slot, start_s))
    return totals


def beside_s(standing: Standing, turn_s: float, num_held: int, num_matched: int, num_output: float) -> float:
    """What prompts under way add by slowing its answer, less what they compute for it; `turn_s` is of `base_s`."""
    shared_s = _shared_s(standing, num_held, num_matched)
    wait_s = turn_s if turn_s > shared_s else shared_s
    return wait_s - turn_s - shared_s * standing.sibling_weight + _slowed_s(standing, wait_s, num_output)


def _turn_s(standing: Standing, num_own_tokens: int) -> float:
    """From now until a prompt that brings so many tokens has its turn. O(log prompts under way)."""
    num_before = bisect_right(standing.turns, num_own_tokens)
    return max(standing.start_s, standing.done_s[num_before - 1]) if num_before else standing.start_s


def _shared_s(standing: Standing, num_held: int, num_matched: int) -> float:
    """What is computed for it by one of the prompts under way, whichever."""
    if num_matched <= num_held or not standing.turns:
        return 0.0
    return min(standing.wait_s, prefill_s(standing, num_held, num_matched))


def _slowed_s(standing: Standing, wait_s: float, num_output: float) -> float:
    """Prompts that are still being prefilled when it decodes: each of their steps is one of its tokens."""
    left_s = standing.wait_s - wait_s
    if left_s <= 0.0:
        return 0.0
    return standing.slower_s * min(num_output, left_s / standing.mixed_step_s)
