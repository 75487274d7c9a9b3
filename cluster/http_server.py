"""The HTTP face: OpenAI-compatible inference, health, metrics and the admin API as JSON. Starlette on uvicorn."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from cluster.admin import AdminServicer
from cluster.choices import Indexed, serve_answers, usage_of
from cluster.conductor import Conductor
from cluster.config import MAX_BODY_BYTES
from cluster.embeddings import EmbedJob, embed
from cluster.errors import ActorAway, BodyTooLarge, CideryError, InvalidRequest, Overloaded
from cluster.fleet_metrics import fleet_text
from cluster.handling import SESSION_HEADER, Handling
from cluster.inference import new_request_id
from cluster.job import Completed, Job
from cluster.metrics import Metrics
from cluster.openai_embeddings import embedding_body, parse_embedding
from cluster.openai_requests import OpenAIRequest, parse_body, parse_common, parse_messages, parse_prompt
from cluster.openai_responses import DONE, Answer, ChatAnswer, TextAnswer, error_body, model_body, sse
from cluster.served_models import ServedModels
from cluster.tokenizer import Prompt, checked_text
from protos.cidery.v1 import admin_pb2

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


class HttpServer:
    """Builds the application; holds no state of its own."""

    def __init__(self, models: ServedModels, conductor: Conductor, admin: AdminServicer, metrics: Metrics) -> None:
        self._models = models
        self._conductor = conductor
        self._admin = admin
        self._metrics = metrics

    def app(self) -> Starlette:
        """All routes."""
        routes = (
            ("GET", "/health", self.health),
            ("GET", "/metrics", self.metrics),
            ("GET", "/v1/models", self.models),
            ("GET", "/v1/models/{model:path}", self.model),
            ("POST", "/v1/chat/completions", self.chat),
            ("POST", "/v1/completions", self.complete),
            ("POST", "/v1/embeddings", self.embed),
            ("GET", "/admin/fleet", self.fleet),
            ("GET", "/admin/index", self.index),
            ("GET", "/admin/explain", self.explain),
            ("POST", "/admin/explain", self.what_if),
            ("POST", "/admin/drain", self.drain),
            ("POST", "/admin/resume", self.resume),
            ("POST", "/admin/cordon", self.cordon),
            ("GET", "/admin/placement", self.placement),
            ("GET", "/admin/lora", self.adapters),
            ("POST", "/admin/lora/load", self.load_adapter),
            ("POST", "/admin/lora/unload", self.unload_adapter),
        )
        return Starlette(
            routes=[
                Route(path, _answering(_no_web_page(handle) if "/admin" in path else handle), methods=[method])
                for method, path, handle in routes
            ],
            exception_handlers={HTTPException: _no_such_route, Exception: _internal},
        )

    async def health(self, request: Request) -> Response:
        """200 if a model can be used, else 503: none has a Mac that is ready, or the router is away."""
        ready = [model.name for model in self._models.all() if model.num_macs]
        if not self._models.is_current:
            return JSONResponse({"status": "router away", "models": ready}, status_code=503)
        return JSONResponse(
            {"status": "ok" if ready else "no Mac is ready", "models": ready}, status_code=200 if ready else 503
        )

    async def metrics(self, request: Request) -> Response:
        """Prometheus: the gateway's own series, and those of every Mac as it answers now."""
        try:
            fleet = await self._admin.GetFleet(admin_pb2.GetFleetRequest(), None)
            of_macs = fleet_text(fleet.macs)
        except ActorAway:
            of_macs = fleet_text((), is_router_up=False)
        return Response(self._metrics.text() + of_macs, media_type="text/plain; version=0.0.4")

    async def models(self, request: Request) -> Response:
        """OpenAI's model list."""
        return JSONResponse({"object": "list", "data": [model_body(model) for model in self._models.all()]})

    async def model(self, request: Request) -> Response:
        """One model of the list."""
        return JSONResponse(model_body(self._models.get(request.path_params["model"])))

    async def chat(self, request: Request) -> Response:
        """/v1/chat/completions."""
        arrived_s = time.monotonic()
        body = parse_body(await _read(request))
        common = parse_common(body, is_chat=True)
        model = self._models.get(common.model)
        prompt = await self._models.chat_prompt(model, parse_messages(body))
        sampling = await self._models.prepare(model, common.sampling)
        job = Job(new_request_id("chatcmpl"), model, prompt, sampling, arrived_s, _handling(request, common.handling))
        return await self._answer(request, common, ChatAnswer(job, common.tells_prompt))

    async def complete(self, request: Request) -> Response:
        """/v1/completions."""
        arrived_s = time.monotonic()
        body = parse_body(await _read(request))
        common = parse_common(body, is_chat=False)
        model = self._models.get(common.model)
        asked = parse_prompt(body)
        prompt = await self._models.text_prompt(model, asked) if isinstance(asked, str) else Prompt(asked)
        sampling = await self._models.prepare(model, common.sampling)
        job = Job(new_request_id("cmpl"), model, prompt, sampling, arrived_s, _handling(request, common.handling))
        echoed = None
        if common.echo:
            echoed = asked if isinstance(asked, str) else model.tokenizer.decode(asked)
        return await self._answer(request, common, TextAnswer(job, common.tells_prompt, echoed))

    async def embed(self, request: Request) -> Response:
        """/v1/embeddings."""
        arrived_s = time.monotonic()
        asked = parse_embedding(parse_body(await _read(request)))
        model = self._models.get(asked.model)
        prompts = [
            await self._models.text_prompt(model, each) if isinstance(each, str) else Prompt(each)
            for each in asked.inputs
        ]
        job = EmbedJob(
            new_request_id("embd"),
            model,
            tuple(prompts),
            arrived_s,
            _handling(request, asked.handling),
            pooling=asked.pooling,
            normalize=asked.normalize,
            dimensions=asked.dimensions,
        )
        embedded = await _unless_disconnected(request, embed(self._conductor, job))
        body = embedding_body(job, embedded, is_base64=asked.is_base64)
        return JSONResponse(body, headers={"x-request-id": job.request_id})

    async def fleet(self, request: Request) -> Response:
        """AdminService.GetFleet."""
        return _json(await self._admin.GetFleet(admin_pb2.GetFleetRequest(), None))

    async def index(self, request: Request) -> Response:
        """AdminService.GetIndex."""
        return _json(await self._admin.GetIndex(admin_pb2.GetIndexRequest(), None))

    async def explain(self, request: Request) -> Response:
        """AdminService.Explain of ?request_id=."""
        asked = admin_pb2.ExplainRequest()
        if request_id := request.query_params.get("request_id"):
            asked.request_id = request_id
        return _json(await self._admin.Explain(asked, None))

    async def what_if(self, request: Request) -> Response:
        """AdminService.Explain of {"text": ..., "model": ...}."""
        body = parse_body(await _read(request))
        asked = admin_pb2.ExplainRequest(text=_text(body, "text"), model=_text(body, "model", ""))
        return _json(await self._admin.Explain(asked, None))

    async def drain(self, request: Request) -> Response:
        """AdminService.Drain of {"mac": ...}."""
        mac = _text(parse_body(await _read(request)), "mac")
        return _json(await self._admin.Drain(admin_pb2.DrainRequest(mac=mac), None))

    async def resume(self, request: Request) -> Response:
        """AdminService.Resume of {"mac": ...}."""
        mac = _text(parse_body(await _read(request)), "mac")
        return _json(await self._admin.Resume(admin_pb2.ResumeRequest(mac=mac), None))

    async def cordon(self, request: Request) -> Response:
        """AdminService.Cordon of {"mac": ..., "note": ...}."""
        body = parse_body(await _read(request))
        asked = admin_pb2.CordonRequest(mac=_text(body, "mac"), note=_text(body, "note", ""))
        return _json(await self._admin.Cordon(asked, None))

    async def placement(self, request: Request) -> Response:
        """AdminService.GetPlacement."""
        return _json(await self._admin.GetPlacement(admin_pb2.GetPlacementRequest(), None))

    async def adapters(self, request: Request) -> Response:
        """AdminService.ListAdapters."""
        return _json(await self._admin.ListAdapters(admin_pb2.ListAdaptersRequest(), None))

    async def load_adapter(self, request: Request) -> Response:
        """AdminService.LoadAdapter of {"name": ..., "path": ..., "model": ...}."""
        body = parse_body(await _read(request))
        asked = admin_pb2.LoadAdapterRequest(
            name=_text(body, "name"), path=_text(body, "path"), model=_text(body, "model", "")
        )
        return _json(await self._admin.LoadAdapter(asked, None))

    async def unload_adapter(self, request: Request) -> Response:
        """AdminService.UnloadAdapter of {"name": ...}."""
        name = _text(parse_body(await _read(request)), "name")
        return _json(await self._admin.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name=name), None))

    async def _answer(self, request: Request, common: OpenAIRequest, answer: Answer) -> Response:
        events = serve_answers(self._conductor, answer.job, common.num_answers)
        if common.stream:
            # The first event comes before the status line, so that a refusal still gets its own status.
            try:
                first = await _unless_disconnected(request, anext(events))
            except BaseException:
                await events.aclose()
                raise
            return EventStream(_stream(answer, first, events, common), answer.job)
        async with aclosing(events):
            collected = await _unless_disconnected(request, _collect(events))
        return JSONResponse(answer.whole(collected), headers={"x-request-id": answer.job.request_id})


