"""The worker as a child process: start, wait until it answers, notice its end, stop."""

import asyncio
import logging
import os
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import grpc

from cluster.config import MAX_NODE_MESSAGE_BYTES, ModelConfig
from cluster.errors import StartupFailed
from protos.cidery.worker.v1 import worker_pb2, worker_pb2_grpc

log = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0
_DESCRIBE_TIMEOUT_S = 600.0  # weights of tens of GB come from disk
_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_NODE_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_NODE_MESSAGE_BYTES),
)


class WorkerProcess:
    """One incarnation of the worker. The child ends with its parent: its standard input closes."""

    def __init__(self, process: Process, socket: Path, log_path: Path) -> None:
        self._process = process
        self._socket = socket
        self._log_path = log_path
        self.channel = grpc.aio.insecure_channel(f"unix:{socket}", options=_OPTIONS)
        self.stub = worker_pb2_grpc.WorkerServiceStub(self.channel)

    @classmethod
    async def start(cls, model: ModelConfig, model_folder: Path, log_path: Path) -> "WorkerProcess":
        """Starts the child; it is not ready before `describe` answers. Its output goes to `log_path`."""
        # A short path: the limit is 103 bytes on macOS.
        socket = Path(tempfile.mkdtemp(prefix="cidery-", dir="/tmp")) / "worker.sock"
        with log_path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "worker", "--model", str(model_folder), "--dtype", model.dtype),
                *("--socket", str(socket), "--exit-with-stdin"),
                stdin=PIPE,
                stdout=output,
                stderr=output,
            )
        log.info("worker started pid=%d socket=%s log=%s", process.pid, socket, log_path)
        return cls(process, socket, log_path)

    @property
    def pid(self) -> int:
        """Process id, for people and for tests that end it."""
        return self._process.pid

    async def describe(self) -> worker_pb2.DescribeResponse:
        """Waits for the weights. Raises StartupFailed with the end of the worker's log when it dies first."""
        ended = asyncio.ensure_future(self._process.wait())
        answer = asyncio.ensure_future(
            self.stub.Describe(worker_pb2.DescribeRequest(), wait_for_ready=True, timeout=_DESCRIBE_TIMEOUT_S)
        )
        try:
            await asyncio.wait({ended, answer}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                described: worker_pb2.DescribeResponse = answer.result()
                return described
            raise StartupFailed(f"worker ended with code {ended.result()} before it was ready:\n{self.log_tail()}")
        except grpc.aio.AioRpcError as error:
            raise StartupFailed(f"worker does not answer: {error.details()}\n{self.log_tail()}") from error
        finally:
            for task in (ended, answer):
                task.cancel()

    async def wait(self) -> int:
        """Exit code, once it has ended."""
        return await self._process.wait()

    def log_tail(self, num_lines: int = 20) -> str:
        """The last lines that the worker wrote."""
        lines = self._log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    async def stop(self) -> None:
        """Ends the child, by force when it doesn't follow; safe to call when it has ended already."""
        await self.channel.close()
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_GRACE_S)
            except TimeoutError:
                log.warning("worker does not end pid=%d after_s=%.0f: killing it", self.pid, _STOP_GRACE_S)
                self._process.kill()
                await self._process.wait()
        self._socket.unlink(missing_ok=True)
        if self._socket.parent.is_dir():
            os.rmdir(self._socket.parent)
