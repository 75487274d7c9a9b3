"""First tokens tell when a Mac's own word about its speed is wrong."""

import pytest

from cluster.routing.correction import SpeedCorrection


def after(*ratios: float) -> SpeedCorrection:
    """Requests predicted to take 2 s by the factor of the moment, that took so many times what the Mac's word said."""
    correction = SpeedCorrection()
    for ratio in ratios:
        correction.observe(2.0 * correction.factor, correction.factor, 2.0 * ratio)
    return correction


@pytest.mark.parametrize("truth", [0.5, 2.0, 4.0])
def test_three_requests_are_believed(truth: float) -> None:
    assert after(truth, truth).factor != pytest.approx(truth)
    assert after(truth, truth, truth).factor == pytest.approx(truth)
    assert after(*[truth] * 50).factor == pytest.approx(truth)


def test_one_stall_changes_nothing() -> None:
    assert after(40.0).factor == 1.0
    assert after(1.0, 1.05, 40.0, 0.95, 1.0).factor == 1.0
    assert after(*[2.0] * 6, 90.0, *[2.0] * 3).factor == pytest.approx(2.0)


def test_what_queues_explain_is_no_reason_to_doubt_a_mac() -> None:
    assert after(*[1.15] * 20).factor == 1.0
    assert after(*[0.87] * 20).factor == 1.0


def test_a_mac_that_tells_the_truth_again_is_believed_again() -> None:
    assert after(*[2.0] * 9, *[1.0] * 6).factor == 1.0


def test_moments_tell_nothing() -> None:
    correction = SpeedCorrection()
    for _ in range(9):
        correction.observe(0.01, 1.0, 5.0)
        correction.observe(5.0, 1.0, 0.01)
    assert correction.factor == 1.0