class ClientGone(CideryError):
    """The client closed its connection; nobody reads the answer."""

    reason = "CANCELLED"
    http_status = 499


class EventStream(Response):
    """Server-sent events; a disconnect ends the generator at once, so that the request is aborted on its Mac."""

    def __init__(self, events: AsyncGenerator[bytes], job: Job) -> None:
        super().__init__(media_type="text/event-stream")
        self._events = events
        self._start_headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-request-id", job.request_id.encode()),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        sender = asyncio.create_task(self._send_all(send))
        watcher = asyncio.create_task(_disconnect(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sender, watcher):
                task.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            results = await asyncio.gather(sender, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _send_all(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": 200, "headers": self._start_headers})
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _stream(
    answer: Answer, first: Indexed, events: AsyncGenerator[Indexed], common: OpenAIRequest
) -> AsyncGenerator[bytes]:
    completed: list[Completed] = []
    async with aclosing(events):
        for index in range(common.num_answers):
            opening = answer.first_chunk(index)
            if opening is not None:
                yield sse(opening)
        try:
            async for each in _after(first, events):
                body = answer.chunk(each)
                if body is not None:
                    yield sse(body)
                if isinstance(each.event, Completed):
                    completed.append(each.event)
            if common.include_usage:
                yield sse(answer.usage_chunk(usage_of(completed)))
        except CideryError as error:
            # The status line is gone; the error is the stream's last word.
            yield sse(error_body(error))
        yield DONE


async def _after(first: Indexed, rest: AsyncGenerator[Indexed]) -> AsyncGenerator[Indexed]:
    yield first
    async for event in rest:
        yield event


async def _collect(events: AsyncGenerator[Indexed]) -> list[Indexed]:
    return [event async for event in events]


async def _unless_disconnected(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`, which is cancelled when the client goes away. Raises ClientGone then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone("the client closed the connection")
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _no_such_route(request: Request, error: Exception) -> Response:
    """Unknown paths and wrong methods, in the shape of all other errors."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = "method_not_allowed" if error.status_code == 405 else "no_such_route"
    body = {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _internal(request: Request, error: Exception) -> Response:
    """A fault of ours: the client is told no more, the log everything."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    message = f"{request.method} {request.url.path}: internal error; the gateway's log has it"
    body = {"error": {"message": message, "type": "server_error", "param": None, "code": "internal"}}
    return JSONResponse(body, status_code=500)


class WebPageRefused(CideryError):
    """Browsers send such requests for any page that is open, also to a loopback address."""

    reason = "WEB_PAGE_REFUSED"
    http_status = 403


def _no_web_page(handle: Endpoint) -> Endpoint:
    async def answer(request: Request) -> Response:
        origin = request.headers.get("origin")
        if origin is not None:
            raise WebPageRefused(f"the fleet can't be steered from a web page (origin {origin[:100]!r})")
        return await handle(request)

    return answer


def _answering(handle: Endpoint) -> Endpoint:
    async def answer(request: Request) -> Response:
        try:
            return await handle(request)
        except CideryError as error:
            headers = {"retry-after": f"{error.retry_after_s:.0f}"} if isinstance(error, Overloaded) else None
            return JSONResponse(error_body(error), status_code=error.http_status, headers=headers)

    return answer


async def _read(request: Request) -> bytes:
    """The body, read only as far as the limit."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"body: at most {MAX_BODY_BYTES} bytes are allowed, got more")
    return bytes(body)


def _handling(request: Request, handling: Handling) -> Handling:
    """A session may be named in a header too, as clients do who can't add fields."""
    return replace(handling, session=handling.session or request.headers.get(SESSION_HEADER, ""))


def _text(body: Any, field: str, default: str | None = None) -> str:
    value = body.get(field, default)
    if not isinstance(value, str):
        raise InvalidRequest(field, "is missing or not a string")
    return checked_text(value, field)


def _json(message: Message) -> Response:
    return JSONResponse(
        MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    )
