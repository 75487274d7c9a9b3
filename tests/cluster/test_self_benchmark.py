"""A worker is measured by real plans, and is left as it was."""

import pytest

from cluster.kv.planner import plan_layout
from cluster.kv.spec import FullAttentionSpec, RecurrentStateSpec, SlidingWindowSpec, StateTensor
from cluster.scheduling.config import SchedulerConfig
from cluster.self_benchmark import WorkerFailed, measure
from protos.cidery.worker.v1 import worker_pb2

FULL = FullAttentionSpec(1, 8)
MODELS = {
    "full": [FULL],
    "hybrid": [FULL, SlidingWindowSpec(1, 8, 64), RecurrentStateSpec("s", (StateTensor((64,), 2),))],
}


class Worker:
    """Takes a millisecond a prefill token and ten a row; refuses what worker.proto does not allow."""

    def __init__(self, fails_at: int = -1) -> None:
        self.sequences: set[int] = set()
        self.answers: list[worker_pb2.WorkerMessage | None] = []
        self.num_plans = 0
        self._fails_at = fails_at

    def send(self, message: worker_pb2.ManagerMessage) -> None:
        plan = message.plan
        self.num_plans += 1
        if self.num_plans == self._fails_at:
            self.answers.append(worker_pb2.WorkerMessage(failure=worker_pb2.Failure(message="out of memory")))
            return
        for seq_id in plan.released_seq_ids:
            self.sequences.remove(seq_id)
        for new in plan.new_sequences:
            assert new.seq_id not in self.sequences
            self.sequences.add(new.seq_id)
        result = worker_pb2.StepResult(step_id=plan.step_id)
        for part in plan.slices:
            assert part.seq_id in self.sequences
            result.timings.run_s += 0.010 if part.num_tokens == 1 else 0.001 * part.num_tokens
            if part.samples:
                result.sampled.add(seq_id=part.seq_id, token_id=3)
        self.answers.append(worker_pb2.WorkerMessage(result=result))

    async def receive(self) -> worker_pb2.WorkerMessage | None:
        return self.answers.pop(0)


def layout_of(model: str, max_model_len: int = 2_048, budget: int = 1 << 22):
    return plan_layout(MODELS[model], kv_budget_bytes=budget, max_model_len=max_model_len)


@pytest.mark.parametrize("model", MODELS)
async def test_times_a_prompt_and_some_tokens_and_leaves_nothing(model) -> None:
    worker = Worker()
    samples = await measure(worker, layout_of(model), SchedulerConfig(max_model_len=2_048), 100)
    assert worker.sequences == set()
    assert sum(each.num_prefill_tokens for each in samples) == 512
    assert sum(each.num_decoding for each in samples) == 7, "the first of eight tokens comes with the prompt"
    for each in samples:
        assert each.seconds == pytest.approx(0.001 * each.num_prefill_tokens + 0.010 * each.num_decoding)


@pytest.mark.parametrize(("max_model_len", "budget"), [(16, 1 << 22), (64, 1 << 16), (9, 1 << 22)])
async def test_makes_do_with_little(max_model_len, budget) -> None:
    worker = Worker()
    layout = layout_of("full", max_model_len, budget)
    await measure(worker, layout, SchedulerConfig(max_model_len=max_model_len), 100)
    assert worker.sequences == set()


async def test_a_worker_that_fails_says_why() -> None:
    with pytest.raises(WorkerFailed, match="out of memory"):
        await measure(Worker(fails_at=2), layout_of("full"), SchedulerConfig(max_model_len=2_048), 100)


async def test_a_worker_that_ends_is_told() -> None:
    worker = Worker()
    worker.send = lambda message: worker.answers.append(None)  # type: ignore[method-assign]
    with pytest.raises(WorkerFailed, match="it ended"):
        await measure(worker, layout_of("full"), SchedulerConfig(max_model_len=2_048), 100)
