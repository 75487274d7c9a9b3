"""One Mac's blocks of one group: masks, log and digest tell the same, whatever comes twice."""

from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.kv.hashing import BlockHash
from cluster.routing.digests import bucket_digests, content_of, hashes_in, in_buckets
from cluster.routing.holdings import Holding


def block(number: int) -> BlockHash:
    return BlockHash(bytes([number % 5]) + blake2b(number.to_bytes(2, "big"), digest_size=15).digest())


def joined(*numbers: int) -> bytes:
    return b"".join(map(block, numbers))


NUMBERS = st.lists(st.integers(0, 12), max_size=8)


class HoldingsMachine(RuleBasedStateMachine):
    """Three Macs beside plain sets."""

    @initialize()
    def start(self) -> None:
        self.masks: dict[BlockHash, int] = {}
        self.holdings = [Holding(self.masks, 1 << slot) for slot in (0, 1, 40)]
        self.held: list[set[int]] = [set(), set(), set()]

    @rule(mac=st.integers(0, 2), numbers=NUMBERS)
    def store(self, mac: int, numbers: list[int]) -> None:
        num_new = len(set(numbers) - self.held[mac])
        assert self.holdings[mac].store(joined(*numbers)) == len(numbers) - num_new
        self.held[mac] |= set(numbers)

    @rule(mac=st.integers(0, 2), numbers=NUMBERS)
    def remove(self, mac: int, numbers: list[int]) -> None:
        num_gone = len(set(numbers) & self.held[mac])
        assert self.holdings[mac].remove(joined(*numbers)) == len(numbers) - num_gone
        self.held[mac] -= set(numbers)

    @rule(mac=st.integers(0, 2))
    def clear(self, mac: int) -> None:
        self.holdings[mac].clear()
        self.held[mac] = set()

    @invariant()
    def agree(self) -> None:
        for holding, held in zip(self.holdings, self.held, strict=True):
            holding.check()
            assert set(holding.blocks()) == set(map(block, held))
            assert len(holding.blocks()) == holding.num_blocks == len(held)
        assert all(self.masks.values())


TestHoldingsMachine = HoldingsMachine.TestCase
TestHoldingsMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_log_follows_the_live_blocks() -> None:
    holding = Holding({}, 1)
    for number in range(200):
        holding.store(joined(*range(number * 100, number * 100 + 100)))
        if number >= 5:
            holding.remove(joined(*range((number - 5) * 100, (number - 5) * 100 + 100)))
    holding.check()
    assert holding.num_blocks == 500
    assert len(holding._log) <= 16 * (500 * 5 // 4 + 1024)


@given(st.sets(st.integers(0, 100)), st.sets(st.integers(0, 100)))
def test_bucket_digests_tell_where_two_sets_differ(ours: set[int], theirs: set[int]) -> None:
    mine, others = bucket_digests(map(block, ours)), bucket_digests(map(block, theirs))
    differing = {bucket for bucket in range(256) if mine[bucket] != others[bucket]}
    assert differing == {block(number)[0] for number in ours ^ theirs}
    sent = set(hashes_in(in_buckets(map(block, theirs), differing)))
    kept = {block(number) for number in ours if block(number)[0] not in differing}
    assert kept | sent == set(map(block, theirs))


def test_a_snapshot_is_split_by_group() -> None:
    content = content_of([(1, block(3)), (0, block(1)), (1, block(4))], 3)
    assert content == (joined(1), joined(3, 4), b"")


def test_half_a_hash_is_refused() -> None:
    try:
        hashes_in(b"x" * 17)
    except ValueError as error:
        assert "multiple of 16 bytes, got 17" in str(error)
    else:
        raise AssertionError("it was taken")
