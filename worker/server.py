"""Serves the manager on a Unix socket: one connection at a time, one thread, the one that owns MLX.

Plans wait in the socket while a step runs, so nothing is gained by a thread that reads ahead, and a second thread would
compete for the interpreter with the building of graphs.
"""

import logging
import socket
import struct
from contextlib import closing
from pathlib import Path

from protos.cidery.worker.v1 import worker_pb2 as pb
from worker.engine import Engine
from worker.errors import ProtocolError

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")


class Connection:
    """Framed messages: length (4 bytes, little-endian) and bytes."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._reader = connected.makefile("rb")

    def close(self) -> None:
        """The socket itself belongs to the caller."""
        self._reader.close()

    def receive(self) -> pb.ManagerMessage | None:
        """The next message; None when the manager is gone, in the middle of a message too."""
        head = self._reader.read(_LENGTH.size)
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        data = self._reader.read(length)
        return pb.ManagerMessage.FromString(data) if len(data) == length else None

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
        with connected, closing(Connection(connected)) as connection:
            try:
                serve_connection(connection, engine, description)
            except OSError as error:
                logger.info("connection broke off: %s", error)
            finally:
                engine.reset()


def serve_connection(connection: Connection, engine: Engine, description: pb.Description) -> None:
    """Executes what the manager sends until it leaves or something fails, which is its last message then."""
    connection.send(pb.WorkerMessage(description=description))
    while (message := connection.receive()) is not None:
        try:
            if message.WhichOneof("message") == "unload_adapter":
                engine.unload_adapter(message.unload_adapter)
            else:
                connection.send(_respond(engine, message))
        except ProtocolError as error:
            logger.error("connection ended: %s", error)
            connection.send(_failure(str(error), is_protocol_error=True))
            return
        except OSError:
            raise
        except Exception as error:
            logger.exception("connection ended: step failed")
            connection.send(_failure(f"{type(error).__name__}: {error}", is_protocol_error=False))
            return


def _respond(engine: Engine, message: pb.ManagerMessage) -> pb.WorkerMessage:
    kind = message.WhichOneof("message")
    if kind == "plan":
        return pb.WorkerMessage(result=engine.execute(message.plan))
    if kind == "configure":
        return pb.WorkerMessage(configured=engine.configure(message.configure))
    if kind == "load_adapter":
        return pb.WorkerMessage(adapter_loaded=engine.load_adapter(message.load_adapter))
    raise ProtocolError("an empty ManagerMessage came; it must hold configure or plan")


def _failure(message: str, *, is_protocol_error: bool) -> pb.WorkerMessage:
    return pb.WorkerMessage(failure=pb.Failure(is_protocol_error=is_protocol_error, message=message))
