"""What a Mac's reports get wrong, learnt from first tokens: a factor on all of its learnt step costs.

Steps are timed by the Mac itself. Where that misses something (a clock that runs wrong, work between the steps, another
program) first tokens come later or sooner than predicted, all by about the same factor. It is the median of the last
few, so one stalled request changes nothing and three in a row are believed; predictions are proportional to the costs,
so each request is an estimate by itself, whatever was believed before.
"""

from collections import deque
from math import exp, log
from statistics import median

_RECENT = 9
# Requests that the Mac's own word counts for at the beginning.
_TRUST = 2
# Predictions are no better than this: later requests and answers that end move first tokens too.
_USUAL_ERROR = log(1.2)
_MOST = log(10.0)
# Below that, messages on their way make up too much of it.
_LEAST_S = 0.25


class SpeedCorrection:
    """One Mac's factor: above 1, it is slower than it says."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._recent: deque[float] = deque([0.0] * _TRUST, maxlen=_RECENT)

    def observe(self, predicted_s: float, factor: float, actual_s: float) -> None:
        """A first token that nothing has disturbed; `factor` is the one that the prediction was made with."""
        if min(predicted_s, actual_s) < _LEAST_S:
            return
        self._recent.append(min(max(log(actual_s * factor / predicted_s), -_MOST), _MOST))
        middle = median(self._recent)
        self.factor = exp(middle) if abs(middle) > _USUAL_ERROR else 1.0
