"""Several answers as one stream: all of each, interleaved as they come; the first failure ends all."""

import asyncio
from dataclasses import dataclass, field

import pytest

from cluster.choices import serve_answers, usage_of
from cluster.errors import MacLost
from cluster.handling import Handling
from cluster.job import Completed, Job, TextChunk
from cluster.sampling import SamplingRequest, seed_of_answer
from cluster.scheduling.request import Finish
from cluster.tokenizer import Prompt


@dataclass
class FakeConductor:
    """Answers with the job's own seed; `fails` names the answer that breaks off, `hangs` those that never end."""

    fails: int = -1
    hangs: tuple[int, ...] = ()
    jobs: list[Job] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    async def serve(self, job: Job):
        at = len(self.jobs)
        self.jobs.append(job)
        try:
            for number in range(3):
                await asyncio.sleep(0)
                yield TextChunk(f"{at}.{number} ", (number,), ())
                if at == self.fails and number == 1:
                    raise MacLost("gone")
            if at in self.hangs:
                await asyncio.Event().wait()
            yield completed(job.asked.seed, at)
        finally:
            self.left.append(job.request_id)


def completed(seed, at=0) -> Completed:
    return Completed(
        Finish.STOP, 10, 8 if at else 0, 3 + at, 0.0, 0.1 * at, 1.0 - at / 10, 2.0 + at, "mac-1", seed, None
    )


def job(**fields) -> Job:
    return Job("r", None, Prompt((1, 2)), SamplingRequest(**fields), 0.0, Handling())  # type: ignore[arg-type]


async def collect(conductor, asked, num_answers):
    return [each async for each in serve_answers(conductor, asked, num_answers)]


async def test_every_answer_is_whole_and_they_come_interleaved():
    conductor = FakeConductor()
    events = await collect(conductor, job(seed=5), 3)
    for index in range(3):
        mine = [each.event for each in events if each.index == index]
        assert "".join(event.text for event in mine[:-1]) == f"{index}.0 {index}.1 {index}.2 "
        assert mine[-1].seed == seed_of_answer(5, index)
    assert [each.index for each in events[:3]] == [0, 1, 2]
    assert [each.request_id for each in conductor.jobs] == ["r-0", "r-1", "r-2"]


async def test_one_answer_is_the_request_itself():
    conductor = FakeConductor()
    events = await collect(conductor, job(), 1)
    assert {each.index for each in events} == {0}
    assert conductor.jobs == [job()]


async def test_without_a_seed_the_answers_differ_from_those_of_another_time():
    seeds = []
    for _ in range(2):
        conductor = FakeConductor()
        await collect(conductor, job(), 4)
        seeds += [each.asked.seed for each in conductor.jobs]
    assert len(set(seeds)) == 8


async def test_the_first_failure_ends_the_others():
    conductor = FakeConductor(fails=1, hangs=(0, 2))
    with pytest.raises(MacLost, match="gone"):
        await asyncio.wait_for(collect(conductor, job(), 3), 5)
    assert sorted(conductor.left) == ["r-0", "r-1", "r-2"]


async def test_leaving_early_ends_all():
    conductor = FakeConductor(hangs=(0, 1, 2))
    events = serve_answers(conductor, job(), 3)
    await anext(events)
    await events.aclose()
    assert sorted(conductor.left) == ["r-0", "r-1", "r-2"]


def test_usage_counts_the_prompt_once():
    usage = usage_of([completed(5, at) for at in range(3)])
    assert (usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_completion_tokens) == (10, 0, 3 + 4 + 5)
    assert (usage.first_token_s, usage.total_s, usage.seed) == (0.8, 4.0, 5)
