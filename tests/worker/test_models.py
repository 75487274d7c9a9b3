"""What is found out about a model, and which models are refused."""

import importlib
import json

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.worker.families import config_of, make_model
from worker import models
from worker.models import SamplingDefaults


def test_vision_wrapper_is_run_as_the_text_model_inside():
    """The wrapper says nothing of the caches that its text model wants."""
    mistral3 = importlib.import_module("mlx_lm.models.mistral3")
    config = {"model_type": "mistral3", "text_config": config_of("llama"), "eos_token_id": 3}
    loaded = models.adapt(mistral3.Model(mistral3.ModelArgs.from_dict(config)), config)
    assert (loaded.family, loaded.max_model_len, loaded.eos_token_ids) == ("llama", 512, (3,))


def test_layers_of_different_widths_are_told_apart():
    loaded = models.adapt(make_model("openelm"), config_of("openelm"))
    assert [layer.num_kv_heads for layer in loaded.caches] == [2, 1, 4]
    assert {layer.head_dim for layer in loaded.caches} == {8}


@pytest.fixture
def model_dir(tmp_path):
    model = make_model("llama")
    weights = {name: weight.astype(mx.bfloat16) for name, weight in tree_flatten(model.parameters())}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps({**config_of("llama"), "eos_token_id": [5, 6]}))
    return tmp_path


@pytest.mark.skipif(mx.metal.is_available(), reason="of a CPU")
def test_auto_dtype_is_float32_on_a_cpu(model_dir):
    """Half precision is emulated there; asked for by name it is given."""
    automatic = models.load(str(model_dir), dtype="auto")
    assert {layer.dtype for layer in automatic.caches} == {mx.float32}
    asked = models.load(str(model_dir), dtype="bfloat16")
    assert {layer.dtype for layer in asked.caches} == {mx.bfloat16}
    assert automatic.weights_bytes == 2 * asked.weights_bytes
    assert asked.eos_token_ids == (5, 6)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, SamplingDefaults()),
        ({}, SamplingDefaults()),
        ({"do_sample": False, "temperature": 0.6}, SamplingDefaults(temperature=0.0)),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)),
    ],
)
def test_generation_config_gives_the_sampling_defaults(model_dir, given, expected):
    if given is not None:
        (model_dir / "generation_config.json").write_text(json.dumps(given))
    assert models.load(str(model_dir), dtype="auto").sampling_defaults == expected
