"""Runs a workload through the real scheduler and KV manager, with a worker that takes no time and knows the answers."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from cluster.kv.layout import KVLayout
from cluster.kv.manager import KVCacheManager
from cluster.kv.planner import plan_layout
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.plan import FilledBlock, Sampled, StepPlan, StepResult
from cluster.scheduling.request import Request, SamplingParams
from cluster.scheduling.scheduler import Scheduler
from tests.bench.reuse_shapes import Shape
from tests.bench.reuse_workloads import BLOCK_SIZE, Turn, Workload


@dataclass(frozen=True, slots=True)
class Outcome:
    """Prompt tokens found in the cache, by request, and what the run took."""

    hits: list[int]
    num_steps: int
    cpu_s: float


class ForcedWorker:
    """Samples the next token of each sequence's turn, and reports blocks filled by the hashes of the turn."""

    def __init__(self) -> None:
        self.num_steps = 0

    def run(self, plan: StepPlan, turn: Turn) -> StepResult:
        """All rows are of one turn: there is one request at a time."""
        self.num_steps += 1
        sampled: list[Sampled] = []
        filled: list[FilledBlock] = []
        for part in plan.slices:
            end = part.start + part.num_tokens
            for index in range(part.start // BLOCK_SIZE, end // BLOCK_SIZE):
                filled.append(FilledBlock(part.seq_id, index, turn.block_hashes[index]))
            if part.samples:
                sampled.append(Sampled(part.seq_id, turn.token_ids[end], None, False))
        return StepResult(plan.step_id, tuple(sampled), tuple(filled), ())


def layout_of(shape: Shape, gib: float, max_length: int, chunk_tokens: int) -> KVLayout:
    """As the planner cuts it. Raises what the planner raises if the longest request does not fit."""
    return plan_layout(
        shape.specs,
        block_size=BLOCK_SIZE,
        kv_budget_bytes=round(gib * 2**30),
        max_model_len=max_length + 1,
        max_in_flight_tokens=chunk_tokens,
    )


def run(
    workload: Workload, layout: KVLayout, policy: str, chunk_tokens: int, on_turn: Callable[[], object] = lambda: None
) -> Outcome:
    """One request after the other, one step at a time. CPU time includes scheduler, manager and worker."""
    kv = KVCacheManager(layout, policy=policy, enable_prefix_caching=True)
    config = SchedulerConfig(
        max_model_len=workload.max_length + 1,
        max_num_seqs=1,
        max_num_batched_tokens=chunk_tokens,
        max_chunk_tokens=chunk_tokens,
        max_plans_in_flight=1,
    )
    scheduler, worker = Scheduler(kv, config), ForcedWorker()
    hits: list[int] = []
    started_s = time.process_time()
    for index, turn in enumerate(workload.turns):
        hits.append(_serve(scheduler, kv, worker, _request(index, turn), turn, float(index)))
        on_turn()
    return Outcome(hits, worker.num_steps, time.process_time() - started_s)


def _request(index: int, turn: Turn) -> Request:
    num_prompt = turn.num_prompt_tokens
    return Request(
        request_id=str(index),
        token_ids=tuple(turn.token_ids[:num_prompt]),
        num_prompt_tokens=num_prompt,
        block_hashes=turn.block_hashes[: num_prompt // BLOCK_SIZE],
        max_tokens=len(turn.token_ids) - num_prompt,
        sampling=SamplingParams(),
        boundaries=turn.boundaries,
    )


def _serve(
    scheduler: Scheduler, kv: KVCacheManager, worker: ForcedWorker, request: Request, turn: Turn, now_s: float
) -> int:
    """Returns the request's cached tokens."""
    scheduler.add(request, now_s)
    num_cached = 0
    while scheduler.has_work():
        plan = scheduler.schedule(now_s)
        if plan is None:
            raise RuntimeError(f"request {request.request_id} of {len(turn.token_ids)} tokens can't be planned")
        for update in scheduler.apply(worker.run(plan, turn)):
            num_cached = update.num_cached_tokens
        kv.take_events()
    return num_cached
