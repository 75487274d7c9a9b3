"""How long waiting work will take, from how fast steps were and how much of its expected cost a request used lately."""

# Until a step has been timed.
_FIRST_TOKENS_PER_S = 1000.0
# Older steps and requests fade: about the last twenty of each count.
_KEPT = 0.95


class DrainEstimate:
    """Two ratios of fading sums, so that a long step and a dear request weigh as much as they take."""

    def __init__(self) -> None:
        self._num_tokens, self._run_s = _FIRST_TOKENS_PER_S, 1.0
        self._num_used, self._num_expected = 1.0, 1.0

    def step_ran(self, num_tokens: int, run_s: float) -> None:
        """A step of so many tokens took so long. Steps that nobody timed say nothing."""
        if run_s > 0:
            self._num_tokens = self._num_tokens * _KEPT + num_tokens
            self._run_s = self._run_s * _KEPT + run_s

    def request_ended(self, num_used: int, num_expected: int) -> None:
        """A request took so many tokens of those it was expected to: the rest was cached, or it stopped early."""
        self._num_used = self._num_used * _KEPT + num_used
        self._num_expected = self._num_expected * _KEPT + num_expected

    def seconds(self, num_expected_tokens: int) -> float:
        """What serving requests that are expected to take so many tokens will take."""
        return num_expected_tokens * self._num_used / self._num_expected * self._run_s / self._num_tokens
