"""Conducts one request: check, hash, route, run, detokenise; and goes on elsewhere when its Mac is lost."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from cluster.errors import (
    ActorAway,
    CideryError,
    InvalidRequest,
    MacLost,
    MacsAway,
    ModelNotFound,
    NoMacReady,
    Overloaded,
    RequestTooLong,
)
from cluster.job import Completed, Event, Job, TextChunk
from cluster.kv.hashing import BlockHash, first_extras, hash_blocks
from cluster.mac_link import MacLinks
from cluster.metrics import Metrics
from cluster.ray_calls import ActorCaller
from cluster.request_log import RequestLog
from cluster.router_actor import RequestNotes
from cluster.routing.decision import Decision, RouteQuery
from cluster.sampling import check_token_ids, resolve
from cluster.scheduling.request import (
    Finish,
    Pooling,
    Reading,
    Request,
    SamplingParams,
    Update,
    one_by_one,
)
from cluster.tokenizer import Detokenizer, StopStrings

log = logging.getLogger(__name__)

# A request is given up when as many Macs as this were lost under it or refused it.
MAX_TRIES = 4
_NOTES_PERIOD_S = 0.02
# Between a Mac's loss and its return, or another's: how long a request waits for any Mac.
_NO_MAC_PATIENCE_S = 30.0
_NO_MAC_PAUSE_S = 0.5


@dataclass(slots=True)
class _Progress:
    """What is known of a running request, over all its Macs."""

    token_ids: list[int] = field(default_factory=list)
    excluded: set[str] = field(default_factory=set)
    num_cached_tokens: int | None = None
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    route_s: float = 0.0
    queue_s: float = 0.0
    first_token_s: float = 0.0
    mac: str = ""
    num_tries: int = 0
    has_finished: bool = False
    # Of the prompt, tokens whose log-probabilities have been told.
    num_scored: int = 0
    embedding: tuple[float, ...] = ()


class _AnswerText:
    """Text of one answer as it grows; `stop` is the stop string that ended it."""

    def __init__(self, job: Job) -> None:
        self._text = Detokenizer(job.model.tokenizer)
        self._stops = StopStrings(job.asked.stop)
        self._num_before_stops = job.asked.min_tokens or 0

    @property
    def stop(self) -> str | None:
        return self._stops.hit

    def push(self, update: Update) -> str:
        """What may be shown after an update; all of it after the last."""
        # The token that ended it is no part of the text.
        shown = update.token_ids[:-1] if update.finish is Finish.STOP else update.token_ids
        new = self._text.push(shown)
        self._num_before_stops -= len(update.token_ids)
        if self._num_before_stops < 0:  # else the answer is not long enough yet to be ended
            new = self._stops.push(new)
        if update.finish is not None:
            new += self._stops.push(self._text.flush())
            new += self._stops.flush()
        return new


class Conductor:
    """Serves requests; `run_notes` must run beside it, because it carries bookings back to the router."""

    def __init__(
        self,
        router: ActorCaller,
        metrics: Metrics,
        tenant_weights: Mapping[str, float],
        request_log: RequestLog | None = None,
    ) -> None:
        self._router = router
        self._request_log = request_log
        self._metrics = metrics
        self._first_token: list[tuple[str, int]] = []
        self._ended: list[tuple[str, int | None]] = []
        self._tenant_weights = tenant_weights
        self._lost: list[tuple[str, int]] = []
        self._has_notes = asyncio.Event()
        self._links = MacLinks(self._mac_lost)

    async def serve(self, job: Job) -> AsyncGenerator[Event]:
        """Chunks, then exactly one Completed. Leaving early aborts the request on its Mac.

        Raises InvalidRequest and its kin before the first chunk; MacLost, NoMacReady or Overloaded when tries run out.
        """
        sampling, max_tokens = _check(job)
        text = _AnswerText(job)
        progress = _Progress()
        finish: Finish | None = None
        with self._metrics.request(job.model.name) as observed:
            try:
                async with aclosing(self._run_somewhere(job, sampling, max_tokens, progress)) as updates:
                    async for update in updates:
                        if update.token_ids:
                            observed.tokens(len(update.token_ids))
                        yield TextChunk(text.push(update), update.token_ids, update.logprobs, update.prompt_logprobs)
                        finish = update.finish
                        if text.stop is not None:
                            finish = Finish.STOP
                            break
            finally:
                self._log(job, max_tokens, progress, finish)
            assert finish is not None
            completed = _completed(job, progress, finish, sampling.seed, text.stop)
            observed.completed(completed)
        log.info(
            "finished request_id=%s mac=%s finish=%s prompt_tokens=%d cached_tokens=%d tokens=%d total_s=%.3f",
            *(job.request_id, completed.mac, finish.name, completed.num_prompt_tokens, completed.num_cached_tokens),
            *(completed.num_completion_tokens, completed.total_s),
        )
        yield completed

    async def run_notes(self) -> None:
        """Tells the router what became of its bookings, many at once; runs until cancelled."""
        while True:
            await self._has_notes.wait()
            await asyncio.sleep(_NOTES_PERIOD_S)
            await self.flush_notes()

    async def flush_notes(self) -> None:
        """Sends what is pending; keeps it when the router is away."""
        self._has_notes.clear()
        notes = RequestNotes(tuple(self._first_token), tuple(self._ended))
        lost, self._lost = self._lost, []
        self._first_token, self._ended = [], []
        try:
            while lost:
                await self._router("lost", *lost[0])
                del lost[0]
            await self._router("note", notes)
        except CideryError as error:
            log.warning("router does not take notes error=%s", error)
            self._first_token = [*notes.first_token, *self._first_token]
            self._ended = [*notes.ended, *self._ended]
            self._lost = [*lost, *self._lost]
            await asyncio.sleep(_NO_MAC_PAUSE_S)
            self._has_notes.set()

    async def close(self) -> None:
        """Ends all requests and sends the last notes."""
        await self._links.close()
        await self.flush_notes()

    async def _run_somewhere(
        self, job: Job, sampling: SamplingParams, max_tokens: int, progress: _Progress
    ) -> AsyncGenerator[Update]:
        """Updates of the request, whichever Macs it takes: a lost Mac's tokens go to the next one with the prompt."""
        try:
            while True:
                weight = self._tenant_weights.get(job.handling.tenant, 1.0)
                request = _request(job, sampling, max_tokens, progress, weight)
                decision = await self._route(job, request, progress)
                try:
                    async with aclosing(self._run_on(decision, job, request, progress)) as updates:
                        async for update in updates:
                            progress.has_finished = update.finish is not None
                            yield update
                    return
                except (MacLost, Overloaded) as error:
                    progress.num_tries += 1
                    progress.excluded.add(decision.mac)
                    log.warning(
                        "moving on request_id=%s mac=%s tokens=%d try=%d error=%s",
                        *(job.request_id, decision.mac, len(progress.token_ids), progress.num_tries, error),
                    )
                    if progress.num_tries == MAX_TRIES:
                        raise
        finally:
            self._ended.append((job.request_id, len(progress.token_ids) if progress.has_finished else None))
            self._has_notes.set()

    async def _run_on(
        self, decision: Decision, job: Job, request: Request, progress: _Progress
    ) -> AsyncGenerator[Update]:
        assert job.model.root is not None
        progress.mac = decision.mac
        is_noted = False
        link = self._links.get(decision)
        async with aclosing(link.run(request, job.model.root, ignore_eos=job.asked.ignore_eos)) as updates:
            async for update in updates:
                if not progress.token_ids:
                    progress.first_token_s = time.monotonic() - job.arrived_s
                # Each Mac's booking for itself; log-probabilities of a prompt come before its prefill is done.
                if not is_noted and (update.token_ids or update.finish is not None):
                    is_noted = True
                    self._first_token.append((job.request_id, update.num_cached_tokens))
                    self._has_notes.set()
                if progress.num_cached_tokens is None:
                    progress.num_cached_tokens = update.num_cached_tokens
                    progress.queue_s = update.queue_s
                progress.num_scored += len(update.prompt_logprobs)
                progress.embedding = update.embedding
                # A stop string may end the answer between two tokens of a step.
                for each in one_by_one(update) if job.asked.stop else (update,):
                    progress.token_ids.extend(each.token_ids)
                    progress.num_drafted_tokens += each.num_drafted_tokens
                    progress.num_accepted_tokens += each.num_accepted_tokens
                    yield each

    async def _route(self, job: Job, request: Request, progress: _Progress) -> Decision:
        """Chooses and books; waits a while when no Mac is ready, because one may be coming back."""
        assert job.model.root is not None
        query = RouteQuery(
            request_id=job.request_id,
            model=job.model.run_by,
            adapter=job.model.adapter,
            root_hash=job.model.root,
            block_hashes=_reusable(request, job.model.block_size),
            num_tokens=len(request.token_ids),
            max_tokens=request.max_tokens,
            exclude=frozenset(progress.excluded),
            tenant=request.tenant,
            tenant_weight=request.tenant_weight,
            priority=request.priority,
            session=job.handling.session,
            deadline_s=_seconds_left(job, progress),
        )
        give_up_s = time.monotonic() + _NO_MAC_PATIENCE_S
        while True:
            try:
                decision: Decision = await self._router("route", query)
            except (ActorAway, ModelNotFound, MacsAway):
                # The router or the Macs are being restarted, or the router doesn't know our Macs yet.
                query = replace(query, exclude=frozenset())
                if time.monotonic() > give_up_s:
                    raise
            except NoMacReady:
                if time.monotonic() > give_up_s or not progress.num_tries:
                    raise
                # All that are left were tried: start over with those that are back.
                progress.excluded.clear()
                query = replace(query, exclude=frozenset())
            else:
                progress.route_s = progress.route_s or time.monotonic() - job.arrived_s
                return decision
            await asyncio.sleep(_NO_MAC_PAUSE_S)

    def _log(self, job: Job, max_tokens: int, progress: _Progress, finish: Finish | None) -> None:
        """Into the request log, if one is kept."""
        model = job.model
        if self._request_log is None or model.root is None:
            return
        self._request_log.write(
            at_s=time.time() - (time.monotonic() - job.arrived_s),
            model=model.run_by,
            extras=first_extras("", model.adapter),
            root=model.root,
            block_size=model.block_size,
            prompt=job.prompt.token_ids,
            output=progress.token_ids,
            max_tokens=max_tokens,
            boundaries=job.prompt.boundaries,
            finish=finish,
        )

    def _mac_lost(self, mac: str, epoch: int) -> None:
        self._lost.append((mac, epoch))
        self._has_notes.set()


