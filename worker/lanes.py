"""A step's work in lanes, each on a core of its own, for MLX's CPU build.

MLX runs what is on one stream on one core, and only products inside of it take more, where BLAS has threads. A lane is
a stream. Decode rows attend in lanes in every step. In a step of many rows the tiles of a prompt's attention do too,
and modules run some of their rows in each lane (`worker.row_lanes`); its products have one thread each then, because
OpenBLAS lets no more than one product at a time have several.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import mlx.core as mx

# OpenBLAS gives a product of so many multiplications one thread.
_ONE_THREAD = 1 << 18

Run = Callable[[], mx.array]


class Lanes:
    """The lanes of one engine."""

    # Those of the graph that is being built.
    _now: ClassVar["Lanes | None"] = None

    def __init__(self, most: int) -> None:
        """`most` 1: there are none."""
        self.num = most
        # Whether modules part their rows.
        self.has_rows = False
        # The first lane is the stream of everything else.
        self._streams = [mx.new_stream(mx.cpu) for _ in range(most - 1)]

    @contextmanager
    def building(self, *, has_rows: bool) -> Iterator[None]:
        """While the graph of a step is built."""
        self.has_rows, Lanes._now = has_rows, self if self.num > 1 else None
        try:
            yield
        finally:
            self.has_rows, Lanes._now = False, None

    @staticmethod
    def now() -> "Lanes | None":
        """None where there is but one, or no graph is being built."""
        return Lanes._now

    def each(self, runs: Sequence[Run], costs: Sequence[int], products: Sequence[int] = ()) -> list[mx.array]:
        """The results, shared out by cost.

        `products` are the multiplications of the largest one of each: those that BLAS would give several threads stay
        in the first lane, unless this step's products have one thread anyway.
        """
        loads, lanes = [0] * self.num, [0] * len(runs)
        is_first = [not self.has_rows and size > _ONE_THREAD for size in products or [0] * len(runs)]
        for place in sorted(range(len(runs)), key=lambda place: (not is_first[place], -costs[place])):
            lanes[place] = 0 if is_first[place] else loads.index(min(loads))
            loads[lanes[place]] += costs[place]
        return [self._run(run, lane) for run, lane in zip(runs, lanes, strict=True)]

    def _run(self, run: Run, lane: int) -> mx.array:
        if not lane:
            return run()
        with mx.stream(self._streams[lane - 1]):
            return run()


def tiles(runs: Sequence[Run], costs: Sequence[int]) -> list[mx.array]:
    """The results, in lanes if the step's rows are."""
    lanes = Lanes.now()
    return [run() for run in runs] if lanes is None or not lanes.has_rows else lanes.each(runs, costs)
