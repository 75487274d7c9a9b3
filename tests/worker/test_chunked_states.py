"""Recurrences by chunks against the same in double precision, and against how exact mlx-lm's own code is."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.gated_delta import gated_delta_ops
from mlx_lm.models.ssm import compute_dt, ssm_attn

from worker import chunked_states

# Of the largest number, beside a few times mlx-lm's own error.
TOLERANCE = 3e-6


def in_single(*arrays):
    return [None if x is None else mx.array(x.astype(np.float32)) for x in arrays]


def in_double(*arrays):
    """What single precision makes of them, in double."""
    return [None if x is None else x.astype(np.float32).astype(np.float64) for x in arrays]


def check_errors(ours, theirs, exact, tolerance=TOLERANCE):
    for mine, other, true in zip(ours, theirs, exact, strict=True):
        assert mine.shape == true.shape
        assert mine.dtype == mx.float32
        largest = max(1.0, np.abs(true).max())
        errors = [np.abs(np.array(each, np.float64) - true).max() / largest for each in (mine, other)]
        # Not "is more", which a NaN would pass.
        assert errors[0] <= tolerance + 4 * errors[1], errors


def delta_inputs(rng, rows, num_tokens, heads, key_dim, value_dim):
    """Keys and queries as normalised as models have them."""
    keys, queries = (rng.normal(size=(rows, num_tokens, heads, key_dim)) for _ in range(2))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    queries /= np.linalg.norm(queries, axis=-1, keepdims=True) * key_dim**0.5
    gates, betas = rng.uniform(0.5, 1.0, (rows, num_tokens, heads)), rng.uniform(0.0, 1.0, (rows, num_tokens, heads))
    return queries, keys, rng.normal(size=(rows, num_tokens, heads, value_dim)), gates, betas


def exact_delta(queries, keys, values, gates, betas, state):
    rows, num_tokens, heads, value_dim = values.shape
    state = np.zeros((rows, heads, value_dim, keys.shape[-1])) if state is None else state
    outputs = []
    for token in range(num_tokens):
        q, k, v = (x[:, token] for x in (queries, keys, values))
        state = state * gates[:, token, :, None, None]
        added = (v - (state @ k[..., None])[..., 0]) * betas[:, token, :, None]
        state = state + added[..., None] * k[..., None, :]
        outputs.append((state @ q[..., None])[..., 0])
    return np.stack(outputs, axis=1), state


def check_delta(*inputs, tolerance=TOLERANCE):
    single = in_single(*inputs)
    exact = exact_delta(*in_double(*inputs))
    check_errors(chunked_states.gated_delta(*single), gated_delta_ops(*single), exact, tolerance)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 3),
    num_tokens=st.sampled_from([1, 2, 15, 16, 17, 32, 47, 130]),
    heads=st.integers(1, 3),
    dims=st.sampled_from([(8, 8), (16, 4), (4, 16)]),
    has_state=st.booleans(),
)
def test_the_gated_delta_rule(seed, rows, num_tokens, heads, dims, has_state):
    rng = np.random.default_rng(seed)
    key_dim, value_dim = dims
    state = rng.normal(size=(rows, heads, value_dim, key_dim)) if has_state else None
    check_delta(*delta_inputs(rng, rows, num_tokens, heads, key_dim, value_dim), state)


@pytest.mark.parametrize(
    "case", ["one token for ever", "gates that close", "gates that hardly close", "twice the step"]
)
def test_the_gated_delta_rule_where_rounding_is_worst(case):
    """The triangular system of equal keys is the worst; a closed gate has no logarithm."""
    rng = np.random.default_rng(1)
    queries, keys, values, gates, betas = delta_inputs(rng, 1, 300, 2, 16, 16)
    if case == "gates that close":
        gates[rng.uniform(size=gates.shape) < 0.3] = 0.0
    elif case == "gates that hardly close":
        gates = 10.0 ** rng.uniform(-12, 0, gates.shape)
    else:
        keys = np.broadcast_to(keys[:, :1], keys.shape)
        gates, betas = np.ones_like(gates), np.ones_like(betas) * (2.0 if case == "twice the step" else 1.0)
    # Equal keys that are reflected at each token, for 300 tokens: the system's condition is some 1,000.
    tolerance = 1e-4 if case == "twice the step" else TOLERANCE
    check_delta(queries, keys, values, gates, betas, rng.normal(size=(1, 2, 16, 16)), tolerance=tolerance)


def exact_ssm(x, log_decay, b, c, state):
    rows, num_tokens, heads, head_dim = x.shape
    b, c = (np.repeat(each, heads // each.shape[2], axis=2) for each in (b, c))
    state = np.zeros((rows, heads, head_dim, b.shape[-1])) if state is None else state
    outputs = []
    for token in range(num_tokens):
        state = state * np.exp(log_decay[:, token, :, None, None]) + x[:, token, ..., None] * b[:, token, :, None]
        outputs.append((state @ c[:, token, ..., None])[..., 0])
    return np.stack(outputs, axis=1), state


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    rows=st.integers(1, 3),
    num_tokens=st.sampled_from([1, 2, 31, 32, 33, 64, 300]),
    groups=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
    dims=st.sampled_from([(8, 8), (16, 4), (4, 16)]),
    has_state=st.booleans(),
    most_dt=st.sampled_from([0.1, 3.0, 100.0]),
)
def test_mamba_2(seed, rows, num_tokens, groups, dims, has_state, most_dt):
    """`most_dt`: up to decays that leave nothing of a state."""
    rng = np.random.default_rng(seed)
    (heads, num_groups), (head_dim, state_size) = groups, dims
    x = rng.normal(size=(rows, num_tokens, heads, head_dim))
    b, c = (rng.normal(size=(rows, num_tokens, num_groups, state_size)) for _ in range(2))
    dt, (a_log, bias) = rng.normal(size=(rows, num_tokens, heads)) * most_dt, rng.normal(size=(2, heads))
    state = rng.normal(size=(rows, heads, head_dim, state_size)) if has_state else None
    x, b, c, dt, a_log, bias, single_state = in_single(x, b, c, dt, a_log, bias, state)
    limits = (0.001, 100.0)
    steps = compute_dt(dt, bias, limits)
    inputs = steps[..., None] * x, steps * -mx.exp(a_log), b, c
    theirs = ssm_attn(x, a_log, b, c, mx.zeros(heads), dt, bias, single_state, limits)
    exact = exact_ssm(*(np.array(each, np.float64) for each in inputs), *in_double(state))
    check_errors(chunked_states.ssm(*inputs, single_state), theirs, exact)
