"""The order of eviction, against the least of all."""

import random

from cluster.kv.prefix_tree import Segment
from cluster.kv.ranking import Ranking


def test_the_lowest_is_the_least_product_of_all_and_pinned_ones_go_last():
    rng, ranking = random.Random(0), Ranking()
    factors = [rng.uniform(0.1, 2) for _ in range(8)]
    queued = []
    for _ in range(20_000):
        what = rng.random()
        if what < 0.4:
            queued.append(Segment(None, 0, 1))
            queued[-1].bin = rng.randrange(8)
            ranking.put(queued[-1], rng.uniform(0, 9), is_pinned=rng.random() < 0.3)
        elif what < 0.6 and queued:
            ranking.put(rng.choice(queued), rng.uniform(0, 9), is_pinned=False)
        elif what < 0.8 and queued:
            moved = rng.choice(queued)
            moved.bin = rng.randrange(8)
            ranking.move(moved)
        elif queued:
            ranking.remove(queued.pop(rng.randrange(len(queued))))
        least = min(((s.entry[3], factors[s.bin] * s.entry[0], s.entry[1], s) for s in queued), default=None)
        assert ranking.lowest(factors.__getitem__) == (least and (least[1], least[3]))
        if len(queued) > 60:
            for segment in queued[10:]:
                ranking.remove(segment)
            del queued[10:]


def test_what_is_void_is_swept_out():
    ranking, segment = Ranking(), Segment(None, 0, 1)
    for at in range(5000):
        segment.bin = at % 7
        ranking.put(segment, 1.0, is_pinned=False)
    assert sum(len(heap) for heaps in ranking._heaps for heap in heaps.values()) < 1100
    assert ranking.lowest(float) == (float(segment.bin), segment)


def test_what_was_never_queued_can_be_moved_and_removed():
    ranking, segment = Ranking(), Segment(None, 0, 1)
    ranking.move(segment)
    ranking.remove(segment)
    assert ranking.lowest(float) is None


def test_of_equal_ones_the_last_queued_goes_first():
    ranking, first, last = Ranking(), Segment(None, 0, 1), Segment(None, 0, 1)
    for segment in (first, last):
        segment.bin = 0
        ranking.put(segment, 1.0, is_pinned=False)
    assert ranking.lowest(float) == (0.0, last)
