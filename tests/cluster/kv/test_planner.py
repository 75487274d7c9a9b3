import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.kv.layout import KVGroup, KVPool
from cluster.kv.planner import (
    MAX_SPLIT_GROUPS,
    KVBudgetTooSmall,
    describe,
    kind_name,
    min_match_tokens,
    plan_layout,
)
from cluster.kv.spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVFormat,
    MLASpec,
    RecurrentStateSpec,
    SharedKVSpec,
    SlidingWindowSpec,
    StateTensor,
)

FULL = FullAttentionSpec(num_kv_heads=2, head_dim=8)
WIDE = FullAttentionSpec(num_kv_heads=4, head_dim=8)
STATE = RecurrentStateSpec("mamba2", (StateTensor((3, 100), 2), StateTensor((10, 10), 4)))


def window(tokens, heads=2, sinks=0):
    return SlidingWindowSpec(heads, 8, tokens, num_sink_tokens=sinks)


def chunked(tokens, heads=2):
    return ChunkedLocalSpec(heads, 8, tokens)


def plan(specs, budget=10**9, max_model_len=1000, **options):
    return plan_layout(specs, kv_budget_bytes=budget, max_model_len=max_model_len, **options)


def cut(layout):
    """(pool, layers) of every group."""
    return [(group.pool_id, group.layer_indices) for group in layout.groups]


def test_layers_of_full_attention_are_one_group_and_a_block_spans_them():
    layout = plan([FULL] * 3, budget=16 * 3 * 64 * 10 + 1, max_model_len=40)
    assert layout.groups == (KVGroup(0, 0, FULL, (0, 1, 2), 16 * 3 * 64),)
    assert layout.pools == (KVPool(0, 16 * 3 * 64, (0,), 10),)
    assert layout.max_concurrency == (9 + 1 / 3072) / 3
    assert layout.token_capacity == 120


def test_layers_of_different_widths_share_a_block_of_their_summed_bytes():
    layout = plan([FULL, WIDE, MLASpec(20, 4)])
    assert cut(layout) == [(0, (0, 1, 2))]
    assert layout.pools[0].page_bytes == 16 * (64 + 128 + 48)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 0), (2, 1), (17, 1), (18, 2), (33, 2)])
def test_the_last_token_needs_no_room(num_tokens, num_blocks):
    assert plan([FULL]).num_blocks_for(num_tokens) == (num_blocks,)


def test_groups_go_full_then_windows_then_chunks_then_states():
    specs = [STATE, chunked(64), window(32), window(8, sinks=4), window(8), FULL, chunked(16), STATE]
    layout = plan([*specs, WIDE])
    assert [layers for _, layers in cut(layout)] == [(5, 8), (4,), (3,), (2,), (6,), (1,), (0, 7)]
    assert [pool.pool_id for pool in layout.pools] == list(range(len(layout.pools)))
    first_groups = [pool.group_ids[0] for pool in layout.pools]
    assert first_groups == sorted(first_groups)


def test_states_of_different_recurrences_are_one_page():
    conv = RecurrentStateSpec("short_conv", (StateTensor((2, 5), 2),))
    layout = plan([STATE, FULL, conv])
    assert cut(layout) == [(0, (1,)), (1, (0, 2))]
    assert layout.groups[1].page_bytes == STATE.state_bytes + conv.state_bytes


def test_kinds_of_equal_size_share_one_pool():
    assert cut(plan([FULL, window(128)] * 12)) == [(0, tuple(range(0, 24, 2))), (0, tuple(range(1, 24, 2)))]


def test_a_kind_of_more_layers_is_cut_into_runs_that_share_the_pool():
    layout = plan([FULL if i % 4 == 3 else chunked(64) for i in range(48)])
    chunks = [i for i in range(48) if i % 4 != 3]
    runs = [tuple(chunks[start : start + 12]) for start in (0, 12, 24)]
    assert cut(layout) == [(0, tuple(range(3, 48, 4))), *((0, run) for run in runs)]


def test_kinds_that_would_take_too_many_runs_get_pools_of_their_own():
    layout = plan([FULL if i % 6 == 5 else window(64) for i in range(62)])
    assert [(pool, len(layers)) for pool, layers in cut(layout)] == [(0, 10), (1, 52)]


@pytest.mark.parametrize(
    ("num_windows", "num_groups"), [(MAX_SPLIT_GROUPS - 1, MAX_SPLIT_GROUPS), (MAX_SPLIT_GROUPS, 2)]
)
def test_six_groups_are_not_too_many(num_windows, num_groups):
    assert len(plan([FULL, *[window(64)] * num_windows]).groups) == num_groups


def test_kinds_of_different_widths_are_not_cut():
    assert cut(plan([FULL, window(64, heads=3), window(64, heads=3)])) == [(0, (0,)), (1, (1, 2))]


