"""Real fleets, started as a user starts them: `cidery serve` in a process of its own, models on disk, real sockets."""

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from cluster.config import bundled_model

START_TIMEOUT_S = 120


class Served:
    """A running `cidery serve`."""

    def __init__(self, process: subprocess.Popen[str], ready: dict[str, Any], log: Path) -> None:
        self.process = process
        self.http: str = ready["http"]
        self.grpc: str = ready["grpc"]
        self.macs: list[str] = ready["macs"]
        self.log = log
        self.client = httpx.Client(base_url=self.http, timeout=120)

    def channel(self) -> grpc.Channel:
        return grpc.insecure_channel(self.grpc)

    def fleet(self) -> dict[str, dict[str, Any]]:
        return {mac["name"]: mac for mac in self.client.get("/admin/fleet").json()["macs"]}

    def chat(self, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
        response = self.client.post("/v1/chat/completions", json={"messages": messages, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, prompt: list[int] | str, **fields: Any) -> dict[str, Any]:
        response = self.client.post("/v1/completions", json={"prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def router(self) -> psutil.Process:
        """The process of its router. Ray names it by its class and, during a call, by the method too."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "".join(process.cmdline()[:1]).startswith("ray::RouterActor"):
                    return process
        raise AssertionError(f"the fleet has no router:\n{self.log.read_text()[-4000:]}")


@contextmanager
def serving(*arguments: str) -> Iterator[Served]:
    """Starts `cidery serve` on free ports and ends it with Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="cidery-e2e-") as folder:
        log = Path(folder) / "serve.log"
        options = ("--json", "--verbose", "--http-port", "0", "--grpc-port", "0", *arguments)
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "cluster", "serve", *options], stdout=subprocess.PIPE, stderr=output, text=True
            )
        served = None
        try:
            assert process.stdout is not None
            line = process.stdout.readline()  # blocks until it serves or ends
            assert line, f"cidery serve ended with {process.wait()}:\n{log.read_text()}"
            served = Served(process, json.loads(line), log)
            yield served
        finally:
            if served is not None:
                served.client.close()
            process.send_signal(signal.SIGINT)
            process.wait(timeout=60)
            assert process.stdout is not None
            process.stdout.close()
    assert process.returncode == 0, f"cidery serve ended with {process.returncode}"


@pytest.fixture(scope="session")
def start() -> Callable[..., AbstractContextManager[Served]]:
    """For tests that need a fleet of their own."""
    return serving


@pytest.fixture(scope="session")
def three_macs() -> Iterator[Served]:
    """Three logical Macs with the bundled model and room for everything."""
    with serving("--macs", "3", "--kv-cache-memory", "64MiB") as served:
        yield served


@pytest.fixture(scope="session")
def tiny_pool() -> Iterator[Served]:
    """One Mac whose KV memory holds a few short requests, small steps: chunked prefill and preemption all the time."""
    arguments = ("--kv-cache-memory", "2MiB", "--max-model-len", "512", "--max-num-batched-tokens", "64")
    with serving(*arguments, "--max-num-seqs", "32") as served:
        yield served


@pytest.fixture(scope="session")
def oracle() -> Callable[..., tuple[list[int], list[float]]]:
    """Tokens and their log-probabilities by mlx-lm's own generation in float32, one request at a time, greedy."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm import load
    from mlx_lm.generate import generate_step

    model, tokenizer = load(bundled_model())
    model.update(tree_map(lambda weights: weights.astype(mx.float32), model.parameters()))

    def generate(prompt: list[int], max_tokens: int, *, ignore_eos: bool = False) -> tuple[list[int], list[float]]:
        tokens: list[int] = []
        chosen: list[float] = []
        for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=max_tokens):
            tokens.append(int(token))
            chosen.append(logprobs[int(token)].item())
            if int(token) in tokenizer.eos_token_ids and not ignore_eos:
                break
        return tokens, chosen

    return generate
