"""What the scheduler counts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts since the start, but for the first three, which are of now."""

    num_running: int
    num_waiting: int
    num_plans_in_flight: int
    num_preemptions: int
    # Over first admissions: tokens looked up in the prefix cache and tokens found there.
    num_queried_tokens: int
    num_cached_tokens: int
    # Guessed and verified, and generated ones that had been guessed.
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
