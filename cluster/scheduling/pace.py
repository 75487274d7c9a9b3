"""How many tokens of prompts a step takes beside rows that decode, so that nobody's next token waits for long.

A step's time is taken as that of a step without prompts and so much for each of their tokens (Sarathi-Serve bounds the
tokens; here the seconds are bounded, since Macs differ by a factor of ten). Both are learned from the steps that ran.
"""

# Older steps fade: about the last ten of each kind count.
_KEPT = 0.9
# Fewer tokens say little of what one of them costs.
_MIN_SAMPLE_TOKENS = 32
# A step has as many at the least: a prompt must get on, on a slow Mac too.
_MIN_TOKENS = 64
_ROUND_TOKENS = 16


class StepPace:
    """Learns from every step; pure arithmetic, O(1)."""

    def __init__(self, target_s: float) -> None:
        """`target_s`: what a step that decodes should take at most."""
        self._target_s = target_s
        self._num_plain, self._plain_s = 0.0, 0.0
        self._num_tokens, self._tokens_s = 0.0, 0.0

    def step_ran(self, num_prefill_tokens: int, run_s: float) -> None:
        """A step took so long. Steps that nobody timed say nothing."""
        if run_s <= 0:
            return
        if num_prefill_tokens == 0:
            self._num_plain = self._num_plain * _KEPT + 1
            self._plain_s = self._plain_s * _KEPT + run_s
        elif num_prefill_tokens >= _MIN_SAMPLE_TOKENS:
            self._num_tokens = self._num_tokens * _KEPT + num_prefill_tokens
            # At least half of it is the prompts': a step without them was perhaps a longer one.
            self._tokens_s = self._tokens_s * _KEPT + max(run_s - self._plain_step_s, run_s / 2)

    def max_prefill_tokens(self, most: int) -> int:
        """Of one step beside rows that decode, `most` if nothing is known."""
        if not self._num_tokens:
            return most
        # Where a step without prompts takes long already, it may take twice as long.
        room_s = max(self._target_s - self._plain_step_s, self._plain_step_s)
        num_tokens = int(room_s * self._num_tokens / self._tokens_s)
        return min(most, max(_MIN_TOKENS, num_tokens // _ROUND_TOKENS * _ROUND_TOKENS))

    @property
    def _plain_step_s(self) -> float:
        return self._plain_s / self._num_plain if self._num_plain else 0.0
