"""Resume points in the order in which they go: a heap for each bin of age, so that growing older costs nothing.

All points of a bin share a factor (how soon prefixes of that class and age are wanted again); a point's own value
changes only with what happens to it. The lowest product is at the top of one of the heaps.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from cluster.kv.prefix_tree import Segment

# Value, a number by which of equal ones the last queued goes first (of a path the deepest), whose point, and whether it
# is pinned. One that is not its segment's own entry any more is void.
Entry = tuple[float, int, Segment, bool]
# Void entries are swept out when they are so many more than the others.
_MAX_VOID = 1024


class Ranking:
    """Owns `Segment.entry`."""

    def __init__(self) -> None:
        self._next_number = 0
        self.reset()

    def reset(self) -> None:
        """Forget all."""
        # What is not pinned, and what is: that goes last.
        self._heaps: tuple[dict[int, list[Entry]], dict[int, list[Entry]]] = ({}, {})
        self._num_points = 0
        self._num_entries = 0

    def put(self, segment: Segment, value: float, *, is_pinned: bool) -> None:
        """Queue a point in its present bin, in place of where it was. Amortised O(log points)."""
        self._num_points += segment.entry is None
        self._next_number -= 1
        segment.entry = entry = (value, self._next_number, segment, is_pinned)
        heappush(self._heaps[is_pinned].setdefault(segment.bin, []), entry)
        self._num_entries += 1
        if self._num_entries > 2 * self._num_points + _MAX_VOID:
            self._sweep()

    def move(self, segment: Segment) -> None:
        """Its bin is another now."""
        if segment.entry is not None:
            self.put(segment, segment.entry[0], is_pinned=segment.entry[3])

    def remove(self, segment: Segment) -> None:
        """It is not to go; nothing if it was not queued. O(1)."""
        if segment.entry is not None:
            segment.entry = None
            self._num_points -= 1

    def lowest(self, factor: Callable[[int], float]) -> tuple[float, Segment] | None:
        """The point that goes first and its rank: its value times the factor of its bin. O(bins)."""
        for heaps in self._heaps:
            lowest: tuple[float, Segment] | None = None
            emptied: list[int] = []
            for key, heap in heaps.items():
                while heap and heap[0][2].entry is not heap[0]:
                    heappop(heap)
                    self._num_entries -= 1
                if not heap:
                    emptied.append(key)
                    continue
                rank = factor(key) * heap[0][0]
                if lowest is None or rank < lowest[0]:
                    lowest = rank, heap[0][2]
            for key in emptied:
                del heaps[key]
            if lowest is not None:
                return lowest
        return None

    def _sweep(self) -> None:
        for heaps in self._heaps:
            for heap in heaps.values():
                heap[:] = [entry for entry in heap if entry[2].entry is entry]
                heapify(heap)
        self._num_entries = self._num_points
