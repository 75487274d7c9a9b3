"""Predicted against actual cache hits of every request: whether the index still tells what the Macs hold."""

from collections import deque

from cluster.routing.mac import Drift

# Requests that an alarm looks back on, and the least number of them.
_RECENT = 64
_LEAST = 8
# Share of the recent prompts' tokens by which predictions may be wrong. A busy Mac evicts between a decision and its
# run, so a little is normal.
_ALARM = 0.05


class DriftBook:
    """One Mac's counts."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT)
        self._num_requests = 0
        self._num_predicted_tokens = 0
        self._num_actual_tokens = 0
        self._num_error_tokens = 0

    def observe(self, num_tokens: int, num_predicted_tokens: int, num_actual_tokens: int) -> bool:
        """One request of a prompt of `num_tokens`. Returns whether this one sets off the alarm."""
        was_alarming = self._is_alarming
        error = abs(num_predicted_tokens - num_actual_tokens)
        self._num_requests += 1
        self._num_predicted_tokens += num_predicted_tokens
        self._num_actual_tokens += num_actual_tokens
        self._num_error_tokens += error
        self._recent.append((error, num_tokens))
        return self._is_alarming and not was_alarming

    def counts(self) -> Drift:
        """Since the Mac joined."""
        return Drift(
            num_requests=self._num_requests,
            num_predicted_tokens=self._num_predicted_tokens,
            num_actual_tokens=self._num_actual_tokens,
            num_error_tokens=self._num_error_tokens,
            is_alarming=self._is_alarming,
        )

    @property
    def _is_alarming(self) -> bool:
        if len(self._recent) < _LEAST:
            return False
        return sum(error for error, _ in self._recent) > _ALARM * sum(tokens for _, tokens in self._recent)
