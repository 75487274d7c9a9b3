"""The prefix index and its protocol: batches in order, and digests when anything doesn't fit."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cluster.kv.events import BlockEvent, BlocksRemoved, BlocksStored, xor_of
from cluster.kv.hashing import BlockHash, hash_block
from cluster.kv.layout import KVGroup
from cluster.kv.spec import FullAttentionSpec, SlidingWindowSpec
from cluster.routing.digests import bucket_digests, in_buckets
from cluster.routing.index import Applied, PrefixIndex

GROUPS = (
    KVGroup(0, 0, FullAttentionSpec(1, 8), (0,), 64),
    KVGroup(1, 0, SlidingWindowSpec(1, 8, 32), (1,), 64),
)
ROOT = BlockHash(bytes(16))


def chain(*tokens: int, parent: BlockHash = ROOT) -> list[BlockHash]:
    hashes = []
    for token in tokens:
        parent = hash_block(parent, [token])
        hashes.append(parent)
    return hashes


def stored(hashes: list[BlockHash], first: int = 0, end: int | None = None, group: int = 0) -> BlocksStored:
    parent = hashes[first - 1] if first else None
    return BlocksStored(group, b"".join(hashes[first:end]), parent, first)


def removed(hashes: list[BlockHash], group: int = 0) -> BlocksRemoved:
    return BlocksRemoved(group, b"".join(hashes))


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex(GROUPS, 16)
    for slot in (0, 1):
        index.open(slot)
        index.load(slot, 0, [b"", b""])
    return index


A = chain(1, 2, 3, 4)


def held(index: PrefixIndex, slot: int, group: int = 0) -> set[BlockHash]:
    return set(index._contents[slot].holdings[group].blocks())


class TestBatches:
    def test_are_applied_in_order(self, index: PrefixIndex) -> None:
        assert index.apply(0, 0, [stored(A, 0, 2)]) is Applied.OK
        assert index.apply(0, 1, [stored(A, 2), removed(A[3:]), stored(A, 3)]) is Applied.OK
        assert held(index, 0) == set(A)
        assert index.stats(0).num_events == 6
        assert index.stats(0).num_no_effect == 0

    def test_one_seen_before_changes_nothing_and_asks_for_digests(self, index: PrefixIndex) -> None:
        """It may also be a Mac that began anew with the same epoch: digests tell."""
        index.apply(0, 0, [stored(A)])
        index.apply(0, 1, [removed(A[2:])])
        assert index.apply(0, 0, [stored(A)]) is Applied.RESYNC
        assert held(index, 0) == set(A[:2])
        assert index.check_digests(0, 2, [xor_of(b"".join(A[:2])), 0]) == ()
        assert index.stats(0).num_repeated == 1
        assert index.stats(0).num_digest_mismatches == 0

    def test_a_silent_restart_is_found_by_its_digest(self, index: PrefixIndex) -> None:
        index.apply(0, 0, [stored(A)])
        index.apply(0, 1, [])
        b = chain(9)
        assert index.apply(0, 0, [stored(b)]) is Applied.RESYNC
        assert index.check_digests(0, 1, [xor_of(b[0]), 0]) == (0,)
        assert not index.is_synced(0)
        index.load(0, 1, [b[0], b""])
        assert held(index, 0) == set(b)
        assert index.apply(0, 1, [removed(b)]) is Applied.OK

    def test_after_a_gap_nothing_is_applied_until_the_digests_agree(self, index: PrefixIndex) -> None:
        index.apply(0, 0, [stored(A, 0, 1)])
        assert index.apply(0, 2, [stored(A, 2, 3)]) is Applied.RESYNC
        assert index.apply(0, 1, [stored(A, 1, 2)]) is Applied.RESYNC
        assert held(index, 0) == {A[0]}
        assert index.is_known(0)
        assert not index.is_synced(0)
        assert index.check_digests(0, 3, [xor_of(A[0]), 0]) == ()
        assert index.apply(0, 3, [stored(A, 1, 2)]) is Applied.OK
        assert index.stats(0).num_gaps == 1

    def test_a_block_whose_parent_is_unknown_is_a_fault(self, index: PrefixIndex) -> None:
        """Full attention has every block before it, so something was missed."""
        assert index.apply(0, 0, [stored(A, 0, 1), stored(A, 2)]) is Applied.RESYNC
        assert held(index, 0) == {A[0]}
        assert index.stats(0).num_unknown_parents == 1
        index.check()

    def test_windows_need_no_parents(self, index: PrefixIndex) -> None:
        assert index.apply(0, 0, [stored(A, 2, group=1)]) is Applied.OK
        assert held(index, 0, 1) == set(A[2:])

    def test_unknown_blocks_do_not_stop_a_removal(self, index: PrefixIndex) -> None:
        index.apply(0, 0, [stored(A)])
        index.apply(0, 1, [removed([*chain(7, 8), *A])])
        assert held(index, 0) == set()
        assert index.num_keys == 0
        assert index.stats(0).num_no_effect == 2

    @pytest.mark.parametrize("group", [-1, 2])
    def test_an_unknown_group_is_named(self, index: PrefixIndex, group: int) -> None:
        with pytest.raises(ValueError, match=f"event of group {group}; the model has groups 0 to 1"):
            index.apply(0, 0, [stored(A, group=group)])

    def test_content_is_unknown_before_the_first_digest(self) -> None:
        index = PrefixIndex(GROUPS, 16)
        index.open(5)
        assert not index.is_known(5)
        assert index.apply(5, 0, [stored(A)]) is Applied.RESYNC
        assert index.check_digests(5, 3, [0, 0]) == ()
        assert index.is_known(5)
        assert index.apply(5, 3, [stored(A)]) is Applied.OK
        index.open(5)
        assert not index.is_known(5)
        assert index.num_keys == 0
        index.close(5)
        index.close(5)
        assert not index.is_open(5)
        assert not index.is_synced(5)
        assert not index.is_known(5)

    def test_a_snapshot_leaves_what_is_right(self, index: PrefixIndex) -> None:
        b = chain(7, 8)
        index.apply(0, 0, [stored(A), stored(b)])
        index.apply(1, 0, [stored(A)])
        index.load(0, 5, [b"".join([*A[:1], *b]), A[1]])
        assert held(index, 0) == {A[0], *b}
        assert held(index, 0, 1) == {A[1]}
        assert held(index, 1) == set(A)
        assert index.holds(0, A[0])
        assert not index.holds(0, A[1])
        index.check()


def test_a_desync_keeps_the_content() -> None:
    index = PrefixIndex(GROUPS, 16)
    index.open(0)
    index.load(0, 0, [b"".join(A), b""])
    index.desync(0)
    assert not index.is_synced(0)
    assert index.match(A, 65, 1).content == [(1, 4)]


CHAINS = [chain(1, 2, 3, 4), chain(1, 2, 5, 6), chain(7, 8)]
PARENTS = {each: parent for row in CHAINS for parent, each in zip([None, *row], row, strict=False)}


class ProtocolMachine(RuleBasedStateMachine):
    """A Mac whose batches are lost, doubled, late or reordered, and that restarts silently: digests mend everything."""

    @initialize()
    def start(self) -> None:
        self.index = PrefixIndex(GROUPS, 16)
        self.index.open(0)
        self.next_seq = 0
        self.held: list[set[BlockHash]] = [set(), set()]
        self.wire: list[tuple[int, int, list[BlockEvent]]] = []
        self.num_restarts = 0
        self.index.check_digests(0, 0, [0, 0])
        self.wants_sync = False
        # No message was lost or came out of turn since the last handshake.
        self.is_exact = True

    @rule(row=st.sampled_from(CHAINS), depth=st.integers(1, 4), happens=st.sampled_from(["sent", "lost", "late"]))
    def store(self, row: list[BlockHash], depth: int, happens: str) -> None:
        events: list[BlockEvent] = []
        for each in row[:depth]:
            for group in (0, 1):
                if each not in self.held[group]:
                    self.held[group].add(each)
                    events.append(BlocksStored(group, each, PARENTS[each], 0))
        self._send(events, happens)

    @rule(row=st.sampled_from(CHAINS), depth=st.integers(0, 3), happens=st.sampled_from(["sent", "lost", "late"]))
    def evict(self, row: list[BlockHash], depth: int, happens: str) -> None:
        """Tail first, and not what another chain still needs; windows anywhere."""
        doomed = [each for each in reversed(row[depth:]) if each in self.held[0]]
        doomed = [e for e in doomed if not any(PARENTS[o] == e and o not in doomed for o in self.held[0])]
        self.held[0] -= set(doomed)
        events: list[BlockEvent] = [removed(doomed)] if doomed else []
        if row[0] in self.held[1]:
            self.held[1].discard(row[0])
            events.append(removed(row[:1], 1))
        self._send(events, happens)

    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        """Any batch ever sent, late or twice."""
        if self.wire:
            life, seq, events = data.draw(st.sampled_from(self.wire))
            # Only the periodic digest can tell that a number of an earlier life fits by chance.
            self.is_exact &= life == self.num_restarts
            if self.index.apply(0, seq, events) is Applied.RESYNC:
                self.wants_sync = True

    @rule()
    def restart_silently(self) -> None:
        """The same epoch, nothing held, numbers from 0."""
        self.next_seq, self.held = 0, [set(), set()]
        self.num_restarts += 1
        self.is_exact = False

    @rule()
    def handshake(self) -> None:
        digests = [xor_of(b"".join(each)) for each in self.held]
        differing = self.index.check_digests(0, self.next_seq, digests)
        buckets = {}
        for group in differing:
            wanted = self.index.differing_buckets(0, group, bucket_digests(self.held[group]))
            assert wanted, "the digest of the whole differs, so one of a bucket does"
            buckets[group] = (wanted, in_buckets(self.held[group], wanted))
        self.index.load_buckets(0, buckets)
        assert self.index.check_digests(0, self.next_seq, digests) == ()
        self.wants_sync, self.is_exact = False, True

    @invariant()
    def knows_what_the_mac_holds_or_that_it_does_not(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check()
        if self.index.is_synced(0) and self.is_exact and self.index.stats(0).next_seq == self.next_seq:
            assert [held(self.index, 0, group) for group in (0, 1)] == self.held

    def teardown(self) -> None:
        if hasattr(self, "index"):
            self.handshake()
            assert [held(self.index, 0, group) for group in (0, 1)] == self.held

    def _send(self, events: list[BlockEvent], happens: str) -> None:
        if not events:
            return
        self.wire.append((self.num_restarts, self.next_seq, events))
        if happens == "sent" and self.index.apply(0, self.next_seq, events) is Applied.RESYNC:
            self.wants_sync = True
        self.next_seq += 1


TestProtocolMachine = ProtocolMachine.TestCase
TestProtocolMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
