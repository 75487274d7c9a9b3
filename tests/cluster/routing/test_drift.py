"""Predictions that don't come true are counted, and set off one alarm."""

from cluster.routing.drift import DriftBook


def test_counts_and_alarms_once_until_predictions_hold_again() -> None:
    book = DriftBook()
    assert [book.observe(100, 80, 80) for _ in range(7)] == [False] * 7
    assert not book.observe(100, 80, 60), "20 of 800 tokens"
    assert [book.observe(100, 80, 0) for _ in range(3)] == [True, False, False]
    counts = book.counts()
    assert counts.is_alarming
    assert (counts.num_requests, counts.num_predicted_tokens, counts.num_actual_tokens) == (11, 880, 620)
    assert counts.num_error_tokens == 20 + 3 * 80
    for _ in range(64):
        book.observe(100, 80, 80)
    assert not book.counts().is_alarming
    assert book.observe(1_000, 0, 900), "more than predicted is wrong too"


def test_a_few_requests_are_no_reason_for_an_alarm() -> None:
    book = DriftBook()
    assert not any(book.observe(100, 100, 0) for _ in range(7))
    assert book.observe(100, 100, 0)
