"""A worker that hangs is left; one that has nothing to do is not."""

import asyncio
from pathlib import Path

import pytest

from cluster import worker_process
from cluster.config import MacConfig, ModelConfig, bundled_model
from cluster.mac_engine import MacEngine
from cluster.routing.speed import StepSample
from cluster.worker_process import receive_in_time
from protos.cidery.worker.v1 import worker_pb2


class SlowWorker:
    """Answers after a while."""

    pid = 1

    def __init__(self, answers_after_s: float) -> None:
        self._answers_after_s = answers_after_s

    async def receive(self) -> worker_pb2.WorkerMessage:
        await asyncio.sleep(self._answers_after_s)
        return worker_pb2.WorkerMessage(result=worker_pb2.StepResult(step_id=7))


@pytest.fixture
def short_waits(monkeypatch):
    monkeypatch.setattr(worker_process, "_STEP_TIMEOUT_S", 0.2)
    monkeypatch.setattr(worker_process, "_WATCH_PERIOD_S", 0.05)


@pytest.fixture
def engine(tmp_path):
    config = MacConfig(ModelConfig(bundled_model(), "tiny"))
    return MacEngine("mac-1", config, Path(bundled_model()), tmp_path / "log", lambda: None)


async def test_a_step_that_takes_too_long_ends_the_worker(short_waits):
    assert await receive_in_time(SlowWorker(60), lambda: True) is None


async def test_a_step_in_time_is_waited_for(short_waits):
    message = await receive_in_time(SlowWorker(0.1), lambda: True)
    assert message.result.step_id == 7


async def test_a_worker_with_nothing_to_do_is_never_too_slow(short_waits):
    message = await receive_in_time(SlowWorker(0.5), lambda: False)
    assert message.result.step_id == 7


def test_drafts_count_as_rows_of_their_step(engine):
    """Else the router would learn that rows are dear where tokens are guessed."""

    class Scheduler:
        def apply(self, result):
            return []

    engine.scheduler = Scheduler()
    engine._in_flight = {7: StepSample(0, 0.0, 2, 30, 0.0)}
    speculated = [worker_pb2.Speculated(seq_id=seq_id, num_drafts=seq_id) for seq_id in (1, 3)]
    timings = worker_pb2.StepTimings(run_s=0.5)
    engine._apply(worker_pb2.StepResult(step_id=7, speculated=speculated, timings=timings))
    assert list(engine.step_samples) == [StepSample(0, 0.0, 6, 30, 0.5)]
