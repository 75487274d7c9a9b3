"""The request log says how long and what is shared, and nothing else; the simulator reads it."""

import base64
import json
import os
import stat
from pathlib import Path

import pytest

from cluster.errors import StartupFailed
from cluster.kv.hashing import first_extras, root_hash
from cluster.request_log import RequestLog
from cluster.scheduling.request import Finish
from cluster.simulation.errors import BadInput
from cluster.simulation.trace_files import read_trace

ROOT = root_hash(model="m", tokenizer="t", kv_format="f", block_size=16)


def write(log: RequestLog, prompt: list[int], output: list[int], at_s: float = 100.0, **changed: object) -> None:
    fields = {
        "at_s": at_s,
        "model": "m",
        "root": ROOT,
        "block_size": 16,
        "prompt": tuple(prompt),
        "output": output,
        "max_tokens": 50,
        "boundaries": (5,),
        "finish": Finish.STOP,
    }
    log.write(**(fields | changed))  # type: ignore[arg-type]


def test_one_line_a_request(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RequestLog(str(path))
    write(log, list(range(130)), list(range(70)), finish=None)
    log.close()
    line = json.loads(path.read_text())
    assert len(base64.b64decode(line.pop("hashes"))) == 8 * 3, "200 tokens fill three hashes of 64"
    assert line == {
        **{"cidery": 1, "at": 100.0, "model": "m", "prompt": 130, "output": 70, "max": 50, "block": 64},
        **{"ends": [5], "finish": "none"},
    }
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_the_simulator_finds_what_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RequestLog(str(path))
    first = list(range(130))
    write(log, first, [7] * 70)
    write(log, [*first, *[7] * 70, *range(20)], [8], at_s=107.5, max_tokens=9)
    write(log, list(range(1000, 1130)), [], at_s=103.0)
    log.close()
    trace = read_trace(path)
    assert [(r.at_s, r.num_prompt_tokens, r.num_output_tokens, r.session) for r in trace.requests] == [
        (100.0, 130, 70, 0),
        (103.0, 130, 1, 1),
        (107.5, 220, 1, 0),
    ]
    assert trace.block_size == 64
    assert trace.all_hashes(2)[:3] == trace.all_hashes(0)[:3]
    assert not set(trace.all_hashes(1)) & set(trace.all_hashes(0))
    assert [r.max_tokens for r in trace.requests] == [70, 50, 9]
    assert trace.requests[0].boundaries == (5,)


def test_the_same_text_has_other_hashes_in_another_process(tmp_path: Path) -> None:
    """Two logs stand for two processes: each has a secret of its own."""
    lines = []
    for name in ("a", "b"):
        log = RequestLog(str(tmp_path / name))
        write(log, list(range(64)), [])
        log.close()
        lines.append(json.loads((tmp_path / name).read_text())["hashes"])
    assert lines[0] != lines[1]


def test_no_token_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RequestLog(str(path))
    write(log, [123456789] * 64, [987654321] * 10)
    log.close()
    assert "123456789" not in path.read_text()
    assert "987654321" not in path.read_text()


def test_a_file_that_cant_be_opened(tmp_path: Path) -> None:
    with pytest.raises(StartupFailed, match="can't be opened: Is a directory"):
        RequestLog(str(tmp_path))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full to stand for a full disk")
def test_a_full_disk_ends_the_log_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog("/dev/full")
    write(log, [1] * 64, [])
    write(log, [1] * 64, [])
    log.close()
    ended = [record for record in caplog.records if "request log ends path=/dev/full" in record.getMessage()]
    assert len(ended) == 1, "said once, not at every request"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"cidery": 2}, "is version 2 of the request log; this program reads 1"),
        ({"block": 32}, "block is 32, that of the lines before 64"),
        ({"model": "n"}, "is of model 'n', lines before of 'm'"),
        ({"hashes": "!"}, "hashes are not base64"),
        ({"hashes": "AAAA"}, "hashes are 3 bytes"),
        ({"hashes": None}, "hashes are not base64"),
        ({"ends": [99]}, "ends must be offsets within the 64 tokens"),
        ({"prompt": "x"}, "prompt must be a number"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, changed: dict[str, object], says: str) -> None:
    path = tmp_path / "log.jsonl"
    log = RequestLog(str(path))
    write(log, list(range(64)), [1])
    write(log, list(range(64)), [1])
    log.close()
    first, second = path.read_text().splitlines()
    path.write_text(first + "\n" + json.dumps(json.loads(second) | changed) + "\n")
    with pytest.raises(BadInput) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert says in str(caught.value)


def test_what_an_adapter_made_is_shared_with_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    log = RequestLog(str(path))
    write(log, list(range(130)), [7] * 70)
    write(log, list(range(130)), [7] * 70, extras=first_extras("", "digest"))
    log.close()
    plain, adapted = (base64.b64decode(json.loads(line)["hashes"]) for line in path.read_text().splitlines())
    hashes = [{joined[at : at + 8] for at in range(0, len(joined), 8)} for joined in (plain, adapted)]
    assert not hashes[0] & hashes[1]
