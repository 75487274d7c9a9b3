"""Settings that contradict themselves are refused when they are made."""

import pytest

from cluster.config import BatchConfig, GatewayConfig


def test_every_running_request_has_a_token_in_a_step():
    with pytest.raises(ValueError, match=r"max_num_batched_tokens must be at least max_num_seqs \(64\).*got 32"):
        BatchConfig(max_num_batched_tokens=32)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 1e-300])
def test_a_share_is_a_usable_number(weight):
    with pytest.raises(ValueError, match="the weight of tenant 'research' must be from 1e-6 to 1e6"):
        GatewayConfig(tenant_weights={"research": weight})
