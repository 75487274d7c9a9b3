"""How often requests stop at a point."""

import pytest

from cluster.kv.hashing import HASH_BYTES
from cluster.kv.points import PointKind, StopModel
from cluster.kv.prefix_tree import PrefixTree, Segment


def point(kind):
    segment = Segment(None, 0, 1)
    segment.is_point, segment.kind = True, kind
    return segment


def test_a_point_where_requests_part_is_worth_more_than_one_that_they_pass():
    stops = StopModel()
    parted, passed = point(PointKind.MESSAGE), point(PointKind.MESSAGE)
    for _ in range(10):
        stops.observe(parted, is_stop=True)
        stops.observe(passed, is_stop=False)
    assert stops.share(parted) > 0.7
    assert stops.share(passed) < 0.1


def test_what_one_point_of_a_kind_shows_is_expected_of_the_next():
    stops = StopModel()
    before = stops.first_share(PointKind.PROMPT_END)
    for _ in range(20):
        stops.observe(point(PointKind.PROMPT_END), is_stop=True)
    assert stops.first_share(PointKind.PROMPT_END) > before
    assert stops.share(point(PointKind.PROMPT_END)) == stops.first_share(PointKind.PROMPT_END)
    assert stops.first_share(PointKind.MESSAGE) == before, "another kind"


def test_segments_that_are_no_points_teach_nothing():
    stops = StopModel()
    before = [stops.first_share(kind) for kind in PointKind]
    segment = Segment(None, 0, 1)
    stops.observe(segment, is_stop=True)
    assert [stops.first_share(kind) for kind in PointKind] == before
    assert segment.num_stops == 1


def line(*ends):
    """A tree of one group with points at these positions of one prefix, first to last."""
    tree, points, start = PrefixTree(1), [], 0
    for end in ends:
        hashes = b"".join(i.to_bytes(HASH_BYTES, "little") for i in range(start, end))
        segment = tree.append(points[-1] if points else tree.root, hashes, [range(start, end)])
        segment.is_point = True
        points.append(segment)
        start = end
    return tree, points


def test_where_prefixes_are_found_cut_a_point_on_the_way_is_worth_more():
    stops, rarely_cut = StopModel(), StopModel()
    _, (point_on_the_way, end) = line(8, 32)
    for _ in range(50):
        stops.observe_return(is_cut=True)
        rarely_cut.observe_return(is_cut=False)
    kept = stops.first_share(point_on_the_way.kind)
    # Three quarters of all lengths up to 32 lie beyond 8.
    assert stops.share(point_on_the_way) == pytest.approx(kept + 0.75 * 50.4 / 54)
    assert rarely_cut.share(point_on_the_way) == pytest.approx(kept + 0.75 * 0.4 / 54)
    assert stops.share(end) == kept, "a cut beyond the end cuts nothing"


def test_a_point_close_before_the_next_is_no_place_where_a_cut_falls():
    stops = StopModel()
    _, (first, second, _) = line(8, 31, 32)
    assert stops.share(second) < stops.share(first) / 2
    second.is_point = False
    assert stops.share(first) == pytest.approx(stops.first_share(first.kind) + 0.1 * 0.75), "the next point counts"


def test_below_a_branch_something_is_likely_to_be_left():
    stops = StopModel()
    tree, (first, _) = line(8, 32)
    with_one = stops.share(first)
    tree.append(first, b"\xff" * HASH_BYTES, [[99]])
    assert stops.share(first) == stops.first_share(first.kind) < with_one


def test_a_share_is_never_more_than_all():
    stops = StopModel()
    _, (first, _) = line(1, 1000)
    for _ in range(1000):
        stops.observe(first, is_stop=True)
        stops.observe_return(is_cut=True)
    assert stops.share(first) == 1.0
