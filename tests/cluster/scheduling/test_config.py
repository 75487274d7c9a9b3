import pytest

from cluster.scheduling.config import SchedulerConfig


def test_the_defaults_go_with_any_model():
    assert SchedulerConfig(max_model_len=2).max_plans_in_flight == 2


@pytest.mark.parametrize(
    ("field", "least"),
    [
        ("max_model_len", 2),
        ("max_num_seqs", 1),
        ("max_num_batched_tokens", 64),
        ("max_chunk_tokens", 1),
        ("max_waiting", 1),
        ("max_plans_in_flight", 1),
    ],
)
def test_a_limit_out_of_range_is_named(field, least):
    """The token budget has at least one token for each running sequence, so that none can starve."""
    SchedulerConfig(**{"max_model_len": 8} | {field: least})
    with pytest.raises(ValueError, match=f"{field} must be at least {least}, got {least - 1}"):
        SchedulerConfig(**{"max_model_len": 8} | {field: least - 1})
