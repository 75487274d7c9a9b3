"""WorkerService over a Unix socket.

gRPC's threads only move messages: plans go into one inbox, and the main thread, the only one that touches MLX, executes
them in order and puts each result into the stream's outbox at once.
"""

import logging
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import grpc

from protos.cidery.worker.v1 import worker_pb2 as pb
from protos.cidery.worker.v1 import worker_pb2_grpc
from worker.engine import Engine
from worker.errors import ProtocolError

logger = logging.getLogger(__name__)

# Prompts travel as one message: 4 bytes a token and no fixed bound.
_OPTIONS = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
# One Run stream, a refused second one, Describe, and one to spare.
_NUM_THREADS = 4


@dataclass(frozen=True, slots=True)
class Failure:
    """Ends a stream with a status other than OK."""

    code: grpc.StatusCode
    message: str


class Stream:
    """One Run call as the main thread sees it."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context
        # Results, then None or a Failure.
        self.outbox: SimpleQueue[pb.RunResponse | Failure | None] = SimpleQueue()

    @property
    def is_active(self) -> bool:
        """False once the client is gone."""
        return bool(self._context.is_active())


@dataclass(frozen=True, slots=True)
class Opened:
    """A client called Run."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class Received:
    """A message of a stream."""

    stream: Stream
    message: pb.RunRequest


@dataclass(frozen=True, slots=True)
class Ended:
    """The client closed its side, or is gone."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class Stop:
    """End the process."""

    reason: str


Event = Opened | Received | Ended | Stop
Inbox = SimpleQueue[Event]


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Moves messages between sockets and the main thread."""

    def __init__(self, description: pb.DescribeResponse, inbox: Inbox) -> None:
        self._description = description
        self._inbox = inbox

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeResponse:  # noqa: N802
        """See worker.proto."""
        return self._description

    def Run(  # noqa: N802
        self, request_iterator: Iterator[pb.RunRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.RunResponse]:
        """See worker.proto. RESOURCE_EXHAUSTED while another stream runs, INVALID_ARGUMENT for a ProtocolError."""
        stream = Stream(context)
        self._inbox.put(Opened(stream))
        Thread(target=self._read, args=(request_iterator, stream), name="run-reader", daemon=True).start()
        while (item := stream.outbox.get()) is not None:
            if isinstance(item, Failure):
                context.abort(item.code, item.message)
            else:
                yield item

    def _read(self, requests: Iterator[pb.RunRequest], stream: Stream) -> None:
        try:
            for message in requests:
                self._inbox.put(Received(stream, message))
        except grpc.RpcError:
            # The client is gone without closing its side; same end.
            logger.info("run stream broke off")
        finally:
            self._inbox.put(Ended(stream))


class Worker:
    """The main thread's loop: owns the engine and the one stream that it serves."""

    def __init__(self, engine: Engine, inbox: Inbox) -> None:
        self._engine = engine
        self._inbox = inbox
        self._stream: Stream | None = None

    def run(self) -> str:
        """Serve until a Stop comes; its reason is the result."""
        while True:
            event = self._inbox.get()
            if isinstance(event, Stop):
                self._end_streams()
                return event.reason
            if isinstance(event, Opened):
                self._open(event.stream)
            elif event.stream is not self._stream:
                # What a failed or refused stream still sends.
                continue
            elif isinstance(event, Received):
                self._handle(event.stream, event.message)
            else:
                self._close(None)

    def _end_streams(self) -> None:
        """Each open call has a thread that waits for its outbox, and the process can't end before they do."""
        if self._stream is not None:
            self._close(None)
        while not self._inbox.empty():
            event = self._inbox.get()
            if isinstance(event, Opened):
                event.stream.outbox.put(None)

    def _open(self, stream: Stream) -> None:
        if self._stream is not None and self._stream.is_active:
            refusal = "another Run stream is active; one is allowed"
            stream.outbox.put(Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal))
            return
        if self._stream is not None:
            self._close(None)
        self._stream = stream

    def _close(self, failure: Failure | None) -> None:
        stream, self._stream = self._stream, None
        self._engine.reset()
        if stream is not None:
            stream.outbox.put(failure)

    def _handle(self, stream: Stream, message: pb.RunRequest) -> None:
        try:
            stream.outbox.put(self._respond(message))
        except ProtocolError as error:
            logger.error("run stream ended: %s", error)
            self._close(Failure(grpc.StatusCode.INVALID_ARGUMENT, str(error)))
        except Exception as error:
            logger.exception("run stream ended: step failed")
            self._close(Failure(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"))

    def _respond(self, message: pb.RunRequest) -> pb.RunResponse:
        kind = message.WhichOneof("message")
        if kind == "plan":
            return pb.RunResponse(result=self._engine.execute(message.plan))
        if kind == "configure":
            return pb.RunResponse(configured=self._engine.configure(message.configure))
        raise ProtocolError("an empty RunRequest came; it must hold configure or plan")


def listen(socket_path: str, servicer: WorkerServicer) -> grpc.Server:
    """Answer on `socket_path`, replacing a dead worker's socket file. Raises RuntimeError if it cannot bind."""
    Path(socket_path).unlink(missing_ok=True)
    server = grpc.server(futures.ThreadPoolExecutor(_NUM_THREADS, "grpc"), options=_OPTIONS)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)
    server.add_insecure_port(f"unix:{socket_path}")
    server.start()
    return server
