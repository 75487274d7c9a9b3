"""Vectors for texts: each input is a request of its own that draws nothing and shares steps with whatever else runs."""

import asyncio
import math
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from cluster.conductor import Conductor
from cluster.errors import CideryError, InvalidRequest
from cluster.handling import Handling
from cluster.job import Completed, Job
from cluster.sampling import SamplingRequest
from cluster.scheduling.request import Pooling
from cluster.served_models import ServedModel
from cluster.tokenizer import Prompt

MAX_INPUTS = 2048
# Of one call; the rest waits here, so that one caller doesn't fill the queues.
_AT_ONCE = 64
_NOTHING_DRAWN = SamplingRequest(max_tokens=0, may_draw_none=True)


@dataclass(frozen=True, slots=True)
class EmbedJob:
    """A call as a face (gRPC or HTTP) hands it over, which calls its inputs `field`. `dimensions` None: all."""

    request_id: str
    model: ServedModel
    prompts: tuple[Prompt, ...]
    arrived_s: float
    handling: Handling
    field: str = "input"
    deadline_s: float | None = None
    pooling: Pooling | None = None
    normalize: bool = True
    dimensions: int | None = None

    @property
    def resolved_pooling(self) -> Pooling:
        """As asked, or as the model was made."""
        return self.pooling or self.model.pooling


@dataclass(frozen=True, slots=True)
class Embedded:
    """One input's vector."""

    values: tuple[float, ...]
    num_prompt_tokens: int
    num_cached_tokens: int


def check_num_inputs(field: str, num_inputs: int) -> None:
    """Raises InvalidRequest."""
    if not 1 <= num_inputs <= MAX_INPUTS:
        raise InvalidRequest(field, f"must have 1 to {MAX_INPUTS:,} entries, got {num_inputs}")


async def embed(conductor: Conductor, job: EmbedJob) -> list[Embedded]:
    """In the order of the inputs. The first that fails ends the others, and its error is raised."""
    if job.dimensions is not None and job.dimensions < 1:
        raise InvalidRequest("dimensions", f"must be at least 1, got {job.dimensions}")
    gate = asyncio.Semaphore(_AT_ONCE)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_embed_one(conductor, job, at, gate)) for at in range(len(job.prompts))]
    except BaseExceptionGroup as errors:
        known = errors.subgroup(CideryError)
        raise (known or errors).exceptions[0] from None
    return [task.result() for task in tasks]


async def _embed_one(conductor: Conductor, job: EmbedJob, at: int, gate: asyncio.Semaphore) -> Embedded:
    one = Job(
        f"{job.request_id}-{at}",
        job.model,
        job.prompts[at],
        _NOTHING_DRAWN,
        job.arrived_s,
        job.handling,
        job.deadline_s,
        job.resolved_pooling,
    )
    try:
        async with gate, aclosing(conductor.serve(one)) as events:
            async for event in events:
                if isinstance(event, Completed):
                    return Embedded(_shaped(event.embedding, job), event.num_prompt_tokens, event.num_cached_tokens)
    except InvalidRequest as error:
        if type(error) is InvalidRequest and error.field.startswith("prompt"):
            raise InvalidRequest(error.field.replace("prompt", f"{job.field}[{at}]", 1), error.detail) from error
        raise
    raise CideryError(f"{one.request_id}: ended without a vector")


def _shaped(values: Sequence[float], job: EmbedJob) -> tuple[float, ...]:
    """Cut, then of length 1: the order that models trained for cutting expect."""
    if job.dimensions is not None:
        if job.dimensions > len(values):
            limit = f"{job.model.name} gives vectors of {len(values)} numbers"
            raise InvalidRequest("dimensions", f"must be at most {len(values)}: {limit}, got {job.dimensions}")
        values = values[: job.dimensions]
    if job.normalize:
        length = math.sqrt(math.fsum(value * value for value in values))
        values = [value / length for value in values] if length else values
    return tuple(values)
