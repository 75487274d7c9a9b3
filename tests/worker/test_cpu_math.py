"""The CPU's attention, sigmoid, RoPE and recurrent updates against MLX's and mlx-lm's."""

import mlx.core as mx
import numpy as np
import pytest

from worker import cpu_math, cpu_rope, cpu_states
from worker.attention import Step
from worker.batch import Batch, Span
from worker.kv_tensors import KVTensors
from worker.metal.dispatch import twin_kernels


def test_exp2_is_exact_to_float32_wherever_it_counts():
    exponents = np.concatenate([np.linspace(-125, 0, 200_001), -np.geomspace(1e-9, 1, 1000)]).astype(np.float32)
    ours = np.array(cpu_math.exp2(mx.array(exponents)))
    assert np.abs(ours / np.exp2(exponents.astype(np.float64)) - 1).max() < 4e-7


def test_exp2_of_what_underflows_is_as_good_as_zero():
    assert np.array(cpu_math.exp2(mx.array([-1e30, -500.0]))).max() < 1e-37


@pytest.mark.parametrize("mask", [None, "causal", "rows"])
@pytest.mark.parametrize("scale", [0.2, 20.0])
def test_attention_agrees_with_mlx(mask, scale):
    """With and without masks, for flat and for peaked distributions."""
    rng = np.random.RandomState(0)
    queries, keys, values = (
        mx.array(rng.randn(3, heads, n, 32).astype(np.float32)) for heads, n in ((6, 5), (2, 40), (2, 40))
    )
    given = mask
    if mask == "rows":
        given = mx.array(np.arange(40) < np.array([1, 17, 40])[:, None])[:, None, None, :]
    ours = cpu_math.attend(queries, keys, values, scale, given)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=given)
    # Scores of some hundreds have a rounding error of some 1e-5 already.
    assert mx.abs(ours - expected).max() < 1e-5 * max(1, scale)


def test_sigmoid_agrees_with_mlx_and_never_overflows():
    x = mx.array(np.concatenate([np.linspace(-90, 90, 20_000), [-1e30, 1e30, 0.0]]).astype(np.float32))
    assert x.size > cpu_math._MIN_SIGMOIDS
    expected = 1 / (1 + np.exp(-np.array(x).astype(np.float64).clip(-500, 500)))
    assert np.abs(np.array(cpu_math.sigmoid(x)) - expected).max() < 4e-7


def test_sigmoid_of_more_than_a_chunk_keeps_its_order_and_what_is_no_number():
    x = np.random.RandomState(0).randn(3, cpu_math._CHUNK // 2 + 7).astype(np.float32) * 20
    x[0, 5], x[1, 0], x[2, -1] = np.nan, np.inf, -np.inf
    ours = np.array(cpu_math.sigmoid(mx.array(x)))
    expected = 1 / (1 + np.exp(-x.astype(np.float64).clip(-80, 80)))
    assert ours.shape == x.shape
    assert np.isnan(ours[0, 5])
    finite = ~np.isnan(x)
    np.testing.assert_allclose(ours[finite], expected[finite], rtol=5e-6, atol=1e-30)


@pytest.mark.parametrize("dims", [16, 8])
@pytest.mark.parametrize("freqs", [None, mx.array([1.0, 2.0, 9.0, 30.0, 50.0, 70.0, 90.0, 99.0])])
@pytest.mark.parametrize("spans", [[(5, 9)], [(0, 1)], [(7, 1), (0, 3), (100, 1)]])
def test_shared_rope_rotates_bit_for_bit_like_mlx(dims, freqs, spans):
    """In both layouts, whole and partial, with given frequencies; the second call finds the tables made."""
    freqs = freqs if freqs is None else freqs[: dims // 2]
    batch = Batch([Span([0] * n, start, list(range(1, 20)), samples=False) for start, n in spans], block_size=8)
    step = Step(twin_kernels())
    shared = cpu_rope.SharedRope()
    shape = (1, 3, batch.num_tokens, 16) if batch.is_flat else (batch.num_tokens, 3, 1, 16)
    x = mx.random.normal(shape)
    given = {"traditional": False, "base": None if freqs is not None else 1e4, "scale": 0.5, "offset": batch.offset}
    expected = cpu_rope._mlx_rope(x, dims, freqs=freqs, **given)
    step.begin(batch, KVTensors((), groups=(), num_blocks=(), block_size=8))
    for _ in range(2):
        assert mx.array_equal(shared(x, dims, freqs=freqs, **given), expected)
    assert len(shared._tables) == 1
    step.end()
    assert mx.array_equal(shared(x, dims, freqs=freqs, **given), expected)


@pytest.fixture
def step():
    """One that is being built."""
    step = Step(twin_kernels())
    step.begin(
        Batch([Span([0], 5, [1], samples=True)], block_size=8), KVTensors((), groups=(), num_blocks=(), block_size=8)
    )
    yield step
    step.end()


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_one_token_of_mamba_2_is_as_mlx_lms(step, rows, groups):
    heads, dim, size = 4, 6, 5
    given = [normal(rows, 1, heads, dim), normal(heads), normal(rows, 1, groups, size), normal(rows, 1, groups, size)]
    given += [normal(heads), normal(rows, 1, heads), normal(heads), normal(rows, heads, dim, size), (0.01, 3.0)]
    expected = cpu_states._mlx_ssm_update(*given)
    assert all(
        mx.allclose(*pair, rtol=1e-5, atol=1e-5) for pair in zip(cpu_states.ssm_update(*given), expected, strict=True)
    )


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("gates", [(), (5,)], ids=["one gate", "a gate for each element"])
def test_one_token_of_a_gated_delta_net_is_as_mlx_lms(step, rows, key_heads, gates):
    heads, key_dim, dim = 4, 5, 6
    given = [normal(rows, 1, key_heads, key_dim), normal(rows, 1, key_heads, key_dim), normal(rows, 1, heads, dim)]
    given += [mx.random.uniform(shape=(rows, 1, heads, *gates)), mx.random.uniform(shape=(rows, 1, heads))]
    given += [normal(rows, heads, dim, key_dim)]
    expected = cpu_states._mlx_gated_delta_ops(*given)
    ours = cpu_states.gated_delta_ops(*given)
    assert all(mx.allclose(*pair, rtol=1e-5, atol=1e-5) for pair in zip(ours, expected, strict=True))


def test_what_is_not_one_token_in_a_step_is_left_to_mlx_lm(step, monkeypatch):
    """Several tokens, half precision, no state yet, or no step."""
    monkeypatch.setattr(cpu_states, "_mlx_gated_delta_ops", lambda *given: "theirs")

    def update(num_tokens=1, dtype=mx.float32, *, has_state=True):
        rows = mx.zeros((1, num_tokens, 2, 4), dtype)
        state = mx.zeros((1, 2, 4, 4)) if has_state else None
        return cpu_states.gated_delta_ops(rows, rows, rows, rows[..., 0], rows[..., 0], state)

    assert update() != "theirs"
    assert update(num_tokens=2) == update(dtype=mx.bfloat16) == update(has_state=False) == "theirs"
    step.end()
    assert update() == "theirs"