def test_kinds_share_a_pool_only_where_their_arrays_are_alike():
    """Pages of equal bytes are not enough: the n-th layer of each group lies in the same array."""
    state = RecurrentStateSpec("s", (StateTensor((16 * 128,), 1),))
    assert cut(plan([WIDE, window(64), window(64), state])) == [(0, (0,)), (1, (1, 2)), (2, (3,))]
    swapped = SlidingWindowSpec(1, 40, window=64, value_head_dim=24)
    assert cut(plan([FullAttentionSpec(1, 24, value_head_dim=40), swapped])) == [(0, (0,)), (1, (1,))]
    assert cut(plan([FullAttentionSpec(2, 16), SlidingWindowSpec(4, 8, window=64)])) == [(0, (0,)), (0, (1,))]


def test_shared_layers_take_no_memory():
    alone, shared = plan([FULL, window(64)]), plan([FULL, window(64), SharedKVSpec(0), SharedKVSpec(1)])
    assert alone == shared


@pytest.mark.parametrize(
    ("specs", "layer", "source"),
    [
        ([FULL, SharedKVSpec(2), FULL], 1, 2),
        ([FULL, SharedKVSpec(-1)], 1, -1),
        ([FULL, SharedKVSpec(9)], 1, 9),
        ([SharedKVSpec(0)], 0, 0),
        ([FULL, SharedKVSpec(0), SharedKVSpec(1)], 2, 1),
        ([STATE, SharedKVSpec(0)], 1, 0),
    ],
)
def test_only_what_an_earlier_layer_of_attention_keeps_can_be_shared(specs, layer, source):
    with pytest.raises(ValueError, match=f"layer {layer} shares the KV of layer {source}, which is no earlier layer"):
        plan(specs)


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        ([], {}, "a model needs at least one layer with a KV cache, got none"),
        ([FULL], {"block_size": 0}, "block_size must be at least 1, got 0"),
        ([FULL], {"max_model_len": 1}, r"max_model_len must be at least 2 \(a prompt token and one to answer\), got 1"),
        ([FULL], {"max_in_flight_tokens": -1}, "max_in_flight_tokens must be at least 0, got -1"),
    ],
)
def test_a_size_out_of_range_is_named(specs, options, message):
    with pytest.raises(ValueError, match=message):
        plan(specs, **options)


def test_without_hybrid_every_layer_of_attention_keeps_every_token():
    quantised = KVFormat(4, 32, 4)
    specs = [FULL, SlidingWindowSpec(3, 8, 64, quantised, 4), ChunkedLocalSpec(5, 8, 64), STATE]
    layout = plan(specs, hybrid=False)
    assert cut(layout) == [(0, (0, 1, 2)), (1, (3,))]
    assert layout.groups[0].page_bytes == 16 * sum(spec.token_bytes for spec in specs[:3])
    assert plan(specs[1:2], hybrid=False).groups[0].spec == FullAttentionSpec(3, 8, quantised, 4)


def test_a_budget_for_exactly_one_longest_sequence_is_enough():
    """One byte less is too little, and the message has what, needed, got and what to do."""
    needed = (1 + 3) * 16 * 64
    assert plan([FULL], budget=needed, max_model_len=49).max_concurrency == 1
    message = (
        rf"max_model_len 49 tokens needs {needed} bytes of KV \(3 \+ 1 blocks of 1024 bytes, .*\), "
        rf"got a KV budget of {needed - 1} bytes; lower max_model_len to 33 or less, or raise the budget"
    )
    with pytest.raises(KVBudgetTooSmall, match=message):
        plan([FULL], budget=needed - 1, max_model_len=49)


def test_the_message_names_every_pools_blocks():
    with pytest.raises(KVBudgetTooSmall, match=r"3 \+ 1 blocks of 1024 bytes and 1 \+ 1 blocks of 1000 bytes"):
        plan([FULL, STATE], budget=1000, max_model_len=49)


def test_a_negative_budget_is_too_small():
    """What is left of a small Mac after the weights may be less than nothing."""
    with pytest.raises(KVBudgetTooSmall, match="got a KV budget of -5 bytes; no max_model_len fits, or raise"):
        plan([FULL], budget=-5, max_model_len=2)


def test_the_budget_is_split_as_the_longest_sequence_needs_it():
    layout = plan([FULL, window(64, heads=3), STATE], budget=10**7, max_model_len=4097)
    needs = layout.num_blocks_for(4097)
    for pool, need in zip(layout.pools, needs, strict=True):
        assert pool.num_blocks - 1 == pytest.approx(need * layout.max_concurrency, rel=0.01, abs=1)


def test_in_flight_tokens_lengthen_windows():
    short, long = plan([window(64)]), plan([window(64)], max_in_flight_tokens=160)
    assert long.num_blocks_for(1000)[0] == short.num_blocks_for(1000)[0] + 10


