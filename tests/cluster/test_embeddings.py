"""Many inputs of one call: in order, cut and scaled, and over at once when one fails."""

import asyncio
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cluster import embeddings
from cluster.embeddings import EmbedJob, embed
from cluster.errors import InvalidRequest, Overloaded, RequestTooLong
from cluster.handling import Handling
from cluster.job import Completed, TextChunk
from cluster.model_files import pooling_of
from cluster.openai_embeddings import embedding_body, parse_embedding
from cluster.scheduling.request import Finish, Pooling
from cluster.tokenizer import Prompt

MODEL = SimpleNamespace(name="m", pooling=Pooling.MEAN)


class Conductor:
    """Answers with the prompt's own tokens as the vector; refuses those that a test names."""

    def __init__(self, errors=()) -> None:
        self.errors = dict(errors)
        self.num_running = self.most_running = 0
        self.num_left_early = 0
        self.jobs = []

    async def serve(self, job):
        self.jobs.append(job)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        has_ended = False
        try:
            if job.prompt.token_ids in self.errors:
                has_ended = True
                raise self.errors[job.prompt.token_ids]
            await asyncio.sleep(0.01 * (1 + sum(job.prompt.token_ids) % 3))
            yield TextChunk("", (), ())
            has_ended = True
            vector = tuple(map(float, job.prompt.token_ids))
            yield Completed(Finish.LENGTH, len(vector), 0, 0, 0.0, 0.0, 0.0, 0.0, "a", 0, None, vector)
        finally:
            self.num_running -= 1
            self.num_left_early += not has_ended


def job_of(*prompts, **changes) -> EmbedJob:
    prompts = tuple(Prompt(prompt) for prompt in prompts)
    return replace(EmbedJob("r", MODEL, prompts, 0.0, Handling(), normalize=False), **changes)


async def test_vectors_come_in_the_order_of_the_inputs_and_draw_nothing():
    conductor = Conductor()
    embedded = await embed(conductor, job_of((3, 4), (1, 2, 3), (9,)))
    assert [each.values for each in embedded] == [(3.0, 4.0), (1.0, 2.0, 3.0), (9.0,)]
    assert {(job.asked.max_tokens, job.pooling) for job in conductor.jobs} == {(0, Pooling.MEAN)}
    assert len({job.request_id for job in conductor.jobs}) == 3


async def test_cut_comes_before_length_one():
    (one,) = await embed(Conductor(), job_of((3, 4, 12), normalize=True, dimensions=2))
    assert one.values == pytest.approx((0.6, 0.8))
    (zero,) = await embed(Conductor(), job_of((0, 0), normalize=True))
    assert zero.values == (0.0, 0.0)
    (asked,) = await embed(Conductor(), job_of((1,), pooling=Pooling.CLS))
    assert asked.values == (1.0,)


@pytest.mark.parametrize("dimensions", [0, 3])
async def test_dimensions_that_there_are_not_are_refused(dimensions):
    with pytest.raises(InvalidRequest, match="dimensions: must be at"):
        await embed(Conductor(), job_of((3, 4), dimensions=dimensions))


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (InvalidRequest("prompt[3]", "bad token"), InvalidRequest, r"input\[1\]\[3\]: bad token"),
        (InvalidRequest("request", "odd"), InvalidRequest, "request: odd"),
        (RequestTooLong("too long"), RequestTooLong, "prompt: too long"),
        (Overloaded("full", 7.0), Overloaded, "full"),
    ],
)
async def test_the_first_that_fails_ends_the_others(error, kind, words):
    conductor = Conductor({(7,): error})
    with pytest.raises(kind, match=words):
        await embed(conductor, job_of((1, 2), (7,), (3, 4)))
    assert conductor.num_running == 0
    assert conductor.num_left_early >= 1


async def test_one_call_does_not_fill_the_queues(monkeypatch):
    monkeypatch.setattr(embeddings, "_AT_ONCE", 4)
    conductor = Conductor()
    await embed(conductor, job_of(*((at,) for at in range(1, 20))))
    assert conductor.most_running == 4


async def test_leaving_early_ends_all():
    conductor = Conductor()
    task = asyncio.create_task(embed(conductor, job_of((1,), (2,))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert conductor.num_running == 0


async def test_the_body_says_what_was_done():
    job = job_of((3, 4), (5,))
    body = embedding_body(job, await embed(Conductor(), job), is_base64=False)
    assert body["usage"]["prompt_tokens"] == 3
    assert [each["index"] for each in body["data"]] == [0, 1]
    assert body["cidery"] == {"pooling": "mean", "normalize": False}
    assert math.isclose(json.loads(json.dumps(body))["data"][0]["embedding"][1], 4.0)


@pytest.mark.parametrize(
    ("given", "inputs"),
    [("x", ("x",)), (["x", "y"], ("x", "y")), ([1, 2], ((1, 2),)), ([[1], "y"], ((1,), "y")), ([[]], ((),))],
)
def test_every_form_of_input(given, inputs):
    assert parse_embedding({"input": given}).inputs == inputs


@pytest.mark.parametrize(
    ("modes", "pooling"),
    [
        (None, Pooling.LAST),
        ({"pooling_mode_mean_tokens": True}, Pooling.MEAN),
        ({"pooling_mode_cls_token": True}, Pooling.CLS),
        ({"pooling_mode_lasttoken": True}, Pooling.LAST),
    ],
)
def test_a_model_says_how_it_was_made_to_stand_for_a_text(tmp_path, modes, pooling):
    if modes is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    assert pooling_of(tmp_path) is pooling