def _seconds_left(job: Job, progress: _Progress) -> float | None:
    """For the first token; once there was one, a request is brought to its end."""
    if job.deadline_s is None or progress.token_ids:
        return None
    return job.deadline_s - time.monotonic()


def _check(job: Job) -> tuple[SamplingParams, int]:
    """Sampling with every default filled in, and how many tokens may be generated."""
    model, num_prompt = job.model, len(job.prompt.token_ids)
    sampling = resolve(job.asked, model.defaults)
    if not num_prompt:
        raise InvalidRequest("prompt", "is empty; at least one token is needed")
    check_token_ids("prompt", job.prompt.token_ids, model.tokenizer.vocab_size)
    check_token_ids("stop_token_ids", job.asked.stop_token_ids, model.tokenizer.vocab_size)
    check_token_ids("banned_token_ids", job.asked.banned_token_ids, model.tokenizer.vocab_size)
    check_token_ids("logit_bias", tuple(token for token, _ in job.asked.logit_bias), model.tokenizer.vocab_size)
    # Each of them may be out of bounds at the same time; something must be left to draw.
    num_out = len({*job.asked.banned_token_ids, *job.asked.stop_token_ids}) + len(job.asked.banned_sequences or ())
    if num_out > model.tokenizer.vocab_size // 2:
        limit = f"no more than half of the vocabulary's {model.tokenizer.vocab_size} tokens"
        raise InvalidRequest("banned_token_ids", f"with stop tokens and bad words, {limit} may be named, got {num_out}")
    room = model.max_model_len - num_prompt
    asked = job.asked.max_tokens
    needed = 1 if asked is None else asked
    if needed > room:
        wanted = f"{num_prompt} prompt tokens + {needed} max_tokens = {num_prompt + needed} tokens"
        raise RequestTooLong(f"{wanted}, but the context of {model.name} holds {model.max_model_len}")
    max_tokens = asked if asked is not None else room
    if sampling.rules.min_tokens > max_tokens:
        got = f"must be at most max_tokens, which is {max_tokens}, got {sampling.rules.min_tokens}"
        raise InvalidRequest("min_tokens", got)
    return sampling, max_tokens


