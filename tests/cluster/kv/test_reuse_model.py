"""What is learned of reuse."""

from cluster.kv.prefix_tree import NO_GAP
from cluster.kv.reuse_model import NUM_BUCKETS, ReuseModel, bucket_of


def test_buckets_grow_with_age_and_end():
    buckets = [bucket_of(age) for age in range(1 << 12)]
    assert buckets == sorted(buckets)
    assert bucket_of(1 << 16) == bucket_of(1 << 40) == NUM_BUCKETS - 1


def test_habits_change():
    """Thousands of uses at age 3 long ago count for little after as many at age 300."""
    model = ReuseModel()
    for _ in range(5000):
        model.observe(NO_GAP, 3)
    model.refresh([])
    soon = model.index(NO_GAP, 0)
    for _ in range(10_000):
        model.observe(NO_GAP, 300)
    model.refresh([])
    assert soon > 0.2
    assert model.index(NO_GAP, 0) < soon / 5
    assert model.index(NO_GAP, 250) > model.index(NO_GAP, 0)
