"""What is learned of reuse."""

from cluster.kv.ages import NO_GAP, NUM_BINS, bin_of
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
