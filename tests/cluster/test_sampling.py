"""What a client leaves out comes from the model; what it gets wrong is named."""

import json

import pytest

from cluster.errors import InvalidRequest
from cluster.sampling import Defaults, SamplingRequest, check_token_ids, resolve

BAD = {
    "temperature": (float("nan"), float("inf"), -0.1, 101.0),
    "top_p": (0.0, -1.0, 1.1, float("nan")),
    "min_p": (-0.1, 1.1, float("nan")),
    "top_k": (-1, 2**31),
    "seed": (-1, 2**64),
    "max_tokens": (0, -1),
    "num_top_logprobs": (-1, 21),
    "stop": (("",), ("a",) * 17, ("a" * 1025,)),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_a_value_out_of_range_is_refused_by_field_and_value(field, value):
    with pytest.raises(InvalidRequest) as caught:
        resolve(SamplingRequest(**{field: value}), Defaults())
    assert caught.value.field.split("[")[0] in (field, "top_logprobs")


def test_the_client_wins_over_the_model_and_the_model_over_ours():
    defaults = Defaults(temperature=0.6, top_k=20)
    params = resolve(SamplingRequest(temperature=0.0, seed=3), defaults)
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.0, 20, 1.0, 3)


def test_without_a_seed_each_request_gets_its_own():
    assert len({resolve(SamplingRequest(), Defaults()).seed for _ in range(20)}) == 20


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Defaults(1.0, 0, 1.0, 0.0)),
        ({"do_sample": False, "temperature": 0.7}, Defaults(temperature=0.0)),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, Defaults(0.6, 20, 0.95, 0.0)),
        ({"top_k": None}, Defaults()),
    ],
)
def test_defaults_come_from_generation_config(tmp_path, config, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert Defaults.of_model(tmp_path) == expected


def test_a_model_without_generation_config_has_plain_defaults(tmp_path):
    assert Defaults.of_model(tmp_path) == Defaults()


def test_the_first_token_outside_the_vocabulary_is_named():
    check_token_ids("prompt", (0, 99), 100)
    with pytest.raises(InvalidRequest, match=r"prompt\[1\]: must be a token id from 0 to 99, got 100"):
        check_token_ids("prompt", (0, 100, 200), 100)
