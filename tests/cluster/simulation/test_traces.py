"""Every trace format: what is read, what is shared, and what a broken line says."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from cluster.simulation import arrivals
from cluster.simulation.errors import BadInput
from cluster.simulation.trace import Trace
from cluster.simulation.trace_files import read_trace


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def mooncake(at_ms: int, num_prompt: int, num_output: int, ids: list[int]) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": num_prompt, "output_length": num_output, "hash_ids": ids}


def session(*requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    head = {"id": "a", "block_size": 64, "tool_tokens": 64, "system_tokens": 64}
    return head | fields | {"requests": list(requests)}


def call(t: float, runs: list[list[int]], out: int = 10, lane: str = "0", api: float | None = 1.0) -> dict[str, Any]:
    return {"t": t, "lane": lane, "in": 64 * sum(n for _, n in runs), "out": out, "api": api, "think": 0.0, "h": runs}


def test_mooncake_drops_the_last_partial_block(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl", [mooncake(0, 1000, 5, [0, 1]), mooncake(3000, 1024, 5, [0, 2])]))
    first, second = trace.requests
    assert trace.block_size == 512
    assert (len(first.blocks), len(second.blocks)) == (1, 2)
    assert first.blocks[0] == second.blocks[0]
    assert second.at_s == 3.0


def test_mooncake_answer_is_what_the_next_prompt_goes_on_with(tmp_path: Path) -> None:
    rows = [mooncake(0, 1024, 600, [0, 1]), mooncake(9000, 2048, 5, [0, 1, 2, 3])]
    trace = read_trace(write(tmp_path / "t.jsonl", rows))
    first, second = trace.requests
    assert first.blocks == second.blocks[:3], "1,624 tokens fill three blocks"
    assert first.session == second.session
    assert trace.all_hashes(0) == trace.all_hashes(1)[:3]


def test_mooncake_answer_of_a_sibling_is_its_own(tmp_path: Path) -> None:
    """The second prompt is too short to hold the first one's answer."""
    rows = [mooncake(0, 1024, 600, [0, 1]), mooncake(9000, 1536, 5, [0, 1, 2])]
    trace = read_trace(write(tmp_path / "t.jsonl", rows))
    assert len(trace.requests[0].blocks) == 2
    assert len(trace.all_hashes(0)) == 3
    assert trace.all_hashes(0)[2] not in trace.all_hashes(1)


def test_a_first_block_alone_makes_no_session(tmp_path: Path) -> None:
    rows = [mooncake(0, 1024, 1, [0, 1]), mooncake(1, 1024, 1, [0, 2]), mooncake(2, 1536, 1, [0, 2, 3])]
    assert [r.session for r in read_trace(write(tmp_path / "t.jsonl", rows)).requests] == [0, 1, 1]


def test_agents_share_tools_and_system_prompt_and_nothing_else(tmp_path: Path) -> None:
    rows = [session(call(0, [[1, 4]])), session(call(0, [[1, 4]])), session(call(0, [[1, 4]]), system_tokens=128)]
    first, second, other = read_trace(write(tmp_path / "t.jsonl", rows)).requests
    assert first.blocks[:2] == second.blocks[:2]
    assert first.blocks[2] != second.blocks[2]
    assert first.blocks[0] != other.blocks[0], "another length, another prompt"


def test_agents_wait_for_the_answer_that_ended_last(tmp_path: Path) -> None:
    calls = [call(0, [[1, 4]]), call(5, [[1, 6]]), call(5.5, [[20, 3]], lane="0.1"), call(9, [[1, 8]])]
    requests = read_trace(write(tmp_path / "t.jsonl", [session(*calls)])).requests
    assert [(r.after, r.delay_s) for r in requests] == [(None, 0.0), (0, 4.0), (0, 4.5), (2, 2.5)]
    assert len(requests[0].blocks) == 4, "10 tokens of an answer fill no block"


def test_agents_whose_answer_fills_a_block_leave_it_findable(tmp_path: Path) -> None:
    calls = [call(0, [[1, 4]], out=70), call(5, [[1, 6]])]
    trace = read_trace(write(tmp_path / "t.jsonl", [session(*calls)]))
    assert trace.all_hashes(0) == trace.all_hashes(1)[:5]


def test_a_gap_in_a_chain_makes_other_contents(tmp_path: Path) -> None:
    """Block ids may come again after another prefix: their KV differs."""
    calls = [call(0, [[1, 6]]), call(5, [[1, 3], [5, 2]])]
    first, second = read_trace(write(tmp_path / "t.jsonl", [session(*calls)])).requests
    assert first.blocks[:3] == second.blocks[:3]
    assert not set(first.blocks[3:]) & set(second.blocks[3:])


