"""One model's prefix index: which Mac holds which block, and where each could resume a prompt.

By group, a bit mask of Macs for each block hash; a Mac's bit is 1 << slot. Memory follows the live blocks, and a Mac's
end frees all that it had. A Mac's content is known from its first snapshot or equal digest on; events then change it in
the order of their seq. Whatever doesn't fit (a gap, a seq again, an unknown parent, another digest) leaves it as it is
and asks for a resync.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from cluster.kv.events import BlockEvent, BlocksStored
from cluster.kv.group_managers import GroupManager, make_manager
from cluster.kv.hashing import HASH_BYTES, BlockHash
from cluster.kv.layout import KVGroup
from cluster.routing.digests import NUM_BUCKETS, bucket_digests, hashes_in, in_buckets
from cluster.routing.holdings import Holding
from cluster.routing.match import Depths, ResumePass, leading_runs


class Applied(Enum):
    """What the sender of a batch or snapshot has to do next."""

    # Nothing.
    OK = auto()
    # Compare digests, see PrefixIndex.check_digests; join first if the router doesn't know this incarnation.
    RESYNC = auto()


@dataclass(frozen=True, slots=True)
class ContentStats:
    """Counts of one Mac's incarnation. `num_events` are (group, block) changes, `num_no_effect` those already so."""

    next_seq: int
    is_synced: bool
    num_blocks_by_group: tuple[int, ...]
    num_events: int
    num_no_effect: int
    num_gaps: int
    num_repeated: int
    num_unknown_parents: int
    num_digest_mismatches: int


@dataclass(frozen=True, slots=True)
class MacIndexStats:
    """What the prefix index knows of one Mac."""

    mac: str
    epoch: int
    content: ContentStats


@dataclass(frozen=True, slots=True)
class IndexStats:
    """`num_keys` are distinct (group, block_hash) of each model that at least one Mac holds."""

    num_keys: int
    macs: tuple[MacIndexStats, ...]


@dataclass(slots=True)
class _Content:
    holdings: tuple[Holding, ...]
    next_seq: int = 0
    is_synced: bool = False
    # Known at least once: it was synced and may have missed something since.
    is_known: bool = False
    num_events: int = 0
    num_no_effect: int = 0
    num_gaps: int = 0
    num_repeated: int = 0
    num_unknown_parents: int = 0
    num_digest_mismatches: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """Where Macs can resume a prompt, in tokens, and what says so.

    `resumable` leaves out Macs that hold nothing of use. `content` is how far each one's full attention goes, in
    blocks; `lowered` are (group, macs, from, to) in blocks.
    """

    resumable: list[tuple[int, int]]
    content: Depths
    lowered: list[tuple[int, int, int, int]] = field(default_factory=list)


