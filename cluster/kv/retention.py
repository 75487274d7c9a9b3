"""What is forgotten first when memory is short.

The unit is the resume point: the end of a segment with all that lets a sequence go on there. In this order:

1. window blocks that no resume point needs (windows that were left behind; kept only while memory is cheap);
2. resume points by rank of the policy; with a point goes, at once, what nothing else can use: its window, its state,
   and the blocks down to the next point or branch. Where every layer attends fully each block's end is as good a point,
   so only as many blocks as needed go, off the tail;
3. pinned points, so that a pin can make nobody's admission fail.
"""

from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf

from cluster.kv.events import EventLog
from cluster.kv.group_managers import GroupManager
from cluster.kv.hashing import HASH_BYTES
from cluster.kv.layout import NULL_BLOCK
from cluster.kv.memory import PoolSet
from cluster.kv.point_costs import PointCosts, fallback_of
from cluster.kv.points import PointKind, StopModel
from cluster.kv.policies import RetentionPolicy
from cluster.kv.prefix_tree import PrefixTree, Segment, held
from cluster.kv.sequence import Sequence

_MAX_GHOSTS = 4096
# Resume points are ranked anew after so many requests, as a share of the segments: the cost of a ranking is spread.
_RANKED_PER_REQUEST = 64
_CHEAP, _POINT, _PINNED = 0, 1, 2


@dataclass(slots=True)
class EvictionCounts:
    """Blocks evicted in one group since the start, by reason."""

    num_left_behind: int = 0
    num_ranked: int = 0
    num_orphaned: int = 0


