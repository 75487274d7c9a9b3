"""The policy benchmark itself: cases, bars, and one small run."""

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from tests.bench import bench_policies
from tests.bench.bench_policies import OURS, SKEWED, WRONG, misleading
from tests.bench.policies_cases import FLEETS, MIXED_CAPACITY, MODELS, fleet_of
from tests.bench.policies_report import bars, table


def row(
    policy: str, ttft: float, e2e: float, fleet: str = "uniform", seed: int = 0, error: float = 0.0
) -> dict[str, Any]:
    times = {"mean": ttft, "p50": ttft, "p90": ttft, "p99": ttft}
    return {
        **{"workload": "w", "fleet": fleet, "model": "dense", "policy": policy, "seed": seed, "requests": 20},
        **{
            "hit_rate": 0.5,
            "hit_error": error,
            "rejected": 0,
            "load": 0.8,
            "ttft_s": times,
            "e2e_s": times | {"mean": e2e},
        },
    }


def met(rows: list[dict[str, Any]]) -> dict[str, bool]:
    return {bar["what"].split(": ")[1]: bar["is_met"] for bar in bars(rows, OURS, WRONG, SKEWED)}


def test_bars_of_a_uniform_fleet() -> None:
    rows = [row(OURS, 10.1, 20.7), row("a", 10.0, 30.0), row("b", 12.0, 20.0)]
    assert met(rows) == {
        "mean TTFT within 2 % of the best other": True,
        "end to end within 3 %": False,
        "hits predicted to 1 %": True,
    }


def test_bars_of_a_mixed_fleet_ask_for_a_lead() -> None:
    rows = [row(OURS, 9.1, 20.0, "mixed"), row("a", 10.0, 20.0, "mixed")]
    assert not met(rows)["mean TTFT 10 % below the best other"]
    rows.append(row(OURS, 8.7, 20.0, "mixed", seed=1))
    assert met(rows)["mean TTFT 10 % below the best other"], "the mean of the seeds counts"


def test_bars_of_a_policy_that_is_told_wrong() -> None:
    rows = [row(OURS, 9.0, 20.0), row("a", 10.0, 20.0), row(WRONG, 10.1, 20.0), row(SKEWED, 10.3, 20.0, error=0.5)]
    assert met(rows)[f"mean TTFT within 2 %, {WRONG}"]
    assert not met(rows)[f"mean TTFT within 2 %, {SKEWED}"]


def test_no_bar_without_a_rival() -> None:
    assert bars([row(OURS, 1.0, 1.0), row(WRONG, 1.0, 1.0)], OURS, WRONG, SKEWED) == []


def test_the_table_shows_means_and_seeds() -> None:
    shown = table([row(OURS, 8.0, 20.0), row(OURS, 9.0, 22.0, seed=1)])
    assert "8.50" in shown
    assert "8.00-9.00" in shown


@pytest.mark.parametrize("model", MODELS)
def test_a_quarter_of_a_mixed_fleet_is_slow(model: str) -> None:
    speeds = [[mac.costs.speed for mac in fleet_of(fleet, model).macs] for fleet in FLEETS]
    assert speeds[0] == [1.0] * 16
    assert sorted(speeds[1]) == [0.4] * 4 + [1.0] * 12
    assert speeds[2] == speeds[1]
    assert pytest.approx(sum(speeds[1]) / sum(speeds[0])) == MIXED_CAPACITY


def test_misleading_fleets_run_at_their_true_speed() -> None:
    fleet = fleet_of("uniform", "dense")
    for how in (WRONG, SKEWED):
        misled = misleading(fleet, how).macs
        assert [mac.costs for mac in misled] == [mac.costs for mac in fleet.macs]
        assert {mac.told_prefill_factor for mac in misled} == ({2.0} if how == WRONG else {1.0, 2.0})


def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "mooncake"
    folder.mkdir()
    lines = [
        {"timestamp": 3000 * (i // 4), "input_length": 2000, "output_length": 5, "hash_ids": [0, 1 + i, 40 + i, 80 + i]}
        for i in range(40)
    ]
    (folder / "conversation_trace.jsonl.gz").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--workloads", "conversation", "--models", "dense", "--seeds", "1", "--traces", str(tmp_path)]
    rows = tmp_path / "rows.jsonl"
    monkeypatch.setattr(sys, "argv", ["bench", *options, "--rows", str(rows)])
    assert bench_policies.main() == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["rows"]) == 3 * len(bench_policies.POLICIES)
    assert {each["requests"] for each in result["rows"]} == {20}, "sessions with odd numbers"
    assert all(each["load"] > 0 for each in result["rows"])
    assert result["bars"]
    whole = rows.read_text()
    rows.write_text(whole[:-30])
    monkeypatch.setattr(sys, "argv", ["bench", *options, "--rows", str(rows), "--report-only"])
    assert bench_policies.main() == 0
    assert json.loads(capsys.readouterr().out)["rows"] == result["rows"][:-1], "the row that was cut does not count"
    monkeypatch.setattr(sys, "argv", ["bench", *options, "--rows", str(rows)])
    assert bench_policies.main() == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [*result["rows"][:-1], approximately(result["rows"][-1])]
    only = ["--only", "conversation:mixed:dense", "--policies", "round_robin"]
    monkeypatch.setattr(sys, "argv", ["bench", *options, *only])
    assert bench_policies.main() == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert (row["fleet"], row["policy"]) == ("mixed", "round_robin")


def approximately(row: dict[str, object]) -> dict[str, object]:
    """But for the time that the run took."""
    return {**row, "cpu_s": ANY}


def test_traces_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--traces", str(tmp_path)])
    assert bench_policies.main() == 1
