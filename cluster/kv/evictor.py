"""Takes blocks out of the prefix tree and gives them back to the pools: what goes with a resume point, no more."""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.kv.events import EventLog
from cluster.kv.group_managers import GroupManager, locals_by_rule
from cluster.kv.layout import NULL_BLOCK
from cluster.kv.memory import PoolSet
from cluster.kv.prefix_tree import PrefixTree, Segment


@dataclass(slots=True)
class EvictionCounts:
    """Blocks evicted in one group since the start, by reason."""

    num_left_behind: int = 0
    num_ranked: int = 0
    num_orphaned: int = 0


class Evictor:
    """Knows what each group still needs a block for; decides nothing of what goes first."""

    def __init__(
        self, tree: PrefixTree, managers: Sequence[GroupManager], pools: PoolSet, events: EventLog, block_size: int
    ) -> None:
        self._tree = tree
        self._managers = managers
        self._pools = pools
        self._events = events
        self._block_size = block_size
        # Groups of windows and chunks, those of one rule together.
        self._windows = locals_by_rule(managers)
        self.counts = [EvictionCounts() for _ in managers]
        # Grows with every block evicted: a look-up made before may be stale.
        self.num_evicted = 0

    def bytes_of(self, segment: Segment) -> int:
        """All that a segment holds. O(positions)."""
        num_bytes = 0
        for manager in self._managers:
            blocks = segment.blocks[manager.group_id]
            num_bytes += manager.page_bytes * (len(blocks) - blocks.count(NULL_BLOCK))
        return num_bytes

    def has_evictable_tail(self, segment: Segment) -> bool:
        """Whether no sequence holds its last block in any group."""
        for manager in self._managers:
            block_id = segment.blocks[manager.group_id][-1]
            if block_id != NULL_BLOCK and not self._pools[manager.pool_id].is_evictable(block_id):
                return False
        return True

    @property
    def has_windows(self) -> bool:
        """Whether some layers leave blocks behind."""
        return bool(self._windows)

    def thin(self, segment: Segment) -> None:
        """Drop the window blocks of a segment that no point needs."""
        for same in self._windows:
            starts = [max(segment.thinned[m.group_id], m.num_sink_blocks, segment.start) for m in same]
            end = self._needed_in_subtree(segment, same[0], min(starts))
            for manager, start in zip(same, starts, strict=True):
                if end > start:
                    self._thin_group(segment, manager, start, end)

    def _thin_group(self, segment: Segment, manager: GroupManager, start: int, end: int) -> None:
        num_dropped = self.clear(segment, manager, start, end, spares_held=True)
        self.counts[manager.group_id].num_left_behind += num_dropped
        blocks = segment.blocks[manager.group_id]
        # Blocks that a sequence still holds are left, and looked at again.
        left = (i for i in range(start, end) if blocks[i - segment.start] != NULL_BLOCK)
        segment.thinned[manager.group_id] = next(left, end)

    def _needed_in_subtree(self, segment: Segment, manager: GroupManager, start: int) -> int:
        """The first position that a point at or below the segment's end needs, or `start` if that is not before it.

        Looks as deep as a window. What a point below needs never begins before what one above it needs.
        """
        first, stack = segment.end, [segment]
        while stack and first > start:
            node = stack.pop()
            needed = manager.first_needed(node.end * self._block_size)
            if needed >= first:
                continue
            if node.is_point or not (node.children or node.num_cursors):
                first = needed
            else:
                stack.extend(node.children.values())
        return max(first, start)

    def thin_upwards(self, segment: Segment) -> None:
        """Drop what a point that is gone needed, in its segment and in those above that its window reached."""
        if self._windows:
            self.thin_from(segment, self._lowest_needed(segment.end))

    def _lowest_needed(self, end: int) -> int:
        return min(same[0].first_needed(end * self._block_size) for same in self._windows)

    def thin_from(self, segment: Segment | None, lowest: int) -> None:
        """Thin a segment and those above it, down to a position; nothing if it is gone."""
        node = segment
        while node is not None and node.parent is not None and node.end > lowest:
            self.thin(node)
            node = node.parent

    def first_unreferenced(self, segment: Segment, start: int) -> int:
        """One past the last position from `start` on that a sequence holds in any group. O(positions)."""
        first = start
        for manager in self._managers:
            blocks = segment.blocks[manager.group_id]
            pool, offset = self._pools[manager.pool_id], segment.num_blocks
            while offset > first - segment.start and not pool.ref_count(blocks[offset - 1]):
                offset -= 1
            first = segment.start + offset
        return first

    def trim(self, segment: Segment, end: int, *, is_orphan: bool) -> None:
        """Drop a leaf's positions from `end` on, and what of its window lies above it."""
        old_end = segment.end
        for manager in self._managers:
            num_dropped = self.clear(segment, manager, end, segment.end)
            counts = self.counts[manager.group_id]
            if is_orphan:
                counts.num_orphaned += num_dropped
            else:
                counts.num_ranked += num_dropped
        parent = segment.parent
        is_gone = end == segment.start
        self._tree.trim(segment, end)
        if is_gone and self._windows:
            self.thin_from(parent, self._lowest_needed(old_end))

    def clear(self, segment: Segment, manager: GroupManager, start: int, end: int, *, spares_held: bool = False) -> int:
        """Forget one group's blocks at positions `[start, end)`, or those that no sequence holds; returns how many.

        O(positions).
        """
        blocks = segment.blocks[manager.group_id]
        first, last = start - segment.start, end - segment.start
        pool = self._pools[manager.pool_id]
        if manager.is_full:
            ids: list[int] = blocks[first:last].tolist()
            pool.forget(ids)
            self.num_evicted += len(ids)
            self._events.removed(manager.group_id, segment.hashes_between(start, end))
            return len(ids)
        offsets = [i for i in range(first, last) if blocks[i] != NULL_BLOCK]
        if spares_held:
            offsets = [i for i in offsets if not pool.ref_count(blocks[i])]
        if offsets:
            self.num_evicted += len(offsets)
            pool.forget([blocks[i] for i in offsets])
            hashes = b"".join(segment.hash_at(segment.start + i) for i in offsets)
            self._events.removed(manager.group_id, hashes)
            for i in offsets:
                blocks[i] = NULL_BLOCK
        return len(offsets)
