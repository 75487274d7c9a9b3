"""A log that a real gateway writes is one that the simulator can play."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from cluster.cli import main
from tests.e2e.conftest import Served

pytestmark = pytest.mark.ray


def test_what_the_gateway_logs_can_be_simulated(
    tmp_path: Path, start: Callable[..., AbstractContextManager[Served]]
) -> None:
    path = tmp_path / "requests.jsonl"
    first = list(range(5, 135))
    with start("--request-log", str(path)) as served:
        answer = served.complete(first, max_tokens=8, temperature=0)
        served.complete([*first, 7, 8, 9], max_tokens=3, temperature=0)
        with pytest.raises(httpx.ReadTimeout):
            served.client.post("/v1/completions", json={"prompt": first, "max_tokens": 300}, timeout=0.05)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["prompt"], line["max"]) for line in lines] == [(130, 8), (133, 3), (130, 300)]
    assert lines[0]["output"] == answer["usage"]["completion_tokens"]
    assert lines[2]["finish"] == "none", "a client that leaves is logged too"
    assert lines[0]["hashes"][:20] == lines[1]["hashes"][:20]
    result = CliRunner().invoke(main, ["simulate", str(path), "--macs", "1", "--json"])
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["served"] == 3
    assert told["hit_rate"] > 0.5
