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

from collections.abc import Iterable
from itertools import pairwise

from cluster.kv.prefix_tree import NO_GAP

# Buckets of a quarter octave.
_PER_OCTAVE = 4
_NUM_OCTAVES = 16
NUM_BUCKETS = _PER_OCTAVE * _NUM_OCTAVES
# One class for unknown gaps, one an octave for the rest.
_NUM_CLASSES = _NUM_OCTAVES + 1
# Belief before any evidence: as many observations, with a chance of reuse in each octave that does not depend on age.
_PRIOR_WEIGHT = 1.0
_PRIOR_PER_OCTAVE = 0.4
# When so many uses have been seen, they count half: habits change.
_HALVE_AT = 4096


def bucket_of(age: int) -> int:
    """The bucket of an age. The first ages have one each, as integer arithmetic has it."""
    octave = (age + 1).bit_length() - 1
    if octave >= _NUM_OCTAVES:
        return NUM_BUCKETS - 1
    return octave * _PER_OCTAVE + ((age + 1 - (1 << octave)) * _PER_OCTAVE >> octave)


def class_of(gap: int) -> int:
    """The class of prefixes whose last two uses were `gap` apart."""
    return 0 if gap == NO_GAP else min((gap + 1).bit_length(), _NUM_CLASSES - 1)


_FIRST_AGE = [(1 << b // _PER_OCTAVE) * (_PER_OCTAVE + b % _PER_OCTAVE) / _PER_OCTAVE for b in range(NUM_BUCKETS + 1)]
_WIDTHS = [after - first for first, after in pairwise(_FIRST_AGE)]
_PRIOR_HAZARD = 1 - (1 - _PRIOR_PER_OCTAVE) ** (1 / _PER_OCTAVE)


class ReuseModel:
    """Counts, and the index computed from them when asked to refresh."""

    def __init__(self) -> None:
        self._used = [[0.0] * NUM_BUCKETS for _ in range(_NUM_CLASSES)]
        self._num_used = [0.0] * _NUM_CLASSES
        self._index = [_index([0.0] * NUM_BUCKETS, [0.0] * NUM_BUCKETS)] * _NUM_CLASSES

    def observe(self, gap: int, age: int) -> None:
        """A prefix of that class was wanted again at that age."""
        kind = class_of(gap)
        self._used[kind][bucket_of(age)] += 1
        self._num_used[kind] += 1
        if self._num_used[kind] >= _HALVE_AT:
            self._used[kind] = [count / 2 for count in self._used[kind]]
            self._num_used[kind] /= 2

    def refresh(self, waiting: Iterable[tuple[int, int]]) -> None:
        """Compute the index anew, given (gap, age) of all prefixes that have not been wanted again yet.

        O(prefixes + classes * buckets).
        """
        still = [[0.0] * NUM_BUCKETS for _ in range(_NUM_CLASSES)]
        for gap, age in waiting:
            still[class_of(gap)][bucket_of(age)] += 1
        self._index = [_index(used, waits) for used, waits in zip(self._used, still, strict=True)]

    def index(self, gap: int, age: int) -> float:
        """Uses per request of waiting, of a prefix of that class at that age."""
        return self._index[class_of(gap)][bucket_of(age)]


def _index(used: list[float], waiting: list[float]) -> list[float]:
    """The steepest slope from each age on, of P(used) over time waited: the upper hull from the right. O(buckets)."""
    at_risk = 0.0
    hazards = [0.0] * NUM_BUCKETS
    for bucket in range(NUM_BUCKETS - 1, -1, -1):
        # Half of those that wait in this bucket have been through it.
        exposed = at_risk + used[bucket] + waiting[bucket] / 2
        hazards[bucket] = (used[bucket] + _PRIOR_WEIGHT * _PRIOR_HAZARD) / (exposed + _PRIOR_WEIGHT)
        at_risk += used[bucket] + waiting[bucket]
    alive, time = [1.0], [0.0]
    for hazard, width in zip(hazards, _WIDTHS, strict=True):
        # Those used in the bucket waited half of it.
        time.append(time[-1] + alive[-1] * width * (1 - hazard / 2))
        alive.append(alive[-1] * (1 - hazard))
    index = [0.0] * NUM_BUCKETS
    hull = [NUM_BUCKETS]
    for bucket in range(NUM_BUCKETS - 1, -1, -1):
        while len(hull) > 1 and _slope(alive, time, bucket, hull[-2]) >= _slope(alive, time, bucket, hull[-1]):
            hull.pop()
        index[bucket] = _slope(alive, time, bucket, hull[-1])
        hull.append(bucket)
    return index


def _slope(alive: list[float], time: list[float], start: int, end: int) -> float:
    return (alive[start] - alive[end]) / (time[end] - time[start])
