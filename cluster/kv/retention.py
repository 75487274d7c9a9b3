"""What is forgotten first when memory is short.

The unit is the resume point: the end of a segment with all that lets a sequence go on there. In this order:

1. window blocks that no resume point needs (windows that were left behind; kept only while memory is cheap);
2. resume points by rank of the policy; with a point goes, at once, what nothing else can use: its window, its state,
   and the blocks down to the next point or branch. Where every layer attends fully each block's end is as good a point,
   so only as many blocks as needed go, off the tail;
3. pinned points, so that a pin can make nobody's admission fail. What is pinned beyond the budget counts as 2.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq

from cluster.kv.ages import NO_GAP, NUM_BINS, PER_OCTAVE, Ages, Prefix, bin_of
from cluster.kv.events import EventLog
from cluster.kv.evictor import Evictor
from cluster.kv.group_managers import GroupManager
from cluster.kv.hashing import HASH_BYTES
from cluster.kv.memory import PoolSet
from cluster.kv.point_costs import PointCosts, fallback_of
from cluster.kv.points import PointKind, StopModel
from cluster.kv.policies import RetentionPolicy
from cluster.kv.prefix_tree import PrefixTree, Segment
from cluster.kv.ranking import Ranking
from cluster.kv.sequence import Sequence

_MAX_GHOSTS = 4096
# Of the memory, what pins may hold at most: the rest stays open to everyone.
_PIN_SHARE = 0.5


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
        self._ages = Ages()
        self._ghosts: dict[bytes, Prefix] = {}
        self._ranking = Ranking()
        # Points that could not go because a sequence held something of them, and whether one has ended since.
        self._held: dict[Segment, None] = {}
        self._has_ended = False
        self._now_s = 0.0
        self._pin_budget_bytes = _PIN_SHARE * pools.usable_bytes
        self._pinned: dict[Segment, None] = {}
        self._pins_over_budget: set[Segment] = set()
        self._pins_counted_at = -1
        # Of the pins that count, at the last time that memory was short.
        self.pinned_bytes = 0
        # Where windows were left behind, by the segment that ended there then; the oldest first.
        self._left_behind: dict[Segment, int] = {}

    @property
    def clock(self) -> int:
        """Requests started: what ages are counted in."""
        return self._ages.clock

    def used(self, path: Seq[Segment], depth: int, hashes: bytes, now_s: float) -> int:
        """A request started on the first `depth` positions of a path and wants all of `hashes`.

        Returns how long whoever goes on there has waited, as the policy's clock counts, or -1 if nobody was there.
        """
        self._grow_older()
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
        for segment in path:
            self._ages.track(segment)
            if segment.entry is not None:
                self._put(segment)
        return gap

    def release(self, is_enough: Callable[[], bool], lacking: Callable[[], int], worth: float | None = None) -> bool:
        """Evict until `is_enough()`; False if all that may go is gone before. `lacking()`: blocks still needed.

        With a `worth`, only what ranks below it may go, and nothing that is pinned.

        Amortised O(log points) a point.
        """
        self._count_pins()
        if self._has_ended:
            self._try_held_again()
        has_retried = False
        while not is_enough():
            if self._left_behind:
                segment, start = next(iter(self._left_behind.items()))
                del self._left_behind[segment]
                self.evictor.thin_from(segment, start)
                continue
            lowest = self._ranking.lowest(self._policy.factor)
            if lowest is None:
                if has_retried or not self._held:
                    return False
                self._try_held_again()
                has_retried = True
                continue
            rank, segment = lowest
            if worth is not None and (rank >= worth or self._is_pinned(segment)):
                return False
            if not self._rises(segment):
                self._evict(segment, lacking())
        return True

    def designate(self, segment: Segment, kind: PointKind) -> None:
        """The segment's end is a resume point from now on, unless it would keep nothing and so never be evicted."""
        if self._costs.is_free(segment):
            return
        is_new = not segment.is_point
        segment.kind = kind if is_new else max(segment.kind, kind)
        segment.is_point = True
        if not self._is_full_only:
            self._put(segment)
            if is_new:
                # Whoever lies below would fall back to here.
                for child in segment.children.values():
                    self._put_below(child)

    def cut(self, segment: Segment, at: int) -> Segment:
        """See `PrefixTree.cut`."""
        upper = self._tree.cut(segment, at)
        if upper is not segment:
            self.touched(upper)
        return upper

    def touched(self, segment: Segment) -> None:
        """A segment is new, or its last use, gap or pin have changed. O(log points)."""
        self._ages.track(segment)
        if segment.pinned_until_s > self._now_s:
            self._pinned[segment] = None
        self._ranking.move(segment)

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
        value = self._policy.value(self.clock, sequence.priority, lost, freed)
        return self._policy.factor(bin_of(sequence.gap, 0)) * value

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
        """A sequence that ended there has gone on: what it came from can go now, and must if it is no point."""
        if segment.parent is not None:
            self._prune(segment)

    def ended(self, segment: Segment, first_held: int) -> None:
        """A sequence that ended there is gone, and held window blocks from `first_held` on."""
        self._has_ended = True
        if segment.parent is not None and self.evictor.has_windows:
            self._left_behind[segment] = min(first_held, self._left_behind.get(segment, first_held))
        self.settle(segment)

    def reset(self) -> None:
        """Everything cached is gone; what was learned of reuse stays."""
        self._ages.reset()
        self._ranking.reset()
        self._held.clear()
        self._left_behind.clear()
        self._ghosts.clear()
        self._pinned.clear()
        self._pins_over_budget.clear()
        self.pinned_bytes = 0

    def check(self) -> None:
        """Assert that what waits is counted, and that nothing which could go is missing. O(segments)."""
        counts = [0] * NUM_BINS
        for prefix in (*self._tree.walk(), *self._ghosts.values()):
            assert prefix.bin == bin_of(prefix.gap, self.clock - prefix.last_use), "a prefix is in another's bin"
            counts[prefix.bin] += 1
        assert counts == self._ages.counts, "waiting prefixes are miscounted"
        for segment in self._tree.walk():
            if segment.entry is None and segment not in self._held:
                assert self._value_of(segment) is None, "a point that could go is not queued"
        factor = self._policy.factor
        queued = [(s.entry[3], factor(s.bin) * s.entry[0]) for s in self._tree.walk() if s.entry is not None]
        lowest = self._ranking.lowest(factor)
        assert (lowest and lowest[0]) == (min(queued)[1] if queued else None), "another point ranks lower"

    def _grow_older(self) -> None:
        """Another request. Amortised O(log ages) points move; one in an octave of its age is looked at again."""
        for prefix in self._ages.tick():
            if isinstance(prefix, Segment) and prefix.entry is not None:
                if prefix.bin % PER_OCTAVE:
                    self._ranking.move(prefix)
                else:
                    self._put(prefix)
        self._policy.refresh(self._ages.counts)

    def _observe_ghosts(self, hashes: bytes, depth: int) -> int:
        gap = NO_GAP
        if self._ghosts:
            for at in range(depth * HASH_BYTES, len(hashes), HASH_BYTES):
                ghost = self._ghosts.pop(hashes[at : at + HASH_BYTES], None)
                if ghost is not None:
                    self._ages.forget(ghost)
                    gap = self.clock - ghost.last_use
                    self._policy.observe(ghost.gap, gap)
        return gap

    def _value_of(self, segment: Segment) -> float | None:
        """What the segment's point is worth, but for its age; None if evicting it would free nothing."""
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
        return self._policy.value(segment.last_use, segment.priority, lost, freed)

    def _put(self, segment: Segment) -> None:
        """Queue a segment's point by what it is worth now; one that is held waits until a sequence has ended."""
        value = self._value_of(segment)
        if value is not None:
            self._ranking.put(segment, value, is_pinned=self._is_pinned(segment))
            return
        self._ranking.remove(segment)
        if segment.is_point or not segment.children:
            self._held[segment] = None

    def _put_below(self, segment: Segment) -> None:
        """Queue anew the next point at or below, down to a branch: what it would fall back to, or free, has changed."""
        while not segment.is_point and len(segment.children) == 1:
            (segment,) = segment.children.values()
        self._put(segment)

    def _try_held_again(self) -> None:
        held, self._held, self._has_ended = self._held, {}, False
        for segment in held:
            self._put(segment)

    def _rises(self, segment: Segment) -> bool:
        """Queue a point again that is worth more than it was, or held; otherwise take it out."""
        entry, value = segment.entry, self._value_of(segment)
        assert entry is not None
        if value is None or value > entry[0]:
            self._put(segment)
            return True
        self._ranking.remove(segment)
        return False

    def _is_pinned(self, segment: Segment) -> bool:
        return segment.pinned_until_s > self._now_s and segment not in self._pins_over_budget

    def _count_pins(self) -> None:
        """Pins hold as much as the budget allows: those that end last, then those used last. O(what is pinned)."""
        if self._pins_counted_at == self.clock or not self._pinned:
            return
        self._pins_counted_at = self.clock
        known = [s for s in self._pinned if s.parent is not None]
        pinned = [s for s in known if s.pinned_until_s > self._now_s]
        pinned.sort(key=lambda s: (s.pinned_until_s, s.last_use), reverse=True)
        self._pinned = dict.fromkeys(pinned)
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
        for segment in known:
            if segment.entry is not None and segment.entry[3] != self._is_pinned(segment):
                self._put(segment)

    def _evict(self, segment: Segment, num_blocks: int) -> None:
        if segment.children or segment.num_cursors:
            self._drop_inner(segment)
        else:
            self._drop_leaf(segment, num_blocks)

    def _drop_inner(self, segment: Segment) -> None:
        """An inner point goes: its state now, its window as far as nothing else needs it."""
        states = [m for m in self._managers if m.is_state]
        if any(self._pools[m.pool_id].ref_count(segment.blocks[m.group_id][-1]) for m in states):
            self._held[segment] = None  # A sequence is just starting from it.
            return
        segment.is_point = False
        for manager in states:
            num_dropped = self.evictor.clear(segment, manager, segment.end - 1, segment.end)
            self.evictor.counts[manager.group_id].num_ranked += num_dropped
        self.evictor.thin_upwards(segment)
        if len(segment.children) == 1:
            self._put_below(segment)

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
            self._put(segment)
        else:
            assert parent is not None
            self._forget(segment)
            self._prune(parent)

    def _prune(self, segment: Segment) -> None:
        """What has become a leaf and can't be resumed at its end goes, and so does what is above it."""
        while segment.parent is not None and not segment.children and not segment.num_cursors:
            parent = segment.parent
            if segment.is_point or self._is_full_only:
                self._put(segment)
                return
            # Whoever is still to copy its last block knows that by its id.
            self.evictor.trim(segment, segment.start, is_orphan=True)
            self._forget(segment)
            segment = parent
        if not self._is_full_only and segment.parent is not None:
            if segment.is_point:
                self._put(segment)
            elif len(segment.children) == 1:
                self._put_below(segment)

    def _forget(self, segment: Segment) -> None:
        self._ages.forget(segment)
        self._ranking.remove(segment)
        self._held.pop(segment, None)

    def _remember(self, segment: Segment) -> None:
        """A point that goes is remembered by its hash, so that its being wanted again is seen."""
        while len(self._ghosts) >= _MAX_GHOSTS:
            self._ages.forget(self._ghosts.pop(next(iter(self._ghosts))))
        key = bytes(segment.hash_at(segment.end - 1))
        self._ages.forget(self._ghosts.pop(key, Prefix()))
        self._ghosts[key] = ghost = Prefix(segment.gap, segment.last_use)
        self._ages.track(ghost)
