"""The choice is the least predicted seconds, and says so."""

import pytest

from cluster.routing.load import MacLoad
from cluster.routing.policy import Choice, RoutingConfig, Standing, choose

CONFIG = RoutingConfig(default_prefill_tokens_per_s=1_000.0, decode_slowdown_s=0.001, expected_output_tokens=200)


def standing(
    mac: str,
    matched: int = 0,
    expected: int = 0,
    load: MacLoad | None = None,
    speed: float = 1_000.0,
    last_booking: int = 0,
    excluded: str = "",
) -> Standing:
    return Standing(mac, matched, expected, load or MacLoad(), speed, last_booking, excluded)


def pick(*standings: Standing, num_tokens: int = 1_000, max_tokens: int = 100) -> Choice:
    return choose(standings, num_tokens, max_tokens, CONFIG)


def test_adds_up_waiting_prefilling_and_decoding() -> None:
    load = MacLoad(num_requests=3, num_prefill_tokens=2_000, num_decoding=1)
    (candidate,) = pick(standing("a", matched=600, load=load, speed=2_000.0)).candidates
    assert candidate.num_prefill_tokens == 400
    assert candidate.wait_s == pytest.approx(1.0)
    assert candidate.prefill_s == pytest.approx(0.2)
    assert candidate.decode_s == pytest.approx(3 * 100 * 0.001)
    assert candidate.total_s == pytest.approx(1.5)


def test_expects_no_longer_answers_than_configured() -> None:
    (candidate,) = pick(standing("a", load=MacLoad(1)), max_tokens=100_000).candidates
    assert candidate.decode_s == pytest.approx(0.2)


def test_a_faster_mac_wins_a_cold_prompt() -> None:
    choice = pick(standing("slow", speed=500.0), standing("fast", speed=2_000.0))
    assert choice.mac == "fast"
    assert "less busy or faster" in choice.reason


def test_cached_tokens_win_while_their_queue_is_short() -> None:
    short = pick(standing("warm", matched=800, load=MacLoad(1, 700)), standing("cold"))
    long = pick(standing("warm", matched=800, load=MacLoad(1, 900)), standing("cold"))
    assert (short.mac, long.mac) == ("warm", "cold")
    assert short.reason == ("warm holds 800 of 1000 prompt tokens, more than any other: 1.000 s there, 1.000 s on cold")
    assert long.reason == (
        "cold holds 0 of 1000 prompt tokens; warm holds 800 but its queue costs 1.000 s: 1.000 s there, 1.200 s on warm"
    )


def test_what_a_sibling_computes_is_not_waited_for() -> None:
    """900 of the 950 booked tokens are the request's own prefix: anywhere else it would compute them itself."""
    candidate = pick(standing("a", matched=900, expected=900, load=MacLoad(1, 950))).candidates[0]
    assert candidate.wait_s == pytest.approx(0.05)


def test_expecting_more_than_is_booked_is_no_negative_wait() -> None:
    assert pick(standing("a", matched=900, expected=900)).candidates[0].wait_s == 0.0


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_equals_go_to_the_least_recently_booked_not_by_name(names: tuple[str, str]) -> None:
    choice = pick(standing(names[0], last_booking=7), standing(names[1], last_booking=3))
    assert choice.mac == names[1]
    assert "booked least recently" in choice.reason


def test_noise_of_the_learnt_speeds_is_no_difference() -> None:
    assert pick(standing("a", speed=1_020.0, last_booking=2), standing("b", last_booking=1)).mac == "b"


def test_among_equals_the_one_with_more_cached_wins() -> None:
    assert pick(standing("a", last_booking=1), standing("b", matched=16, last_booking=2)).mac == "b"


def test_an_excluded_mac_is_shown_but_not_chosen() -> None:
    choice = pick(standing("a", matched=900, excluded="draining"), standing("b"))
    assert choice.mac == "b"
    assert [each.excluded for each in choice.candidates] == ["draining", ""]
    assert choice.reason.endswith("is the only Mac that can take the request")


def test_none_is_chosen_if_all_are_excluded() -> None:
    assert pick(standing("a", excluded="lost")).mac is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"default_prefill_tokens_per_s": 0.0},
        {"lease_s": -1.0},
        {"decode_slowdown_s": -0.1},
        {"expected_output_tokens": -1},
    ],
)
def test_settings_are_checked(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        RoutingConfig(**wrong)  # type: ignore[arg-type]


def test_a_difference_that_nobody_notices_does_not_pile_up_work() -> None:
    """Learnt speeds differ by noise; a short cold prompt goes to the Mac booked least recently all the same."""
    fast, slow = standing("fast", speed=20_000.0, last_booking=7), standing("slow", speed=9_000.0, last_booking=3)
    assert pick(fast, slow, num_tokens=100).mac == "slow"
    assert pick(fast, slow, num_tokens=10_000).mac == "fast"
