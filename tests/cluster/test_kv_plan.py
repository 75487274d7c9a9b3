import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cluster.kv_plan import kv

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.json"))
USUAL = ("--memory", "24GiB", "--max-model-len", "32768")


def plan(*args):
    return CliRunner().invoke(kv, ["plan", *map(str, args)])


def report(*args):
    result = plan(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def path_of(name):
    return next(path for path in CONFIGS if path.stem == name)


def written(folder, config):
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    return path


def test_all_models_are_there():
    assert len(CONFIGS) == 11


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_model_wastes_at_most_a_percent_and_keeps_its_blocks_small(path):
    told = report(path, *USUAL)
    assert 0 <= told["waste_percent"] <= 1
    assert told["unused_bytes"] < min(pool["page_bytes"] for pool in told["pools"])
    assert told["block_size"] == told["min_match_tokens"] == 16
    assert all(group["block_tokens"] == (None if group["is_state"] else 16) for group in told["groups"])


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_report_has_everything_and_adds_up(path):
    told = report(path, *USUAL)
    assert set(told) == {
        *("model_type", "budget_bytes", "max_model_len", "block_size", "pools", "groups", "num_shared_layers"),
        *("unused_bytes", "waste_percent", "null_block_bytes", "bytes_per_sequence", "token_capacity"),
        *("max_concurrency", "min_match_tokens", "reasons"),
    }
    used = sum(pool["num_blocks"] * pool["page_bytes"] for pool in told["pools"])
    assert used + told["unused_bytes"] == told["budget_bytes"] == 24 * 2**30
    assert told["null_block_bytes"] == sum(pool["page_bytes"] for pool in told["pools"])
    needed = sum(pool["num_blocks_per_sequence"] * pool["page_bytes"] for pool in told["pools"])
    assert needed == told["bytes_per_sequence"]
    assert told["max_concurrency"] == (told["budget_bytes"] - told["null_block_bytes"]) / needed
    assert sorted(g for pool in told["pools"] for g in pool["group_ids"]) == [g["group_id"] for g in told["groups"]]
    assert told["reasons"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_people_get_a_table_with_the_same_facts(path):
    told, result = report(path, *USUAL), plan(path, *USUAL)
    assert result.exit_code == 0, result.output
    for group in told["groups"]:
        assert group["kind"] in result.output
        assert f"{group['page_bytes']:,}" in result.output
    for fact in (f"{told['token_capacity']:,} tokens", f"{told['max_concurrency']:.2f} sequences", "16 tokens"):
        assert fact in result.output
    assert f"{told['waste_percent']:.3f} %" in result.output
    unwrapped = " ".join(result.output.split())
    assert all(reason in unwrapped for reason in told["reasons"])


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("qwen3-8b", [(0, "full-attention", None, 36)]),
        ("gemma-3-27b", [(0, "full-attention", None, 10), (1, "window", 1024, 52)]),
        ("gpt-oss-20b", [(0, "full-attention", None, 12), (0, "window", 128, 12)]),
        ("llama-4-scout", [(0, "full-attention", None, 12), *[(0, "chunked", 8192, 12)] * 3]),
        ("qwen3-next-80b", [(0, "full-attention", None, 12), (1, "gated_delta_net", None, 36)]),
        ("lfm2-1.2b", [(0, "full-attention", None, 6), (1, "short_conv", None, 10)]),
        ("granite-4-h-tiny", [(0, "full-attention", None, 4), (1, "mamba2", None, 36)]),
        ("nemotron-h-8b", [(0, "full-attention", None, 4), (1, "mamba2", None, 24)]),
        ("mamba2-2.7b", [(0, "mamba2", None, 64)]),
        ("deepseek-v3", [(0, "latent-attention", None, 61)]),
        ("mistral-7b-v0.1", [(0, "full-attention", None, 32)]),
    ],
)
def test_models_are_cut_as_their_layers_allow(name, groups):
    told = report(path_of(name), *USUAL)
    assert [(g["pool_id"], g["kind"], g["window"], len(g["layers"])) for g in told["groups"]] == groups


def test_the_bundled_model_is_the_default_and_its_context_too():
    told = report()
    assert (told["model_type"], told["max_model_len"], told["budget_bytes"]) == ("qwen3", 4096, 24 * 2**30)


def test_a_folder_is_as_good_as_its_file(tmp_path):
    path = written(tmp_path, path_of("gemma-3-27b").read_text())
    assert report(tmp_path, *USUAL) == report(path, *USUAL) == report(path_of("gemma-3-27b"), *USUAL)


