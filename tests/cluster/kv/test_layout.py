import pytest

from cluster.kv.layout import KVBudgetTooSmall, KVGroup, plan_layout
from cluster.kv.spec import FullAttentionSpec

SPEC = FullAttentionSpec(num_kv_heads=2, head_dim=8, dtype_bytes=2)


def test_a_token_is_a_key_and_a_value():
    assert SPEC.token_bytes == 2 * 2 * 8 * 2


@pytest.mark.parametrize("field", ["num_kv_heads", "head_dim", "dtype_bytes"])
def test_a_spec_field_below_one_is_named(field):
    with pytest.raises(ValueError, match=f"{field} must be at least 1, got 0"):
        FullAttentionSpec(**{"num_kv_heads": 1, "head_dim": 1, "dtype_bytes": 1} | {field: 0})


def test_all_layers_share_one_group_and_one_block_spans_them():
    layout = plan_layout([SPEC] * 3, kv_budget_bytes=16 * 3 * 64 * 10 + 1, max_model_len=40)
    assert layout.groups == (KVGroup(0, (0, 1, 2)),)
    assert layout.block_bytes == 16 * 3 * 64
    assert (layout.num_blocks, layout.num_usable_blocks) == (10, 9)
    assert layout.token_capacity == 9 * 16
    assert layout.max_concurrency == 9 / 3


def test_layers_of_different_widths_share_a_block_of_their_summed_bytes():
    wide = FullAttentionSpec(num_kv_heads=4, head_dim=8, dtype_bytes=2)
    assert plan_layout([SPEC, wide], kv_budget_bytes=10**6, max_model_len=2).block_bytes == 16 * (64 + 128)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 0), (2, 1), (17, 1), (18, 2), (33, 2)])
def test_the_last_token_needs_no_room(num_tokens, num_blocks):
    layout = plan_layout([SPEC], kv_budget_bytes=10**6, max_model_len=40)
    assert layout.num_blocks_for(num_tokens) == num_blocks


def test_a_budget_for_exactly_one_longest_sequence_is_enough():
    """One byte less is too little, and the message has what, needed and got."""
    needed = (1 + 3) * 16 * 64
    assert plan_layout([SPEC], kv_budget_bytes=needed, max_model_len=49).max_concurrency == 1
    with pytest.raises(
        KVBudgetTooSmall, match=f"49 tokens needs 4 blocks .* = {needed} bytes .* got {needed - 1} bytes"
    ):
        plan_layout([SPEC], kv_budget_bytes=needed - 1, max_model_len=49)


def test_a_negative_budget_is_too_small():
    """What is left of a small Mac after the weights may be less than nothing."""
    with pytest.raises(KVBudgetTooSmall, match="got -5 bytes = 0 blocks"):
        plan_layout([SPEC], kv_budget_bytes=-5, max_model_len=2)


def test_a_model_without_layers_is_refused():
    with pytest.raises(ValueError, match="at least one layer"):
        plan_layout([], kv_budget_bytes=10**6, max_model_len=2)


@pytest.mark.parametrize(
    ("sizes", "message"), [({"block_size": 0}, "block_size"), ({"max_model_len": 1}, "max_model_len")]
)
def test_a_size_out_of_range_is_named(sizes, message):
    with pytest.raises(ValueError, match=f"{message} must be at least"):
        plan_layout([SPEC], **{"kv_budget_bytes": 10**6, "max_model_len": 2} | sizes)
