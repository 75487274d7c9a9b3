"""A step's work in lanes, each on a core of its own, for MLX's CPU build.

MLX runs what is on one stream on one core, and only products inside of it take more, where BLAS has threads. A lane is
a stream. Decode rows attend in lanes in every step. In a step of many rows the tiles of a prompt's attention do too,
and modules run some of their rows in each lane (`worker.row_lanes`); its products have one thread each then, because
OpenBLAS lets no more than one product at a time have several.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, TypeVar

import mlx.core as mx

from worker.group_rows import DecodeGroup

# Fewer keys, in numbers, are attended to before lanes have waited for each other.
MIN_KEYS = 1 << 18
# OpenBLAS gives a product of so many multiplications one thread.
_ONE_THREAD = 1 << 18

T = TypeVar("T")


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

    def each(self, runs: Sequence[Callable[[], T]], costs: Sequence[int], products: Sequence[int] = ()) -> list[T]:
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

    def _run(self, run: Callable[[], T], lane: int) -> T:
        if not lane:
            return run()
        with mx.stream(self._streams[lane - 1]):
            return run()


def tiles(runs: Sequence[Callable[[], mx.array]], costs: Sequence[int]) -> list[mx.array]:
    """The results, in lanes if the step's rows are."""
    lanes = Lanes.now()
    return [run() for run in runs] if lanes is None or not lanes.has_rows else lanes.each(runs, costs)


def by_group(
    attend: Callable[[DecodeGroup], T], groups: Sequence[DecodeGroup], num_kv_heads: int, queries: mx.array
) -> list[T]:
    """Attention of decode rows in plain MLX: in lanes, and groups cut for them, where enough is to be read.

    `queries [num_rows, num_heads, 1, head_dim]` are those of all groups. Results are in the order of rows.
    """
    lanes, (_, num_heads, _, head_dim) = Lanes.now(), queries.shape
    num_keys = sum(group.num_slots for group in groups) * num_kv_heads * head_dim
    if lanes is None or num_keys < MIN_KEYS:
        return [attend(group) for group in groups]
    pieces = [piece for group in groups for piece in group.cut(lanes.num)]
    costs = [piece.num_slots for piece in pieces]
    products = [
        cost // (piece.last - piece.first) * num_heads // num_kv_heads * head_dim
        for piece, cost in zip(pieces, costs, strict=True)
    ]
    return lanes.each([partial(attend, piece) for piece in pieces], costs, products)
