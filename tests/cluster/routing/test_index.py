"""The prefix index against a dict scan, and its protocol of batches, gaps, snapshots and incarnations."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.kv.hashing import BlockHash
from cluster.routing.index import Applied, PrefixIndex


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def keys(*numbers: int, group: int = 0) -> list[tuple[int, BlockHash]]:
    return [(group, block(number)) for number in numbers]


def chain(*numbers: int) -> list[BlockHash]:
    return [block(number) for number in numbers]


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex()
    for mac in ("a", "b"):
        index.join(mac, 1)
        assert index.load_snapshot(mac, 1, 0, []) is Applied.OK
    return index


class TestMatch:
    def test_counts_the_leading_blocks_of_each_mac(self, index: PrefixIndex) -> None:
        index.apply("a", 1, 0, keys(1, 2, 3), [])
        index.apply("b", 1, 0, keys(1, 2), [])
        assert index.match(chain(1, 2, 3, 4)) == {"a": 3, "b": 2}

    def test_a_hole_ends_the_run(self, index: PrefixIndex) -> None:
        index.apply("a", 1, 0, keys(1, 3), [])
        assert index.match(chain(1, 2, 3)) == {"a": 1}

    def test_leaves_out_macs_without_the_first_block(self, index: PrefixIndex) -> None:
        index.apply("a", 1, 0, keys(2, 3), [])
        assert index.match(chain(1, 2, 3)) == {}
        assert index.match([]) == {}

    def test_keeps_groups_apart(self, index: PrefixIndex) -> None:
        index.apply("a", 1, 0, keys(1, 2) + keys(1, group=1), [])
        assert index.match(chain(1, 2), group=1) == {"a": 1}
        assert index.match(chain(1, 2), group=2) == {}

    def test_stops_where_the_last_run_ends(self, index: PrefixIndex) -> None:
        """A long cold prompt costs one look-up, not one a block."""

        class Counting(list[BlockHash]):
            num_read = 0

            def __iter__(self):  # type: ignore[no-untyped-def]
                for each in super().__iter__():
                    self.num_read += 1
                    yield each

        prompt = Counting(chain(*range(1, 500)))
        index.match(prompt)
        assert prompt.num_read == 1

    def test_a_mac_that_fell_out_does_not_come_back_when_another_falls_out(self, index: PrefixIndex) -> None:
        index.join("c", 1)
        for mac, held in (("a", (1, 3, 4)), ("b", (1, 2, 3, 4)), ("c", (1, 2))):
            index.load_snapshot(mac, 1, 0, keys(*held))
        assert index.match(chain(1, 2, 3, 4)) == {"a": 1, "b": 4, "c": 2}

    @settings(deadline=None)
    @given(missing=st.lists(st.frozensets(st.integers(0, 5), max_size=3), max_size=5))
    def test_equals_a_scan_of_every_mac(self, missing: list[frozenset[int]]) -> None:
        index = PrefixIndex()
        prompt = list(range(6))
        held = [frozenset(prompt) - each for each in missing]
        expected = {}
        for number, blocks in enumerate(held):
            index.join(str(number), 1)
            index.load_snapshot(str(number), 1, 0, keys(*blocks))
            depth = next((i for i, each in enumerate(prompt) if each not in blocks), len(prompt))
            if depth:
                expected[str(number)] = depth
        index.check()
        assert index.match(chain(*prompt)) == expected


class TestBatches:
    def test_a_batch_seen_before_changes_nothing(self, index: PrefixIndex) -> None:
        index.apply("a", 1, 0, keys(1), [])
        index.apply("a", 1, 1, [], keys(1))
        assert index.apply("a", 1, 0, keys(1), []) is Applied.OK
        assert index.match(chain(1)) == {}
        assert index.stats().macs[0].num_stale_batches == 1

    def test_a_gap_asks_for_a_snapshot_until_it_comes(self, index: PrefixIndex) -> None:
        index.apply("a", 1, 0, keys(1), [])
        assert index.apply("a", 1, 2, keys(3), []) is Applied.RESYNC
        assert index.apply("a", 1, 1, keys(2), []) is Applied.RESYNC
        assert index.apply("a", 1, 0, keys(1), []) is Applied.RESYNC
        assert not index.is_synced("a")
        assert index.match(chain(1, 2, 3)) == {"a": 1}, "as it was before the gap"
        assert index.load_snapshot("a", 1, 3, keys(2, 3)) is Applied.OK
        assert index.match(chain(2, 3)) == {"a": 2}
        assert index.apply("a", 1, 3, keys(4), []) is Applied.OK
        assert index.stats().macs[0].num_gaps == 1

    def test_the_first_content_comes_by_snapshot(self) -> None:
        index = PrefixIndex()
        index.join("a", 1)
        assert index.apply("a", 1, 0, keys(1), []) is Applied.RESYNC
        assert index.match(chain(1)) == {}

    @pytest.mark.parametrize(("mac", "epoch"), [("a", 2), ("c", 1)])
    def test_an_unknown_incarnation_is_asked_to_resync(self, index: PrefixIndex, mac: str, epoch: int) -> None:
        assert index.apply(mac, epoch, 0, keys(1), []) is Applied.RESYNC
        assert index.load_snapshot(mac, epoch, 0, keys(1)) is Applied.RESYNC
        assert index.match(chain(1)) == {}
        assert not index.is_synced("c")

    @pytest.mark.parametrize("present", [False, True])
    @pytest.mark.parametrize("num_changes", [2, 3, 4])
    def test_a_block_that_comes_and_goes_in_one_batch(
        self, index: PrefixIndex, present: bool, num_changes: int
    ) -> None:
        """Changes alternate, so their order follows from what was there before."""
        index.load_snapshot("a", 1, 0, keys(1) if present else [])
        changes = [present ^ (step % 2 == 0) for step in range(num_changes)]
        index.apply("a", 1, 0, keys(*[1] * sum(changes), 5), keys(*[1] * (num_changes - sum(changes)), 6))
        index.check()
        assert index.match(chain(1)) == ({"a": 1} if changes[-1] else {})
        assert index.match(chain(5)) == {"a": 1}


class TestSnapshots:
    def test_one_older_than_the_events_is_ignored(self, index: PrefixIndex) -> None:
        index.apply("a", 1, 0, keys(1), [])
        assert index.load_snapshot("a", 1, 0, []) is Applied.OK
        assert index.match(chain(1)) == {"a": 1}

    def test_one_older_than_a_gap_does_not_close_it(self, index: PrefixIndex) -> None:
        index.apply("a", 1, 0, keys(1), [])
        index.apply("a", 1, 5, keys(1), [])
        assert index.load_snapshot("a", 1, 0, []) is Applied.RESYNC

    def test_replaces_all_groups(self, index: PrefixIndex) -> None:
        index.apply("a", 1, 0, keys(1, 2) + keys(3, group=1), [])
        index.load_snapshot("a", 1, 1, keys(2) + keys(4, group=2))
        index.check()
        assert index.match(chain(1)) == {}
        assert index.match(chain(2)) == {"a": 1}
        assert index.match(chain(3), group=1) == {}
        assert index.match(chain(4), group=2) == {"a": 1}


class TestIncarnations:
    def test_leaving_frees_everything(self, index: PrefixIndex) -> None:
        index.apply("a", 1, 0, keys(1, 2), [])
        index.expect("r1", "a", chain(3), 0)
        index.expect("r2", "b", chain(3), 0)
        index.leave("a", 1)
        index.check()
        assert index.match_expected(chain(3))[1] == {"b": 1}
        index.leave("b", 1)
        assert index.stats().num_keys == index.stats().num_expected == 0

    def test_a_reused_slot_has_nothing_of_its_last_owner(self, index: PrefixIndex) -> None:
        index.apply("a", 1, 0, keys(1), [])
        index.apply("b", 1, 0, keys(1), [])
        index.leave("a", 1)
        index.join("c", 1)
        index.join("d", 1)
        index.check()
        assert index.match(chain(1)) == {"b": 1}

    def test_leaving_late_does_not_hurt_the_next_incarnation(self, index: PrefixIndex) -> None:
        index.join("a", 2)
        index.load_snapshot("a", 2, 0, keys(1))
        index.leave("a", 1)
        assert index.match(chain(1)) == {"a": 1}

    def test_joining_twice_changes_nothing(self, index: PrefixIndex) -> None:
        index.apply("a", 1, 0, keys(1), [])
        index.join("a", 1)
        assert index.match(chain(1)) == {"a": 1}
        assert index.is_synced("a")


class TestExpected:
    def test_counts_until_the_request_ends(self, index: PrefixIndex) -> None:
        index.apply("a", 1, 0, keys(1), [])
        index.expect("r", "a", chain(1, 2, 3), 0)
        index.check()
        assert index.match(chain(1, 2, 3)) == {"a": 1}
        assert index.match_expected(chain(1, 2, 3, 4))[1] == {"a": 3}
        index.unexpect("r")
        index.unexpect("r")
        index.check()
        assert index.match_expected(chain(1, 2, 3))[1] == {"a": 1}

    def test_is_shared_by_siblings(self, index: PrefixIndex) -> None:
        index.expect("r1", "a", chain(1, 2), 0)
        index.expect("r2", "a", chain(1, 2, 3), 2)
        index.expect("r3", "b", chain(1), 0)
        index.check()
        index.unexpect("r1")
        index.check()
        assert index.match_expected(chain(1, 2, 3))[1] == {"a": 3, "b": 1}

    def test_ends_with_the_confirmation(self, index: PrefixIndex) -> None:
        """What was announced and evicted again is gone, whatever the request is doing."""
        index.expect("r1", "a", chain(1, 2), 0)
        index.expect("r2", "a", chain(1), 0)
        index.apply("a", 1, 0, keys(1), [])
        index.apply("a", 1, 1, [], keys(1))
        index.check()
        assert index.match_expected(chain(1, 2))[1] == {}
        assert index.match_expected(chain(2))[1] == {"a": 1}

    def test_tells_how_much_of_its_own_each_request_has_computed(self, index: PrefixIndex) -> None:
        index.expect("r1", "a", chain(1, 2, 3), 0)
        index.expect("r2", "a", chain(1, 2, 4, 5), 2)
        index.apply("a", 1, 0, keys(1, 2), [])
        index.apply("a", 1, 1, keys(4, 9), [])
        index.check()
        assert index.take_computed() == {"r1": 2, "r2": 1}
        assert index.take_computed() == {}
        index.apply("a", 1, 2, keys(3), [])
        index.unexpect("r1")
        assert index.take_computed() == {}, "of a request that has ended nobody asks"

    def test_a_block_that_several_compute_is_confirmed_for_each(self, index: PrefixIndex) -> None:
        """The last block of a prompt always runs again, so identical prompts compute it side by side."""
        index.expect("r1", "a", chain(1, 2), 0)
        index.expect("r2", "a", chain(1, 2), 1)
        index.apply("a", 1, 0, keys(2), [])
        index.check()
        assert index.take_computed() == {"r1": 1, "r2": 1}

    def test_a_snapshot_confirms_too(self, index: PrefixIndex) -> None:
        index.expect("r", "a", chain(1), 0)
        index.load_snapshot("a", 1, 4, keys(1))
        assert index.stats().num_expected == 0
        index.check()

    def test_a_second_booking_replaces_the_first(self, index: PrefixIndex) -> None:
        index.expect("r", "a", chain(1), 0)
        index.expect("r", "b", chain(1), 0)
        index.check()
        assert index.match_expected(chain(1))[1] == {"b": 1}

    def test_nothing_is_expected_of_an_unknown_mac(self, index: PrefixIndex) -> None:
        index.expect("r", "c", chain(1), 0)
        assert index.match_expected(chain(1))[1] == {}


def test_stats_count_what_happened(index: PrefixIndex) -> None:
    index.apply("a", 1, 0, keys(1, 2), keys(9))
    index.apply("b", 1, 0, keys(1, 1) + keys(1, group=3), [])
    stats = index.stats()
    a, b = stats.macs
    assert stats.num_keys == 3
    assert (a.mac, a.epoch, a.next_seq, a.num_blocks, a.num_events, a.num_no_effect_events) == ("a", 1, 1, 2, 3, 1)
    assert (b.num_blocks, b.num_events, b.num_no_effect_events) == (2, 3, 1)
