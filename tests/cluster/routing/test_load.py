"""Bookings: every path gives back what was booked, and prefills shrink as blocks are announced."""

import pytest

from cluster.kv.hashing import BlockHash
from cluster.routing.load import Booking, LoadBook
from cluster.routing.mac import MacLoad


def chain(length: int, start: int = 0) -> list[BlockHash]:
    return [BlockHash((start + number).to_bytes(16, "big")) for number in range(length)]


@pytest.fixture
def loads() -> LoadBook:
    loads = LoadBook()
    loads.add_slot()
    loads.add_slot()
    return loads


def book(loads: LoadBook, request_id: str, slot: int = 0, num_tokens: int = 100, matched: int = 0, until: float = 9.0):
    loads.book(Booking(request_id, slot, chain(num_tokens // 16), num_tokens, matched, until))
    loads.check()


def test_counts_what_is_left_to_prefill_and_its_context(loads: LoadBook) -> None:
    book(loads, "a", num_tokens=100, matched=64)
    book(loads, "b", num_tokens=10)
    assert loads.load(0) == MacLoad(2, 46, 0)
    assert loads.load(1) == MacLoad()
    assert loads.prefill_work[0] == 36 * 164 + 10 * 10


def test_announced_blocks_are_progress(loads: LoadBook) -> None:
    book(loads, "a")
    held = set(chain(4))
    loads.progress(0, 16, lambda slot, block_hash: block_hash in held)
    loads.check()
    assert loads.load(0) == MacLoad(1, 36, 0)
    assert loads.pending
    held = set(chain(6))
    loads.progress(0, 16, lambda slot, block_hash: block_hash in held)
    loads.check()
    assert loads.load(0) == MacLoad(1, 4, 0)
    assert not loads.pending, "all of it is confirmed: from here on events alone say what is there"
    loads.progress(0, 16, lambda slot, block_hash: False)
    assert loads.load(0) == MacLoad(1, 4, 0)


def test_a_whole_prompt_that_is_cached_still_runs_a_token(loads: LoadBook) -> None:
    book(loads, "a", num_tokens=64, matched=63)
    loads.progress(0, 16, lambda slot, block_hash: True)
    loads.check()
    assert loads.load(0) == MacLoad(1, 1, 0)


def test_a_first_token_turns_prefill_into_decoding_once(loads: LoadBook) -> None:
    book(loads, "a")
    for _ in range(2):
        loads.first_token("a")
        loads.check()
    assert loads.load(0) == MacLoad(1, 0, 1)
    assert loads.decode_context_tokens[0] == 100
    loads.first_token("unknown")


def test_a_release_takes_back_all_once(loads: LoadBook) -> None:
    book(loads, "a")
    book(loads, "b")
    loads.first_token("b")
    assert loads.release("a") is not None
    assert loads.release("a") is None
    assert loads.release("b") is not None
    loads.check()
    assert loads.load(0) == MacLoad()
    assert not loads.pending
    assert len(loads) == 0


def test_booking_again_moves_the_booking(loads: LoadBook) -> None:
    book(loads, "a", slot=0)
    book(loads, "a", slot=1, matched=32)
    assert (loads.load(0), loads.load(1)) == (MacLoad(), MacLoad(1, 68, 0))
    assert loads.get("a") is not None
    assert loads.get("b") is None


def test_leases_and_incarnations_end(loads: LoadBook) -> None:
    book(loads, "a", until=5.0)
    book(loads, "b", until=6.0)
    book(loads, "c", slot=1, until=7.0)
    assert [each.request_id for each in loads.expire(5.0)] == ["a"]
    assert [each.request_id for each in loads.drop(1)] == ["c"]
    loads.check()
    assert loads.load(0) == MacLoad(1, 100, 0)
    assert loads.load(1) == MacLoad()


def test_a_prompt_without_a_full_block_is_expected_nowhere(loads: LoadBook) -> None:
    book(loads, "a", num_tokens=5)
    assert not loads.pending
    loads.progress(0, 16, lambda slot, block_hash: True)
    loads.release("a")
    loads.check()
