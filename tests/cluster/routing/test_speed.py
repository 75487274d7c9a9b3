"""Learnt prefill speeds follow the Mac and shrug off outliers."""

import pytest

from cluster.routing.speed import PrefillSpeeds


@pytest.fixture
def speeds() -> PrefillSpeeds:
    return PrefillSpeeds(1_000.0)


def test_starts_at_the_default(speeds: PrefillSpeeds) -> None:
    assert speeds.speed("a") == 1_000.0


@pytest.mark.parametrize("true_speed", [150.0, 8_000.0])
def test_finds_the_true_speed(speeds: PrefillSpeeds, true_speed: float) -> None:
    for _ in range(30):
        speeds.observe("a", 512, 512 / true_speed)
    assert speeds.speed("a") == pytest.approx(true_speed, rel=0.02)


def test_one_stalled_step_moves_little(speeds: PrefillSpeeds) -> None:
    for _ in range(20):
        speeds.observe("a", 512, 0.512)
    speeds.observe("a", 512, 60.0)
    assert speeds.speed("a") >= 900.0


def test_each_mac_has_its_own(speeds: PrefillSpeeds) -> None:
    speeds.observe("a", 1_500, 1.0)
    speeds.observe("b", 900, 1.0)
    assert (speeds.speed("a"), speeds.speed("b")) == (1_500.0, 900.0)
    speeds.forget("b")
    speeds.forget("a")
    assert speeds.speed("a") == 1_000.0
    speeds.observe("a", 1_500, 1.0)
    assert speeds.speed("a") == 1_500.0, "the count of observations was forgotten too"


@pytest.mark.parametrize(("num_tokens", "seconds"), [(63, 0.01), (512, 0.0), (512, -1.0), (0, 0.0)])
def test_ignores_what_says_nothing(speeds: PrefillSpeeds, num_tokens: int, seconds: float) -> None:
    speeds.observe("a", num_tokens, seconds)
    assert speeds.speed("a") == 1_000.0


def test_a_mac_that_has_not_reported_is_taken_for_an_average_one(speeds: PrefillSpeeds) -> None:
    """Else the default, far below what the others have shown, would keep it from ever getting work."""
    for mac, true_speed in (("a", 8_000.0), ("b", 12_000.0)):
        for _ in range(50):
            speeds.observe(mac, 1_000, 1_000 / true_speed)
    assert speeds.speed("new") == pytest.approx(10_000.0, rel=0.01)
