"""Virtual time: callbacks in the order of their moment, those of one moment in the order in which they were added."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

_Event = tuple[float, int, Callable[..., object], tuple[Any, ...]]


class Timeline:
    """A clock that jumps from event to event."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[_Event] = []
        self._num_added = 0

    def at(self, at_s: float, callback: Callable[..., object], *args: object) -> None:
        """Calls back at a moment, which is now if it has passed. O(log events)."""
        self._num_added += 1
        heappush(self._heap, (max(at_s, self.now_s), self._num_added, callback, args))

    def after(self, delay_s: float, callback: Callable[..., object], *args: object) -> None:
        """Calls back so much later."""
        self.at(self.now_s + delay_s, callback, *args)

    def run(self, is_done: Callable[[], bool]) -> None:
        """Until done, or until nothing is left to happen."""
        heap = self._heap
        while heap and not is_done():
            self.now_s, _, callback, args = heappop(heap)
            callback(*args)
