"""How often requests stop at a point."""

from cluster.kv.points import PointKind, StopModel
from cluster.kv.prefix_tree import Segment


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
