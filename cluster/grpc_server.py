"""What every gRPC service of the gateway shares: errors as rich statuses, and bad bytes answered as bad requests."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import duration_pb2
from google.protobuf.any_pb2 import Any as AnyProto
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from cluster.errors import CideryError, InvalidRequest, Overloaded

log = logging.getLogger(__name__)

DOMAIN = "cidery.v1"


@dataclass(frozen=True, slots=True)
class Malformed:
    """Stands in for a request whose bytes could not be parsed."""

    message: str


def add_service(server: grpc.aio.Server, service: ServiceDescriptor, servicer: object) -> None:
    """Registers `servicer`, whose methods bear the names of the rpcs.

    Unlike the generated code, which answers INTERNAL, bytes that don't parse (invalid UTF-8 in a string, say) get
    INVALID_ARGUMENT.
    """
    handlers = {}
    for method in service.methods:
        behaviour = getattr(servicer, method.name)
        make = grpc.unary_stream_rpc_method_handler if method.server_streaming else grpc.unary_unary_rpc_method_handler
        handlers[method.name] = make(
            _streaming(behaviour) if method.server_streaming else _unary(behaviour),
            request_deserializer=_parser(GetMessageClass(method.input_type)),
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))


@asynccontextmanager
async def answering(context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
    """Turns our errors into the call's status; whatever else is raised is a bug, logged with its traceback."""
    try:
        yield
    except CideryError as error:
        await context.abort_with_status(rpc_status.to_status(status_of(error)))


def status_of(error: CideryError) -> status_pb2.Status:
    """google.rpc.Status with ErrorInfo, and BadRequest or RetryInfo where they say more."""
    details: list[Message] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN)]
    if isinstance(error, InvalidRequest):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.detail)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = [AnyProto() for _ in details]
    for target, detail in zip(packed, details, strict=True):
        target.Pack(detail)
    return status_pb2.Status(code=error.code.value, message=str(error), details=packed)


def _parser(kind: type[Message]) -> Callable[[bytes], Message | Malformed]:
    def parse(data: bytes) -> Message | Malformed:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            return Malformed(f"not a {kind.DESCRIPTOR.full_name}: {error}")

    return parse


def _unary(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(request: Message | Malformed, context: grpc.aio.ServicerContext) -> Any:
        async with answering(context):
            return await behaviour(_parsed(request), context)

    return handle


def _streaming(behaviour: Callable[..., Any]) -> Callable[..., Any]:
    async def handle(request: Message | Malformed, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        async with answering(context):
            responses = behaviour(_parsed(request), context)
            try:
                async for response in responses:
                    yield response
            finally:
                await responses.aclose()

    return handle


def _parsed(request: Message | Malformed) -> Message:
    if isinstance(request, Malformed):
        raise InvalidRequest("request", request.message)
    return request
