"""The CPU's attention against `mx.fast`'s."""

import mlx.core as mx
import numpy as np
import pytest

from worker import cpu_attention


def test_exp2_is_exact_to_float32_wherever_it_counts():
    exponents = np.concatenate([np.linspace(-125, 0, 200_001), -np.geomspace(1e-9, 1, 1000)]).astype(np.float32)
    ours = np.array(cpu_attention.exp2(mx.array(exponents)))
    assert np.abs(ours / np.exp2(exponents.astype(np.float64)) - 1).max() < 4e-7


def test_exp2_of_what_underflows_is_as_good_as_zero():
    assert np.array(cpu_attention.exp2(mx.array([-1e30, -500.0]))).max() < 1e-37


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
    ours = cpu_attention.attend(queries, keys, values, scale, given)
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=given)
    # Scores of some hundreds have a rounding error of some 1e-5 already.
    assert mx.abs(ours - expected).max() < 1e-5 * max(1, scale)