class Retention:
    """Owns the order of eviction; changes the tree and the pools only by evicting."""

    def __init__(
        self,
        tree: PrefixTree,
        managers: Seq[GroupManager],
        pools: PoolSet,
        events: EventLog,
        policy: RetentionPolicy,
        block_size: int,
    ) -> None:
        self._tree = tree
        self._managers = managers
        self._pools = pools
        self._events = events
        self._policy = policy
        self._block_size = block_size
        self._windows = [m for m in managers if not m.is_full and not m.is_state]
        self._costs = PointCosts(managers, block_size)
        self._stops = StopModel()
        self._is_full_only = all(m.is_full for m in managers)
        self.counts = [EvictionCounts() for _ in managers]
        # Grows with every block evicted: a look-up made before may be stale.
        self.num_evicted = 0
        # Requests started: what ages are counted in.
        self.clock = 0
        self._ghosts: dict[bytes, tuple[int, int]] = {}
        self._queue: list[tuple[int, float, int, Segment]] = []
        self._ranked_at = -1
        self._next_number = 0
        self._now_s = 0.0
        # Window blocks since the last ranking.
        self._num_left_behind = 0

    def used(self, path: Seq[Segment], depth: int, hashes: bytes, now_s: float) -> int:
        """A request started on the first `depth` positions of a path and wants all of `hashes`.

        Returns the gap since a longer prefix of it was last here, as the policy's clock counts, or -1.
        """
        self.clock += 1
        self._now_s = max(self._now_s, now_s)
        clock = self.clock
        num_wanted = len(hashes) // HASH_BYTES
        for segment in path:
            age = clock - segment.last_use
            self._policy.observe(segment.gap, age)
            segment.gap, segment.last_use = age, clock
        for segment in path[:-1]:
            self._stops.observe(segment, is_stop=False)
        if path and (end := path[-1]).end < num_wanted:
            if depth < end.end:
                self._stops.observe(end, is_stop=False)
            elif end.children:
                # It goes on, but not as anything known does.
                self._stops.observe(end, is_stop=True)
        return self._observe_ghosts(hashes, depth)

    def release(self, is_enough: Callable[[], bool], lacking: Callable[[], int], worth: float = inf) -> bool:
        """Evict until `is_enough()`; False if everything evictable worth less is gone before.

        `lacking()`: blocks still needed.

        Amortised O(log segments) a point.
        """
        ranked_at = -1
        while not is_enough():
            if not self._queue or (ranked_at < 0 and self._is_stale()):
                if ranked_at == self.num_evicted:
                    return False
                self._rank()
                ranked_at = self.num_evicted
                continue
            if self._num_left_behind and self._queue[-1][0] != _CHEAP:
                # A point would go although windows have been left behind since the ranking.
                self._rank()
                continue
            kind, rank, _, segment = self._queue[-1]
            if kind != _CHEAP and rank >= worth:
                return False
            self._queue.pop()
            if segment.parent is not None:
                self._evict(segment, kind, lacking())
        return True

    def designate(self, segment: Segment, kind: PointKind) -> None:
        """The segment's end is a resume point from now on."""
        segment.kind = max(segment.kind, kind) if segment.is_point else kind
        segment.is_point = True

    def worth(self, sequence: Sequence, depth: int, kind: PointKind) -> float:
        """Rank of a checkpoint that a running sequence would make after `depth` blocks. O(segments above)."""
        fallback = max((at for at in sequence.pending if at < depth), default=0)
        fallback = max(fallback, sequence.cursor.end if sequence.cursor.is_point else fallback_of(sequence.cursor))
        lost = float(depth - fallback) * self._block_size
        freed = sum(m.page_bytes for m in self._managers if m.is_state)
        if kind is PointKind.TURN_END:
            freed += sum(m.page_bytes for m in self._managers if m.is_full) * (depth - fallback)
        else:
            lost *= self._stops.first_share(kind)
        return self._policy.rank(sequence.gap, sequence.priority, 0, lost, freed)

    def left_behind(self, num_blocks: int) -> None:
        """So many window blocks of a running sequence are cached and not needed by it any more."""
        self._num_left_behind += num_blocks

    def settle(self, segment: Segment) -> None:
        """A sequence that ended there is gone: the point can be evicted now, or goes at once if it is none."""
        if segment.parent is not None:
            self._prune(segment)

    def reset(self) -> None:
        """Everything cached is gone; what was learned of reuse stays."""
        self._queue.clear()
        self._ghosts.clear()

    def _is_stale(self) -> bool:
        return self.clock - self._ranked_at > self._tree.num_segments // _RANKED_PER_REQUEST

    def _observe_ghosts(self, hashes: bytes, depth: int) -> int:
        gap = -1
        if self._ghosts:
            for at in range(depth * HASH_BYTES, len(hashes), HASH_BYTES):
                ghost = self._ghosts.pop(hashes[at : at + HASH_BYTES], None)
                if ghost is not None:
                    last_use, last_gap = ghost
                    gap = self.clock - last_use
                    self._policy.observe(last_gap, gap)
        return gap

    def _rank(self) -> None:
        """Rank every point. O(segments log segments)."""
        self._ranked_at = clock = self.clock
        self._num_left_behind = 0
        segments = list(self._tree.walk())
        waiting = [(s.gap, clock - s.last_use) for s in segments]
        waiting += [(gap, clock - last_use) for last_use, gap in self._ghosts.values()]
        self._policy.refresh(waiting)
        self._queue.clear()
        reach: dict[Segment, list[int]] = {}
        for segment in reversed(segments):
            if self._windows:
                reach[segment] = needed = self._needed_from(segment, reach)
                if self._has_left_behind(segment, needed):
                    self._queue.append((_CHEAP, clock - segment.last_use, self._number(), segment))
            self._consider(segment)
        self._queue.sort(key=_eviction_order, reverse=True)

    def _consider(self, segment: Segment) -> None:
        """Queue the segment's point if evicting it would free anything."""
        # A running sequence will append below: what it came from is an inner point already.
        is_leaf = not segment.children and not segment.num_cursors
        if not is_leaf and (self._is_full_only or not segment.is_point):
            return
        if is_leaf and not self._has_evictable_tail(segment):
            return
        fallback = fallback_of(segment)
        freed = self._costs.leaf_bytes(segment, fallback) if is_leaf else self._costs.inner_bytes(segment, fallback)
        if freed == 0:
            return
        lost = float(segment.end - fallback) * self._block_size
        if self._is_full_only:
            lost = segment.num_blocks * self._block_size
        if not is_leaf:
            lost *= self._stops.share(segment)
        rank = self._policy.rank(segment.gap, segment.priority, self.clock - segment.last_use, lost, freed)
        kind = _PINNED if segment.pinned_until_s > self._now_s else _POINT
        self._queue.append((kind, rank, self._number(), segment))

    def _number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _has_evictable_tail(self, segment: Segment) -> bool:
        for manager in self._managers:
            block_id = segment.blocks[manager.group_id][-1]
            if block_id != NULL_BLOCK and not self._pools[manager.pool_id].is_evictable(block_id):
                return False
        return True

    def _needed_from(self, segment: Segment, reach: dict[Segment, list[int]]) -> list[int]:
        """For each window group the first position that points at or below the segment's end need."""
        needed: list[int] = []
        for at, manager in enumerate(self._windows):
            is_needed = segment.is_point or not (segment.children or segment.num_cursors)
            first = manager.first_needed(segment.end * self._block_size) if is_needed else segment.end
            for child in segment.children.values():
                first = min(first, reach[child][at])
            needed.append(first)
        return needed

    def _has_left_behind(self, segment: Segment, needed: Seq[int]) -> bool:
        return any(
            min(first, segment.end) > max(segment.thinned[m.group_id], m.num_sink_blocks)
            for first, m in zip(needed, self._windows, strict=True)
        )

    def _evict(self, segment: Segment, kind: int, num_blocks: int) -> None:
        if kind == _CHEAP:
            self._thin(segment)
        elif segment.children or segment.num_cursors:
            self._drop_inner(segment)
        else:
            self._drop_leaf(segment, kind, num_blocks)

    def _thin(self, segment: Segment) -> None:
        """Drop the window blocks of a segment that no point needs."""
        for at, manager in enumerate(self._windows):
            end = min(self._needed_in_subtree(segment, at), segment.end)
            start = max(segment.thinned[manager.group_id], manager.num_sink_blocks, segment.start)
            if end > start:
                num_dropped = self._clear(segment, manager, start, end)
                self.counts[manager.group_id].num_left_behind += num_dropped
                blocks = segment.blocks[manager.group_id]
                # Blocks that a sequence still holds are left, and looked at again.
                left = (i for i in range(start, end) if blocks[i - segment.start] != NULL_BLOCK)
                segment.thinned[manager.group_id] = next(left, end)

    def _needed_in_subtree(self, segment: Segment, at: int) -> int:
        """The first position that a point at or below the segment's end needs. Looks as deep as a window."""
        manager = self._windows[at]
        first, stack = segment.end, [segment]
        while stack:
            node = stack.pop()
            needed = manager.first_needed(node.end * self._block_size)
            if needed >= segment.end:
                continue
            if node.is_point or not (node.children or node.num_cursors):
                first = min(first, needed)
            stack.extend(node.children.values())
        return first

    def _drop_inner(self, segment: Segment) -> None:
        """An inner point goes: its state now, its window as far as nothing else needs it."""
        if self._is_full_only or not segment.is_point:
            return
        states = [m for m in self._managers if m.is_state]
        if any(self._pools[m.pool_id].ref_count(segment.blocks[m.group_id][-1]) for m in states):
            return  # A sequence is just starting from it.
        segment.is_point = False
        for manager in states:
            if segment.blocks[manager.group_id][-1] != NULL_BLOCK:
                self.counts[manager.group_id].num_ranked += self._clear(segment, manager, segment.end - 1, segment.end)
        self._thin_upwards(segment)

    def _thin_upwards(self, segment: Segment) -> None:
        """Drop what a point that is gone needed, in its segment and in those above that its window reached."""
        if not self._windows:
            return
        lowest = min(m.first_needed(segment.end * self._block_size) for m in self._windows)
        self._thin_from(segment, lowest)

    def _thin_from(self, segment: Segment | None, lowest: int) -> None:
        """Thin a segment and those above it, down to a position."""
        node = segment
        while node is not None and node.parent is not None and node.end > lowest:
            self._thin(node)
            node = node.parent

    def _drop_leaf(self, segment: Segment, kind: int, num_blocks: int) -> None:
        end = segment.start
        if self._is_full_only:
            end = max(end, segment.end - max(1, num_blocks))
        end = self._first_unreferenced(segment, end)
        rank, parent = self.clock - segment.last_use, segment.parent
        old_end = segment.end
        if segment.is_point and end < old_end:
            self._remember(segment)
        self._trim(segment, end, is_orphan=False)
        if segment.parent is not None:
            # Its running sequences, or its own worth, keep the rest.
            segment.is_point = segment.is_point and segment.end == old_end
            if self._is_full_only and self._has_evictable_tail(segment):
                self._requeue(segment, kind, rank)
        elif parent is not None:
            self._prune(parent)

    def _requeue(self, segment: Segment, kind: int, age: int) -> None:
        """Queue a leaf, or what has become one, at its rank."""
        lost = float(segment.num_blocks * self._block_size)
        if self._is_full_only:
            freed = self._managers[0].page_bytes * segment.num_blocks
        else:
            fallback = fallback_of(segment)
            lost, freed = float(segment.end - fallback) * self._block_size, self._costs.leaf_bytes(segment, fallback)
        if freed:
            rank = self._policy.rank(segment.gap, segment.priority, age, lost, freed)
            insort(self._queue, (kind, rank, self._number(), segment), key=lambda entry: _descending(entry))

    def _prune(self, segment: Segment) -> None:
        """After a leaf is gone: what above it has become a leaf and can't be resumed at its end goes too."""
        while segment.parent is not None and not segment.children and not segment.num_cursors:
            parent = segment.parent
            if segment.is_point or self._is_full_only:
                if self._has_evictable_tail(segment):
                    kind = _PINNED if segment.pinned_until_s > self._now_s else _POINT
                    self._requeue(segment, kind, self.clock - segment.last_use)
                return
            end = self._first_unreferenced(segment, segment.start)
            is_gone = end == segment.start
            self._trim(segment, end, is_orphan=True)
            if not is_gone:
                return
            segment = parent

    def _first_unreferenced(self, segment: Segment, start: int) -> int:
        """One past the last position from `start` on that a sequence holds in any group. O(positions)."""
        first = start
        for manager in self._managers:
            blocks = segment.blocks[manager.group_id]
            pool, offset = self._pools[manager.pool_id], segment.num_blocks
            while offset > first - segment.start and not pool.ref_count(blocks[offset - 1]):
                offset -= 1
            first = segment.start + offset
        return first

    def _trim(self, segment: Segment, end: int, *, is_orphan: bool) -> None:
        """Drop a leaf's positions from `end` on, and what of its window lies above it."""
        lowest = [m.first_needed(segment.end * self._block_size) for m in self._windows]
        for manager in self._managers:
            num_dropped = self._clear(segment, manager, end, segment.end)
            counts = self.counts[manager.group_id]
            if is_orphan:
                counts.num_orphaned += num_dropped
            else:
                counts.num_ranked += num_dropped
        parent = segment.parent
        is_gone = end == segment.start
        self._tree.trim(segment, end)
        if is_gone and lowest:
            self._thin_from(parent, min(lowest))

    def _clear(self, segment: Segment, manager: GroupManager, start: int, end: int) -> int:
        """Forget one group's unreferenced blocks at positions `[start, end)`; returns how many. O(positions)."""
        blocks = segment.blocks[manager.group_id]
        first, last = start - segment.start, end - segment.start
        pool = self._pools[manager.pool_id]
        if manager.is_full:
            ids: list[int] = blocks[first:last].tolist()
            pool.forget(ids)
            self.num_evicted += len(ids)
            if ids:
                self._events.removed(manager.group_id, segment.hashes_between(start, end))
            return len(ids)
        offsets = [i for i in range(first, last) if blocks[i] != NULL_BLOCK and pool.is_evictable(blocks[i])]
        if offsets:
            self.num_evicted += len(offsets)
            pool.forget(held([blocks[i] for i in offsets]))
            hashes = b"".join(segment.hash_at(segment.start + i) for i in offsets)
            self._events.removed(manager.group_id, hashes)
            for i in offsets:
                blocks[i] = NULL_BLOCK
        return len(offsets)

    def _remember(self, segment: Segment) -> None:
        """A point that goes is remembered by its hash, so that its being wanted again is seen."""
        while len(self._ghosts) >= _MAX_GHOSTS:
            del self._ghosts[next(iter(self._ghosts))]
        self._ghosts[bytes(segment.hash_at(segment.end - 1))] = (segment.last_use, segment.gap)


def _eviction_order(entry: tuple[int, float, int, Segment]) -> tuple[int, float, int]:
    """What goes first sorts first; left-behind windows by age, the oldest first."""
    kind, rank, number, _ = entry
    return (kind, -rank if kind == _CHEAP else rank, number)


def _descending(entry: tuple[int, float, int, Segment]) -> tuple[int, float, int]:
    kind, rank, number = _eviction_order(entry)
    return (-kind, -rank, -number)
