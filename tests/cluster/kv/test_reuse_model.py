"""What is learned of reuse."""

import random

import pytest

from cluster.kv import reuse_model
from cluster.kv.ages import NO_GAP, NUM_BINS, NUM_BUCKETS, bin_of
from cluster.kv.reuse_model import ReuseModel

NOBODY = [0] * NUM_BINS


def index(model, age):
    return model.index[bin_of(NO_GAP, age)]


def test_habits_change():
    """Thousands of uses at age 3 long ago count for little after as many at age 300."""
    model = ReuseModel()
    for _ in range(5000):
        model.observe(NO_GAP, 3)
    model.refresh(NOBODY)
    soon = index(model, 0)
    for _ in range(10_000):
        model.observe(NO_GAP, 300)
    model.refresh(NOBODY)
    assert soon > 0.2
    assert index(model, 0) < soon / 5
    assert index(model, 250) > index(model, 0)


@pytest.mark.parametrize("num_seen", [0, 1, 7, 40, NUM_BUCKETS])
def test_the_index_is_the_steepest_slope_to_any_later_age(num_seen):
    rng = random.Random(num_seen)
    used = [rng.randrange(30) * (bucket < num_seen) for bucket in range(NUM_BUCKETS)]
    waiting = [rng.randrange(300) * (bucket < num_seen) for bucket in range(NUM_BUCKETS)]
    alive, time = reuse_model._curve(used, waiting, NUM_BUCKETS)
    slopes = [
        max((alive[at] - alive[end]) / (time[end] - time[at]) for end in range(at + 1, NUM_BUCKETS + 1))
        for at in range(NUM_BUCKETS)
    ]
    assert reuse_model._index(used, waiting) == pytest.approx(slopes)
