"""Models with a prefix cache: registering what was computed, keeping states, finding the longest hit.

One group of full attention is the common case and needs no more than a walk of the tree; everything else is hybrid.
"""

from cluster.kv.coordinator import KVCacheCoordinator
from cluster.kv.events import EventLog
from cluster.kv.hashing import HASH_BYTES
from cluster.kv.layout import NULL_BLOCK, KVLayout
from cluster.kv.points import PointKind
from cluster.kv.policies import RetentionPolicy
from cluster.kv.prefix_tree import Segment, num_common
from cluster.kv.sequence import BlockCopy, ComputedBlocks, Pages, Sequence, TableEdit

# Where windows are left behind, a long prefix gets a point so often: where it can be cut when memory is short.
_INTERVAL_TOKENS = 4096


class _CachingCoordinator(KVCacheCoordinator):
    """What both kinds of model with a prefix cache share: registering and ending."""

    def __init__(self, layout: KVLayout, policy: RetentionPolicy, events: EventLog) -> None:
        super().__init__(layout, policy, events)
        # Grows when a state or a missing block becomes findable: a look-up made before may find more now.
        self.num_filled = 0
        # Blocks between points on the way where windows make them; states take pages of their own, by checkpoints.
        has_intervals = policy.weighs_costs and self.retention.evictor.has_windows and not self._state_managers
        self._interval = max(1, _INTERVAL_TOKENS // self.block_size) if has_intervals else 0

    @property
    def _stamp(self) -> tuple[int, int, int]:
        return self.retention.evictor.num_evicted, self.num_filled, self.tree.num_splits

    def is_current(self, computed: ComputedBlocks, hashes: bytes) -> bool:
        """Whether a look-up would find the same again. O(1)."""
        if computed.stamp != self._stamp:
            return False
        depth = computed.num_matched_tokens // self.block_size
        end = computed.path[-1] if computed.path else self.tree.root
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
            if sequence.points:
                end = min(end, sequence.points[0][0])
            if self._interval:
                end = min(end, (depth // self._interval + 1) * self._interval)
            num_done = self._advance(sequence, hashes[done * HASH_BYTES : (done + end - depth) * HASH_BYTES], edits)
            done += num_done
            if sequence.points and sequence.depth == sequence.points[0][0]:
                self._make_point(sequence, sequence.points.pop(0)[1])
            elif self._interval and sequence.depth % self._interval == 0:
                self._make_point(sequence, PointKind.INTERVAL)
        return edits

    def checkpoint(self, seq_id: int, num_tokens: int, kind: PointKind) -> tuple[BlockCopy, ...]:
        """Keep the state that the sequence has now, after `num_tokens` tokens, a multiple of the block size.

        Returns the copies to make before the next token runs; none if there is no need, or no memory that is worth it.
        """
        assert num_tokens % self.block_size == 0, f"a state after {num_tokens} tokens is at no block's end"
        sequence, depth = self.sequences[seq_id], num_tokens // self.block_size
        if not self._state_managers or depth in sequence.pending or (sequence.tail and sequence.tail[0] == depth):
            return ()
        needs = [0] * len(self.pools.pools)
        for manager in self._state_managers:
            needs[manager.pool_id] += 1
        if self.pools.lacks(needs):
            if kind is PointKind.INTERVAL:
                # Nor is the boundary worth moving: what an attention block could have would go.
                return ()
            if kind is PointKind.TURN_END and sequence.tail is not None:
                # Written anew: who ends in between with the copy under way loses it, but no other point is evicted.
                pages, sequence.tail = sequence.tail[1], None
                return self._copy_states(sequence, depth, kind, pages)
            if not self.make_room(needs, self.retention.worth(sequence, depth, kind)):
                return ()
        pages = {m.group_id: self.pools[m.pool_id].allocate(1)[0] for m in self._state_managers}
        return self._copy_states(sequence, depth, kind, pages)

    def _copy_states(self, sequence: Sequence, depth: int, kind: PointKind, pages: Pages) -> tuple[BlockCopy, ...]:
        sequence.pending[depth] = (kind, pages)
        return tuple(BlockCopy(group, sequence.tables[group][0], page) for group, page in pages.items())

    def confirm_checkpoint(self, seq_id: int, num_tokens: int) -> None:
        """The copies were made. A point is findable from now on; the newest turn end stays the sequence's own."""
        sequence, depth = self.sequences.get(seq_id), num_tokens // self.block_size
        if sequence is None or depth not in sequence.pending:
            return
        kind, pages = sequence.pending.pop(depth)
        if kind is not PointKind.TURN_END:
            self._publish(sequence, depth, pages, kind)
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
                self._publish(sequence, depth, pages, PointKind.TURN_END)
            elif sequence.tail is not None and sequence.tail[0] <= sequence.depth:
                self._publish(sequence, *sequence.tail, PointKind.TURN_END)
                sequence.tail = None
        if sequence.depth and not self._state_managers:
            self._make_point(sequence, PointKind.TURN_END)
        cursor = sequence.cursor
        first_held = min((sequence.first_held[local.group_id] for local, _ in self._local_groups), default=0)
        self._close(sequence)
        self.retention.ended(cursor, first_held)

    def _advance(self, sequence: Sequence, hashes: bytes, edits: list[TableEdit]) -> int:
        """Register blocks after the cursor as far as one segment goes; returns how many."""
        segment, num_blocks = sequence.cursor.children.get(hashes[:HASH_BYTES]), len(hashes) // HASH_BYTES
        if segment is None:
            self._append(sequence, hashes)
            return num_blocks
        num_same = num_common(segment, sequence.depth, hashes, 0)
        self._adopt(sequence, segment, num_same, edits)
        parting = sequence.depth + num_same
        upper = self.retention.cut(segment, parting)
        self._move(sequence, upper, parting)
        if num_same < num_blocks:
            self._part(upper)
        return num_same

    def _append(self, sequence: Sequence, hashes: bytes) -> None:
        """Blocks that the tree did not have."""
        first, last = sequence.depth, sequence.depth + len(hashes) // HASH_BYTES
        cursor = sequence.cursor
        parent_hash = cursor.hash_at(first - 1) if first else None
        rows: list[list[int]] = []
        for manager in self.managers:
            ids = [NULL_BLOCK] * (last - first) if manager.is_state else sequence.tables[manager.group_id][first:last]
            rows.append(ids)
            if not manager.is_state:
                # No window moves on before what it leaves has been registered.
                self.pools[manager.pool_id].cache(ids, manager.group_id)
                self.events.stored(manager.group_id, hashes, parent_hash, first)
        segment = self.tree.append(cursor, hashes, rows)
        if segment is not cursor:
            segment.gap, segment.priority = sequence.gap, sequence.priority
            segment.pinned_until_s = sequence.pinned_until_s
        self._move(sequence, segment, last)

    def _adopt(self, sequence: Sequence, segment: Segment, num_blocks: int, edits: list[TableEdit]) -> None:
        """Blocks whose content the tree has: the sequence takes the tree's and gives its own copies back."""
        for manager in self._token_managers:
            group, pool = manager.group_id, self.pools[manager.pool_id]
            table, known = sequence.tables[group], segment.blocks[group]
            for index in range(sequence.depth, sequence.depth + num_blocks):
                own, offset = table[index], index - segment.start
                if known[offset] == NULL_BLOCK:
                    known[offset] = own
                    pool.cache([own], group)
                    self.num_filled += 1
                    segment.thinned[group] = min(segment.thinned[group], index)
                    self.events.stored(
                        group, segment.hashes_between(index, index + 1), segment.hash_before(index), index
                    )
                else:
                    pool.touch([known[offset]])
                    table[index] = known[offset]
                    pool.free([own])
                    edits.append(TableEdit(sequence.seq_id, group, index, known[offset]))

    def _make_point(self, sequence: Sequence, kind: PointKind) -> None:
        """The sequence's newest registered block ends a resume point; a recurrent model needs a checkpoint for that."""
        if self._state_managers:
            return
        segment = self.retention.cut(sequence.cursor, sequence.depth)
        self._move(sequence, segment, sequence.depth)
        self.retention.designate(segment, kind)

    def _publish(self, sequence: Sequence, depth: int, pages: Pages, kind: PointKind) -> None:
        """Make a state after `depth` registered blocks findable."""
        segment = sequence.cursor
        assert depth <= sequence.depth, "a state ahead of its registered blocks"
        while segment.start >= depth:
            assert segment.parent is not None
            segment = segment.parent
        segment = self.retention.cut(segment, depth)
        for group, page in pages.items():
            pool, states = self.pools[self.managers[group].pool_id], segment.blocks[group]
            if states[-1] == NULL_BLOCK:
                states[-1] = page
                pool.cache([page], group)
                self.events.stored(
                    group, segment.hashes_between(depth - 1, depth), segment.hash_before(depth - 1), depth - 1
                )
            pool.free([page])
        self.num_filled += 1
        self.retention.designate(segment, kind)

    def _move(self, sequence: Sequence, segment: Segment, depth: int) -> None:
        left = sequence.cursor
        segment.num_cursors += 1
        left.num_cursors -= 1
        sequence.cursor, sequence.depth = segment, depth
        segment.last_use = self.retention.clock
        segment.priority = max(segment.priority, sequence.priority)
        segment.pinned_until_s = max(segment.pinned_until_s, sequence.pinned_until_s)
        self.retention.touched(segment)
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
            return ComputedBlocks(num_tokens - 1, None, num_tokens, tuple(path), copies_last=True, stamp=self._stamp)
        limited_by = 0 if depth < (num_tokens - 1) // size else None
        return ComputedBlocks(depth * size, limited_by, depth * size, tuple(path), stamp=self._stamp)


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
            holes = [present[m.group_id].find(b"\x00", m.first_needed(num_tokens - 1)) for m in partial]
            holes += [present[m.group_id].find(b"\x00", 0, m.num_sink_blocks) for m in partial]
            if max(holes, default=-1) < 0:
                whole = num_tokens - 1
                return ComputedBlocks(whole, None, num_tokens, tuple(path), copies_last=True, stamp=self._stamp)
        alone = [limit if m.is_full else m.longest_hit(present[m.group_id], limit) for m in self.managers]
        if (lowest_hit := min(alone)) < limit:
            limit, limited_by = lowest_hit, alone.index(lowest_hit)
        is_settled = False
        while not is_settled:
            is_settled = True
            for manager in partial:
                length = manager.longest_hit(present[manager.group_id], limit)
                if length < limit:
                    limit, limited_by, is_settled = length, manager.group_id, False
        hits = tuple(num_blocks * size for num_blocks in alone)
        return ComputedBlocks(limit * size, limited_by, matched * size, tuple(path), hits, stamp=self._stamp)
