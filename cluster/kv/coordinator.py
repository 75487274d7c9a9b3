"""Joins the groups of one model: a prefix is cached when every group can resume at its end; blocks go to all or none.

Owns the live sequences and the prefix tree. The managers know the rule of each group, the pools who is referenced, the
retention what to forget.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from cluster.kv.events import EventLog
from cluster.kv.group_managers import make_manager
from cluster.kv.hashing import HASH_BYTES
from cluster.kv.layout import NULL_BLOCK, KVLayout
from cluster.kv.memory import PoolResize, PoolSet
from cluster.kv.prefix_tree import PrefixTree, Segment, num_common
from cluster.kv.retention import Retention, RetentionPolicy
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
    """Of one group since the start: tokens looked up, tokens found, and how often it ended a hit."""

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
            ids = self._hit_blocks(computed, manager.group_id)
            num_kept = sum(block_id != NULL_BLOCK for block_id in ids) - computed.copies_last
            num_evictable = sum(pool.is_evictable(block_id) for block_id in ids)
            most = self._layout.num_group_blocks_for(group, num_tokens + 1)
            needs[manager.pool_id] += max(0, most - num_kept) + num_evictable
        return needs

    def is_current(self, computed: ComputedBlocks, hashes: bytes) -> bool:
        """Whether a look-up would find the same again. O(1)."""
        return True

    def checkpoint(self, seq_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
        """See the manager. Nothing is kept without a prefix cache."""
        return ()

    def confirm_checkpoint(self, seq_id: int, num_tokens: int, *, is_point: bool) -> None:
        """See the manager."""

    def open(
        self,
        seq_id: int,
        computed: ComputedBlocks,
        hashes: bytes,
        points: Iterable[int],
        *,
        now_s: float,
        priority: int,
        pinned_until_s: float,
    ) -> StartedBlocks:
        """Open the sequence's block tables with the cached blocks, pinned, and a state of its own."""
        depth = computed.num_tokens // self.block_size
        path = [segment for segment in computed.path if segment.start < depth]
        gap = self.retention.used(path, depth, hashes, now_s)
        for counts in self.counts:
            counts.num_queried_tokens += len(hashes) // HASH_BYTES * self.block_size
            counts.num_hit_tokens += computed.num_tokens
        if computed.limited_by is not None:
            self.counts[computed.limited_by].num_limited += 1
        started = self._start(seq_id, computed, [point // self.block_size for point in points])
        sequence = self.sequences[seq_id]
        sequence.gap, sequence.priority, sequence.pinned_until_s = gap, priority, pinned_until_s
        for segment in path:
            segment.priority = max(segment.priority, priority)
            segment.pinned_until_s = max(segment.pinned_until_s, pinned_until_s)
        return started

    def _start(self, seq_id: int, computed: ComputedBlocks, points: Iterable[int]) -> StartedBlocks:
        assert seq_id not in self.sequences, f"sequence {seq_id} was started twice"
        depth = computed.num_tokens // self.block_size
        tables: list[list[int]] = []
        for manager in self.managers:
            ids = [] if manager.is_state else self._hit_blocks(computed, manager.group_id)
            self.pools[manager.pool_id].touch(ids)
            tables.append(ids)
        cursor = next((s for s in computed.path if s.start < depth <= s.end), self.tree.root)
        # A cursor keeps its segment; what lies beyond must stay evictable.
        cursor = self.tree.cut(cursor, depth) if depth else cursor
        first_held = [m.first_needed(computed.num_tokens) if not m.is_state else 0 for m in self.managers]
        sequence = Sequence(seq_id, tables, depth * self.block_size, cursor, depth, first_held)
        sequence.points = sorted(point for point in set(points) if point > depth)
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
        length = -(-num_tokens // self.block_size)
        needs = [0] * len(self.pools.pools)
        for manager in self._token_managers:
            needs[manager.pool_id] += length - len(sequence.tables[manager.group_id])
        if not self.make_room(needs):
            return None
        taken: dict[int, tuple[int, ...]] = {}
        for manager in self._token_managers:
            table = sequence.tables[manager.group_id]
            ids = self.pools[manager.pool_id].allocate(length - len(table))
            table.extend(ids)
            taken[manager.group_id] = tuple(ids)
        sequence.num_slots = length * self.block_size
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

    def make_room(self, needs: Seq[int]) -> bool:
        """See that each pool has so many empty blocks, by evicting and by moving the boundary between pools."""
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

        return self.retention.release(is_enough, num_lacking)

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
        self.tree.check()
        assert self.pools.spare_bytes >= 0, "the pools exceed the budget"
        for pool_id, pool in enumerate(self.pools.pools):
            held, cached = [0] * pool.num_blocks, set[int]()
            groups = [m.group_id for m in self.managers if m.pool_id == pool_id]
            for sequence in self.sequences.values():
                checkpoints = [*sequence.pending.values(), *([sequence.tail[1]] if sequence.tail else [])]
                ids = [b for group in groups for b in sequence.tables[group]]
                ids += [pages[group] for pages in checkpoints for group in groups if group in pages]
                for block_id in ids:
                    held[block_id] += block_id != NULL_BLOCK
            for group, block_id in self._sources:
                held[block_id] += group in groups
            for segment in self.tree.walk():
                for group in groups:
                    ids = [b for b in segment.blocks[group] if b != NULL_BLOCK]
                    assert not cached.intersection(ids), "a block is at two places of the tree"
                    assert not self.managers[group].is_full or len(ids) == segment.num_blocks, (
                        "a hole in full attention"
                    )
                    cached.update(ids)
            pool.check(held, cached)
        self._check_cursors()

    def _check_cursors(self) -> None:
        counted = dict.fromkeys([self.tree.root, *self.tree.walk()], 0)
        for sequence in self.sequences.values():
            assert sequence.cursor in counted, "a cursor lies in a segment that is gone"
            counted[sequence.cursor] += 1
            assert sequence.depth == sequence.cursor.end, "a cursor lies inside a segment"
        for segment, num_cursors in counted.items():
            assert segment.num_cursors == num_cursors, "cursors are miscounted"
            is_useful = segment.children or num_cursors or segment.is_point or segment is self.tree.root
            assert is_useful or all(m.is_full for m in self.managers), "an orphan is left"

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
        for manager in self._token_managers:
            if manager.is_full:
                continue
            group = manager.group_id
            first = max(manager.first_needed(num_resumable), manager.num_sink_blocks)
            start = max(sequence.first_held[group], manager.num_sink_blocks)
            table = sequence.tables[group]
            if first > start:
                end = min(first, len(table))
                self.pools[manager.pool_id].free(reversed(table[start:end]))
                self.retention.left_behind(end - start)
                table[start:end] = [NULL_BLOCK] * (end - start)
                sequence.first_held[group] = end

    def _close(self, sequence: Sequence) -> None:
        """Give back all that a sequence holds."""
        del self.sequences[sequence.seq_id]
        sequence.cursor.num_cursors -= 1
        for manager in self.managers:
            self.pools[manager.pool_id].free(reversed(sequence.tables[manager.group_id]))
        for pages in sequence.pending.values():
            self._free_pages(pages)
        if sequence.tail is not None:
            self._free_pages(sequence.tail[1])

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
                    checkpoints = [*sequence.pending.values(), *([sequence.tail[1]] if sequence.tail else [])]
                    for pages in checkpoints:
                        if manager.group_id in pages:
                            pages[manager.group_id] = moves.get(pages[manager.group_id], pages[manager.group_id])


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Nothing is ever found or kept; any number of groups."""

    def find_longest_cache_hit(self, hashes: bytes, num_tokens: int) -> ComputedBlocks:
        """Always nothing."""
        return ComputedBlocks(0, None, 0)

    def register(self, seq_id: int, first_index: int, hashes: bytes) -> list[TableEdit]:
        """Never kept."""
        return []

    def free(self, seq_id: int, num_processed: int, *, is_settled: bool) -> None:
        """See the base class."""
        self._close(self.sequences[seq_id])


class _CachingCoordinator(KVCacheCoordinator):
    """What both kinds of model with a prefix cache share: registering and ending."""

    def __init__(self, layout: KVLayout, policy: RetentionPolicy, events: EventLog) -> None:
        super().__init__(layout, policy, events)
        # Grows when a checkpoint becomes findable: a look-up made before may find more now.
        self.num_checkpoints = 0

    @property
    def _stamp(self) -> tuple[int, int, int]:
        return self.retention.num_evicted, self.num_checkpoints, self.tree.num_splits

    def is_current(self, computed: ComputedBlocks, hashes: bytes) -> bool:
        """Whether a look-up would find the same again. O(1)."""
        if computed.stamp != self._stamp:
            return False
        depth = computed.num_matched_tokens // self.block_size
        end = computed.path[-1] if computed.path else self.tree.root
        if depth < end.start:
            return False
        if end.end > depth:
            return bytes(end.hash_at(depth)) != hashes[depth * HASH_BYTES : (depth + 1) * HASH_BYTES]
        return hashes[depth * HASH_BYTES : (depth + 1) * HASH_BYTES] not in end.children

    def register(self, seq_id: int, first_index: int, hashes: bytes) -> list[TableEdit]:
        """See the base class. O(blocks), by slices."""
        sequence = self.sequences.get(seq_id)
        if sequence is None or first_index < sequence.depth:
            return []
        assert first_index == sequence.depth, f"block {first_index} of sequence {seq_id} skips {sequence.depth}"
        edits: list[TableEdit] = []
        done, num_blocks = 0, len(hashes) // HASH_BYTES
        while done < num_blocks:
            depth = sequence.depth
            end = depth + num_blocks - done
            if sequence.points and sequence.points[0] < end:
                end = sequence.points[0]
            num_done = self._advance(sequence, hashes[done * HASH_BYTES : (done + end - depth) * HASH_BYTES], edits)
            done += num_done
            if sequence.points and sequence.depth == sequence.points[0]:
                sequence.points.pop(0)
                self._make_point(sequence)
        return edits

    def checkpoint(self, seq_id: int, num_tokens: int) -> tuple[BlockCopy, ...]:
        """Keep the state that the sequence has now, after `num_tokens` tokens, a multiple of the block size.

        Returns the copies to make before the next token runs; none if there is no memory for it, or no need.
        """
        sequence, depth = self.sequences[seq_id], num_tokens // self.block_size
        if not self._state_managers or depth in sequence.pending or (sequence.tail and sequence.tail[0] == depth):
            return ()
        needs = [0] * len(self.pools.pools)
        for manager in self._state_managers:
            needs[manager.pool_id] += 1
        if not self.make_room(needs):
            return ()
        pages: dict[int, int] = {}
        copies: list[BlockCopy] = []
        for manager in self._state_managers:
            (page,) = self.pools[manager.pool_id].allocate(1)
            pages[manager.group_id] = page
            copies.append(BlockCopy(manager.group_id, sequence.tables[manager.group_id][0], page))
        sequence.pending[depth] = pages
        return tuple(copies)

    def confirm_checkpoint(self, seq_id: int, num_tokens: int, *, is_point: bool) -> None:
        """The copies were made. A point is findable from now on; the newest other one stays the sequence's own."""
        sequence, depth = self.sequences.get(seq_id), num_tokens // self.block_size
        if sequence is None or depth not in sequence.pending:
            return
        pages = sequence.pending.pop(depth)
        if is_point:
            self._publish(sequence, depth, pages)
            return
        if sequence.tail is not None:
            self._free_pages(sequence.tail[1])
        sequence.tail = (depth, pages)

    def free(self, seq_id: int, num_processed: int, *, is_settled: bool) -> None:
        """See the base class. Where it ends becomes a resume point."""
        sequence = self.sequences[seq_id]
        depth = num_processed // self.block_size
        if self._state_managers and sequence.depth:
            if is_settled and num_processed % self.block_size == 0 and depth == sequence.depth:
                # The state it worked on is just the one to keep.
                pages = {m.group_id: sequence.tables[m.group_id].pop() for m in self._state_managers}
                self._publish(sequence, depth, pages)
            elif sequence.tail is not None and sequence.tail[0] <= sequence.depth:
                self._publish(sequence, *sequence.tail)
                sequence.tail = None
        if sequence.depth and not self._state_managers:
            self._make_point(sequence)
        cursor = sequence.cursor
        self._close(sequence)
        self.retention.settle(cursor)

    def _advance(self, sequence: Sequence, hashes: bytes, edits: list[TableEdit]) -> int:
        """Register blocks after the cursor as far as one segment goes; returns how many."""
        segment, depth = sequence.cursor, sequence.depth
        if depth == segment.end:
            child = segment.children.get(hashes[:HASH_BYTES])
            if child is None:
                self._append(sequence, hashes)
                return len(hashes) // HASH_BYTES
            segment = child
        num_same = num_common(segment, depth, hashes, 0)
        if num_same:
            self._adopt(sequence, segment, num_same, edits)
            self._move(sequence, segment, depth + num_same)
            self._move(sequence, self.tree.cut(segment, sequence.depth), sequence.depth)
            return num_same
        # The prompts part here.
        upper = self.tree.cut(segment, depth)
        if not self._state_managers:
            self.retention.designate(upper)
        self._move(sequence, upper, depth)
        return 0

    def _append(self, sequence: Sequence, hashes: bytes) -> None:
        """Blocks that the tree did not have."""
        first, last = sequence.depth, sequence.depth + len(hashes) // HASH_BYTES
        cursor = sequence.cursor
        parent_hash = cursor.hash_before(first) if first else None
        if cursor.parent is not None and first > cursor.start:
            parent_hash = cursor.hash_at(first - 1)
        rows: list[list[int]] = []
        for manager in self.managers:
            ids = [NULL_BLOCK] * (last - first) if manager.is_state else sequence.tables[manager.group_id][first:last]
            rows.append(ids)
            present = [block_id for block_id in ids if block_id != NULL_BLOCK]
            self.pools[manager.pool_id].cache(present)
            if len(present) == last - first:
                self.events.stored(manager.group_id, hashes, parent_hash, first)
            else:
                for offset, block_id in enumerate(ids):
                    if block_id != NULL_BLOCK:
                        self._store_one(manager.group_id, hashes, parent_hash, first, offset)
        segment = self.tree.append(cursor, hashes, rows)
        if segment is not cursor:
            segment.gap, segment.priority = sequence.gap, sequence.priority
            segment.pinned_until_s = sequence.pinned_until_s
            segment.last_use = self.retention.clock
        self._move(sequence, segment, last)

    def _store_one(self, group: int, hashes: bytes, parent_hash: bytes | None, first: int, offset: int) -> None:
        at = offset * HASH_BYTES
        parent = hashes[at - HASH_BYTES : at] if offset else parent_hash
        self.events.stored(group, hashes[at : at + HASH_BYTES], parent, first + offset)  # type: ignore[arg-type]

    def _adopt(self, sequence: Sequence, segment: Segment, num_blocks: int, edits: list[TableEdit]) -> None:
        """Blocks whose content the tree has: the sequence takes the tree's and gives its own copies back."""
        for manager in self._token_managers:
            group, pool = manager.group_id, self.pools[manager.pool_id]
            table, known = sequence.tables[group], segment.blocks[group]
            for index in range(sequence.depth, sequence.depth + num_blocks):
                own, offset = table[index], index - segment.start
                if own == NULL_BLOCK or own == known[offset]:
                    continue
                if known[offset] == NULL_BLOCK:
                    known[offset] = own
                    pool.cache([own])
                    segment.thinned[group] = min(segment.thinned[group], index)
                    self.events.stored(
                        group, segment.hashes_between(index, index + 1), segment.hash_before(index), index
                    )
                else:
                    pool.touch([known[offset]])
                    table[index] = known[offset]
                    pool.free([own])
                    edits.append(TableEdit(sequence.seq_id, group, index, known[offset]))

    def _make_point(self, sequence: Sequence) -> None:
        """The sequence's newest registered block ends a resume point; a recurrent model needs a checkpoint for that."""
        if self._state_managers:
            return
        segment = self.tree.cut(sequence.cursor, sequence.depth)
        self._move(sequence, segment, sequence.depth)
        self.retention.designate(segment)

    def _publish(self, sequence: Sequence, depth: int, pages: dict[int, int]) -> None:
        """Make a state after `depth` registered blocks findable."""
        segment = sequence.cursor
        assert depth <= sequence.depth, "a state ahead of its registered blocks"
        while segment.start >= depth:
            assert segment.parent is not None
            segment = segment.parent
        segment = self.tree.cut(segment, depth)
        for group, page in pages.items():
            pool, states = self.pools[self.managers[group].pool_id], segment.blocks[group]
            if states[-1] == NULL_BLOCK:
                states[-1] = page
                pool.cache([page])
                self.events.stored(
                    group, segment.hashes_between(depth - 1, depth), segment.hash_before(depth - 1), depth - 1
                )
            pool.free([page])
        self.num_checkpoints += 1
        self.retention.designate(segment)

    def _move(self, sequence: Sequence, segment: Segment, depth: int) -> None:
        left = sequence.cursor
        segment.num_cursors += 1
        left.num_cursors -= 1
        sequence.cursor, sequence.depth = segment, depth
        if left is not segment:
            # After a split nothing may be left that makes its lower part worth keeping.
            self.retention.settle(left)


class UnitaryKVCacheCoordinator(_CachingCoordinator):
    """A model whose layers form one group of full attention: what the tree matches is the hit."""

    def find_longest_cache_hit(self, hashes: bytes, num_tokens: int) -> ComputedBlocks:
        """See the base class. O(segments)."""
        size = self.block_size
        path, depth = self.tree.match(hashes, num_tokens // size)
        if depth * size == num_tokens:
            return ComputedBlocks(num_tokens - 1, None, num_tokens, tuple(path), True, self._stamp)
        limited_by = 0 if depth < (num_tokens - 1) // size else None
        return ComputedBlocks(depth * size, limited_by, depth * size, tuple(path), False, self._stamp)


class HybridKVCacheCoordinator(_CachingCoordinator):
    """Any number of groups of any kinds, with or without full attention."""

    def find_longest_cache_hit(self, hashes: bytes, num_tokens: int) -> ComputedBlocks:
        """See the base class. The fixed point over all groups: each lowers the length until none does."""
        size = self.block_size
        path, matched = self.tree.match(hashes, num_tokens // size)
        limit = min(matched, (num_tokens - 1) // size)
        limited_by = 0 if matched < (num_tokens - 1) // size else None
        partial = [m for m in self.managers if not m.is_full]
        present = {m.group_id: self.tree.present(path, matched, m.group_id) for m in partial}
        if matched * size == num_tokens and not self._state_managers:
            lowest = [present[m.group_id].find(b"\x00", m.first_needed(num_tokens - 1)) for m in partial]
            sinks = [present[m.group_id].find(b"\x00", 0, m.num_sink_blocks) for m in partial]
            if max([*lowest, *sinks], default=-1) < 0:
                return ComputedBlocks(num_tokens - 1, None, num_tokens, tuple(path), True, self._stamp)
        is_settled = False
        while not is_settled:
            is_settled = True
            for manager in partial:
                length = manager.longest_hit(present[manager.group_id], limit)
                if length < limit:
                    limit, limited_by, is_settled = length, manager.group_id, False
        return ComputedBlocks(limit * size, limited_by, matched * size, tuple(path), False, self._stamp)


def _rename(blocks: "list[int] | Seq[int]", moves: dict[int, int]) -> None:
    for at, block_id in enumerate(blocks):
        if block_id in moves:
            blocks[at] = moves[block_id]  # type: ignore[index]