def test_without_the_hybrid_manager_there_is_full_attention_only():
    hybrid, full = (
        report(path_of("gemma-3-27b"), *USUAL, *extra) for extra in ([], ["--disable-hybrid-kv-cache-manager"])
    )
    assert [group["kind"] for group in full["groups"]] == ["full-attention"]
    assert full["max_concurrency"] < hybrid["max_concurrency"] / 4
    assert "as --disable-hybrid-kv-cache-manager asks" in full["reasons"][-1]


def test_options_reach_the_plan():
    path = path_of("gemma-3-27b")
    assert report(path, *USUAL, "--block-size", 32)["min_match_tokens"] == 32
    assert report(path, *USUAL, "--gpu-memory-utilization", 0.5)["budget_bytes"] == 12 * 2**30
    usual, quantised = (report(path, *USUAL, *bits)["groups"][0]["page_bytes"] for bits in ([], ["--kv-bits", 4]))
    assert quantised == usual * 4.5 / 16
    smaller = report(path, *USUAL, "--kv-bits", 8, "--kv-group-size", 32)
    assert smaller["groups"][0]["page_bytes"] == usual * 9 / 16
    assert "stored in 8 bits in groups of 32, a scale and a bias each" in smaller["reasons"][-1]
    states = report(path_of("mamba2-2.7b"), *USUAL, "--max-model-len", 4096, "--kv-bits", 8)
    assert states["reasons"][-1] == "Nothing is quantised: recurrent states never are."
    longer = report(path, *USUAL, "--max-num-batched-tokens", 2048)
    assert longer["bytes_per_sequence"] > report(path, *USUAL)["bytes_per_sequence"]


def test_the_models_element_type_counts(tmp_path):
    config = json.loads(path_of("qwen3-8b").read_text())
    usual = report(written(tmp_path, config), *USUAL)["groups"][0]["page_bytes"]
    assert report(written(tmp_path, config | {"dtype": "float32"}), *USUAL)["groups"][0]["page_bytes"] == 2 * usual


def test_layers_that_share_are_counted(tmp_path):
    config = json.loads(path_of("qwen3-8b").read_text()) | {"num_kv_shared_layers": 6}
    path = written(tmp_path, config)
    assert report(path, *USUAL)["num_shared_layers"] == 6
    assert "6 read what others keep" in plan(path, *USUAL).output


def test_a_small_budget_is_shown_in_its_own_unit(tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 4}
    result = plan(written(tmp_path, config), "--memory", 800, "--max-model-len", 2)
    assert "llama: 800 bytes of KV memory" in result.output


@pytest.mark.parametrize(
    ("args", "exit_code", "message"),
    [
        (["nowhere"], 2, "MODEL nowhere: neither a folder with a config.json nor such a file"),
        ([path_of("qwen3-8b"), "--memory", "1GiB"], 1, "got a KV budget of 1073741824 bytes; lower max_model_len to"),
        ([path_of("qwen3-8b"), "--memory", "0"], 1, "no max_model_len fits, or raise the budget"),
        ([path_of("qwen3-8b"), "--memory", "lots"], 2, "'lots' is no size"),
        ([path_of("qwen3-8b"), "--max-model-len", "0"], 2, "max_model_len must be at least 2"),
        ([path_of("qwen3-8b"), "--block-size", "0"], 1, "block_size must be 16 or 32 tokens, got 0"),
        ([path_of("qwen3-8b"), "--kv-bits", "7"], 1, "kv_bits must be one of 4, 8, got 7"),
        ([path_of("qwen3-8b"), "--kv-group-size", "32"], 1, "kv_group_size 32 says how"),
        ([path_of("qwen3-8b"), "--gpu-memory-utilization", "1.5"], 2, "1.5 is not in the range"),
        ([path_of("mamba2-2.7b")], 2, "the model doesn't tell its longest context; give --max-model-len"),
    ],
)
def test_errors_say_what_is_wrong(args, exit_code, message):
    result = plan(*args)
    assert result.exit_code == exit_code
    assert message in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "can't be read as JSON"),
        ("[]", "expected a JSON object, got list"),
        ("[" * 100_000, "can't be read as JSON"),
        (
            {"model_type": "lfm2", "num_hidden_layers": 2, "full_attn_idxs": [[1]]},
            "a list of layer numbers is expected",
        ),
        ({"model_type": "rwkv7"}, "rwkv7: config.json lacks num_hidden_layers"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "--"}, "at least one layer with a KV cache, got none"),
    ],
)
def test_a_config_that_says_too_little_is_refused(tmp_path, content, message):
    result = plan(written(tmp_path, content), *USUAL)
    assert result.exit_code in (1, 2)
    assert message in result.output


def test_help_has_an_example():
    assert "cidery kv plan ./gemma-3-27b-it-4bit --memory 24GiB" in plan("--help").output
