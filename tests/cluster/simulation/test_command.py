"""`cidery simulate` as a user meets it."""

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from cluster.cli import main
from cluster.simulation import plots


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": i * 2000, "input_length": 1600, "output_length": 20, "hash_ids": [0, 1, 2, 10 + i]}
        for i in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def simulate(*args: object) -> Result:
    return CliRunner().invoke(main, ["simulate", *map(str, args)])


def test_a_table_of_the_run_and_of_the_macs(trace: Path) -> None:
    result = simulate(trace, "--macs", 2)
    assert result.exit_code == 0, result.output
    assert "TTFT mean" in result.stdout
    assert "mac-1" in result.stdout
    assert "mac-2" in result.stdout


def test_json_has_all_figures(trace: Path) -> None:
    result = simulate(trace, "--macs", 2, "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["requests"], told["served"], told["rejected"]) == (8, 8, {})
    assert told["hit_rate"] == pytest.approx(7 * 1536 / (8 * 1600), abs=1e-4)
    assert set(told["ttft_s"]) == set(told["e2e_s"]) == {"mean", "p50", "p90", "p99"}
    assert sum(mac["requests"] for mac in told["macs"]) == 8
    assert simulate(trace, "--macs", 2, "--json").stdout == result.stdout


def test_more_load_takes_longer(trace: Path) -> None:
    calm, crowded = (json.loads(simulate(trace, "--macs", 1, "--json", "--rate", r).stdout) for r in (1, 50))
    assert crowded["e2e_s"]["mean"] > calm["e2e_s"]["mean"]
    assert json.loads(simulate(trace, "--json", "--requests", 3).stdout)["requests"] == 3


def test_a_fleet_file_and_a_model(trace: Path, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet.json"
    fleet.write_text(
        '{"classes": {"a": {"prefill_tokens_per_s": 500, "kv_memory": "40GiB"}}, "macs": [{"class": "a", "count": 3}]}'
    )
    told = json.loads(simulate(trace, "--fleet", fleet, "--json").stdout)
    assert [mac["name"] for mac in told["macs"]] == ["a-1", "a-2", "a-3"]
    both = simulate(trace, "--fleet", fleet, "--macs", 3)
    assert (both.exit_code, "--macs and --fleet" in both.stderr) == (2, True)
    config = Path(__file__).parents[2] / "configs" / "qwen3-next-80b.json"
    result = simulate(trace, "--model", config, "--max-model-len", 32768, "--json", "--macs", 2)
    assert json.loads(result.stdout)["served"] == 8, result.output


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--macs", "0"], "0 is not in the range"),
        (["--rate", "0"], "0.0 is not in the range"),
        (["--fail", "mac-1"], "'mac-1' is no failure; write mac-3@600"),
        (["--fail", "mac-99@1"], "no Mac is named 'mac-99'"),
        (["--policy", "best"], "'best' is not one of 'predicted_seconds', 'round_robin'"),
        (["--event-loss", "1"], "1.0 is not in the range"),
        (["--kv-cache-memory", "1MiB"], "mac-1: "),
        (["--fleet", "nowhere.json"], "'nowhere.json' does not exist"),
    ],
)
def test_bad_options_say_what_is_wrong(trace: Path, args: list[str], says: str) -> None:
    result = simulate(trace, *args)
    assert result.exit_code != 0
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_a_broken_trace_names_the_line(trace: Path) -> None:
    with trace.open("a") as file:
        file.write("oops\n")
    result = simulate(trace)
    assert result.exit_code == 1
    assert f"{trace}:9: is no JSON" in result.stderr


def test_plots_without_matplotlib_say_how_to_get_it(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = simulate(trace, "--plots", "somewhere")
    assert result.exit_code == 1
    assert "pip install 'cidery[plots]'" in result.stderr


def test_plots_are_pngs(trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    result = simulate(trace, "--macs", 2, "--plots", tmp_path / "out")
    assert result.exit_code == 0, result.output
    files = sorted((tmp_path / "out").iterdir())
    assert len(files) == 3
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
    plots.check_plots()


def test_policies_side_by_side(trace: Path) -> None:
    result = simulate(trace, "--macs", 2, "--policy", "round_robin", "--policy", "predicted_seconds")
    assert result.exit_code == 0, result.output
    assert "round_robin" in result.stdout
    assert "predicted_seconds" in result.stdout
    assert "mac-1" not in result.stdout, "Macs are shown of a single run"
    lines = simulate(trace, "--policy", "round_robin", "--policy", "least_loaded", "--json").stdout.splitlines()
    assert [json.loads(line)["policy"] for line in lines] == ["round_robin", "least_loaded"]


def test_help_has_examples() -> None:
    result = simulate("--help")
    assert "cidery simulate requests.jsonl --fleet fleet.json" in result.output
    assert '"kv_memory": "88GiB"' in result.output
