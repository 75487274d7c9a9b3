"""The worker as a child process: start, wait until it answers, notice its end, stop."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import tempfile
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from pathlib import Path

from cluster.config import MacConfig
from cluster.errors import StartupFailed
from protos.cidery.worker.v1 import worker_pb2

log = logging.getLogger(__name__)

_STOP_GRACE_S = 5.0
_CONNECT_PAUSE_S = 0.02
# The largest step of the largest model takes a few seconds.
_STEP_TIMEOUT_S = 60.0
_WATCH_PERIOD_S = 5.0
_LENGTH_BYTES = 4
_TAIL_BYTES = 32 * 1024


class WorkerProcess:
    """One incarnation of the worker. The child ends with its parent: its standard input closes."""

    def __init__(self, process: Process, socket: Path, log_path: Path) -> None:
        self._process = process
        self._socket = socket
        self._log_path = log_path
        self._reader: StreamReader | None = None
        self._writer: StreamWriter | None = None

    @classmethod
    async def start(
        cls, config: MacConfig, model_folder: Path, log_path: Path, *, measures_steps: bool = True
    ) -> "WorkerProcess":
        """Starts the child; `connect` waits until it has its model. Its output goes to `log_path`.

        With `measures_steps` it runs its largest step first, which takes up to some seconds.
        """
        # A short path: the limit is 103 bytes on macOS.
        socket = Path(tempfile.mkdtemp(prefix="cidery-", dir="/tmp")) / "worker.sock"
        with log_path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "worker", "--model", str(model_folder), "--dtype", config.model.dtype),
                *("--socket", str(socket), "--exit-with-stdin"),
                *_options(config, measures_steps=measures_steps),
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

    async def connect(self) -> worker_pb2.Description:
        """Waits for the weights, however long they take; the socket is there when they are.

        Raises StartupFailed with the end of the worker's log when it dies first.
        """
        while self._reader is None:
            if self._process.returncode is not None:
                raise self._failed(f"ended with code {self._process.returncode} before it was ready")
            try:
                self._reader, self._writer = await asyncio.open_unix_connection(str(self._socket))
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(_CONNECT_PAUSE_S)
        message = await self.receive()
        if message is None:
            raise self._failed("closed the connection before it described its model")
        return message.description

    def send(self, message: worker_pb2.ManagerMessage) -> None:
        """Queues a message; never blocks. At most two plans are on their way at once, which bounds the queue."""
        assert self._writer is not None
        data = message.SerializeToString()
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    async def receive(self) -> worker_pb2.WorkerMessage | None:
        """The next message; None when the worker is gone."""
        assert self._reader is not None
        try:
            length = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "little")
            return worker_pb2.WorkerMessage.FromString(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def log_tail(self, num_lines: int = 20) -> str:
        """The last lines that the worker wrote."""
        with self._log_path.open("rb") as file:
            file.seek(max(0, self._log_path.stat().st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    async def stop(self) -> None:
        """Ends the child, by force when it doesn't follow; safe to call when it has ended already."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
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

    def _failed(self, how: str) -> StartupFailed:
        return StartupFailed(f"worker {how}:\n{self.log_tail()}")


def _options(config: MacConfig, *, measures_steps: bool) -> list[str]:
    """What the worker is told beside its model; what is not set, it decides itself."""
    settings = {
        "--block-size": config.kv.block_size_tokens,
        "--kv-bits": config.kv.kv_bits,
        "--kv-group-size": config.kv.kv_group_size,
        "--num-speculative-tokens": config.speculation.max_drafts or None,
        "--draft-model": config.speculation.draft_model,
    }
    if measures_steps:
        settings |= {
            "--max-num-seqs": config.batch.max_num_seqs,
            "--max-num-batched-tokens": config.batch.max_num_batched_tokens,
            "--max-model-len": config.model.max_model_len,
        }
    return [word for name, value in settings.items() if value is not None for word in (name, str(value))]


async def receive_in_time(worker: WorkerProcess, is_busy: Callable[[], bool]) -> worker_pb2.WorkerMessage | None:
    """The next message; None when the worker is gone, or was busy for so long that it must be taken for hung."""
    receiving = asyncio.ensure_future(worker.receive())
    num_silent_s = 0.0
    while not receiving.done():
        await asyncio.wait({receiving}, timeout=_WATCH_PERIOD_S)
        num_silent_s = num_silent_s + _WATCH_PERIOD_S if is_busy() else 0.0
        if not receiving.done() and num_silent_s >= _STEP_TIMEOUT_S:
            log.error("worker hangs pid=%d silent_s=%.0f", worker.pid, num_silent_s)
            receiving.cancel()
            return None
    return receiving.result()
