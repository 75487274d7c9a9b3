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
    assert loads.turns(0) == [(10, 10, 10 * 10), (36, 36, 36 * 164)]


def test_turns_go_by_what_was_computed_there_since(loads: LoadBook) -> None:
    book(loads, "old", num_tokens=100)
    loads.progress(0, 16, lambda slot, block_hash: block_hash in set(chain(2)))
    assert [each[:2] for each in loads.turns(0)] == [(68, 68)]
    book(loads, "new", num_tokens=80)
    loads.first_token("old")
    assert [each[:2] for each in loads.turns(0)] == [(12, 80)], "68 tokens since it came"
    loads.book(Booking("sibling", 0, chain(5), 90, 80, 9.0, num_held_tokens=16))
    assert [each[:2] for each in loads.turns(0)] == [(12, 80), (74, 10)], "as long as it was without the other's help"


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


def test_a_prompt_keeps_a_state_where_another_parts_unless_it_has_passed(loads: LoadBook) -> None:
    """States and windows live at places, not along the content."""
    loads.book(Booking("a", 0, chain(10), 160, 0, 9.0))
    fork = [*chain(6), *chain(4, 100)]
    assert loads.num_to_come(0, fork, 16) == 6
    assert loads.num_to_come(1, fork, 16) == 0
    assert loads.num_to_come(0, chain(4, 100), 16) == 0
    held = set(chain(5))
    loads.progress(0, 16, lambda slot, block_hash: block_hash in held)
    assert loads.num_to_come(0, fork, 16) == 6
    held = set(chain(6))
    loads.progress(0, 16, lambda slot, block_hash: block_hash in held)
    assert loads.num_to_come(0, fork, 16) == 0, "passed"
    assert loads.num_to_come(0, chain(10), 16) == 10, "its own end is still to come"
    loads.book(Booking("b", 0, [*chain(6), *chain(1, 100)], 112, 0, 9.0))
    assert loads.num_to_come(0, fork, 16) == 7, "another will keep one further on"


def test_a_mac_is_further_than_it_has_announced(loads: LoadBook) -> None:
    loads.book(Booking("a", 0, chain(10), 160, 0, 9.0, num_ahead_tokens=32))
    assert loads.num_to_come(0, [*chain(2), *chain(2, 100)], 16) == 0, "two blocks may have been planned by now"
    assert loads.num_to_come(0, [*chain(3), *chain(2, 100)], 16) == 3


def test_the_end_of_a_prompt_is_kept_however_far_its_mac_may_be(loads: LoadBook) -> None:
    """Whoever asks the same again, or goes on from there, finds it; the last token of the same prompt runs anew."""
    loads.book(Booking("a", 0, chain(10), 165, 0, 9.0, num_ahead_tokens=1_000))
    assert loads.num_to_come(0, chain(10), 16) == 10
    assert loads.num_to_come(0, [*chain(10), *chain(3, 100)], 16) == 10
    assert loads.num_to_come(0, [*chain(9), *chain(3, 100)], 16) == 0, "they part before it"
    loads.book(Booking("a", 0, chain(10), 160, 0, 9.0, num_ahead_tokens=1_000))
    assert loads.num_to_come(0, [*chain(10), *chain(3, 100)], 16) == 9


def test_a_prompt_that_stops_anyway_is_worth_waiting_for_there(loads: LoadBook) -> None:
    """The content of four blocks was there, but nothing to go on from: it is computed again, and a state kept then."""
    loads.book(Booking("a", 0, chain(10), 160, 32, 9.0, num_ahead_tokens=64, stop_depth=4))
    fork = [*chain(5), *chain(2, 100)]
    held = set(chain(4))
    loads.progress(0, 16, lambda slot, block_hash: block_hash in held)
    loads.check()
    assert loads.load(0) == MacLoad(1, 128, 0), "what was there before is no progress"
    assert loads.num_to_come(0, fork, 16) == 4
    assert loads.num_to_come(0, [*chain(3), *chain(2, 100)], 16) == 0, "they part before it"
    held = set(chain(5))
    loads.progress(0, 16, lambda slot, block_hash: block_hash in held)
    loads.check()
    assert loads.load(0) == MacLoad(1, 80, 0)
    assert loads.num_to_come(0, fork, 16) == 0, "its Mac has told of the state by now, if it is still there"


def test_a_prompt_whose_content_is_all_there_is_still_under_way(loads: LoadBook) -> None:
    loads.book(Booking("a", 0, chain(4), 64, 0, 9.0, stop_depth=4))
    loads.progress(0, 16, lambda slot, block_hash: True)
    loads.check()
    assert loads.load(0) == MacLoad(1, 64, 0)
    assert loads.num_to_come(0, chain(4), 16) == 4
    loads.first_token("a")
    loads.release("a")
    loads.check()
    assert not loads.pending


def test_whether_anything_was_booked_since(loads: LoadBook) -> None:
    book(loads, "a")
    first = loads.get("a")
    assert first is not None
    assert loads.is_latest(first)
    book(loads, "b", slot=1)
    assert loads.is_latest(first)
    book(loads, "c")
    assert not loads.is_latest(first)
