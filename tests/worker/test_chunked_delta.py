"""The gated delta rule by chunks against mlx-lm's loop over tokens."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.gated_delta import gated_delta_ops

from worker import chunked_delta

TOLERANCE = 2e-5


def inputs(rng, rows, num_tokens, heads, key_dim, value_dim):
    """Keys and queries as normalised as models have them."""
    keys, queries = (rng.normal(size=(rows, num_tokens, heads, key_dim)) for _ in range(2))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    queries /= np.linalg.norm(queries, axis=-1, keepdims=True) * key_dim**0.5
    gates, betas = rng.uniform(0.5, 1.0, (rows, num_tokens, heads)), rng.uniform(0.0, 1.0, (rows, num_tokens, heads))
    return queries, keys, rng.normal(size=(rows, num_tokens, heads, value_dim)), gates, betas


def check(queries, keys, values, gates, betas, state):
    arrays = [mx.array(x.astype(np.float32)) for x in (queries, keys, values, gates, betas)]
    state = None if state is None else mx.array(state.astype(np.float32))
    for ours, theirs in zip(chunked_delta.run(*arrays, state), gated_delta_ops(*arrays, state), strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == mx.float32
        # Not "differs by more", which a NaN would pass.
        assert mx.abs(ours - theirs).max().item() <= TOLERANCE * max(1.0, mx.abs(theirs).max().item())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 3),
    num_tokens=st.sampled_from([1, 2, 15, 16, 17, 32, 47, 130]),
    heads=st.integers(1, 3),
    dims=st.sampled_from([(8, 8), (16, 4), (4, 16)]),
    has_state=st.booleans(),
)
def test_chunks_give_what_the_loop_gives(seed, rows, num_tokens, heads, dims, has_state):
    rng = np.random.default_rng(seed)
    key_dim, value_dim = dims
    state = rng.normal(size=(rows, heads, value_dim, key_dim)) if has_state else None
    check(*inputs(rng, rows, num_tokens, heads, key_dim, value_dim), state)


@pytest.mark.parametrize(
    "case", ["one token for ever", "gates that close", "gates that hardly close", "twice the step"]
)
def test_where_rounding_is_worst(case):
    """The triangular system of equal keys is the worst; a closed gate has no logarithm."""
    rng = np.random.default_rng(1)
    queries, keys, values, gates, betas = inputs(rng, 1, 300, 2, 16, 16)
    if case == "gates that close":
        gates[rng.uniform(size=gates.shape) < 0.3] = 0.0
    elif case == "gates that hardly close":
        gates = 10.0 ** rng.uniform(-12, 0, gates.shape)
    else:
        keys = np.broadcast_to(keys[:, :1], keys.shape)
        gates, betas = np.ones_like(gates), np.ones_like(betas) * (2.0 if case == "twice the step" else 1.0)
    check(queries, keys, values, gates, betas, rng.normal(size=(1, 2, 16, 16)))
