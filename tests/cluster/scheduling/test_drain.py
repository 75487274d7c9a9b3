"""What a full queue tells those it refuses."""

import pytest

from cluster.scheduling.drain import DrainEstimate


def test_before_anything_was_timed_it_assumes_a_thousand_tokens_a_second():
    assert DrainEstimate().seconds(500) == 0.5


def test_a_long_step_counts_as_long_as_it_took():
    """Prefills of 500 tokens in 1 s between decodes of 10 in 0.1 s: 510 in 1.1 s, not the mean of 500 and 100."""
    drain = DrainEstimate()
    for _ in range(200):
        drain.step_ran(500, 1.0)
        drain.step_ran(10, 0.1)
    assert drain.seconds(510) == pytest.approx(1.1, rel=0.05)


def test_a_step_that_nobody_timed_changes_nothing():
    drain = DrainEstimate()
    drain.step_ran(10, 0.0)
    assert drain.seconds(1000) == 1.0


def test_it_learns_how_much_of_the_expected_is_used():
    """Answers that stop early, prompts that are cached."""
    drain = DrainEstimate()
    for _ in range(200):
        drain.request_ended(100, 1000)
    assert drain.seconds(1000) == pytest.approx(0.1, rel=0.01)
    for _ in range(200):
        drain.request_ended(1000, 1000)
    assert drain.seconds(1000) == pytest.approx(1.0, rel=0.01)


def test_requests_that_used_nothing_take_no_time():
    drain = DrainEstimate()
    for _ in range(20_000):
        drain.request_ended(0, 1000)
    assert drain.seconds(1000) == pytest.approx(0.0, abs=1e-9)
