"""The fleet's prefix index: which Mac holds which block.

Owns, by group, a bit mask of Macs for each block hash, and for each Mac the set of what it holds, so that memory
follows the live blocks and a Mac's end frees everything it had. A Mac's content is known from its first snapshot on;
events then change it in the order of their seq. After a gap it stays as it was until the next snapshot.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from cluster.kv.hashing import BlockHash
from cluster.routing.expected import ExpectedBlocks

# A block as events name it: (group, block_hash).
Block = tuple[int, BlockHash]

# The group whose blocks are expected of a request that was just routed.
PREFIX_GROUP = 0


class Applied(Enum):
    """What the sender of a batch or snapshot has to do next."""

    # Nothing: it was applied, or its content was known already.
    OK = auto()
    # Send a snapshot; if this was one, join first: the index doesn't know this incarnation.
    RESYNC = auto()


@dataclass(frozen=True, slots=True)
class MacIndexStats:
    """Counts of one incarnation: events are (group, block) changes; gaps, stale batches and no-ops as they arrived."""

    mac: str
    epoch: int
    next_seq: int
    is_synced: bool
    num_blocks: int
    num_events: int
    num_gaps: int
    num_stale_batches: int
    num_no_effect_events: int


@dataclass(frozen=True, slots=True)
class IndexStats:
    """`num_keys` are distinct (group, block_hash) held by at least one Mac."""

    num_keys: int
    num_expected: int
    macs: tuple[MacIndexStats, ...]


@dataclass(slots=True)
class _Incarnation:
    mac: str
    epoch: int
    slot: int
    next_seq: int = 0
    is_synced: bool = False
    held: dict[int, set[BlockHash]] = field(default_factory=dict)
    num_events: int = 0
    num_gaps: int = 0
    num_stale_batches: int = 0
    num_no_effect_events: int = 0

    @property
    def bit(self) -> int:
        return 1 << self.slot


class PrefixIndex:
    """Blocks by Mac, confirmed by events and expected of requests under way."""

    def __init__(self) -> None:
        self._masks: dict[int, dict[BlockHash, int]] = {}
        self._macs: dict[str, _Incarnation] = {}
        # None: a free slot.
        self._by_slot: list[_Incarnation | None] = []
        self._expected = ExpectedBlocks()
        self._num_computed: dict[str, int] = {}

    def join(self, mac: str, epoch: int) -> None:
        """Starts an incarnation with unknown content, in place of an earlier one. The same epoch again: no effect."""
        known = self._macs.get(mac)
        if known is not None:
            if known.epoch == epoch:
                return
            self._free(known)
        slot = self._by_slot.index(None) if None in self._by_slot else len(self._by_slot)
        if slot == len(self._by_slot):
            self._by_slot.append(None)
        self._macs[mac] = self._by_slot[slot] = _Incarnation(mac, epoch, slot)

    def leave(self, mac: str, epoch: int) -> None:
        """Frees all that is known of the incarnation; no effect if it isn't the present one."""
        known = self._find(mac, epoch)
        if known is not None:
            self._free(known)

    def is_synced(self, mac: str) -> bool:
        """Whether the Mac's content is known and no event of it is missing."""
        known = self._macs.get(mac)
        return known is not None and known.is_synced

    def apply(self, mac: str, epoch: int, seq: int, stored: Sequence[Block], removed: Sequence[Block]) -> Applied:
        """One batch of presence changes. Batches already applied are ignored; after a gap all are, until a snapshot.

        A block that is in both lists changed several times: what counts is which change it saw more often.
        """
        known = self._find(mac, epoch)
        if known is None:
            return Applied.RESYNC
        if seq < known.next_seq:
            known.num_stale_batches += 1
        elif known.is_synced and seq > known.next_seq:
            known.num_gaps += 1
            known.is_synced = False
        elif known.is_synced:
            known.next_seq = seq + 1
            self._change(known, stored, removed)
        return Applied.OK if known.is_synced else Applied.RESYNC

    def load_snapshot(self, mac: str, epoch: int, next_seq: int, blocks: Iterable[Block]) -> Applied:
        """Makes the Mac's content exactly `blocks`; the batch `next_seq` is the first that they don't include.

        A snapshot older than the events applied is ignored.
        """
        known = self._find(mac, epoch)
        if known is None:
            return Applied.RESYNC
        if next_seq < known.next_seq:
            known.num_stale_batches += 1
            return Applied.OK if known.is_synced else Applied.RESYNC
        wanted = set(blocks)
        gone = [block for block in _blocks_of(known) if block not in wanted]
        self._store(known, [block for block in wanted if block[1] not in known.held.get(block[0], ())])
        self._remove(known, gone)
        self._confirm(known, wanted)
        known.next_seq = next_seq
        known.is_synced = True
        return Applied.OK

    def expect(self, request_id: str, mac: str, block_hashes: Sequence[BlockHash], num_matched: int) -> None:
        """Counts these blocks as present on `mac` until it confirms them or `unexpect`; no effect on unknown Macs.

        The first `num_matched` are there or under way already; the request itself will compute the others.
        """
        known = self._macs.get(mac)
        if known is not None:
            held = known.held.get(PREFIX_GROUP, ())
            shared = [each for each in block_hashes[:num_matched] if each not in held]
            own = [each for each in block_hashes[num_matched:] if each not in held]
            self._expected.add(request_id, known.bit, own, shared)

    def unexpect(self, request_id: str) -> None:
        """The request has ended; no effect if nothing is expected of it."""
        self._expected.discard(request_id)
        self._num_computed.pop(request_id, None)

    def take_computed(self) -> dict[str, int]:
        """How many of its own blocks each request was seen to compute since the last call."""
        computed, self._num_computed = self._num_computed, {}
        return computed

    def match(self, block_hashes: Sequence[BlockHash], group: int = PREFIX_GROUP) -> dict[str, int]:
        """Leading blocks that each Mac holds, Macs without the first block left out. O(deepest match)."""
        return self._depths(map(self._masks.get(group, {}).get, block_hashes))

    def match_expected(self, block_hashes: Sequence[BlockHash]) -> tuple[dict[str, int], dict[str, int]]:
        """Depths as by `match`, and depths with the blocks that requests under way will have computed."""
        confirmed = self.match(block_hashes)
        expected = self._expected.masks
        if expected.keys().isdisjoint(block_hashes):
            return confirmed, confirmed
        masks = self._masks.get(PREFIX_GROUP, {})
        return confirmed, self._depths(masks.get(each, 0) | expected.get(each, 0) for each in block_hashes)

    def stats(self) -> IndexStats:
        """O(Macs)."""
        return IndexStats(
            num_keys=sum(len(masks) for masks in self._masks.values()),
            num_expected=len(self._expected.masks),
            macs=tuple(
                MacIndexStats(
                    mac=known.mac,
                    epoch=known.epoch,
                    next_seq=known.next_seq,
                    is_synced=known.is_synced,
                    num_blocks=sum(len(held) for held in known.held.values()),
                    num_events=known.num_events,
                    num_gaps=known.num_gaps,
                    num_stale_batches=known.num_stale_batches,
                    num_no_effect_events=known.num_no_effect_events,
                )
                for known in self._macs.values()
            ),
        )

    def check(self) -> None:
        """Raises AssertionError unless masks are exactly what the Macs hold and every slot has one owner."""
        masks: dict[int, dict[BlockHash, int]] = {}
        for known in self._macs.values():
            assert self._by_slot[known.slot] is known
            assert all(known.held.values())
            for group, block_hash in _blocks_of(known):
                by_hash = masks.setdefault(group, {})
                by_hash[block_hash] = by_hash.get(block_hash, 0) | known.bit
        assert masks == self._masks
        assert sum(known is not None for known in self._by_slot) == len(self._macs)
        self._expected.check()

    def _find(self, mac: str, epoch: int) -> _Incarnation | None:
        known = self._macs.get(mac)
        return known if known is not None and known.epoch == epoch else None

    def _free(self, known: _Incarnation) -> None:
        self._remove(known, list(_blocks_of(known)))
        self._expected.drop(known.bit)
        del self._macs[known.mac]
        self._by_slot[known.slot] = None

    def _change(self, known: _Incarnation, stored: Sequence[Block], removed: Sequence[Block]) -> None:
        both = set(stored).intersection(removed) if stored and removed else set()
        if both:
            surplus = {block: stored.count(block) - removed.count(block) for block in both}
            stored = [block for block in stored if surplus.get(block, 1) > 0]
            removed = [block for block in removed if surplus.get(block, -1) < 0]
        self._store(known, stored)
        self._remove(known, removed)
        self._confirm(known, stored)

    def _confirm(self, known: _Incarnation, blocks: Iterable[Block]) -> None:
        hashes = (block_hash for group, block_hash in blocks if group == PREFIX_GROUP)
        for request_id, num_blocks in self._expected.confirm(known.bit, hashes).items():
            self._num_computed[request_id] = self._num_computed.get(request_id, 0) + num_blocks

    def _store(self, known: _Incarnation, blocks: Iterable[Block]) -> None:
        bit = known.bit
        for group, block_hash in blocks:
            known.num_events += 1
            held = known.held.setdefault(group, set())
            if block_hash in held:
                known.num_no_effect_events += 1
                continue
            held.add(block_hash)
            masks = self._masks.setdefault(group, {})
            masks[block_hash] = masks.get(block_hash, 0) | bit

    def _remove(self, known: _Incarnation, blocks: Iterable[Block]) -> None:
        bit = known.bit
        for group, block_hash in blocks:
            known.num_events += 1
            held = known.held.get(group)
            if held is None or block_hash not in held:
                known.num_no_effect_events += 1
                continue
            held.remove(block_hash)
            if not held:
                del known.held[group]
            masks = self._masks[group]
            masks[block_hash] &= ~bit
            if not masks[block_hash]:
                del masks[block_hash]
                if not masks:
                    del self._masks[group]

    def _depths(self, masks: Iterable[int | None]) -> dict[str, int]:
        """Macs fall out in groups where the mask changes; the walk ends when none is left."""
        depths: dict[str, int] = {}
        alive, depth = -1, 0
        for mask in masks:
            left = alive & mask if mask else 0
            if left != alive:
                if depth:
                    self._set_depth(depths, alive & ~left, depth)
                if not left:
                    return depths
                alive = left
            depth += 1
        if depth:
            self._set_depth(depths, alive, depth)
        return depths

    def _set_depth(self, depths: dict[str, int], mask: int, depth: int) -> None:
        while mask:
            lowest = mask & -mask
            known = self._by_slot[lowest.bit_length() - 1]
            assert known is not None, "a mask names a free slot"
            depths[known.mac] = depth
            mask ^= lowest


def _blocks_of(known: _Incarnation) -> Iterator[Block]:
    return ((group, block_hash) for group, held in known.held.items() for block_hash in held)
