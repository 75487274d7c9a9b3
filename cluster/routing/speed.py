"""How fast each Mac prefills, learnt from what it reports."""

# Shorter prefills are dominated by what a step costs however few its tokens.
_MIN_TOKENS = 64
# Weight of a new observation once the first few are in.
_WEIGHT = 0.2
# One observation counts at most this factor away from the estimate: a stalled step must not make a Mac look dead.
_CLAMP = 2.0


class PrefillSpeeds:
    """Tokens a second by Mac; a moving average with clamped outliers. Starts at the default."""

    def __init__(self, default_tokens_per_s: float) -> None:
        self._default_tokens_per_s = default_tokens_per_s
        self._tokens_per_s: dict[str, float] = {}
        self._num_observed: dict[str, int] = {}

    def speed(self, mac: str) -> float:
        """Tokens a second. A Mac that has not reported is taken for an average one, so that it gets its first work."""
        known = self._tokens_per_s
        if mac in known or not known:
            return known.get(mac, self._default_tokens_per_s)
        return sum(known.values()) / len(known)

    def observe(self, mac: str, num_tokens: int, seconds: float) -> None:
        """A prefill of `num_tokens` took `seconds` of the Mac's time; too short ones are not counted."""
        if num_tokens < _MIN_TOKENS or seconds <= 0.0:
            return
        estimate = self.speed(mac)
        observed = min(max(num_tokens / seconds, estimate / _CLAMP), estimate * _CLAMP)
        self._num_observed[mac] = self._num_observed.get(mac, 0) + 1
        # The default is a guess: the first observations replace it rather than being averaged with it.
        weight = max(_WEIGHT, 1.0 / self._num_observed[mac])
        self._tokens_per_s[mac] = estimate + weight * (observed - estimate)

    def forget(self, mac: str) -> None:
        """Back to the default."""
        self._tokens_per_s.pop(mac, None)
        self._num_observed.pop(mac, None)