def test_a_prefix_can_be_found_from_one_block_on():
    assert min_match_tokens(plan([FULL, STATE], block_size=32)) == 32


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (FULL, "full-attention"),
        (MLASpec(4, 2), "latent-attention"),
        (window(64), "window"),
        (chunked(64), "chunked"),
        (STATE, "mamba2"),
    ],
)
def test_every_kind_has_a_name(spec, name):
    assert kind_name(spec) == name


@pytest.mark.parametrize(
    ("specs", "reasons"),
    [
        ([FULL] * 36, ["36 full-attention layers need the same tokens", "steps of 16 tokens."]),
        (
            [FULL, window(64)],
            ["1 full-attention and 1 window layers: 2 groups, all with pages of 1,024 bytes, share one pool"],
        ),
        (
            [FULL if i % 6 == 5 else window(64) for i in range(62)],
            [
                "10 full-attention and 52 window layers: pages differ (10,240 and 53,248 bytes), so each kind has its "
                "own pool; sharing one would take 31 block tables."
            ],
        ),
        (
            [FULL, window(64, heads=3), chunked(32, heads=5)],
            ["1 full-attention, 1 window and 1 chunked layers: pages differ", "their arrays differ"],
        ),
        (
            [chunked(20), MLASpec(32, 0)],
            ["1 latent-attention and 1 chunked layers: pages of 1,024 bytes each, but of unlike arrays"],
        ),
        ([chunked(20), chunked(20), MLASpec(32, 0)], ["pages differ", "their arrays differ"]),
        ([FULL, window(8), window(64, heads=3)], ["only kinds with equal ones share a pool"]),
        (
            [FULL, STATE, STATE],
            ["2 recurrent layers (mamba2): a page is one state of them all, 2,000 bytes, in a pool of its own; blocks "
             "of attention stay at 16 tokens.", "wherever a state was kept."],
        ),
        ([STATE], ["1,000 bytes, in a pool of its own."]),
    ],
)  # fmt: skip
def test_a_layout_says_why_it_is_so(specs, reasons):
    text = " ".join(describe(plan(specs)))
    for reason in reasons:
        assert reason in text


heads = st.integers(1, 3)
attention = st.one_of(
    st.builds(FullAttentionSpec, heads, st.just(8)),
    st.builds(MLASpec, st.sampled_from([12, 16]), st.just(4)),
    st.builds(
        SlidingWindowSpec, heads, st.just(8), st.sampled_from([5, 40]), num_sink_tokens=st.sampled_from([0, 0, 3])
    ),
    st.builds(ChunkedLocalSpec, heads, st.just(8), st.sampled_from([20, 64])),
)
kept_specs = attention | st.builds(
    RecurrentStateSpec, st.sampled_from(["a", "b"]), st.sampled_from([(StateTensor((n,), 4),) for n in (16, 64, 999)])
)


@st.composite
def models(draw):
    """A few kinds of layers, repeated, some of them shared."""
    kinds = draw(st.lists(kept_specs, min_size=1, max_size=4))
    specs = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=14))
    sources = [i for i, spec in enumerate(specs) if not isinstance(spec, RecurrentStateSpec)]
    shared = draw(st.lists(st.sampled_from(sources), max_size=3)) if sources else []
    return [*specs, *map(SharedKVSpec, shared)]


options = st.fixed_dictionaries(
    {
        "max_model_len": st.integers(2, 400),
        "block_size": st.sampled_from([1, 4, 16]),
        "max_in_flight_tokens": st.sampled_from([0, 30]),
        "hybrid": st.booleans(),
    }
)


EQUAL_BY_CHANCE = {"max_model_len": 2, "block_size": 4, "max_in_flight_tokens": 0, "hybrid": False}


def least_budget(specs, options):
    layout = plan(specs, **options)
    return layout.bytes_for(options["max_model_len"]) + sum(pool.page_bytes for pool in layout.pools)


@given(models(), options, st.integers(0, 10**6))
def test_every_layer_is_in_one_group_and_no_byte_is_padded(specs, options, extra_bytes):
    layout = plan(specs, least_budget(specs, options) + extra_bytes, **options)
    layers = sorted(layer for group in layout.groups for layer in group.layer_indices)
    assert layers == [i for i, spec in enumerate(specs) if not isinstance(spec, SharedKVSpec)]
    assert [group.group_id for group in layout.groups] == list(range(len(layout.groups)))
    for group in layout.groups:
        assert list(group.layer_indices) == sorted(group.layer_indices)
        members = [specs[i] for i in group.layer_indices]
        if group.is_state:
            assert group.page_bytes == sum(spec.state_bytes for spec in members)
        else:
            assert group.page_bytes == layout.block_size * sum(spec.token_bytes for spec in members)
    assert sum(group.is_state for group in layout.groups) <= 1


