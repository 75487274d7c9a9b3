"""Bookings come back, each exactly once."""

import pytest

from cluster.routing.load import Booking, LoadBook, MacLoad


def booking(request_id: str, mac: str = "a", epoch: int = 1, tokens: int = 100, expires_at_s: float = 10.0) -> Booking:
    return Booking(request_id, mac, epoch, tokens, expires_at_s)


@pytest.fixture
def book() -> LoadBook:
    return LoadBook()


def test_a_booking_counts_until_its_release(book: LoadBook) -> None:
    book.book(booking("r1"))
    book.book(booking("r2", tokens=50))
    assert book.load("a", 1) == MacLoad(num_requests=2, num_prefill_tokens=150, num_decoding=0)
    book.release("r1")
    book.release("r1")
    book.check()
    assert book.load("a", 1) == MacLoad(num_requests=1, num_prefill_tokens=50, num_decoding=0)


def test_the_first_token_moves_a_request_from_prefill_to_decode(book: LoadBook) -> None:
    book.book(booking("r1"))
    book.first_token("r1")
    book.first_token("r1")
    book.first_token("unknown")
    book.check()
    assert book.load("a", 1) == MacLoad(num_requests=1, num_prefill_tokens=0, num_decoding=1)
    book.release("r1")
    assert book.load("a", 1) == MacLoad()


def test_progress_of_a_prefill_shortens_the_wait(book: LoadBook) -> None:
    book.book(booking("r1", tokens=100))
    book.prefilled("r1", 64)
    book.prefilled("unknown", 64)
    book.check()
    assert book.load("a", 1).num_prefill_tokens == 36
    book.prefilled("r1", 64)
    assert book.load("a", 1).num_prefill_tokens == 0
    book.first_token("r1")
    book.check()


def test_booking_again_moves_the_request(book: LoadBook) -> None:
    book.book(booking("r1"))
    book.book(booking("r1", mac="b"))
    book.check()
    assert book.load("a", 1) == MacLoad()
    assert book.load("b", 1).num_requests == 1


def test_leases_end(book: LoadBook) -> None:
    book.book(booking("r1", expires_at_s=10.0))
    book.book(booking("r2", expires_at_s=11.0))
    assert book.expire(9.9) == ()
    assert book.expire(10.0) == ("r1",)
    assert book.expire(20.0) == ("r2",)
    assert book.load("a", 1) == MacLoad()


def test_an_incarnation_takes_only_its_own_bookings_along(book: LoadBook) -> None:
    book.book(booking("r1", epoch=1))
    book.book(booking("r2", epoch=2))
    assert book.drop("a", 1) == ("r1",)
    book.check()
    assert book.incarnations() == {("a", 2)}