def _request(job: Job, sampling: SamplingParams, max_tokens: int, progress: _Progress, tenant_weight: float) -> Request:
    assert job.model.root is not None
    token_ids = job.prompt.token_ids + tuple(progress.token_ids)
    extras = first_extras(job.handling.cache_salt, job.model.adapter)
    return Request(
        request_id=job.request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(job.prompt.token_ids),
        block_hashes=tuple(hash_blocks(job.model.root, token_ids, job.model.block_size, extras)),
        max_tokens=max_tokens,
        sampling=sampling,
        stop_token_ids=job.asked.stop_token_ids,
        boundaries=job.prompt.boundaries,
        tenant=job.handling.tenant,
        tenant_weight=tenant_weight,
        priority=job.handling.priority,
        retention_priority=job.handling.retention_priority,
        pin_s=job.handling.pin_s,
        cache_salt=job.handling.cache_salt,
        adapter=job.model.adapter,
        reading=_reading(job, progress),
    )


def _reading(job: Job, progress: _Progress) -> Reading | None:
    """What is still wanted of the prompt: what a lost Mac had told is not computed again."""
    if job.pooling is not None:
        return Reading(pooling=job.pooling)
    num_top = job.asked.num_prompt_logprobs
    return None if num_top is None else Reading(num_top, first_scored=1 + progress.num_scored)


def _reusable(request: Request, block_size: int) -> tuple[BlockHash, ...]:
    """Of blocks that a Mac need not compute if it has them cached: see `LiveRequest.reusable_hashes`."""
    reading = request.reading
    if reading is None or reading.pooling is Pooling.LAST:
        return request.block_hashes
    if reading.pooling is None and reading.first_scored >= request.num_prompt_tokens:
        return request.block_hashes
    return request.block_hashes[: (reading.first_scored - 1) // block_size]


def _completed(job: Job, progress: _Progress, finish: Finish, seed: int, stop: str | None) -> Completed:
    return Completed(
        finish=finish,
        num_prompt_tokens=len(job.prompt.token_ids),
        num_cached_tokens=progress.num_cached_tokens or 0,
        num_completion_tokens=len(progress.token_ids),
        num_drafted_tokens=progress.num_drafted_tokens,
        num_accepted_tokens=progress.num_accepted_tokens,
        route_s=progress.route_s,
        queue_s=progress.queue_s,
        first_token_s=progress.first_token_s,
        total_s=time.monotonic() - job.arrived_s,
        mac=progress.mac,
        seed=seed,
        stop=stop,
        embedding=progress.embedding,
    )
