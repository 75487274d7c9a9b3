"""The bins of what waits, against a count from scratch."""

import random

from cluster.kv.ages import NO_GAP, NUM_BINS, NUM_BUCKETS, Ages, Prefix, bin_of, bucket_of


def test_buckets_grow_with_age_and_end():
    buckets = [bucket_of(age) for age in range(1 << 12)]
    assert buckets == sorted(buckets)
    assert bucket_of(1 << 16) == bucket_of(1 << 40) == NUM_BUCKETS - 1


def test_a_gap_has_a_class_of_its_own_an_octave():
    assert bin_of(NO_GAP, 0) == 0
    assert bin_of(0, 0) < bin_of(1, 0) == bin_of(2, 0) < bin_of(3, 0)
    assert bin_of(1 << 40, 1 << 40) == NUM_BINS - 1


def test_counts_are_those_of_a_count_from_scratch():
    rng, ages = random.Random(0), Ages()
    waiting = []
    for _ in range(3000):
        before = {prefix: prefix.bin for prefix in waiting}
        moved = ages.tick()
        assert set(moved) == {prefix for prefix in waiting if prefix.bin != before[prefix]}
        what = rng.random()
        if what < 0.3:
            waiting.append(Prefix(rng.choice([NO_GAP, 0, 7, 100]), ages.clock))
            ages.track(waiting[-1])
        elif what < 0.5 and waiting:
            used = rng.choice(waiting)
            used.gap, used.last_use = ages.clock - used.last_use, ages.clock
            ages.track(used)
        elif what < 0.6 and waiting:
            ages.forget(waiting.pop(rng.randrange(len(waiting))))
        counts = [0] * NUM_BINS
        for prefix in waiting:
            counts[bin_of(prefix.gap, ages.clock - prefix.last_use)] += 1
        assert ages.counts == counts
    ages.reset()
    assert ages.counts == [0] * NUM_BINS


def test_the_oldest_grow_no_older():
    ages, prefix = Ages(), Prefix(last_use=-(1 << 20))
    ages.track(prefix)
    assert [ages.tick() for _ in range(1000)] == [[]] * 1000
    assert ages.counts[NUM_BUCKETS - 1] == 1


def test_what_goes_twice_is_counted_once():
    ages, prefix = Ages(), Prefix()
    ages.forget(prefix)
    ages.track(prefix)
    ages.forget(prefix)
    ages.forget(prefix)
    assert not any(ages.counts)
