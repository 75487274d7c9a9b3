"""Settings that contradict themselves are refused when they are made."""

import pytest

from cluster.config import BatchConfig, GatewayConfig, MacConfig, ModelConfig, SpeculationConfig


def test_every_running_request_has_a_token_in_a_step():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens must be at least max_num_seqs \(64\).*got 32"):
        BatchConfig(max_num_batched_tokens=32)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 1e-300])
def test_a_share_is_a_usable_number(weight):
    with pytest.raises(ValueError, match="the weight of tenant 'research' must be from 1e-6 to 1e6"):
        GatewayConfig(tenant_weights={"research": weight})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"method": "medusa"}, "must be off, ngram, draft, auto, got 'medusa'"),
        ({"method": "ngram", "num_tokens": 0}, "must be from 1 to 15, got 0"),
        ({"method": "ngram", "num_tokens": 16}, "must be from 1 to 15, got 16"),
        ({"method": "draft"}, "draft needs a draft model"),
        ({"method": "ngram", "draft_model": "x"}, "ngram has no use for a draft model"),
        ({"method": "off", "draft_model": "x"}, "off has no use for a draft model"),
    ],
)
def test_speculation_that_cannot_be_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        SpeculationConfig(**fields)


def test_speculation_travels_with_the_other_settings_of_a_mac():
    config = MacConfig(ModelConfig("m", "m"), speculation=SpeculationConfig("auto", 5, "small"))
    assert MacConfig.from_dict(config.to_dict()) == config
    assert (config.speculation.max_drafts, SpeculationConfig().max_drafts) == (5, 0)
