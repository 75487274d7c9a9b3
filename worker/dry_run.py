"""The largest step, run once before the worker serves: what it takes beside weights and pools is no room for KV.

Nothing is estimated that can be measured. Pools hold what the step itself writes: a context before it is one block,
read again and again, so gathers, masks, logits and the states that wait outside of pools have the size that they will
have. Memory is affine in the context, so contexts grow until the longest one or until time is up, and what is left is
a straight line; one through the shortest context, which is not read from pools, is too steep.

Not in it, where no kernel reads pools in place: copies of the keys that decode rows see. They are one layer's at a
time, so a small share of the pools themselves.
"""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import mlx.core as mx

from protos.cidery.v1.sampling_pb2 import SamplingParams
from protos.cidery.worker.v1 import worker_pb2 as pb

if TYPE_CHECKING:
    from worker.engine import Engine

logger = logging.getLogger(__name__)

_ROOT = bytes(16)
# Contexts stop growing here; a worker that loads for a minute may measure for a few seconds.
_TIME_S = 3.0
# Of what weights leave: what states may take while they are measured. More sequences are extrapolated.
_STATE_SHARE = 16
# What makes the most of a row's logits: sorted, penalised, with alternatives.
_SAMPLING = SamplingParams(
    temperature=1.0, top_k=50, top_p=0.9, presence_penalty=0.1, num_top_logprobs=20, num_prompt_logprobs=20, seed=1
)
# The scheduler's max_scored_tokens: rows of one step whose logits are kept for what they say of a prompt.
MAX_SCORED_ROWS = 128


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step that the manager will ask for. `max_model_len` None: what the model was made for."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None = None
    block_size: int = 16

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_size"):
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
        run = _Run(engine, limits)
        decode_peak = run.decode_rows()
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
    """Steps of an engine over the smallest pools that hold what one of them writes."""

    def __init__(self, engine: "Engine", limits: StepLimits) -> None:
        self._engine = engine
        self._block_size = limits.block_size
        described = engine.describe()
        states = [index for index, layer in enumerate(described.layers) if layer.states]
        attention = [index for index in range(len(described.layers)) if index not in states]
        self._max_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._num_rows = min(self._max_rows, _affordable_rows(described))
        num_blocks = max(self._num_rows, -(-limits.max_num_batched_tokens // self._block_size) + 1)
        kinds = [(caches, size) for caches, size in ((attention, num_blocks), (states, self._num_rows)) if caches]
        self._is_state = [caches is states for caches, _ in kinds]
        engine.configure(
            pb.Configure(
                block_size=self._block_size,
                root_hash=_ROOT,
                groups=[pb.Group(pool=pool, layers=caches) for pool, (caches, _) in enumerate(kinds)],
                # And the null block.
                num_blocks=[size + 1 for _, size in kinds],
            )
        )
        engine.commit_pools()
        self._live: list[int] = []
        self._empty_bytes = mx.get_active_memory()

    def decode_rows(self) -> int:
        """As many sequences as there may be, twice: the states of one step wait while the next one makes its own."""
        plan = pb.StepPlan()
        ids = range(1, self._num_rows + 1)
        for seq_id in ids:
            self._begin(plan, seq_id, 0, 1, [seq_id], seq_id)
        first = self._peak_of(plan)
        again = pb.StepPlan(slices=[pb.Slice(seq_id=each, start=1, num_tokens=1, samples=True) for each in ids])
        return max(first, self._peak_of(again)) * self._max_rows // self._num_rows

    def chunk(self, start: int, num_tokens: int) -> int:
        """The last tokens of one prompt."""
        plan = pb.StepPlan()
        first, last = start // self._block_size, (start + num_tokens - 1) // self._block_size
        blocks = [1] * first + list(range(1, last - first + 2))
        seq_id = 1 + max(self._live, default=0)
        self._begin(plan, seq_id, start, num_tokens, blocks, 1)
        return self._peak_of(plan)

    def _begin(
        self, plan: pb.StepPlan, seq_id: int, start: int, num_tokens: int, blocks: Sequence[int], slot: int
    ) -> None:
        """One more sequence, which runs its last tokens; it has these blocks and this state."""
        tables = [
            pb.GroupBlocks(group=group, block_ids=[slot] if is_state else blocks)
            for group, is_state in enumerate(self._is_state)
        ]
        length = start + num_tokens
        plan.new_sequences.add(
            seq_id=seq_id,
            token_ids=[0] * length,
            num_prompt_tokens=length,
            sampling=_SAMPLING,
            block_tables=tables,
            first_scored=max(1, length - MAX_SCORED_ROWS),
        )
        plan.slices.add(seq_id=seq_id, start=start, num_tokens=num_tokens, samples=True)

    def _peak_of(self, plan: pb.StepPlan) -> int:
        """What the step took over the pools; sequences that are not in it are gone."""
        running = {piece.seq_id for piece in plan.slices}
        plan.released_seq_ids.extend(seq_id for seq_id in self._live if seq_id not in running)
        self._live = sorted(running)
        mx.reset_peak_memory()
        self._engine.execute(plan)
        return mx.get_peak_memory() - self._empty_bytes


def _affordable_rows(described: pb.Description) -> int:
    """Sequences whose states may be there at once, in their pool and outside of it."""
    tensors = [tensor for layer in described.layers for tensor in layer.states]
    row_bytes = sum(prod(tensor.shape) * tensor.dtype_bytes for tensor in tensors)
    room = described.memory_limit_bytes - described.weights_bytes
    return max(1, room // _STATE_SHARE // row_bytes) if row_bytes else sys.maxsize
