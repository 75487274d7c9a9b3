"""How likely, and how soon, is a cached prefix wanted again? Learned from what requests did want.

Ages count requests started since the last use, in buckets that grow with age. For each class of prefixes (by the gap
between their last two uses) the model keeps how many were used again at which age. What is worth keeping is ranked by
hit density, as in LHD (Beckmann et al., NSDI 2018): the most uses per request of waiting that any patience buys,

    index(age) = max over horizons h of  P(used in the next h) / E[waiting until used, at most h]

which is Gittins' index of the hazard curve. Where uses come at random it falls with age, as LRU assumes. Where sessions
come in turns it rises towards their turn, and what was used just now goes first: that is what LRU gets wrong.

Wanted prefixes count whether or not they were still here ("ghosts"): otherwise a cache too small to see a reuse would
never learn of it.
"""

from collections.abc import Sequence
from itertools import pairwise

from cluster.kv.ages import NUM_BINS, NUM_BUCKETS, NUM_CLASSES, PER_OCTAVE, bin_of

# Belief before any evidence: as many observations, with a chance of reuse in each octave that does not depend on age.
_PRIOR_WEIGHT = 1.0
_PRIOR_PER_OCTAVE = 0.4
_CLASSES_A_REQUEST = 2
# When so many uses have been seen, they count half: habits change.
_HALVE_AT = 4096


_FIRST_AGE = [(1 << b // PER_OCTAVE) * (PER_OCTAVE + b % PER_OCTAVE) / PER_OCTAVE for b in range(NUM_BUCKETS + 1)]
_WIDTHS = [after - first for first, after in pairwise(_FIRST_AGE)]
_PRIOR_HAZARD = 1 - (1 - _PRIOR_PER_OCTAVE) ** (1 / PER_OCTAVE)


class ReuseModel:
    """Counts by bin, and the index computed from them, a class at a time."""

    def __init__(self) -> None:
        self._used = [0.0] * NUM_BINS
        self._num_used = [0.0] * NUM_CLASSES
        self._next_class = 0
        # Uses per request of waiting, by bin.
        self.index = _PRIOR_INDEX * NUM_CLASSES

    def observe(self, gap: int, age: int) -> None:
        """A prefix of that gap was wanted again at that age."""
        at = bin_of(gap, age)
        kind = at // NUM_BUCKETS
        self._used[at] += 1
        self._num_used[kind] += 1
        if self._num_used[kind] >= _HALVE_AT:
            own = slice(kind * NUM_BUCKETS, (kind + 1) * NUM_BUCKETS)
            self._used[own] = [count / 2 for count in self._used[own]]
            self._num_used[kind] /= 2

    def refresh(self, waiting: Sequence[int]) -> None:
        """Compute the index of the next classes anew that have been seen, given how many wait in each bin.

        Classes take turns: an index changes little from one request to the next. O(buckets).
        """
        num_done = 0
        for _ in range(NUM_CLASSES):
            kind = self._next_class
            self._next_class = (kind + 1) % NUM_CLASSES
            own = slice(kind * NUM_BUCKETS, (kind + 1) * NUM_BUCKETS)
            if self._num_used[kind] or any(waiting[own]):
                self.index[own] = _index(self._used[own], waiting[own])
                num_done += 1
                if num_done == _CLASSES_A_REQUEST:
                    return


def _curve(used: Sequence[float], waiting: Sequence[float], num_buckets: int) -> tuple[list[float], list[float]]:
    """Of those that wait at age 0: how many still do at the start of each bucket, and how long they have on average.

    Nobody has been seen beyond so many buckets.
    """
    at_risk = 0.0
    hazards: list[float] = []
    for bucket in range(num_buckets - 1, -1, -1):
        # Half of those that wait in this bucket have been through it.
        exposed = at_risk + used[bucket] + waiting[bucket] / 2
        hazards.append((used[bucket] + _PRIOR_WEIGHT * _PRIOR_HAZARD) / (exposed + _PRIOR_WEIGHT))
        at_risk += used[bucket] + waiting[bucket]
    alive, time = [1.0], [0.0]
    for hazard, width in zip(reversed(hazards), _WIDTHS, strict=False):
        # Those used in the bucket waited half of it.
        time.append(time[-1] + alive[-1] * width * (1 - hazard / 2))
        alive.append(alive[-1] * (1 - hazard))
    return alive, time


def _index(used: Sequence[float], waiting: Sequence[float]) -> list[float]:
    """The steepest slope from each age on, of P(used) over time waited: the upper hull from the right. O(buckets).

    Beyond the last age that anybody has seen the prior holds, whose slopes fall with age.
    """
    num_seen = NUM_BUCKETS
    while num_seen and not used[num_seen - 1] and not waiting[num_seen - 1]:
        num_seen -= 1
    alive, time = _curve(used, waiting, num_seen)
    scale, started = alive[-1] / _PRIOR_ALIVE[num_seen], time[-1]
    alive += [scale * share for share in _PRIOR_ALIVE[num_seen + 1 :]]
    time += [started + scale * (at - _PRIOR_TIME[num_seen]) for at in _PRIOR_TIME[num_seen + 1 :]]
    index = _PRIOR_INDEX[:]
    hull = list(range(NUM_BUCKETS, num_seen - 1, -1))
    for bucket in range(num_seen - 1, -1, -1):
        while len(hull) > 1 and _slope(alive, time, bucket, hull[-2]) >= _slope(alive, time, bucket, hull[-1]):
            hull.pop()
        index[bucket] = _slope(alive, time, bucket, hull[-1])
        hull.append(bucket)
    return index


def _slope(alive: list[float], time: list[float], start: int, end: int) -> float:
    return (alive[start] - alive[end]) / (time[end] - time[start])


_NOBODY = [0] * NUM_BUCKETS
_PRIOR_ALIVE, _PRIOR_TIME = _curve(_NOBODY, _NOBODY, NUM_BUCKETS)
_PRIOR_INDEX = [_slope(_PRIOR_ALIVE, _PRIOR_TIME, bucket, bucket + 1) for bucket in range(NUM_BUCKETS)]
