"""One Mac of the simulation: the real scheduler and KV manager, and a worker that only knows how long things take."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from cluster.kv.hashing import BlockHash
from cluster.kv.manager import KVCacheManager
from cluster.mac_engine import MAX_PLANS_IN_FLIGHT
from cluster.routing.speed import StepSample
from cluster.scheduling.plan import FilledBlock, Sampled, Slice, StepPlan, StepResult
from cluster.scheduling.request import Request, Update
from cluster.scheduling.scheduler import Scheduler
from cluster.self_benchmark import sample_of
from cluster.simulation.cost_model import CostModel
from cluster.simulation.timeline import Timeline

# As in cluster/self_benchmark.py.
_MEASURED_PROMPT_TOKENS = 512
_MEASURED_ANSWER_TOKENS = 8


@dataclass(slots=True)
class Script:
    """What a request will turn out to be: hashes of all full blocks of prompt and answer, and where it stops."""

    hashes: tuple[BlockHash, ...]
    num_tokens: int


@dataclass(slots=True)
class _Sequence:
    script: Script
    has_stopped: bool = False


class SimulatedWorker:
    """Executes plans by the script of each request. The first token of a sequence is the number of its script."""

    def __init__(self, costs: CostModel, block_size: int) -> None:
        self._costs = costs
        self._block_size = block_size
        self._sequences: dict[int, _Sequence] = {}
        self.scripts: dict[int, Script] = {}

    def run(self, plan: StepPlan) -> StepResult:
        """The result, `run_s` included; a sequence that has stopped is skipped, as the real worker does."""
        sequences, block_size = self._sequences, self._block_size
        for seq_id in plan.released_seq_ids:
            sequences.pop(seq_id, None)
        for new in plan.new_sequences:
            sequences[new.seq_id] = _Sequence(self.scripts[new.token_ids[0]])
        sampled: list[Sampled] = []
        filled: list[FilledBlock] = []
        skipped: list[int] = []
        ran = []
        for part in plan.slices:
            seq_id, start = part.seq_id, part.start
            sequence = sequences[seq_id]
            if sequence.has_stopped:
                skipped.append(seq_id)
                continue
            ran.append(part)
            end = start + part.num_tokens
            for index in range(start // block_size, end // block_size):
                filled.append(FilledBlock(seq_id, index, sequence.script.hashes[index]))
            if part.samples:
                sequence.has_stopped = end + 1 >= sequence.script.num_tokens
                sampled.append(Sampled(seq_id, 0, None, sequence.has_stopped))
        run_s = self._costs.step_time_s(ran) if ran else 0.0
        return StepResult(plan.step_id, tuple(sampled), tuple(filled), tuple(skipped), run_s)


class SimulatedMac:
    """Runs steps back to back, the next one planned while one runs, as cluster/mac_engine.py does."""

    def __init__(
        self,
        name: str,
        scheduler: Scheduler,
        kv: KVCacheManager,
        worker: SimulatedWorker,
        timeline: Timeline,
        on_step: Callable[["SimulatedMac", StepPlan, StepResult, list[Update]], None],
    ) -> None:
        self.name = name
        self.kv = kv
        self.scheduler = scheduler
        self.is_dead = False
        self._worker = worker
        self._timeline = timeline
        self._on_step = on_step
        self._plans: deque[StepPlan] = deque()

    def add(self, request: Request, script: Script) -> Update | None:
        """Takes a request in; see `Scheduler.add` for the answer and what it raises."""
        update = self.scheduler.add(request, self._timeline.now_s)
        if update is None:
            self._worker.scripts[request.token_ids[0]] = script
            self._pump()
        return update

    def forget(self, number: int) -> None:
        """The request with this script is over."""
        self._worker.scripts.pop(number, None)

    def kill(self) -> None:
        """Nothing comes from it any more."""
        self.is_dead = True

    def _pump(self) -> None:
        was_idle = not self._plans
        while len(self._plans) < MAX_PLANS_IN_FLIGHT:
            plan = self.scheduler.schedule(self._timeline.now_s)
            if plan is None:
                break
            self._plans.append(plan)
        if was_idle and self._plans:
            self._start()

    def _start(self) -> None:
        plan = self._plans[0]
        result = self._worker.run(plan)
        self._timeline.after(result.run_s, self._finish, plan, result)

    def _finish(self, plan: StepPlan, result: StepResult) -> None:
        if self.is_dead:
            return
        self._plans.popleft()
        # The worker goes on at once with what is queued; it does not wait for the scheduler.
        if self._plans:
            self._start()
        updates = self.scheduler.apply(result)
        self._pump()
        self._on_step(self, plan, result, updates)


def self_benchmark(costs: CostModel, chunk_tokens: int) -> tuple[StepSample, ...]:
    """What a Mac measures before it joins: a prompt in chunks, and a few tokens of an answer."""
    prompt, last = _MEASURED_PROMPT_TOKENS, _MEASURED_PROMPT_TOKENS + _MEASURED_ANSWER_TOKENS - 1
    ends = [*range(0, prompt, min(chunk_tokens, prompt)), *range(prompt, last + 1)]
    samples = []
    for start, end in pairwise(ends):
        plan = StepPlan(1, slices=(Slice(1, start, end - start, end >= prompt, {}),))
        samples.append(replace(sample_of(plan), seconds=costs.step_time_s(plan.slices)))
    return tuple(samples)