def arrays_of(spec):
    """Elements of a layer's arrays: of keys and of values, of latents, or of each tensor of a state."""
    if isinstance(spec, RecurrentStateSpec):
        return [(math.prod(tensor.shape), tensor.dtype_bytes) for tensor in spec.tensors]
    if isinstance(spec, MLASpec):
        return [spec.token_bytes]
    value_dim = spec.head_dim if spec.value_head_dim is None else spec.value_head_dim
    return [(spec.num_kv_heads * dim, spec.format) for dim in (spec.head_dim, value_dim)]


@given(models(), options, st.integers(0, 10**6))
# Equal bytes by chance, but a state is no place for keys.
@example((FullAttentionSpec(1, 8), *[RecurrentStateSpec("s", (StateTensor((16,), 4),))] * 2), EQUAL_BY_CHANCE, 0)
def test_groups_share_a_pool_exactly_where_their_arrays_are_alike(specs, options, extra_bytes):
    layout = plan(specs, least_budget(specs, options) + extra_bytes, **options)
    for one in layout.groups:
        for other in layout.groups:
            is_alike = [arrays_of(specs[i]) for i in one.layer_indices] == [
                arrays_of(specs[i]) for i in other.layer_indices
            ]
            assert is_alike == (one.pool_id == other.pool_id)
    for pool in layout.pools:
        assert {layout.groups[group_id].page_bytes for group_id in pool.group_ids} == {pool.page_bytes}
    assert sorted(g for pool in layout.pools for g in pool.group_ids) == list(range(len(layout.groups)))


@given(models(), options, st.integers(0, 10**6))
def test_pools_take_the_budget_to_the_last_page_that_fits(specs, options, extra_bytes):
    budget = least_budget(specs, options) + extra_bytes
    layout = plan(specs, budget, **options)
    taken = sum(map(math.prod, ((pool.num_blocks, pool.page_bytes) for pool in layout.pools)))
    assert 0 <= budget - taken < min(pool.page_bytes for pool in layout.pools)
    assert all(pool.num_blocks >= 2 for pool in layout.pools)
    needs = layout.num_blocks_for(options["max_model_len"])
    assert all(need < pool.num_blocks for need, pool in zip(needs, layout.pools, strict=True))


@given(models(), options)
def test_one_byte_less_than_the_longest_sequence_needs_is_too_little(specs, options):
    budget = least_budget(specs, options)
    assert plan(specs, budget, **options).max_concurrency == 1
    with pytest.raises(KVBudgetTooSmall, match=f"needs {budget} bytes"):
        plan(specs, budget - 1, **options)


@given(models(), options)
def test_the_length_that_the_message_advises_fits_and_one_more_does_not(specs, options):
    budget = least_budget(specs, options) - 1
    with pytest.raises(KVBudgetTooSmall) as raised:
        plan(specs, budget, **options)
    message = str(raised.value)
    if "no max_model_len fits" in message:
        advised = 1
    else:
        advised = int(message.split("lower max_model_len to ")[1].split()[0])
        plan(specs, budget, **options | {"max_model_len": advised})
    with pytest.raises(KVBudgetTooSmall):
        plan(specs, budget, **options | {"max_model_len": advised + 1})


@given(models(), options)
def test_without_hybrid_there_is_one_group_of_attention(specs, options):
    layout = plan(specs, **options | {"hybrid": False})
    assert sum(not group.is_state for group in layout.groups) <= 1
    assert all(group.is_state or group.is_full for group in layout.groups)


@given(models(), options)
@example(
    [ChunkedLocalSpec(1, 8, 20), ChunkedLocalSpec(1, 8, 20), MLASpec(12, 4)],
    {"max_model_len": 2, "block_size": 1, "max_in_flight_tokens": 0, "hybrid": True},
)
def test_only_cutting_to_one_page_size_takes_more_than_a_group_a_kind(specs, options):
    layout = plan(specs, **options)
    groups = [group for group in layout.groups if not group.is_state]
    kinds = {
        (
            kind_name(g.spec),
            getattr(g.spec, "window", 0),
            getattr(g.spec, "num_sink_tokens", 0),
            getattr(g.spec, "chunk", 0),
        )
        for g in groups
    }
    if len(groups) > len(kinds):
        assert len({group.page_bytes for group in groups}) == 1
        assert len({group.pool_id for group in groups}) == 1
        assert len(groups) <= MAX_SPLIT_GROUPS


@given(models(), options)
def test_every_layout_can_be_described(specs, options):
    layout = plan(specs, **options)
    reasons = describe(layout)
    assert 2 <= len(reasons) <= 3
    assert all(reason.endswith(".") for reason in reasons)
