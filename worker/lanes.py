"""A step's work in lanes, each on a core of its own, for MLX's CPU build.

MLX runs what is on one stream on one core, and only products inside of it take more, where BLAS has threads. A lane is
a stream. Decode rows whose contexts are long enough attend in lanes. In a step of many rows the tiles of a prompt's
attention do too, and modules run some of their rows in each lane (`worker.row_lanes`); its products have one thread
each then, because OpenBLAS lets no more than one product at a time have several.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import ClassVar, TypeVar

import mlx.core as mx

from worker.group_rows import DecodeGroup

# From so many numbers of keys a layer, attention in two lanes took 0.4 to 0.6 of the time (EPYC, idle). Half as many
# gained a tenth, and lost up to seven tenths where others wanted the core.
MIN_KEYS = 1 << 20
# OpenBLAS gives a product of so many multiplications one thread; more, where it has kernels for small ones.
_ONE_THREAD = 1 << 18

T = TypeVar("T")


class Lanes:
    """The lanes of one engine."""

    # Those of the graph that is being built.
    _now: ClassVar["Lanes | None"] = None

    def __init__(self, streams: Sequence[mx.Stream]) -> None:
        """`streams` of the lanes beside the first, which is the stream of everything else."""
        self.num = 1 + len(streams)
        # Whether modules part their rows.
        self.has_rows = False
        self._streams = streams

    @contextmanager
    def building(self, *, are_used: bool = True, has_rows: bool) -> Iterator[None]:
        """While the graph of a step is built, which may be one for a single core."""
        self.has_rows, Lanes._now = has_rows, self if are_used and self.num > 1 else None
        try:
            yield
        finally:
            self.has_rows, Lanes._now = False, None

    @staticmethod
    def now() -> "Lanes | None":
        """None where there is but one, the step is to use one, or no graph is being built."""
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
    if lanes is None or sum(group.num_slots for group in groups) * num_kv_heads * head_dim < MIN_KEYS:
        return [attend(group) for group in groups]
    pieces = [piece for group in groups for piece in group.cut(lanes.num)]
    costs = [piece.num_slots for piece in pieces]
    products = [
        cost // (piece.last - piece.first) * num_heads // num_kv_heads * head_dim
        for piece, cost in zip(pieces, costs, strict=True)
    ]
    return lanes.each([partial(attend, piece) for piece in pieces], costs, products)
