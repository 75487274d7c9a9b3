"""What was booked of late fades, and the oldest sessions are forgotten."""

import pytest

from cluster.routing.history import WORK_HALF_LIFE_S, BookingHistory


@pytest.fixture
def history() -> BookingHistory:
    history = BookingHistory()
    history.add_slot()
    history.add_slot()
    return history


def test_work_fades_by_half_in_a_half_life(history: BookingHistory) -> None:
    history.book(0, "", 8.0, 100.0)
    assert history.recent_work_s(0, 100.0 + WORK_HALF_LIFE_S) == pytest.approx(4.0)
    history.book(0, "", 1.0, 100.0 + WORK_HALF_LIFE_S)
    assert history.recent_work_s(0, 100.0 + 2 * WORK_HALF_LIFE_S) == pytest.approx(2.5)
    assert history.recent_work_s(1, 0.0) == 0.0
    assert history.last_booking == [2, 0]
    history.check()


def test_a_slot_begins_anew_with_another_mac(history: BookingHistory) -> None:
    history.book(0, "s", 8.0, 1.0)
    history.book(1, "t", 8.0, 1.0)
    history.clear(0)
    history.check()
    assert (history.recent_work_s(0, 1.0), history.last_booking) == (0.0, [0, 2])
    assert (history.slot_of("s"), history.slot_of("t"), history.slot_of("")) == (-1, 1, -1)


def test_a_session_is_where_it_was_last(history: BookingHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.routing.history.MAX_SESSIONS", 2)
    for session, slot in (("a", 0), ("b", 0), ("a", 1), ("c", 0)):
        history.book(slot, session, 1.0, 0.0)
        history.check()
    assert [history.slot_of(session) for session in "abc"] == [1, -1, 0]
