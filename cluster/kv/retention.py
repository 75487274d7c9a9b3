"""What is forgotten first when memory is short.

The unit is the resume point: the end of a segment with all that lets a sequence go on there. In this order:

1. window blocks that no resume point needs (windows that were left behind; kept only while memory is cheap);
2. resume points by rank of the policy; with a point goes, at once, what nothing else can use: its window, its state,
   and the blocks down to the next point or branch. Where every layer attends fully each block's end is as good a point,
   so only as many blocks as needed go, off the tail;
3. pinned points, so that a pin can make nobody's admission fail. What is pinned beyond the budget counts as 2.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from cluster.kv.events import EventLog
from cluster.kv.evictor import Evictor
from cluster.kv.group_managers import GroupManager
from cluster.kv.hashing import HASH_BYTES
from cluster.kv.memory import PoolSet
from cluster.kv.point_costs import PointCosts, fallback_of
from cluster.kv.points import PointKind, StopModel
from cluster.kv.policies import RetentionPolicy
from cluster.kv.prefix_tree import NO_GAP, PrefixTree, Segment
from cluster.kv.sequence import Sequence

_MAX_GHOSTS = 4096
# Resume points are ranked anew after so many requests, as a share of the segments: the cost of a ranking is spread.
_RANKED_PER_REQUEST = 256
_CHEAP, _POINT, _PINNED = 0, 1, 2
# Of the memory, what pins may hold at most: the rest stays open to everyone.
_PIN_SHARE = 0.5

# Kind, rank and a number of its own, all negated, and whose point: the greatest goes first, off a list's end. What is
# left behind ranks by age, the oldest first.
Entry = tuple[int, float, int, Segment]


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
        self._policy = policy
        self._block_size = block_size
        self._costs = PointCosts(managers, block_size)
        self._stops = StopModel()
        self._is_full_only = all(m.is_full for m in managers)
        self._has_states = any(m.is_state for m in managers)
        self.evictor = Evictor(tree, managers, pools, events, block_size)
        # Requests started: what ages are counted in.
        self.clock = 0
        self._ghosts: dict[bytes, tuple[int, int]] = {}
        self._queue: list[Entry] = []
        self._ranked_at = -1
        self._next_number = 0
        self._now_s = 0.0
        self._pin_budget_bytes = _PIN_SHARE * pools.usable_bytes
        self._pins_over_budget: set[Segment] = set()
        # Of the pins that count, at the last ranking.
        self.pinned_bytes = 0
        # Where windows were left behind since the last ranking, by the segment that ended there then.
        self._left_behind: dict[Segment, int] = {}

    def used(self, path: Seq[Segment], depth: int, hashes: bytes, now_s: float) -> int:
        """A request started on the first `depth` positions of a path and wants all of `hashes`.

        Returns how long whoever goes on there has waited, as the policy's clock counts, or -1 if nobody was there.
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
        gap = self._observe_ghosts(hashes, depth)
        if gap != NO_GAP:
            self._stops.observe_return(is_cut=True)
        if path and depth == (end := path[-1]).end < num_wanted:
            if end.children:
                # It goes on, but not as anything known does.
                self._stops.observe(end, is_stop=True)
            elif gap == NO_GAP:
                # The newest turn of somebody who comes again; what follows will wait as this did.
                self._stops.observe_return(is_cut=False)
                gap = end.gap
        return gap

    def release(self, is_enough: Callable[[], bool], lacking: Callable[[], int], worth: float | None = None) -> bool:
        """Evict until `is_enough()`; False if all that may go is gone before. `lacking()`: blocks still needed.

        With a `worth`, only what ranks below it may go, and nothing that is pinned.

        Amortised O(log segments) a point.
        """
        ranked_at = -1
        while not is_enough():
            if self._left_behind and (not self._queue or -self._queue[-1][0] != _CHEAP):
                segment, start = next(iter(self._left_behind.items()))
                del self._left_behind[segment]
                self.evictor.thin_from(segment, start)
                continue
            if not self._queue or (ranked_at < 0 and self._is_stale()):
                if ranked_at == self.evictor.num_evicted:
                    # Nothing went since the last ranking: the rest is held by sequences.
                    return False
                self._rank()
                ranked_at = self.evictor.num_evicted
                continue
            entry = self._queue[-1]
            if worth is not None and entry[:2] <= (-_POINT, -worth):
                return False
            self._queue.pop()
            segment = entry[3]
            if segment.parent is not None and not self._rises(entry):
                self._evict(segment, -entry[0], lacking())
        return True

    def designate(self, segment: Segment, kind: PointKind) -> None:
        """The segment's end is a resume point from now on, unless it would keep nothing and so never be evicted."""
        if self._costs.is_free(segment):
            return
        segment.kind = max(segment.kind, kind) if segment.is_point else kind
        segment.is_point = True
        if self._queue and not self._is_full_only:
            self._enqueue(segment)

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

    def left_behind(self, sequence: Sequence, start: int) -> None:
        """The sequence no longer needs window blocks that lie in its segment and those above, from `start` on.

        They stay while memory is cheap, for prompts that part there. Where a state is needed too and none is being
        kept, nothing can go on there any more.
        """
        segment = sequence.cursor
        if self._has_states and not sequence.pending:
            self.evictor.thin_from(segment, start)
        else:
            self._left_behind[segment] = min(start, self._left_behind.get(segment, start))

    def settle(self, segment: Segment) -> None:
        """A sequence that ended there is gone: the point can be evicted now, or goes at once if it is none."""
        if segment.parent is not None:
            self._prune(segment)

    def reset(self) -> None:
        """Everything cached is gone; what was learned of reuse stays."""
        self._queue.clear()
        self._left_behind.clear()
        self._ghosts.clear()
        self._pins_over_budget.clear()
        self.pinned_bytes = 0

    def _is_stale(self) -> bool:
        return self.clock - self._ranked_at > self._tree.num_segments // _RANKED_PER_REQUEST

    def _observe_ghosts(self, hashes: bytes, depth: int) -> int:
        gap = NO_GAP
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
        self._left_behind.clear()
        segments = list(self._tree.walk())
        waiting = [(s.gap, clock - s.last_use) for s in segments]
        waiting += [(gap, clock - last_use) for last_use, gap in self._ghosts.values()]
        self._policy.refresh(waiting)
        self._count_pins(segments)
        self._queue.clear()
        reach: dict[Segment, list[int]] = {}
        for segment in reversed(segments):
            if self.evictor.has_windows:
                reach[segment] = needed = self.evictor.needed_from(segment, reach)
                if self.evictor.has_left_behind(segment, needed):
                    self._queue.append((-_CHEAP, clock - segment.last_use, self._number(), segment))
            entry = self._entry_of(segment)
            if entry is not None:
                self._queue.append(entry)
        self._queue.sort()

    def _entry_of(self, segment: Segment) -> Entry | None:
        """Where in the order the segment's point goes; None if evicting it would free nothing."""
        # A running sequence will append below: what it came from is an inner point already.
        is_leaf = not segment.children and not segment.num_cursors
        if is_leaf:
            if not self.evictor.has_evictable_tail(segment):
                return None
        elif self._is_full_only or not segment.is_point:
            return None
        if self._is_full_only:
            lost = float(segment.num_blocks * self._block_size)
            freed = self._managers[0].page_bytes * segment.num_blocks
        else:
            fallback = fallback_of(segment)
            lost = float(segment.end - fallback) * self._block_size
            freed = self._costs.leaf_bytes(segment, fallback) if is_leaf else self._costs.inner_bytes(segment, fallback)
        if freed == 0:
            return None
        if not is_leaf:
            lost *= self._stops.share(segment)
        rank = self._policy.rank(segment.gap, segment.priority, self.clock - segment.last_use, lost, freed)
        return -self._kind_of(segment), -rank, self._number(), segment

    def _enqueue(self, segment: Segment) -> None:
        """Queue a point that there was not at the last ranking, or what has become a leaf."""
        entry = self._entry_of(segment)
        if entry is not None:
            insort(self._queue, entry)

    def _rises(self, old: Entry) -> bool:
        """Queue a segment again whose rank has risen since: what hung on it is gone, or it has been used."""
        kind, rank, _, segment = old
        if -kind == _CHEAP:
            return False
        entry = self._entry_of(segment)
        if entry is None:
            return True
        if entry[:2] >= (kind, rank):
            return False
        insort(self._queue, entry)
        return True

    def _kind_of(self, segment: Segment) -> int:
        is_pinned = segment.pinned_until_s > self._now_s and segment not in self._pins_over_budget
        return _PINNED if is_pinned else _POINT

    def _count_pins(self, segments: Iterable[Segment]) -> None:
        """Pins hold as much as the budget allows: those that end last, then those used last."""
        pinned = [s for s in segments if s.pinned_until_s > self._now_s]
        pinned.sort(key=lambda s: (s.pinned_until_s, s.last_use), reverse=True)
        self._pins_over_budget.clear()
        left = self._pin_budget_bytes
        self.pinned_bytes = 0
        for segment in pinned:
            num_bytes = self.evictor.bytes_of(segment)
            if num_bytes > left:
                self._pins_over_budget.add(segment)
            else:
                left -= num_bytes
                self.pinned_bytes += num_bytes

    def _number(self) -> int:
        self._next_number -= 1
        return self._next_number

    def _evict(self, segment: Segment, kind: int, num_blocks: int) -> None:
        if kind == _CHEAP:
            self.evictor.thin(segment)
        elif segment.children or segment.num_cursors:
            self._drop_inner(segment)
        else:
            self._drop_leaf(segment, num_blocks)

    def _drop_inner(self, segment: Segment) -> None:
        """An inner point goes: its state now, its window as far as nothing else needs it."""
        states = [m for m in self._managers if m.is_state]
        if any(self._pools[m.pool_id].ref_count(segment.blocks[m.group_id][-1]) for m in states):
            return  # A sequence is just starting from it.
        segment.is_point = False
        for manager in states:
            num_dropped = self.evictor.clear(segment, manager, segment.end - 1, segment.end)
            self.evictor.counts[manager.group_id].num_ranked += num_dropped
        self.evictor.thin_upwards(segment)

    def _drop_leaf(self, segment: Segment, num_blocks: int) -> None:
        end = segment.start
        if self._is_full_only:
            end = max(end, segment.end - max(1, num_blocks))
        end = self.evictor.first_unreferenced(segment, end)
        parent = segment.parent
        old_end = segment.end
        if segment.is_point and end < old_end:
            self._remember(segment)
        self.evictor.trim(segment, end, is_orphan=False)
        if segment.parent is not None:
            # Its running sequences, or its own worth, keep the rest.
            segment.is_point = segment.is_point and segment.end == old_end
            self._enqueue(segment)
        else:
            assert parent is not None
            self._prune(parent)

    def _prune(self, segment: Segment) -> None:
        """After a leaf is gone: what above it has become a leaf and can't be resumed at its end goes too."""
        while segment.parent is not None and not segment.children and not segment.num_cursors:
            parent = segment.parent
            if segment.is_point or self._is_full_only:
                self._enqueue(segment)
                return
            # Whoever is still to copy its last block knows that by its id.
            self.evictor.trim(segment, segment.start, is_orphan=True)
            segment = parent

    def _remember(self, segment: Segment) -> None:
        """A point that goes is remembered by its hash, so that its being wanted again is seen."""
        while len(self._ghosts) >= _MAX_GHOSTS:
            del self._ghosts[next(iter(self._ghosts))]
        self._ghosts[bytes(segment.hash_at(segment.end - 1))] = (segment.last_use, segment.gap)
