"""The largest step, run once before the worker serves: what it takes beside weights and pools is no room for KV.

Nothing is estimated that can be measured. Pools are a few blocks: every block table repeats one block, so a step reads
contexts of any length out of it, and gathers, masks, logits and the states that wait outside of pools have the size
that they will have. Memory is affine in the context, so contexts grow until the longest one or until time is up, and
what is left is a straight line.

Not in it, where no kernel reads pools in place: copies of the keys that decode rows see. They are one layer's at a
time, so a small share of the pools themselves.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx

from protos.cidery.v1.sampling_pb2 import SamplingParams
from protos.cidery.worker.v1 import worker_pb2 as pb

if TYPE_CHECKING:
    from worker.engine import Engine

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_ROOT = bytes(16)
# Contexts stop growing here; a worker that loads for a minute may measure for a few seconds.
_TIME_S = 3.0
# What makes the most of a row's logits: sorted, penalised, with alternatives.
_SAMPLING = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, presence_penalty=0.1, num_top_logprobs=20, seed=1)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that the manager will ask for. `max_model_len` None: what the model was made for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


def activation_bytes(
    engine: "Engine", limits: StepLimits, *, clock: Callable[[], float] = time.perf_counter, time_s: float = _TIME_S
) -> int:
    """What steps within `limits` take at most. Leaves the engine reset; it must not be configured yet."""
    started_s = clock()
    made_for = engine.describe().max_model_len
    longest = min(limits.max_model_len or made_for, made_for)
    try:
        run = _Run(engine)
        decode_peak = run.decode_rows(limits)
        points = _context_points(run, min(limits.max_num_batched_tokens, longest), longest, clock, started_s + time_s)
    finally:
        engine.reset()
    peak = max(decode_peak, *(peak for _, peak in points), _extended(points, longest))
    logger.info(
        "dry run rows=%d context=%d of %d activations_mib=%.1f seconds=%.1f",
        *(limits.max_num_batched_tokens, points[-1][0], longest, peak / 2**20, clock() - started_s),
    )
    return peak


def _context_points(
    run: "_Run", num_rows: int, longest: int, clock: Callable[[], float], deadline_s: float
) -> list[tuple[int, int]]:
    """(context, peak) of a chunk of so many tokens, at contexts that double."""
    points: list[tuple[int, int]] = []
    context, before_s = num_rows, clock()
    while True:
        points.append((context, run.chunk(context - num_rows, num_rows)))
        now_s = clock()
        # The next one takes up to twice as long.
        if context == longest or now_s + 2 * (now_s - before_s) > deadline_s:
            return points
        context, before_s = min(2 * context, longest), now_s


def _extended(points: Sequence[tuple[int, int]], longest: int) -> int:
    """The peak at the longest context, on the line through the last two points."""
    if len(points) < 2:
        return points[-1][1]
    (shorter, low), (longer, high) = points[-2:]
    return high + max(0, high - low) * (longest - longer) // (longer - shorter)


class _Run:
    """Steps of an engine whose sequences all have the same block."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        layers = engine.describe().layers
        states = [index for index, layer in enumerate(layers) if layer.states]
        attention = [index for index in range(len(layers)) if index not in states]
        kinds = [(caches, bool(caches is states)) for caches in (attention, states) if caches]
        self._is_state = [is_state for _, is_state in kinds]
        # The null block and the one that everybody has.
        groups = [pb.Group(pool=pool, layers=caches) for pool, (caches, _) in enumerate(kinds)]
        engine.configure(
            pb.Configure(block_size=_BLOCK_SIZE, root_hash=_ROOT, groups=groups, num_blocks=[2] * len(kinds))
        )
        self._live: list[int] = []
        self._next_id = 1
        self._empty_bytes = mx.get_active_memory()

    def decode_rows(self, limits: StepLimits) -> int:
        """As many sequences as there may be, twice: the states of one step wait while the next one makes its own."""
        num_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        plan = pb.StepPlan()
        ids = [self._begin(plan, start=0, num_tokens=1) for _ in range(num_rows)]
        first = self._peak_of(plan)
        again = pb.StepPlan(slices=[pb.Slice(seq_id=each, start=1, num_tokens=1, samples=True) for each in ids])
        return max(first, self._peak_of(again))

    def chunk(self, start: int, num_tokens: int) -> int:
        """The last tokens of one prompt."""
        plan = pb.StepPlan()
        self._begin(plan, start=start, num_tokens=num_tokens)
        return self._peak_of(plan)

    def _begin(self, plan: pb.StepPlan, *, start: int, num_tokens: int) -> int:
        """One more sequence, which runs its last tokens and has room for one more."""
        length, seq_id = start + num_tokens, self._next_id
        self._next_id += 1
        blocks = -(-(length + 1) // _BLOCK_SIZE)
        tables = [
            pb.GroupBlocks(group=group, block_ids=[1] * (1 if is_state else blocks))
            for group, is_state in enumerate(self._is_state)
        ]
        plan.new_sequences.add(
            seq_id=seq_id, token_ids=[0] * length, num_prompt_tokens=length, sampling=_SAMPLING, block_tables=tables
        )
        plan.slices.add(seq_id=seq_id, start=start, num_tokens=num_tokens, samples=True)
        return seq_id

    def _peak_of(self, plan: pb.StepPlan) -> int:
        """What the step took over the pools; sequences that are not in it are gone."""
        running = {piece.seq_id for piece in plan.slices}
        plan.released_seq_ids.extend(seq_id for seq_id in self._live if seq_id not in running)
        self._live = sorted(running)
        mx.reset_peak_memory()
        self._engine.execute(plan)
        return mx.get_peak_memory() - self._empty_bytes