class PrefixIndex:
    """Slots are the caller's: `open` one before anything else of it."""

    def __init__(self, groups: Sequence[KVGroup], block_size: int) -> None:
        self._block_size = block_size
        managers = tuple(make_manager(group, block_size) for group in groups)
        full = [manager for manager in managers if manager.is_full]
        self._is_full = tuple(manager.is_full for manager in managers)
        # The one whose runs bound all others; a model need not have one.
        self._leader = full[0].group_id if full else None
        self._followers: tuple[GroupManager, ...] = tuple(m for m in managers if m.group_id != self._leader)
        self._has_states = any(manager.is_state for manager in managers)
        self._masks: tuple[dict[BlockHash, int], ...] = tuple({} for _ in groups)
        self._contents: dict[int, _Content] = {}

    def open(self, slot: int) -> None:
        """Begin an incarnation of which nothing is known, in place of what the slot had."""
        self.close(slot)
        self._contents[slot] = _Content(tuple(Holding(masks, 1 << slot) for masks in self._masks))

    def close(self, slot: int) -> None:
        """Free all that is known of the slot; no effect if it is not open. O(its blocks)."""
        content = self._contents.pop(slot, None)
        if content is not None:
            for holding in content.holdings:
                holding.clear()

    def is_open(self, slot: int) -> bool:
        """Whether an incarnation has begun there."""
        return slot in self._contents

    def is_synced(self, slot: int) -> bool:
        """Whether the Mac's content is known and no event of it is missing."""
        return slot in self._contents and self._contents[slot].is_synced

    def is_known(self, slot: int) -> bool:
        """Whether the Mac's content was known once; since then something may have been missed."""
        return slot in self._contents and self._contents[slot].is_known

    def desync(self, slot: int) -> None:
        """Events may have been missed: digests will tell. The content stays meanwhile."""
        self._contents[slot].is_synced = False

    def apply(self, slot: int, seq: int, events: Sequence[BlockEvent]) -> Applied:
        """One batch of presence changes, in order. Raises ValueError for a group that the model doesn't have."""
        content = self._contents[slot]
        if seq < content.next_seq:
            # Sent twice, or a Mac that began anew without saying so: digests tell which.
            content.num_repeated += 1
            return Applied.RESYNC
        if not content.is_synced:
            return Applied.RESYNC
        if seq > content.next_seq:
            content.num_gaps += 1
            content.is_synced = False
            return Applied.RESYNC
        content.next_seq = seq + 1
        for event in events:
            if not self._apply_one(content, event):
                content.num_unknown_parents += 1
                content.is_synced = False
                return Applied.RESYNC
        return Applied.OK

    def load(self, slot: int, next_seq: int, joined_by_group: Sequence[bytes]) -> None:
        """Make the Mac's content exactly this; the batch `next_seq` is the first that it doesn't include."""
        self.load_buckets(slot, {group: (range(NUM_BUCKETS), joined) for group, joined in enumerate(joined_by_group)})
        self._settle(self._contents[slot], next_seq)

    def check_digests(self, slot: int, next_seq: int, digests: Sequence[int]) -> tuple[int, ...]:
        """Groups that differ from what the Mac holds before batch `next_seq`. None: it is synced from here on."""
        content = self._contents[slot]
        differing = tuple(group for group, holding in enumerate(content.holdings) if holding.digest != digests[group])
        if not differing:
            self._settle(content, next_seq)
        elif content.is_synced:
            content.num_digest_mismatches += 1
            content.is_synced = False
        return differing

    def differing_buckets(self, slot: int, group: int, digests: Sequence[int]) -> tuple[int, ...]:
        """Buckets of a group in which the Mac holds something else than is known here. O(its blocks)."""
        own = bucket_digests(self._contents[slot].holdings[group].blocks())
        return tuple(bucket for bucket, digest in enumerate(digests) if digest != own[bucket])

    def load_buckets(self, slot: int, buckets_by_group: Mapping[int, tuple[Sequence[int], bytes]]) -> None:
        """Make these buckets of the Mac's content exactly these hashes."""
        content = self._contents[slot]
        for group, (buckets, joined) in buckets_by_group.items():
            holding = content.holdings[group]
            if not holding.num_blocks:
                holding.store(joined)
                continue
            wanted = dict.fromkeys(hashes_in(joined))
            held = set(hashes_in(in_buckets(holding.blocks(), buckets)))
            holding.remove(b"".join(held.difference(wanted)))
            holding.store(b"".join(each for each in wanted if each not in held))

    def match(self, hashes: Sequence[BlockHash], num_tokens: int, macs: int) -> Match:
        """Where each of `macs` can resume a prompt of `num_tokens` with these full blocks; 1 token always runs.

        The same rule, and the same figure, as KVCacheManager.get_computed_blocks of each Mac.
        """
        size = self._block_size
        num_usable = (num_tokens - 1) // size
        if self._leader is None:
            content: Depths = [(macs, len(hashes))]
        else:
            content = leading_runs(self._masks[self._leader].get, hashes, macs)
        if not self._followers:
            resumable = [(mask, min(depth * size, num_tokens - 1)) for mask, depth in content]
            return Match(resumable, content)
        steps = ResumePass(self._followers, self._masks, hashes, size)
        whole = self._whole(steps, content, num_tokens, len(hashes))
        limits = [(mask & ~whole, min(depth, num_usable)) for mask, depth in content]
        resumable = [(mask, depth * size) for mask, depth in steps.run(limits)]
        if whole:
            resumable.append((whole, num_tokens - 1))
        return Match(resumable, content, steps.lowered)

    def holds(self, slot: int, block_hash: BlockHash) -> bool:
        """Whether the Mac has this block in the leading group, or in the first if there is no full attention."""
        return bool(self._masks[self._leader or 0].get(block_hash, 0) >> slot & 1)

    def digests(self, slot: int) -> tuple[int, ...]:
        """Of each group, to be compared with KVCacheManager.digests()."""
        return tuple(holding.digest for holding in self._contents[slot].holdings)

    @property
    def num_keys(self) -> int:
        """Distinct (group, block_hash) that a Mac holds."""
        return sum(map(len, self._masks))

    def stats(self, slot: int) -> ContentStats:
        """Counts of the slot's incarnation."""
        content = self._contents[slot]
        return ContentStats(
            next_seq=content.next_seq,
            is_synced=content.is_synced,
            num_blocks_by_group=tuple(holding.num_blocks for holding in content.holdings),
            num_events=content.num_events,
            num_no_effect=content.num_no_effect,
            num_gaps=content.num_gaps,
            num_repeated=content.num_repeated,
            num_unknown_parents=content.num_unknown_parents,
            num_digest_mismatches=content.num_digest_mismatches,
        )

    def check(self) -> None:
        """Raises AssertionError unless masks, logs and digests agree. O(blocks of all Macs)."""
        every = 0
        for slot, content in self._contents.items():
            every |= 1 << slot
            for holding in content.holdings:
                holding.check()
        for masks in self._masks:
            assert all(mask and not mask & ~every for mask in masks.values()), "a mask names nobody, or a closed slot"

    def _apply_one(self, content: _Content, event: BlockEvent) -> bool:
        """False: the block before the stored ones is not known here, though full attention must have it."""
        if not 0 <= event.group < len(content.holdings):
            raise ValueError(f"event of group {event.group}; the model has groups 0 to {len(content.holdings) - 1}")
        holding = content.holdings[event.group]
        if isinstance(event, BlocksStored):
            parent = event.parent_hash
            if parent is not None and self._is_full[event.group] and not holding.masks.get(parent, 0) & holding.bit:
                return False
            content.num_no_effect += holding.store(event.hashes)
        else:
            content.num_no_effect += holding.remove(event.hashes)
        content.num_events += len(event.hashes) // HASH_BYTES
        return True

    def _settle(self, content: _Content, next_seq: int) -> None:
        content.next_seq = next_seq
        content.is_synced = content.is_known = True

    def _whole(self, steps: ResumePass, content: Depths, num_tokens: int, num_blocks: int) -> int:
        """Macs that have all of a prompt of whole blocks, so that but its last token need not run.

        A state after the last token is of no use for that: it is past it.
        """
        if self._has_states or not num_blocks or num_blocks * self._block_size != num_tokens:
            return 0
        whole = sum(mask for mask, depth in content if depth == num_blocks)
        for manager in self._followers:
            whole = steps.holders(manager.first_needed(num_tokens - 1), num_blocks, manager.group_id, whole)
            whole = steps.holders(0, manager.num_sink_blocks, manager.group_id, whole)
        return whole
