"""How a step uses the cores of a CPU: in the way that made steps of its size faster.

Two threads do nearly twice as much where a core is free. Where others want it, the threads wait for each other, and a
step takes up to three times as long as with one. Which of it holds can't be seen beforehand, and changes: so it is
measured, and what lost is tried again now and then.

A step of many rows does better in lanes (`worker.lanes`), which share most of its work, than with products in several
threads, which share theirs alone.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

# In a lane of fewer rows, products take as long for the weights as for the rows.
ROWS_A_LANE = 64
# What a step of any size takes beside its rows, in rows: so steps of unlike sizes can be compared.
_ROWS_AT_LEAST = 24
# The best of so many steps counts: one that was held up says nothing.
_REMEMBERED_STEPS = 4
# Steps of a size until what lost is tried again; twice as many whenever it loses again.
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 512
# Steps of so many bits of rows and more are alike: products are most of them.
_MOST_BITS = 7


@dataclass(frozen=True, slots=True)
class Cores:
    """How a step of so many rows runs: on one core or, if `are_many`, on all, in lanes or with threads for products."""

    num_rows: int = 0
    are_many: bool = False
    in_lanes: bool = False

    @property
    def has_lanes(self) -> bool:
        """Whether its rows run in lanes."""
        return self.are_many and self.in_lanes


class CoreChoice:
    """Chooses between one core and `most` for each step. `use` sets the number of threads, between two steps.

    With `most` 1 there is nothing to choose, and `use` is never called.
    """

    def __init__(self, most: int, use: Callable[[int], None]) -> None:
        self._most = most
        self._use = use
        self._sizes: dict[tuple[int, bool], _Size] = {}
        self._now = 0

    def choose(self, num_rows: int, *, allows_lanes: bool = True) -> Cores:
        """For a step that is about to be built."""
        cores = Cores(num_rows, in_lanes=allows_lanes and num_rows >= ROWS_A_LANE * self._most)
        return replace(cores, are_many=self._most > 1 and self._size(cores).takes_most())

    def begin(self, cores: Cores) -> None:
        """A step is about to run."""
        wanted = self._most if cores.are_many and not cores.in_lanes else 1
        if self._most > 1 and wanted != self._now:
            self._use(wanted)
            self._now = wanted

    def ended(self, cores: Cores, run_s: float) -> None:
        """A step took so long."""
        if self._most > 1:
            self._size(cores).ran(run_s / (cores.num_rows + _ROWS_AT_LEAST), took_most=cores.are_many)

    def _size(self, cores: Cores) -> "_Size":
        return self._sizes.setdefault((min(cores.num_rows.bit_length(), _MOST_BITS), cores.in_lanes), _Size())


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
        if self.num_since < self.pause and self.last_s[not self.best]:
            return self.best
        # Once: the next step is built before this one has ended.
        self.num_since = 0
        return not self.best

    def ran(self, row_s: float, *, took_most: bool) -> None:
        self.last_s[took_most].append(row_s)
        if took_most == self.best:
            self.num_since += 1
        else:
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