def test_gzip_is_told_by_content(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(gzip.compress(json.dumps(mooncake(0, 10, 1, [0])).encode()))
    assert len(read_trace(path).requests) == 1


GOOD = mooncake(0, 512, 1, [0])


@pytest.mark.parametrize(
    ("rows", "line", "says"),
    [
        ([], None, "holds no line"),
        (["{"], 1, "is no JSON"),
        ([GOOD, "", "nonsense"], 3, "is no JSON"),
        ([GOOD, "[1]"], 2, "expected a JSON object, got list"),
        ([{"a": 1}], 1, "known format"),
        ([GOOD, {"timestamp": 1, "hash_ids": []}], 2, "lacks the field 'input_length'"),
        ([GOOD, mooncake(0, 513, 1, [0])], 2, "513 tokens take 2 blocks, got 1 ids"),
        ([GOOD, mooncake(0, 0, 1, [])], 2, "input_length must be a number of at least 1, got 0"),
        ([GOOD, GOOD | {"output_length": 1.5}], 2, "output_length must be a whole number, got 1.5"),
        ([GOOD, GOOD | {"timestamp": float("nan")}], 2, "timestamp must be a number"),
        ([GOOD, GOOD | {"hash_ids": "x"}], 2, "hash_ids must be a list"),
        ([GOOD, GOOD | {"hash_ids": ["x"]}], 2, "hash_ids must be whole numbers"),
        ([session(call(0, [[1, 2]])), session(block_size=32)], 2, "block_size is 32, that of the lines before 64"),
        ([session(5)], 1, "requests must be objects"),  # type: ignore[arg-type]
        ([session(call(0, [[1, 2]]) | {"h": [[1]]})], 1, "h must be pairs of whole numbers"),
        ([session(call(0, [[1, 2]]) | {"api": "long"})], 1, "api must be a number of at least 0, got 'long'"),
        ([session(call(0, [[1, 2]]) | {"t": "now"})], 1, "t must be a number of at least 0, got 'now'"),
    ],
)
def test_broken_lines_are_named(tmp_path: Path, rows: list[Any], line: int | None, says: str) -> None:
    path = write(tmp_path / "t.jsonl", rows)
    with pytest.raises(BadInput) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{line}: " if line else f"{path}: ")
    assert says in str(caught.value)


def test_truncated_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(GOOD).encode())[:-9])
    with pytest.raises(BadInput, match="can't be read"):
        read_trace(path)


def sessions(tmp_path: Path) -> Trace:
    rows = [session(call(0, [[1, 3]]), call(7, [[1, 4]])) for _ in range(5)]
    return read_trace(write(tmp_path / "t.jsonl", rows))


def test_starts_keep_sessions_whole_and_depend_on_the_seed(tmp_path: Path) -> None:
    trace = sessions(tmp_path)
    one, again, other = (arrivals.started(trace, 0.1, seed) for seed in (1, 1, 2))
    assert [r.at_s for r in one.requests] == [r.at_s for r in again.requests]
    assert [r.session for r in one.requests] != [r.session for r in other.requests]
    for at, request in enumerate(one.requests):
        if request.after is not None:
            assert request.after < at
            assert one.requests[request.after].session == request.session
    assert [r.at_s for r in one.requests] == sorted(r.at_s for r in one.requests)


def test_rate_moves_arrivals_and_not_pauses(tmp_path: Path) -> None:
    trace = arrivals.scaled(read_trace(write(tmp_path / "m.jsonl", [GOOD, GOOD | {"timestamp": 3000}])), 2.0)
    assert [r.at_s for r in trace.requests] == [0.0, 1.5]
    assert {r.delay_s for r in arrivals.scaled(sessions(tmp_path), 2.0).requests} == {0.0, 6.0}
    assert {r.delay_s for r in arrivals.with_pauses(sessions(tmp_path), 2.0).requests} == {0.0, 2.0}


def test_jitter_is_bounded(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "m.jsonl", [GOOD] * 20))
    moments = [r.at_s for r in arrivals.jittered(trace, 3.0, 0).requests]
    assert moments == sorted(moments)
    assert 0 <= moments[0] < moments[-1] <= 3.0


def test_selecting_keeps_predecessors_that_are_there(tmp_path: Path) -> None:
    trace = sessions(tmp_path)
    kept = trace.select(lambda r: r.session % 2 == 1)
    assert len(kept.requests) == 4
    for request in kept.requests:
        if request.after is not None:
            assert kept.requests[request.after].session == request.session
    alone = trace.select(lambda r: r.after is not None)
    assert {r.after for r in alone.requests} == {None}
