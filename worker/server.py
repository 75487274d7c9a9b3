"""Serves the manager on a Unix socket: one connection at a time, on one thread, which builds all graphs.

Plans wait in the socket while a step is built, so nothing is gained by a thread that reads ahead, and a second thread
would compete for the interpreter with the building of graphs.
"""

import logging
import select
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from protos.cidery.worker.v1 import worker_pb2 as pb
from worker.engine import Engine
from worker.errors import ProtocolError

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_RECEIVED_AT_ONCE = 1 << 18


class Connection:
    """Framed messages: length (4 bytes, little-endian) and bytes."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._received = bytearray()

    def receive(self) -> pb.ManagerMessage | None:
        """The next message; None when the manager is gone, in the middle of a message too."""
        while (end := self._message_end()) is None:
            if not self._read():
                return None
        message = pb.ManagerMessage.FromString(bytes(memoryview(self._received)[_LENGTH.size : end]))
        del self._received[:end]
        return message

    def has_message(self, timeout_s: float) -> bool:
        """Whether `receive` will not wait: a message is there, or the manager is gone. Waits so long for that."""
        until_s = time.perf_counter() + timeout_s
        while self._message_end() is None:
            if not select.select([self._socket], [], [], max(0.0, until_s - time.perf_counter()))[0]:
                return False
            if not self._read():
                return True
        return True

    def _message_end(self) -> int | None:
        """Where the first message ends, if it is there in whole."""
        if len(self._received) < _LENGTH.size:
            return None
        end: int = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        return end if len(self._received) >= end else None

    def _read(self) -> bool:
        """Take in what comes next; False at the end."""
        data = self._socket.recv(_RECEIVED_AT_ONCE)
        self._received += data
        return bool(data)

    def send(self, message: pb.WorkerMessage) -> None:
        """Raises OSError when the manager is gone."""
        data = message.SerializeToString()
        self._socket.sendall(_LENGTH.pack(len(data)) + data)


def listen(socket_path: str) -> socket.socket:
    """Answers on `socket_path`, replacing a dead worker's socket file. Raises OSError if it can't."""
    Path(socket_path).unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(socket_path)
    listener.listen()
    return listener


def serve(listener: socket.socket, engine: Engine) -> None:
    """Takes one connection after the other, for ever."""
    description = engine.describe()
    while True:
        connected, _ = listener.accept()
        with connected:
            try:
                serve_connection(Connection(connected), engine, description)
            except OSError as error:
                logger.info("connection broke off: %s", error)
            finally:
                engine.reset()


def serve_connection(connection: Connection, engine: Engine, description: pb.Description) -> None:
    """Executes what the manager sends until it leaves or something fails, which is its last message then."""
    connection.send(pb.WorkerMessage(description=description))

    def report(result: pb.StepResult) -> None:
        connection.send(pb.WorkerMessage(result=result))

    try:
        while True:
            # The next plan comes soon after the result before this step's, and is better built while this step runs.
            if engine.is_running and not connection.has_message(engine.sure_to_run_s()):
                engine.drain(report)
            message = connection.receive()
            if message is None:
                return
            _take(message, engine, connection, report)
    except ProtocolError as error:
        logger.error("connection ended: %s", error)
        connection.send(_failure(str(error), is_protocol_error=True))
    except OSError:
        raise
    except Exception as error:
        logger.exception("connection ended: step failed")
        connection.send(_failure(f"{type(error).__name__}: {error}", is_protocol_error=False))


def _take(
    message: pb.ManagerMessage, engine: Engine, connection: Connection, report: Callable[[pb.StepResult], None]
) -> None:
    kind = message.WhichOneof("message")
    if kind == "plan":
        engine.submit(message.plan, report)
        return
    # Answers come in the order of what they answer.
    engine.drain(report)
    if kind == "configure":
        connection.send(pb.WorkerMessage(configured=engine.configure(message.configure)))
    elif kind == "load_adapter":
        connection.send(pb.WorkerMessage(adapter_loaded=engine.load_adapter(message.load_adapter)))
    elif kind == "unload_adapter":
        engine.unload_adapter(message.unload_adapter)
    else:
        raise ProtocolError("an empty ManagerMessage came; it must hold configure or plan")


def _failure(message: str, *, is_protocol_error: bool) -> pb.WorkerMessage:
    return pb.WorkerMessage(failure=pb.Failure(is_protocol_error=is_protocol_error, message=message))
