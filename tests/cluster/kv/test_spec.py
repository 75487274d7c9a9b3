import pytest

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

FOUR_BITS = KVFormat(bits=4, group_size=64, scale_bytes=4)


@pytest.mark.parametrize(
    ("kv_format", "num_elements", "num_bytes"),
    [
        (KVFormat(), 128, 256),
        (KVFormat(32), 3, 12),
        (FOUR_BITS, 128, 64 + 2 * 4),
        (FOUR_BITS, 65, 33 + 2 * 4),
        (KVFormat(3), 3, 2),
        (KVFormat(), 0, 0),
    ],
)
def test_a_vector_takes_its_bits_and_its_scales_rounded_up(kv_format, num_elements, num_bytes):
    assert kv_format.bytes_for(num_elements) == num_bytes


def test_a_format_without_bits_is_refused():
    with pytest.raises(ValueError, match="bits must be at least 1, got 0"):
        KVFormat(bits=0)


@pytest.mark.parametrize(("group_size", "scale_bytes"), [(-1, 0), (64, -1), (0, 4)])
def test_scales_without_groups_are_refused(group_size, scale_bytes):
    with pytest.raises(ValueError, match=f"got group_size {group_size}, scale_bytes {scale_bytes}"):
        KVFormat(4, group_size, scale_bytes)


@pytest.mark.parametrize(
    "spec", [FullAttentionSpec(2, 8), SlidingWindowSpec(2, 8, window=5), ChunkedLocalSpec(2, 8, chunk=5)]
)
def test_a_token_is_a_key_and_a_value_of_every_head(spec):
    assert spec.token_bytes == 2 * (8 + 8) * 2


@pytest.mark.parametrize(
    "spec",
    [
        FullAttentionSpec(2, 8, value_head_dim=4),
        SlidingWindowSpec(2, 8, window=5, value_head_dim=4),
        ChunkedLocalSpec(2, 8, chunk=5, value_head_dim=4),
    ],
)
def test_values_may_be_narrower_than_keys(spec):
    assert spec.token_bytes == 2 * (8 + 4) * 2


def test_each_heads_vectors_have_scales_of_their_own():
    assert FullAttentionSpec(2, 96, FOUR_BITS).token_bytes == 2 * 2 * (48 + 2 * 4)


def test_a_latent_token_has_no_value_and_maybe_an_index_key():
    assert MLASpec(512, 64).token_bytes == 576 * 2
    assert MLASpec(512, 64, index_dim=128).token_bytes == 704 * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FullAttentionSpec(0, 1), "num_kv_heads must be at least 1, got 0"),
        (lambda: FullAttentionSpec(1, 0), "head_dim must be at least 1, got 0"),
        (lambda: FullAttentionSpec(1, 1, value_head_dim=0), "value_head_dim must be at least 1, got 0"),
        (lambda: SlidingWindowSpec(1, 1, window=0), "window must be at least 1, got 0"),
        (lambda: SlidingWindowSpec(1, 1, window=1, num_sink_tokens=-1), "num_sink_tokens must be at least 0, got -1"),
        (lambda: ChunkedLocalSpec(1, 1, chunk=0), "chunk must be at least 1, got 0"),
        (lambda: MLASpec(0, 1), "latent_dim must be at least 1, got 0"),
        (lambda: MLASpec(1, -1), "rope_dim and index_dim must be at least 0, got -1 and 0"),
        (lambda: MLASpec(1, 1, index_dim=-1), "rope_dim and index_dim must be at least 0, got 1 and -1"),
        (lambda: StateTensor((), 4), r"dimensions and dtype_bytes of at least 1, got \(\) of 4"),
        (lambda: StateTensor((1, 0), 4), r"got \(1, 0\) of 4"),
        (lambda: StateTensor((1,), 0), r"got \(1,\) of 0"),
        (lambda: RecurrentStateSpec("mamba", ()), r"a recurrent state \(mamba\) needs at least one tensor, got none"),
    ],
)
def test_a_field_out_of_range_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def seen(spec, position):
    """What the token at `position` sees, by definition."""
    if isinstance(spec, SlidingWindowSpec):
        return [t for t in range(position + 1) if t > position - spec.window]
    return [t for t in range(position + 1) if t // spec.chunk == position // spec.chunk]


@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("position", range(16))
def test_the_first_needed_token_is_the_first_that_is_seen(size, position):
    window, chunked = SlidingWindowSpec(1, 1, window=size), ChunkedLocalSpec(1, 1, chunk=size)
    assert window.first_needed_token(position) == seen(window, position)[0]
    assert chunked.first_needed_token(position) == seen(chunked, position)[0]


def test_a_state_is_the_sum_of_its_tensors():
    assert RecurrentStateSpec("s", (StateTensor((2, 3), 4), StateTensor((5,), 2))).state_bytes == 24 + 10


def test_a_layer_that_shares_names_its_source():
    assert SharedKVSpec(3).source == 3
