"""Starts the two servers as child processes, watches their CPU time, and ends them with everything they started."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import psutil

from worker import blas

READY_TIMEOUT_S = 180.0
STOP_GRACE_S = 20.0

# The peer's own defaults, written out so that a changed default does not pass unnoticed.
PEER_OPTIONS = (
    *("--decode-concurrency", "32", "--prompt-concurrency", "8"),
    *("--prefill-step-size", "2048", "--prompt-cache-size", "10"),
)


class ServerFailed(Exception):
    """A server did not start or answered with an error; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What both servers are started with."""

    model_folder: Path
    log_folder: Path
    blas: Path | None
    peer_threads: int
    kv_cache_memory: str
    peer_compiles: bool


@dataclass(slots=True)
class Server:
    """One running server; a context manager that ends it."""

    name: str
    # What the request body calls the model.
    model: str
    port: int
    command: list[str]
    environment: dict[str, str]
    log: Path
    _process: subprocess.Popen[bytes] | None = None
    _tree: dict[int, psutil.Process] = field(default_factory=dict)

    def __enter__(self) -> Self:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | self.environment,
                start_new_session=True,
            )
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._see_tree()
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        # Whatever it left behind, and nothing else: a psutil.Process knows its start time, so no reused id is hit.
        _, alive = psutil.wait_procs(list(self._tree.values()), timeout=5)
        for process in alive:
            process.kill()
        self._process = None

    def cpu_s(self) -> float:
        """CPU seconds used so far by the server and all its descendants that live."""
        self._see_tree()
        total = 0.0
        for process in self._tree.values():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
        return total

    def rss_bytes(self) -> int:
        """Resident memory of the server and all its descendants; shared pages count once for each process."""
        self._see_tree()
        return sum(process.memory_info().rss for process in self._tree.values() if process.is_running())

    def log_tail(self) -> str:
        """The end of what it printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def _see_tree(self) -> None:
        assert self._process is not None
        try:
            root = psutil.Process(self._process.pid)
            found = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        self._tree.update({process.pid: process for process in found})

    def _wait_ready(self) -> None:
        assert self._process is not None
        give_up_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < give_up_s:
            if self._process.poll() is not None:
                raise ServerFailed(f"{self.name} ended with code {self._process.returncode}:\n{self.log_tail()}")
            self._see_tree()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.2)
        raise ServerFailed(f"{self.name} was not ready after {READY_TIMEOUT_S:.0f} s:\n{self.log_tail()}")


def cidery(setting: Setting) -> Server:
    """`cidery serve` with one Mac; its worker loads the fast BLAS itself."""
    port = _free_port()
    command = [
        *(str(Path(sys.executable).parent / "cidery"), "serve", "--model", str(setting.model_folder)),
        *("--model-name", "bench", "--http-port", str(port), "--grpc-port", "0"),
        *("--dtype", "float32", "--kv-cache-memory", setting.kv_cache_memory),
    ]
    log = setting.log_folder / f"cidery-{setting.model_folder.name}.log"
    return Server("cidery", "bench", port, command, _environment(most_threads(setting)), log)


def most_threads(setting: Setting) -> int:
    """Of products; where MLX brings its own BLAS, nobody asks."""
    return blas.num_cores() if setting.blas is not None else 1


def peer(setting: Setting) -> Server:
    """`mlx_lm.server` with its own defaults, on the same BLAS."""
    port = _free_port()
    command = [
        *(sys.executable, "-m", "mlx_lm", "server", "--model", str(setting.model_folder)),
        *("--host", "127.0.0.1", "--port", str(port), "--log-level", "WARNING", *PEER_OPTIONS),
    ]
    log = setting.log_folder / f"mlx_lm-{setting.model_folder.name}.log"
    return Server("mlx_lm", "default_model", port, command, peer_environment(setting), log)


def peer_environment(setting: Setting, num_threads: int | None = None) -> dict[str, str]:
    """Of whatever is no worker of Cidery's and is to have the same BLAS, in so many threads or as many as the peer."""
    environment = _environment(num_threads or setting.peer_threads)
    if setting.blas is not None:
        environment["LD_PRELOAD"] = str(setting.blas)
    if not setting.peer_compiles:
        environment["MLX_DISABLE_COMPILE"] = "1"
    return environment


def _environment(num_threads: int) -> dict[str, str]:
    """Neither server's threads spin longer than Cidery's would."""
    return {
        "OPENBLAS_NUM_THREADS": str(num_threads),
        "OPENBLAS_THREAD_TIMEOUT": blas.SPIN_BITS,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
