"""`cidery serve --address`: the fleet lives in a Ray that was there before, and outlives the gateway."""

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

pytestmark = [pytest.mark.ray, pytest.mark.slow]

RESOURCES = '{"head": 1, "mac": 1, "mac:one": 1}'


@pytest.fixture
def ray_address(monkeypatch) -> Iterator[str]:
    """A head as a fleet's would be, ended by its own process: `ray stop` would end every Ray of this machine."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
    options = ["--num-cpus=4", "--num-gpus=0", "--include-dashboard=false", "--object-store-memory=100000000"]
    process = subprocess.Popen(
        [*command, *options, f"--resources={RESOURCES}", "--disable-usage-stats"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(os.environ),
    )
    assert process.stdout is not None
    lines = iter(process.stdout.readline, "")
    assert any("--block" in line for line in lines), "ray did not start"
    yield f"{ray.util.get_node_ip_address()}:{port}"
    process.terminate()
    process.wait(timeout=60)
    process.stdout.close()


def test_a_fleet_outlives_its_gateway_and_is_found_again(start, ray_address):
    options = ("--address", ray_address, "--kv-cache-memory", "16MiB")
    with start(*options) as served:
        assert served.macs == ["one"]
        first = served.complete([5] * 100, max_tokens=4, temperature=0)
        pid = served.fleet()["one"]["worker_pid"]
    with start(*options) as served:
        assert served.fleet()["one"]["worker_pid"] == pid
        again = served.complete([5] * 100, max_tokens=4, temperature=0)
        assert again["choices"] == first["choices"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    with start(*options, "--max-model-len", "256") as served:  # other settings: another manager
        assert served.fleet()["one"]["worker_pid"] != pid
        assert served.client.get("/v1/models").json()["data"][0]["max_model_len"] == 256
        assert served.complete("Hello", max_tokens=2)["usage"]["completion_tokens"] >= 1
