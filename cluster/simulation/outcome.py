"""What a simulation gives: what became of every request, and how busy every Mac was."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.scheduling.scheduler import Scheduler

# Width of the time slices in which load is kept.
SLICE_S = 10.0


@dataclass(slots=True)
class RequestOutcome:
    """One request; times from its arrival. `rejected` is why it got no answer, if it got none."""

    index: int
    session: int
    arrived_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    mac: str = ""
    num_tries: int = 0
    num_predicted_tokens: int = 0
    num_cached_tokens: int = 0
    queue_s: float = 0.0
    first_token_s: float | None = None
    total_s: float = 0.0
    rejected: str = ""


@dataclass(slots=True)
class Usage:
    """One Mac. `busy_s`, by slice of time, is how long its steps took; the last two are the most seen in a slice."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_generated_tokens: int = 0
    busy_s: list[float] = field(default_factory=list)
    num_running: list[int] = field(default_factory=list)
    num_waiting: list[int] = field(default_factory=list)

    def add(self, now_s: float, run_s: float, num_prefill: int, num_generated: int, scheduler: Scheduler) -> None:
        """One step that has ended now."""
        self.num_steps += 1
        self.num_prefill_tokens += num_prefill
        self.num_generated_tokens += num_generated
        index = int(now_s / SLICE_S)
        while len(self.busy_s) <= index:
            self.busy_s.append(0.0)
            self.num_running.append(0)
            self.num_waiting.append(0)
        self.busy_s[index] += run_s
        self.num_running[index] = max(self.num_running[index], scheduler.num_running)
        self.num_waiting[index] = max(self.num_waiting[index], scheduler.num_waiting)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run. `requests` in the order of the trace."""

    trace: str
    duration_s: float
    requests: tuple[RequestOutcome, ...]
    usage: dict[str, Usage]

    @property
    def served(self) -> tuple[RequestOutcome, ...]:
        """Those that got an answer."""
        return tuple(each for each in self.requests if not each.rejected)


def hit_rate(requests: Sequence[RequestOutcome]) -> float:
    """Share of prompt tokens that were found in a cache."""
    num_prompt = sum(each.num_prompt_tokens for each in requests)
    return sum(each.num_cached_tokens for each in requests) / num_prompt if num_prompt else 0.0


def hit_error(requests: Sequence[RequestOutcome]) -> float:
    """How far the router's predictions were off: sum of the differences by the sum of what was found."""
    num_off = sum(abs(each.num_predicted_tokens - each.num_cached_tokens) for each in requests if each.num_tries == 1)
    num_found = sum(each.num_cached_tokens for each in requests if each.num_tries == 1)
    return num_off / num_found if num_found else float(num_off > 0)


def quantile(values: Sequence[float], share: float) -> float:
    """By linear interpolation; 0 of nothing. `values` in ascending order."""
    if not values:
        return 0.0
    at = share * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)
