"""The gRPC face of inference: cidery.v1.InferenceService on top of the conductor."""

import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace

import grpc

from cluster import grammars, wire
from cluster.choices import serve_answers
from cluster.conductor import Conductor
from cluster.embeddings import EmbedJob, check_num_inputs, embed
from cluster.errors import InvalidRequest
from cluster.handling import SESSION_HEADER, Handling
from cluster.job import Completed, Event, Job, TextChunk
from cluster.sampling import SamplingRequest, check_num_answers
from cluster.scheduling.request import Speculation, TokenLogprobs
from cluster.served_models import ServedModel, ServedModels
from cluster.tokenizer import Message, Prompt, Tokenizer
from protos.cidery.v1 import handling_pb2, inference_pb2, sampling_pb2


class InferenceServicer:
    """Registered by `grpc_server.add_service`; methods are named as the rpcs."""

    def __init__(self, models: ServedModels, conductor: Conductor) -> None:
        self._models = models
        self._conductor = conductor

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[inference_pb2.GenerateResponse]:
        """See inference.proto."""
        arrived_s = time.monotonic()
        model = self._models.get(request.model)
        prompt = await self._prompt(model, request, "prompt")
        handling = _handling(request.handling, context)
        num_answers = check_num_answers(request.n if request.HasField("n") else None)
        asked = await self._models.prepare(model, sampling_request(request.sampling))
        job = Job(new_request_id("gen"), model, prompt, asked, arrived_s, handling, _deadline_s(context))
        async for event in self._serve(job, num_answers, context):
            yield inference_pb2.GenerateResponse(request_id=job.request_id, **event)  # type: ignore[arg-type]

    async def Chat(  # noqa: N802
        self, request: inference_pb2.ChatRequest, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[inference_pb2.ChatResponse]:
        """See inference.proto."""
        arrived_s = time.monotonic()
        model = self._models.get(request.model)
        prompt = await self._models.chat_prompt(model, _messages(request.messages))
        handling = _handling(request.handling, context)
        num_answers = check_num_answers(request.n if request.HasField("n") else None)
        asked = await self._models.prepare(model, sampling_request(request.sampling))
        job = Job(new_request_id("chat"), model, prompt, asked, arrived_s, handling, _deadline_s(context))
        async for event in self._serve(job, num_answers, context):
            yield inference_pb2.ChatResponse(request_id=job.request_id, **event)  # type: ignore[arg-type]

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        """See inference.proto."""
        model = self._models.get(request.model)
        if request.messages:
            prompt = await self._models.chat_prompt(model, _messages(request.messages))
        else:
            prompt = await self._models.text_prompt(model, request.text)
        return inference_pb2.TokenizeResponse(token_ids=prompt.token_ids, message_ends=prompt.boundaries)

    async def Embed(  # noqa: N802
        self, request: inference_pb2.EmbedRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.EmbedResponse:
        """See inference.proto."""
        arrived_s = time.monotonic()
        model = self._models.get(request.model)
        check_num_inputs("inputs", len(request.inputs))
        if request.pooling not in wire.POOLING_FROM_PROTO:
            known = ", ".join(sampling_pb2.Pooling.keys()[1:])
            raise InvalidRequest("pooling", f"must be one of {known}, got {request.pooling}")
        prompts = [await self._prompt(model, each, f"inputs[{index}]") for index, each in enumerate(request.inputs)]
        job = EmbedJob(
            new_request_id("embd"),
            model,
            tuple(prompts),
            arrived_s,
            _handling(request.handling, context),
            "inputs",
            _deadline_s(context),
            pooling=wire.POOLING_FROM_PROTO[request.pooling],
            normalize=request.normalize if request.HasField("normalize") else True,
            dimensions=request.dimensions if request.HasField("dimensions") else None,
        )
        await context.send_initial_metadata((("x-request-id", job.request_id),))
        return inference_pb2.EmbedResponse(
            request_id=job.request_id,
            embeddings=[
                inference_pb2.Embedding(
                    values=each.values,
                    num_prompt_tokens=each.num_prompt_tokens,
                    num_cached_tokens=each.num_cached_tokens,
                )
                for each in await embed(self._conductor, job)
            ],
            pooling=wire.POOLING_TO_PROTO[job.resolved_pooling],
        )

    async def _prompt(
        self, model: ServedModel, given: inference_pb2.GenerateRequest | inference_pb2.EmbedInput, field: str
    ) -> Prompt:
        kind = given.WhichOneof("prompt" if isinstance(given, inference_pb2.GenerateRequest) else "input")
        if kind is None:
            raise InvalidRequest(field, "is missing; give text or token_ids")
        if kind == "text":
            return await self._models.text_prompt(model, given.text)
        return Prompt(tuple(given.token_ids.ids))

    async def ListModels(  # noqa: N802
        self, request: inference_pb2.ListModelsRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.ListModelsResponse:
        """See inference.proto."""
        models = [
            inference_pb2.Model(
                id=model.name, max_model_len=model.max_model_len, num_macs=model.num_macs, parent=model.parent
            )
            for model in self._models.all()
        ]
        return inference_pb2.ListModelsResponse(models=models)

    async def _serve(
        self, job: Job, num_answers: int, context: grpc.aio.ServicerContext
    ) -> AsyncGenerator[dict[str, object]]:
        await context.send_initial_metadata((("x-request-id", job.request_id),))
        async with aclosing(serve_answers(self._conductor, job, num_answers)) as events:
            async for each in events:
                yield {"index": each.index} | _event(each.event, job.model)


def _handling(message: handling_pb2.Handling, context: grpc.aio.ServicerContext) -> Handling:
    """A session may be named in the metadata too."""
    handling = Handling.from_proto(message)
    named = [str(value) for key, value in context.invocation_metadata() or () if key == SESSION_HEADER]
    return handling if handling.session or not named else replace(handling, session=named[0])


def _deadline_s(context: grpc.aio.ServicerContext) -> float | None:
    """When the client gives up, by the monotonic clock; None if never."""
    left_s = context.time_remaining()
    return None if left_s is None else time.monotonic() + left_s


def new_request_id(kind: str) -> str:
    """Unique in the fleet."""
    return f"{kind}-{uuid.uuid4().hex}"


def sampling_request(message: sampling_pb2.SamplingParams) -> SamplingRequest:
    """What the client set; the rest stays None. Raises InvalidRequest."""

    def real(name: str) -> float | None:
        return float(getattr(message, name)) if message.HasField(name) else None

    def whole(name: str) -> int | None:
        return int(getattr(message, name)) if message.HasField(name) else None

    for name in ("banned_sequences", "compiled_grammar"):
        if getattr(message, name):
            raise InvalidRequest(name, "is the cluster's own; use bad_words or grammar")
    return SamplingRequest(
        temperature=real("temperature"),
        top_k=whole("top_k"),
        top_p=real("top_p"),
        min_p=real("min_p"),
        seed=whole("seed"),
        max_tokens=whole("max_tokens"),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        num_top_logprobs=whole("num_top_logprobs"),
        num_prompt_logprobs=whole("num_prompt_logprobs"),
        frequency_penalty=real("frequency_penalty"),
        presence_penalty=real("presence_penalty"),
        repetition_penalty=real("repetition_penalty"),
        logit_bias=tuple(message.logit_bias.items()),
        min_tokens=whole("min_tokens"),
        banned_token_ids=tuple(message.banned_token_ids),
        bad_words=tuple(message.bad_words),
        xtc_probability=real("xtc_probability"),
        xtc_threshold=real("xtc_threshold"),
        grammar=_grammar(message.grammar),
        speculation=_speculation(message.speculation),
    )


def _speculation(value: int) -> Speculation:
    known = wire.SPECULATION_FROM_PROTO
    if value not in known:
        raise InvalidRequest("speculation", f"must be a value of the enum Speculation, 0 to {max(known)}, got {value}")
    return known[value]  # type: ignore[index]


def _grammar(message: sampling_pb2.Grammar) -> grammars.Grammar | None:
    """Raises InvalidRequest."""
    kind = message.WhichOneof("kind")
    field = f"grammar.{kind}"
    if kind == "json_schema":
        return grammars.json_schema_text(field, message.json_schema)
    if kind == "json_object":
        return grammars.json_object(field) if message.json_object else None
    if kind == "regex":
        return grammars.regex(field, message.regex)
    if kind == "choice":
        return grammars.choice(f"{field}.texts", tuple(message.choice.texts))
    return None if kind is None else grammars.lark(field, message.lark)


def _messages(messages: Iterable[inference_pb2.ChatMessage]) -> list[Message]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _event(event: Event, model: ServedModel) -> dict[str, object]:
    if isinstance(event, TextChunk):
        logprobs = [_logprobs(each, model.tokenizer) for each in event.logprobs]
        of_prompt = [_logprobs(each, model.tokenizer) for each in event.prompt_logprobs]
        chunk = inference_pb2.Chunk(
            text=event.text, token_ids=event.token_ids, logprobs=logprobs, prompt_logprobs=of_prompt
        )
        return {"chunk": chunk}
    return {"completion": _completion(event)}


def _completion(event: Completed) -> inference_pb2.Completion:
    return inference_pb2.Completion(
        finish_reason=wire.FINISH_TO_PROTO[event.finish],
        usage=inference_pb2.Usage(
            num_prompt_tokens=event.num_prompt_tokens,
            num_cached_tokens=event.num_cached_tokens,
            num_completion_tokens=event.num_completion_tokens,
            num_drafted_tokens=event.num_drafted_tokens,
            num_accepted_tokens=event.num_accepted_tokens,
        ),
        timings=inference_pb2.Timings(
            route_s=event.route_s, queue_s=event.queue_s, first_token_s=event.first_token_s, total_s=event.total_s
        ),
        mac=event.mac,
        seed=event.seed,
        stop=event.stop or "",
    )


def _logprobs(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> sampling_pb2.TokenLogprobs:
    message = wire.logprobs_to_proto(logprobs)
    parts: list[sampling_pb2.TokenLogprobs | sampling_pb2.TopLogprob] = [message, *message.top]
    for part in parts:
        part.text = tokenizer.token_text(part.token_id)
        part.utf8 = tokenizer.token_bytes(part.token_id)
    return message
