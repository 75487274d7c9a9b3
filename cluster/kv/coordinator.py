"""Joins the groups of one model: a prefix is cached when every group can resume at its end; blocks go to all or none.

Owns the live sequences and the prefix tree. The managers know the rule of each group, the pools who is referenced, the
retention what to forget.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from cluster.kv.consistency import check_cursors, check_references, check_unfindable
from cluster.kv.events import EventLog
from cluster.kv.group_managers import GroupManager, locals_by_rule, make_manager
from cluster.kv.hashing import HASH_BYTES
from cluster.kv.layout import NULL_BLOCK, KVLayout
from cluster.kv.memory import PoolResize, PoolSet
from cluster.kv.points import PointKind
from cluster.kv.policies import RetentionPolicy
from cluster.kv.prefix_tree import PrefixTree, Segment
from cluster.kv.retention import Retention
from cluster.kv.sequence import (
    NO_BLOCKS,
    BlockCopy,
    ComputedBlocks,
    GroupBlocks,
    Sequence,
    StartedBlocks,
    TableEdit,
)


@dataclass(slots=True)
class GroupCounts:
    """Of one group since the start: tokens looked up, tokens it could resume, and how often it ended a hit."""

    num_queried_tokens: int = 0
    num_hit_tokens: int = 0
    num_limited: int = 0


class KVCacheCoordinator(ABC):
    """What all models share: allocation over all groups at once."""

    def __init__(self, layout: KVLayout, policy: RetentionPolicy, events: EventLog) -> None:
        self._layout = layout
        self.block_size = layout.block_size
        self.events = events
        self.tree = PrefixTree(len(layout.groups))
        self.managers = tuple(make_manager(group, layout.block_size) for group in layout.groups)
        self.pools = PoolSet(layout)
        self.retention = Retention(self.tree, self.managers, self.pools, events, policy, layout.block_size)
        self.sequences: dict[int, Sequence] = {}
        self.counts = [GroupCounts() for _ in self.managers]
        self._state_managers = [m for m in self.managers if m.is_state]
        self._token_managers = [m for m in self.managers if not m.is_state]
        # Groups that take a block at the same position from one pool, and those that give up one for the same reason:
        # a block's end is handled once for all of them.
        self._token_groups = _by_pool(self._token_managers)
        self._local_groups = [(same[0], pool) for same in locals_by_rule(self.managers) for pool in _by_pool(same)]
        self._resizes: list[PoolResize] = []
        # (group, block) of copies not made yet: referenced, so that no boundary moves over them.
        self._sources: list[tuple[int, int]] = []

    @abstractmethod
    def find_longest_cache_hit(self, hashes: bytes, num_tokens: int) -> ComputedBlocks:
        """The longest prefix, of at most `num_tokens - 1` tokens, that every group can resume. Does not pin it."""

    def blocks_to_start(self, computed: ComputedBlocks, num_tokens: int) -> list[int]:
        """Free blocks of each pool that a sequence of `num_tokens` known tokens uses up from start to its last token.

        A cached block that nobody references leaves the free ones too, so it counts; a shared one is for nothing.
        """
        needs = [0] * len(self.pools.pools)
        for manager, group in zip(self.managers, self._layout.groups, strict=True):
            pool = self.pools[manager.pool_id]
            if manager.is_state:
                # The state to go on from must stay until it is copied.
                needs[manager.pool_id] += 1 + pool.is_evictable(self._state_of(computed, manager.group_id))
                continue
            num_held, num_evictable = pool.count(self._hit_blocks(computed, manager.group_id))
            most = self._layout.num_group_blocks_for(group, num_tokens + 1)
            needs[manager.pool_id] += max(0, most - num_held + computed.copies_last) + num_evictable
        return needs

    @abstractmethod
    def is_current(self, computed: ComputedBlocks, hashes: bytes) -> bool:
        """Whether a look-up would find the same again. O(1)."""

    @abstractmethod
    def checkpoint(self, seq_id: int, num_tokens: int, kind: PointKind) -> tuple[BlockCopy, ...]:
        """See the manager."""

    @abstractmethod
    def confirm_checkpoint(self, seq_id: int, num_tokens: int) -> None:
        """See the manager."""

    def open(
        self,
        seq_id: int,
        computed: ComputedBlocks,
        hashes: bytes,
        points: Mapping[int, PointKind],
        *,
        now_s: float,
        priority: int,
        pinned_until_s: float,
    ) -> StartedBlocks:
        """Open the sequence's block tables with the cached blocks, pinned, and a state of its own."""
        depth = computed.num_tokens // self.block_size
        path = [segment for segment in computed.path if segment.start < depth]
        gap = self.retention.used(path, depth, hashes, now_s)
        for group, counts in enumerate(self.counts):
            counts.num_queried_tokens += len(hashes) // HASH_BYTES * self.block_size
            counts.num_hit_tokens += computed.group_hits[group] if computed.group_hits else computed.num_tokens
        if computed.limited_by is not None and computed.num_tokens < computed.num_matched_tokens:
            # Otherwise the content itself ended: no group is to blame.
            self.counts[computed.limited_by].num_limited += 1
        started = self._start(seq_id, computed, points)
        sequence = self.sequences[seq_id]
        sequence.gap, sequence.priority, sequence.pinned_until_s = gap, priority, pinned_until_s
        for segment in path:
            segment.priority = max(segment.priority, priority)
            segment.pinned_until_s = max(segment.pinned_until_s, pinned_until_s)
            self.retention.touched(segment)
        return started

    def _start(self, seq_id: int, computed: ComputedBlocks, points: Mapping[int, PointKind]) -> StartedBlocks:
        assert seq_id not in self.sequences, f"sequence {seq_id} was started twice"
        depth = computed.num_tokens // self.block_size
        tables: list[list[int]] = []
        for manager in self.managers:
            ids = [] if manager.is_state else self._hit_blocks(computed, manager.group_id)
            self.pools[manager.pool_id].touch(ids)
            tables.append(ids)
        cursor = next((s for s in computed.path if s.start < depth <= s.end), self.tree.root)
        # A cursor keeps its segment; what lies beyond must stay evictable.
        if depth and cursor.end > depth:
            cursor = self.retention.cut(cursor, depth)
            self._part(cursor)
        first_held = [m.first_needed(computed.num_tokens) if not m.is_state else 0 for m in self.managers]
        sequence = Sequence(seq_id, tables, depth * self.block_size, cursor, depth, first_held)
        by_depth: dict[int, PointKind] = {}
        for offset, kind in points.items():
            at = offset // self.block_size
            if at > depth:
                by_depth[at] = max(kind, by_depth.get(at, kind))
        sequence.points = sorted(by_depth.items())
        cursor.num_cursors += 1
        self.sequences[seq_id] = sequence
        return self._start_states(sequence, computed)

    def allocate(self, seq_id: int, num_tokens: int, num_processed: int) -> GroupBlocks | None:
        """Give every group what it needs for the first `num_tokens` positions, or nothing to any of them.

        O(1) where there is room already. Windows give up what tokens from `num_processed` on can't see, even if the
        rest fails.
        """
        sequence = self.sequences[seq_id]
        if num_tokens <= sequence.num_slots:
            return NO_BLOCKS
        self._leave_behind(sequence, num_processed)
        # All tables are equally long.
        num_new = -(-(num_tokens - sequence.num_slots) // self.block_size)
        needs = [0] * len(self.pools.pools)
        for pool_id, groups in self._token_groups:
            needs[pool_id] = num_new * len(groups)
        if not self.make_room(needs):
            # Admission counts without checkpoints: a sequence's own must not keep it from going on.
            self._free_checkpoints(sequence)
            if not self.make_room(needs):
                return None
        taken: dict[int, tuple[int, ...]] = {}
        tables = sequence.tables
        for pool_id, groups in self._token_groups:
            ids = self.pools[pool_id].allocate(needs[pool_id])
            for group, new in zip(groups, zip(*[iter(ids)] * num_new, strict=True), strict=True):
                taken[group] = new
                tables[group] += new
        sequence.num_slots += num_new * self.block_size
        return taken

    def num_missing_bytes(self, seq_id: int, num_tokens: int) -> int:
        """What the sequence will still take on its way to `num_tokens` tokens."""
        sequence = self.sequences[seq_id]
        num_bytes = 0
        for manager, group in zip(self.managers, self._layout.groups, strict=True):
            if not manager.is_state:
                held = len(sequence.tables[manager.group_id]) - sequence.first_held[manager.group_id]
                most = self._layout.num_group_blocks_for(group, num_tokens + 1)
                num_bytes += max(0, most - held) * manager.page_bytes
        return num_bytes

    @abstractmethod
    def register(self, seq_id: int, first_index: int, hashes: bytes) -> list[TableEdit]:
        """Make filled blocks findable; nothing if the sequence is gone."""

    @abstractmethod
    def free(self, seq_id: int, num_processed: int, *, is_settled: bool) -> None:
        """Close the sequence's block tables."""

    def make_room(self, needs: Seq[int], worth: float | None = None) -> bool:
        """See that each pool has so many empty blocks, by moving boundaries and evicting what is worth less."""
        if not self.pools.lacks(needs):
            return True
        if not self.pools.fits(needs):
            return False

        def is_enough() -> bool:
            if not self.pools.lacks(needs):
                return True
            resizes = self.pools.rebalance(needs)
            if resizes is not None:
                self._follow(resizes)
            return resizes is not None

        def num_lacking() -> int:
            return sum(max(0, need - pool.num_empty) for need, pool in zip(needs, self.pools.pools, strict=True))

        return self.retention.release(is_enough, num_lacking, worth)

    def num_unfindable(self) -> list[int]:
        """By group the blocks and states that sequences hold and no look-up can find. O(sequences)."""
        counts = [0] * len(self.managers)
        for sequence in self.sequences.values():
            num_states, depth, length = 1 + len(sequence.checkpoints()), sequence.depth, sequence.num_slots
            for manager in self.managers:
                if manager.is_state:
                    counts[manager.group_id] += num_states
                    continue
                # Only a window moves beyond what is registered, where nothing is; its sinks stay.
                first = max(depth, sequence.first_held[manager.group_id])
                num_sinks = max(0, min(first, manager.num_sink_blocks) - depth)
                counts[manager.group_id] += length // self.block_size - first + num_sinks
        return counts

    def take_resizes(self) -> tuple[PoolResize, ...]:
        """Boundary moves since the last call, in order: for the worker, before anything else of a step."""
        taken = tuple(self._resizes)
        self._resizes.clear()
        return taken

    def release_sources(self) -> None:
        """The plan that makes the copies is complete: whoever gets their sources writes them in a later one."""
        for group, block_id in self._sources:
            self.pools[self.managers[group].pool_id].free([block_id])
        self._sources.clear()

    def reset(self) -> None:
        """Forget everything, without an event."""
        self._sources.clear()
        self.tree.reset()
        self.pools.reset()
        self.retention.reset()
        self.sequences.clear()
        self._resizes.clear()
        self.events.reset()

    def check(self) -> None:
        """Assert that pools, tree, tables and budget agree."""
        assert self.pools.spare_bytes >= 0, "the pools exceed the budget"
        check_references(self.pools, self.managers, self.tree, self.sequences.values(), self._sources)
        check_unfindable(self.num_unfindable(), self.managers, self.tree, self.sequences.values())
        check_cursors(self.managers, self.tree, self.sequences.values())
        self.retention.check()

    def _part(self, segment: Segment) -> None:
        """Two prompts part at the segment's end, where others may too. A recurrent model needs a checkpoint there."""
        if not self._state_managers:
            self.retention.designate(segment, PointKind.PARTING)

    def _hit_blocks(self, computed: ComputedBlocks, group_id: int) -> list[int]:
        """The block table that the hit gives one group: null where it needs nothing. O(blocks)."""
        manager = self.managers[group_id]
        depth = -(-computed.num_tokens // self.block_size)
        ids: list[int] = []
        for segment in computed.path:
            ids.extend(segment.blocks[group_id])
        del ids[depth:]
        first = manager.first_needed(computed.num_tokens)
        num_sinks = manager.num_sink_blocks
        if first > num_sinks:
            ids[num_sinks:first] = [NULL_BLOCK] * (min(first, depth) - num_sinks)
        return ids

    def _start_states(self, sequence: Sequence, computed: ComputedBlocks) -> StartedBlocks:
        """Pages that a sequence needs from the start: its states, and a copy of a last block that it will write."""
        states = [self._state_at_cursor(sequence, m.group_id) for m in self._state_managers]
        for manager, source in zip(self._state_managers, states, strict=True):
            self.pools[manager.pool_id].touch([source])
        needs = [0] * len(self.pools.pools)
        for manager in self._state_managers + (self._token_managers if computed.copies_last else []):
            needs[manager.pool_id] += 1
        has_room = self.make_room(needs)
        assert has_room, "admission promised these pages"
        copies: list[BlockCopy] = []
        zeroes: dict[int, tuple[int, ...]] = {}
        for manager in self._state_managers:
            pool = self.pools[manager.pool_id]
            # Read again: making room may have moved it.
            source = self._state_at_cursor(sequence, manager.group_id)
            (page,) = pool.allocate(1)
            sequence.tables[manager.group_id] = [page]
            if source != NULL_BLOCK:
                copies.append(BlockCopy(manager.group_id, source, page))
                self._sources.append((manager.group_id, source))
            else:
                zeroes[manager.group_id] = (page,)
        if computed.copies_last:
            copies += self._copy_last(sequence)
        tables = {m.group_id: tuple(sequence.tables[m.group_id]) for m in self.managers}
        return StartedBlocks(tables, tuple(copies), zeroes)

    def _state_of(self, computed: ComputedBlocks, group_id: int) -> int:
        """The checkpoint that a hit goes on from."""
        at = computed.num_tokens // self.block_size - 1
        found = (s.blocks[group_id][at - s.start] for s in computed.path if s.start <= at < s.end)
        return next(found, NULL_BLOCK)

    def _state_at_cursor(self, sequence: Sequence, group_id: int) -> int:
        if sequence.depth == 0:
            return NULL_BLOCK
        return sequence.cursor.blocks[group_id][sequence.depth - 1 - sequence.cursor.start]

    def _copy_last(self, sequence: Sequence) -> list[BlockCopy]:
        """The hit ends inside its last block: the sequence writes a copy of it."""
        copies: list[BlockCopy] = []
        for manager in self._token_managers:
            table = sequence.tables[manager.group_id]
            source = table[-1]
            (table[-1],) = self.pools[manager.pool_id].allocate(1)
            self._sources.append((manager.group_id, source))
            copies.append(BlockCopy(manager.group_id, source, table[-1]))
        sequence.num_slots += self.block_size
        return copies

    def _leave_behind(self, sequence: Sequence, num_processed: int) -> None:
        """Give up the blocks that no later token sees, nor the last block end, where it could be resumed. O(blocks)."""
        num_resumable = num_processed // self.block_size * self.block_size
        num_held = lowest = sequence.num_slots // self.block_size
        left: list[list[int]] = [[] for _ in self.pools.pools]
        for manager, (pool_id, groups) in self._local_groups:
            num_sinks = manager.num_sink_blocks
            end = min(manager.first_needed(num_resumable), num_held)
            start = max(sequence.first_held[manager.group_id], num_sinks)
            if end > start:
                lowest = min(lowest, start)
                nulls = [NULL_BLOCK] * (end - start)
                for group in groups:
                    table = sequence.tables[group]
                    sequence.first_held[group] = end
                    left[pool_id] += table[start:end]
                    table[start:end] = nulls
        if lowest < num_held:
            for pool, block_ids in zip(self.pools.pools, left, strict=True):
                pool.free(reversed(block_ids))
            self.retention.left_behind(sequence, lowest)

    def _close(self, sequence: Sequence) -> None:
        """Give back all that a sequence holds."""
        del self.sequences[sequence.seq_id]
        sequence.cursor.num_cursors -= 1
        for manager in self.managers:
            self.pools[manager.pool_id].free(reversed(sequence.tables[manager.group_id]))
        self._free_checkpoints(sequence)

    def _free_checkpoints(self, sequence: Sequence) -> None:
        """Those that only the sequence has; where one is still being made, whoever gets its page writes it later."""
        for pages in sequence.checkpoints():
            self._free_pages(pages)
        sequence.pending.clear()
        sequence.tail = None

    def _free_pages(self, pages: dict[int, int]) -> None:
        for group, page in pages.items():
            self.pools[self.managers[group].pool_id].free([page])

    def _follow(self, resizes: Seq[PoolResize]) -> None:
        """Blocks have moved: whoever knows them by id learns the new ones. O(all blocks), and rare."""
        self._resizes.extend(resizes)
        for resize in resizes:
            if not resize.moves:
                continue
            moves = dict(resize.moves)
            for manager in self.managers:
                if manager.pool_id != resize.pool_id:
                    continue
                for segment in self.tree.walk():
                    _rename(segment.blocks[manager.group_id], moves)
                self._sources = [(g, moves.get(b, b) if g == manager.group_id else b) for g, b in self._sources]
                for sequence in self.sequences.values():
                    _rename(sequence.tables[manager.group_id], moves)
                    checkpoints = sequence.checkpoints()
                    for pages in checkpoints:
                        if manager.group_id in pages:
                            pages[manager.group_id] = moves.get(pages[manager.group_id], pages[manager.group_id])


def _by_pool(managers: Seq[GroupManager]) -> list[tuple[int, list[int]]]:
    """(pool, its groups) of those that these are of."""
    pools: dict[int, list[int]] = {}
    for manager in managers:
        pools.setdefault(manager.pool_id, []).append(manager.group_id)
    return list(pools.items())


def _rename(blocks: "list[int] | Seq[int]", moves: dict[int, int]) -> None:
    for at, block_id in enumerate(blocks):
        if block_id in moves:
            blocks[at] = moves[block_id]  # type: ignore[index]
