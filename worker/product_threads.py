"""How many threads a step's matrix products run in, on a CPU: as many as made steps of its size faster.

Two threads do nearly twice as much where a core is free. Where others want it, the threads wait for each other, and a
step takes up to three times as long as with one. Which of it holds can't be seen beforehand, and changes: so it is
measured, and what lost is tried again now and then.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

# What a step of any size takes beside its rows, in rows: so steps of unlike sizes can be compared.
_ROWS_AT_LEAST = 24
# The best of so many steps counts: one that was held up says nothing.
_REMEMBERED_STEPS = 4
# Steps of a size until what lost is tried again; twice as many whenever it loses again.
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 512
# Steps of so many bits of rows and more are alike: products are most of them.
_MOST_BITS = 7


class ProductThreads:
    """Chooses between one thread and `most` for each step. `use` puts the choice into effect, between two steps.

    With `most` 1 there is nothing to choose, and `use` is never called.
    """

    def __init__(self, most: int, use: Callable[[int], None]) -> None:
        self._most = most
        self._use = use
        self._sizes: dict[int, _Size] = {}
        self._now = 0
        self._num_rows = 0

    def begin(self, num_rows: int) -> None:
        """A step of so many rows is about to run."""
        if self._most == 1:
            return
        self._num_rows = num_rows
        wanted = self._most if self._size().takes_most() else 1
        if wanted != self._now:
            self._use(wanted)
            self._now = wanted

    def ended(self, run_s: float) -> None:
        """The step that began last took so long."""
        if self._most > 1:
            self._size().ran(run_s / (self._num_rows + _ROWS_AT_LEAST), took_most=self._now == self._most)

    def _size(self) -> "_Size":
        return self._sizes.setdefault(min(self._num_rows.bit_length(), _MOST_BITS), _Size())


@dataclass
class _Size:
    """Steps of alike sizes: seconds a row with `most` threads (True) and with one, and whose turn it is."""

    last_s: dict[bool, deque[float]] = field(
        default_factory=lambda: {choice: deque(maxlen=_REMEMBERED_STEPS) for choice in (True, False)}
    )
    best: bool = True
    pause: int = _FIRST_PAUSE
    num_since: int = 0

    def takes_most(self) -> bool:
        return self.best if self.num_since < self.pause and self.last_s[not self.best] else not self.best

    def ran(self, row_s: float, *, took_most: bool) -> None:
        self.last_s[took_most].append(row_s)
        if took_most == self.best:
            self.num_since += 1
        else:
            self.num_since = 0
            # Only its newest step tells how it would do now.
            while len(self.last_s[took_most]) > 1:
                self.last_s[took_most].popleft()
        if not all(self.last_s.values()):
            return
        is_beaten = min(self.last_s[not self.best]) < min(self.last_s[self.best])
        if is_beaten:
            self.best, self.num_since, self.pause = not self.best, 0, _FIRST_PAUSE
        elif took_most != self.best:
            self.pause = min(2 * self.pause, _LONGEST_PAUSE)
