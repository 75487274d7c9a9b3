"""Any mlx-lm model of a supported family is served from its folder; others are refused by name."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import generate_step
from mlx_lm.models import llama, mamba

from cluster.config import bundled_model
from cluster.tokenizer import Tokenizer

pytestmark = [pytest.mark.ray, pytest.mark.slow]

VOCABULARY = 1536
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "eos_token_id": VOCABULARY - 1,
}
MAMBA = {
    "model_type": "mamba",
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "state_size": 8,
    "num_hidden_layers": 2,
    "conv_kernel": 4,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
}


def save(folder: Path, model, config: dict) -> Path:
    """A random model in float32 with the bundled tokenizer."""
    folder.mkdir()
    mx.random.seed(0)
    model.update(tree_map(lambda weights: mx.random.normal(weights.shape) * 0.3, model.parameters()))
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(bundled_model()) / name, folder)
    return folder


def test_a_llama_from_a_folder_gives_mlx_lms_tokens(start, tmp_path):
    model = llama.Model(llama.ModelArgs.from_dict(LLAMA))
    folder = save(tmp_path / "random-llama", model, LLAMA)
    tokenizer = Tokenizer(folder)
    prompt = [5 + number * 7 % 1000 for number in range(70)]
    expected = [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=40)]
    with start("--model", str(folder), "--kv-cache-memory", "16MiB", "--max-num-batched-tokens", "64") as served:
        assert [each["id"] for each in served.client.get("/v1/models").json()["data"]] == ["random-llama"]
        for _ in range(2):  # the second time from the cache
            answer = served.complete(prompt, max_tokens=40, temperature=0, ignore_eos=True, logprobs=0)
            tokens = answer["choices"][0]["logprobs"]["tokens"]
            assert answer["usage"]["completion_tokens"] == len(expected)
            assert tokens == [tokenizer.token_text(token) for token in expected]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


def test_a_mamba_from_a_folder_gives_mlx_lms_tokens_from_its_states_too(start, tmp_path):
    model = mamba.Model(mamba.ModelArgs.from_dict(MAMBA))
    folder = save(tmp_path / "random-mamba", model, MAMBA)
    tokenizer = Tokenizer(folder)
    prompt = [5 + number * 7 % 1000 for number in range(70)]
    expected = [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=20)]
    options = ("--kv-cache-memory", "16MiB", "--max-num-batched-tokens", "64", "--max-model-len", "512")
    with start("--model", str(folder), *options) as served:
        for _ in range(2):
            answer = served.complete(prompt, max_tokens=20, temperature=0, ignore_eos=True, logprobs=0)
            tokens = answer["choices"][0]["logprobs"]["tokens"]
            assert tokens == [tokenizer.token_text(token) for token in expected]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 64


def test_a_family_that_mlx_lm_does_not_know_is_refused_by_name(tmp_path):
    folder = save(tmp_path / "random", llama.Model(llama.ModelArgs.from_dict(LLAMA)), LLAMA | {"model_type": "unheard"})
    done = serve("--model", str(folder))
    assert done.returncode == 1
    assert "unheard" in done.stderr
    assert "Traceback" not in done.stderr.split("worker ended")[0]


def test_a_kv_cache_larger_than_the_machine_is_refused():
    done = serve("--kv-cache-memory", "4000TiB")
    assert done.returncode == 1
    assert "does not fit: beside weights of" in done.stderr


def test_a_context_that_does_not_fit_says_what_would():
    done = serve("--kv-cache-memory", "1MiB")
    assert done.returncode == 1
    assert "a sequence of max_model_len 4096 tokens needs" in done.stderr
    assert "or raise the budget" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "/nowhere"), "is no folder on this machine"),
        (("--model", ""), "--model is empty"),
        (("--address", "127.0.0.1:1"), "no Ray answers at 127.0.0.1:1"),
        (("--request-log", "/nowhere/log"), "/nowhere/log"),
        (("--block-size", "5"), "block_size must be 16 or 32"),
        (("--gpu-memory-utilization", "1.5"), "must be in (0, 1]"),
        (("--kv-cache-memory", "much"), "is no size"),
        (("--macs", "0"), "macs must be from 1 to 16"),
        (("--http-port", "70000"), "http_port must be 0"),
        (("--http-port", "18431", "--grpc-port", "18431"), "they must differ"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(arguments, words):
    done = serve(*arguments)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert "starting Ray" not in done.stderr


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cluster", "serve", "--http-port", "0", "--grpc-port", "0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
