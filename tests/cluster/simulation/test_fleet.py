"""Fleet files, failures and costs: good ones, and what bad ones say."""

from pathlib import Path

import pytest

from cluster.scheduling.plan import Slice
from cluster.simulation.cost_model import CostModel
from cluster.simulation.errors import BadInput
from cluster.simulation.failures import Failure, parse_failure
from cluster.simulation.fleet import read_fleet, read_layers, uniform_fleet

CONFIGS = Path(__file__).parents[2] / "configs"
GOOD = """{
  "max_model_len": 1000,
  "classes": {
    "studio": {"prefill_tokens_per_s": 2000, "kv_memory": "2GiB", "max_num_seqs": 8},
    "mini": {"prefill_tokens_per_s": 300.5, "kv_memory": 1000000, "step_s": 0.05}
  },
  "macs": [
    {"class": "studio", "count": 2},
    {"class": "mini", "name": "kitchen"}
  ]
}"""


def fleet_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.json"
    path.write_text(text)
    return path


def test_a_mixed_fleet(tmp_path: Path) -> None:
    fleet = read_fleet(fleet_file(tmp_path, GOOD))
    assert [mac.name for mac in fleet.macs] == ["studio-1", "studio-2", "kitchen"]
    studio, _, kitchen = fleet.macs
    assert (studio.kv_bytes, kitchen.kv_bytes) == (2**31, 1_000_000)
    assert (studio.limits.max_num_seqs, kitchen.limits.max_num_seqs) == (8, 64)
    assert (kitchen.costs.prefill_tokens_per_s, kitchen.costs.step_s) == (300.5, 0.05)
    assert fleet.max_model_len == 1000


def test_a_model_beside_the_file(tmp_path: Path) -> None:
    config = (CONFIGS / "gemma-3-27b.json").read_text()
    (tmp_path / "config.json").write_text(config)
    fleet = read_fleet(fleet_file(tmp_path, GOOD.replace('"max_model_len"', '"model": "config.json", "max_model_len"')))
    assert fleet.layers == read_layers(CONFIGS / "gemma-3-27b.json")
    assert fleet.layers != uniform_fleet(1).layers


@pytest.mark.parametrize(
    ("old", "new", "line", "says"),
    [
        ('"macs": [', '"macs" [', 7, "is no JSON"),
        ('"prefill_tokens_per_s": 2000, ', "", 4, "class 'studio' lacks 'prefill_tokens_per_s'"),
        (', "kv_memory": 1000000', "", 5, "class 'mini' lacks 'kv_memory'; it has prefill_tokens_per_s, step_s"),
        ('"step_s"', '"stepps"', 5, "class 'mini' has stepps; known are prefill_tokens_per_s"),
        ("300.5", "-1", 5, "class 'mini': prefill_tokens_per_s must be positive"),
        ("300.5", '"fast"', 5, "prefill_tokens_per_s is of the wrong type: 'fast'"),
        ("0.05", "null", 5, "step_s must be a number, got None"),
        ('"2GiB"', '"2 parsecs"', 4, "kv_memory: '2 parsecs' is no size"),
        ('"class": "mini"', '"class": "mni"', 9, "Mac 3 is of class 'mni'; known are studio, mini"),
        ('"class": "mini", ', "", 9, "Mac 3 lacks 'class'"),
        ('"count": 2', '"count": 0', 8, "Mac 1: count must be a whole number of at least 1, got 0"),
        ('"max_num_seqs": 8', '"max_num_seqs": 1.5', 4, "max_num_seqs must be a whole number"),
        ('"name": "kitchen"', '"name": "studio-1"', 1, "macs must be at least one, with names of their own"),
        ('"max_model_len": 1000', '"max_model_len": 1', 1, "max_model_len must be a whole number of at least 2"),
        ('"max_model_len": 1000', '"model": 5', 1, "the fleet: model is of the wrong type: 5"),
        ('"macs"', '"mac"', 1, "the fleet has mac; known are model, max_model_len, classes, macs"),
        ('{"class": "mini", "name": "kitchen"}', "7", 1, "macs must be objects"),
    ],
)
def test_bad_files_name_the_line(tmp_path: Path, old: str, new: str, line: int, says: str) -> None:
    assert old in GOOD
    path = fleet_file(tmp_path, GOOD.replace(old, new, 1))
    with pytest.raises(BadInput) as caught:
        read_fleet(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert says in str(caught.value)


def test_a_list_is_no_fleet(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="expected an object"):
        read_fleet(fleet_file(tmp_path, "[]"))


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No such file"):
        read_fleet(fleet_file(tmp_path, GOOD.replace('"max_model_len"', '"model": "x", "max_model_len"')))


@pytest.mark.parametrize(
    ("text", "failure"),
    [("mac-3@600", Failure("mac-3", 600.0)), ("a@0.5+1.5", Failure("a", 0.5, 1.5))],
)
def test_failures(text: str, failure: Failure) -> None:
    assert parse_failure(text) == failure


@pytest.mark.parametrize("text", ["", "mac-3", "mac-3@", "mac-3@x", "@5", "mac-3@5+", "mac-3@-5"])
def test_bad_failures(text: str) -> None:
    with pytest.raises(ValueError, match="is no failure"):
        parse_failure(text)


def row(start: int, num_tokens: int) -> Slice:
    return Slice(1, start, num_tokens, False, {})


def test_costs_grow_with_context_and_rows() -> None:
    costs = CostModel(100.0, context_doubling_tokens=1000, step_s=0.5, row_s=0.01, context_token_s=0.001)
    assert costs.step_time_s([row(0, 200)]) == pytest.approx(2.0 * 1.1)
    assert costs.step_time_s([row(900, 200)]) == pytest.approx(2.0 * 2.0)
    assert costs.step_time_s([row(10, 1)]) == pytest.approx(0.5 + 0.01 + 0.01)
    assert costs.step_time_s([row(0, 200), row(10, 1), row(20, 1)]) == pytest.approx(2.2 + 0.02 + 0.03)
    assert CostModel(100.0, speed=0.5, step_s=0.5, row_s=0, context_token_s=0).step_time_s([row(0, 1)]) == 1.0


@pytest.mark.parametrize("field", ["prefill_tokens_per_s", "context_doubling_tokens", "step_s", "speed"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_costs_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        CostModel(**{field: value})
