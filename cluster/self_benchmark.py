"""How fast a worker is, measured before it takes its first request, so that the router need not guess.

A short prompt warms it up (the first steps compile kernels), a longer one is timed, prefill and a few decode steps. A
scheduler and a KV ledger of their own make the plans and are thrown away: nothing of it is ever found in the cache.
"""

from dataclasses import replace
from typing import Protocol

from cluster import wire
from cluster.kv.layout import KVLayout
from cluster.kv.manager import KVCacheManager
from cluster.routing.speed import StepSample
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.plan import StepPlan
from cluster.scheduling.request import Request, SamplingParams
from cluster.scheduling.scheduler import Scheduler
from protos.cidery.worker.v1 import worker_pb2

_WARM_UP_TOKENS = 64
_PROMPT_TOKENS = 512
_ANSWER_TOKENS = 8


class MeasuredWorker(Protocol):
    """What is needed of a worker."""

    def send(self, message: worker_pb2.ManagerMessage) -> None:
        """Queue a message."""

    async def receive(self) -> worker_pb2.WorkerMessage | None:
        """The next one; None when the worker is gone."""


class WorkerFailed(Exception):
    """The worker failed or ended while it was measured; the message is its own."""


async def measure(
    worker: MeasuredWorker, layout: KVLayout, config: SchedulerConfig, vocab_size: int
) -> tuple[StepSample, ...]:
    """Steps of a prompt of 512 tokens, or as many as a quarter of the memory holds, and of 8 decoded.

    Raises WorkerFailed.

    The worker must be configured and know no sequence; afterwards it knows none again.
    """
    kv = KVCacheManager(layout, enable_prefix_caching=False)
    scheduler = Scheduler(kv, config)
    room = min(config.max_model_len - _ANSWER_TOKENS, layout.token_capacity // 4)
    samples: list[StepSample] = []
    live: set[int] = set()
    step_id = 0
    for most in (_WARM_UP_TOKENS, _PROMPT_TOKENS):
        num_tokens = max(1, min(most, room))
        samples.clear()
        scheduler.add(
            Request(
                request_id=f"self-benchmark-{most}",
                token_ids=tuple(7 * number % vocab_size for number in range(num_tokens)),
                num_prompt_tokens=num_tokens,
                block_hashes=(),
                max_tokens=_ANSWER_TOKENS,
                sampling=SamplingParams(),
            ),
            0.0,
        )
        while (plan := scheduler.schedule(0.0)) is not None:
            # The real ledger begins with the pools as they were laid out.
            assert not plan.resizes, "a quarter of the memory needs no other split"
            step_id = plan.step_id
            live.update(new.seq_id for new in plan.new_sequences)
            live.difference_update(plan.released_seq_ids)
            result = wire.result_from_proto(await _run(worker, plan))
            scheduler.apply(result)
            samples.append(replace(sample_of(plan), seconds=result.run_s))
    await _run(worker, StepPlan(step_id + 1, released_seq_ids=tuple(sorted(live))))
    return tuple(samples)


def sample_of(plan: StepPlan) -> StepSample:
    """What a step has to do, its seconds still to come; a row of one token decodes."""
    prefill = [part for part in plan.slices if part.num_tokens > 1]
    num_tokens = sum(part.num_tokens for part in prefill)
    work = sum(part.num_tokens * (part.start + part.num_tokens / 2) for part in prefill)
    decoding = [part.start for part in plan.slices if part.num_tokens == 1]
    return StepSample(num_tokens, work / num_tokens if num_tokens else 0.0, len(decoding), sum(decoding), 0.0)


async def _run(worker: MeasuredWorker, plan: StepPlan) -> worker_pb2.StepResult:
    worker.send(wire.plan_to_proto(plan))
    message = await worker.receive()
    if message is None or message.HasField("failure"):
        raise WorkerFailed("it ended" if message is None else message.failure.message)
    return message.result
