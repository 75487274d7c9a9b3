"""Limits of one Mac's scheduler."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Raises ValueError naming field, value and allowed range.

    One step runs at most `max_num_batched_tokens` tokens: one of each decoding sequence, the rest prefill. Prompts that
    don't end in it get at most `max_chunk_tokens` of it together, so that neither rows that decode nor the first tokens
    of short prompts wait for more; several that end may fill it.
    """

    # Prompt and generated tokens of one sequence.
    max_model_len: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_chunk_tokens: int = 256
    # Seconds: beside rows that decode, prompts get no more tokens than such a step has time for (`pace`).
    target_step_s: float = 0.5
    # Of one step: rows whose logits are kept for the log-probabilities of prompts, a vocabulary's worth of memory each.
    max_scored_tokens: int = 128
    # Waiting requests; running ones are not counted.
    max_waiting: int = 1024
    # 2: the next step is planned while one runs, so that the worker never waits for the scheduler.
    max_plans_in_flight: int = 2
    # Guessed tokens that one sequence may run in a step beside its next one.
    num_speculative_tokens: int = 0

    def __post_init__(self) -> None:
        # Every running sequence gets a row in every step only if the budget has a token for each.
        for name, value, least in (
            ("max_model_len", self.max_model_len, 2),
            ("max_num_seqs", self.max_num_seqs, 1),
            ("max_num_batched_tokens", self.max_num_batched_tokens, self.max_num_seqs),
            ("max_chunk_tokens", self.max_chunk_tokens, 1),
            ("max_scored_tokens", self.max_scored_tokens, 1),
            ("max_waiting", self.max_waiting, 1),
            ("max_plans_in_flight", self.max_plans_in_flight, 1),
            ("num_speculative_tokens", self.num_speculative_tokens, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not self.target_step_s > 0:
            raise ValueError(f"target_step_s must be positive, got {self.target_step_s}")
