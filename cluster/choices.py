"""Several answers to one request: as many requests, which share the prompt's blocks on their Mac, as one stream."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from cluster.conductor import Conductor
from cluster.job import Completed, Event, Job
from cluster.sampling import fixed_seed, seed_of_answer


@dataclass(frozen=True, slots=True)
class Indexed:
    """An event of one of the answers."""

    index: int
    event: Event


@dataclass(frozen=True, slots=True)
class _Ended:
    """An answer's stream is over: `error` is None if as it should."""

    error: BaseException | None


async def serve_answers(conductor: Conductor, job: Job, num_answers: int) -> AsyncGenerator[Indexed]:
    """Events of all answers as they come; each answer ends with its Completed.

    The first that fails ends the others, and its error is raised; so does leaving early.
    """
    if num_answers == 1:
        async with aclosing(conductor.serve(job)) as events:
            async for event in events:
                yield Indexed(0, event)
        return
    queue: asyncio.Queue[Indexed | _Ended] = asyncio.Queue()
    tasks = [asyncio.create_task(_run(conductor, each, at, queue)) for at, each in enumerate(_jobs(job, num_answers))]
    num_left = num_answers
    try:
        while num_left:
            item = await queue.get()
            if isinstance(item, Indexed):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_left -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def usage_of(completed: list[Completed]) -> Completed:
    """All answers as one: the prompt counted once, with what had been cached before the request came.

    The slowest answer's times; Mac, seed and finish are the first's.
    """
    return replace(
        completed[0],
        num_cached_tokens=min(each.num_cached_tokens for each in completed),
        num_completion_tokens=sum(each.num_completion_tokens for each in completed),
        num_drafted_tokens=sum(each.num_drafted_tokens for each in completed),
        num_accepted_tokens=sum(each.num_accepted_tokens for each in completed),
        queue_s=max(each.queue_s for each in completed),
        first_token_s=min(each.first_token_s for each in completed),
        total_s=max(each.total_s for each in completed),
    )


async def _run(conductor: Conductor, job: Job, index: int, queue: asyncio.Queue[Indexed | _Ended]) -> None:
    error: BaseException | None = None
    try:
        async with aclosing(conductor.serve(job)) as events:
            async for event in events:
                queue.put_nowait(Indexed(index, event))
    except Exception as caught:  # noqa: BLE001 whatever it is, it is raised where the stream is read
        error = caught
    queue.put_nowait(_Ended(error))


def _jobs(job: Job, num_answers: int) -> list[Job]:
    seed = fixed_seed(job.asked)
    return [
        replace(job, request_id=f"{job.request_id}-{at}", asked=replace(job.asked, seed=seed_of_answer(seed, at)))
        for at in range(num_answers)
    ]
