"""The sampler against a brute-force NumPy twin, and the properties that a request may rely on."""

import mlx.core as mx
import numpy as np
import pytest

from worker.sampler import Draw, RowSampling, uniform

_VOCAB_SIZE = 600


def _row(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, num_top_logprobs=None) -> RowSampling:
    return RowSampling(temperature, top_k, top_p, min_p, seed, num_top_logprobs)


MIX = [
    _row(temperature=0.0),
    _row(),
    _row(temperature=0.7, top_k=20, top_p=0.95, seed=4),
    _row(top_p=0.5, seed=9),
    _row(temperature=1.5, min_p=0.1, seed=2**63 + 5),
    _row(top_k=1),
    _row(temperature=1e-4, top_p=0.9),
    _row(top_k=300, min_p=0.01, seed=1),
    _row(temperature=2.0, top_k=64, min_p=0.02, top_p=0.99, seed=8),
]


def _logits(rows=9, seed=0, scale=3.0) -> mx.array:
    return mx.array(np.random.RandomState(seed).randn(rows, _VOCAB_SIZE).astype(np.float32) * scale)


def _draw(logits, rows, positions) -> list[int]:
    draw = Draw(logits, rows, positions)
    mx.eval(*draw.outputs)
    return draw.token_ids()


def _distribution(logits: np.ndarray, row: RowSampling) -> np.ndarray:
    """What a row may draw, by the definition: temperature, min_p, top_k, then top_p on the rest."""
    if row.temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    scaled = logits.astype(np.float64) / row.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    kept = [i for rank, i in enumerate(order) if not row.top_k or rank < row.top_k]
    kept = [i for i in kept if probs[i] >= row.min_p * probs.max()]
    total, reached, nucleus = sum(probs[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        reached += probs[i]
        if reached >= row.top_p * total:
            break
    result = np.zeros(len(probs))
    result[nucleus] = probs[nucleus]
    return result / result.sum()


@pytest.mark.parametrize("row", MIX)
def test_draws_follow_the_truncated_distribution(row):
    """Over many positions: never a token that the definition excludes, and the right frequencies."""
    logits = _logits(1, seed=5)
    num_draws = 4000
    tokens = _draw(mx.repeat(logits, num_draws, axis=0), [row] * num_draws, list(range(num_draws)))
    expected = _distribution(np.array(logits[0]), row)
    counts = np.bincount(tokens, minlength=_VOCAB_SIZE) / num_draws
    assert counts[expected == 0].sum() == 0
    # Total variation of a sample this large, with room for many small tokens.
    assert np.abs(counts - expected).sum() / 2 < 0.15
    deviation = np.sqrt(expected * (1 - expected) / num_draws)
    assert np.all(np.abs(counts - expected) <= 5 * deviation + 1e-3)


def test_row_draws_the_same_token_in_any_batch():
    """Alone, in the whole batch, or in any order: composition never shows."""
    logits, positions = _logits(), list(range(10, 10 + len(MIX)))
    together = _draw(logits, MIX, positions)
    alone = [_draw(logits[i : i + 1], [MIX[i]], [positions[i]])[0] for i in range(len(MIX))]
    assert together == alone
    rng = np.random.RandomState(1)
    for _ in range(20):
        some = rng.permutation(len(MIX))[: rng.randint(1, len(MIX) + 1)].tolist()
        picked = _draw(logits[mx.array(some)], [MIX[i] for i in some], [positions[i] for i in some])
        assert picked == [together[i] for i in some]


def test_draw_depends_on_seed_and_position_alone():
    logits = mx.zeros((1, _VOCAB_SIZE))
    draws = {
        (seed, position): _draw(logits, [_row(seed=seed)], [position])[0] for seed in range(5) for position in range(5)
    }
    for (seed, position), token in draws.items():
        assert _draw(logits, [_row(seed=seed)], [position]) == [token]
    assert len(set(draws.values())) > 15


def test_uniform_numbers_are_the_same_on_every_machine():
    """Frozen: a request that moves to another Mac, or meets another version, continues with the same draws."""
    assert [round(uniform(seed, position), 6) for seed, position in ((0, 0), (0, 1), (2**64 - 1, 5))] == FROZEN
    values = np.array([uniform(1, position) for position in range(20000)])
    assert values.min() >= 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 0.01


FROZEN = [0.794603, 0.569683, 0.386379]


@pytest.mark.parametrize("row", [_row(top_k=1), _row(temperature=0.0), _row(top_p=1e-9), _row(temperature=1e-30)])
def test_narrowest_settings_are_greedy(row):
    logits = _logits()
    expected = np.argmax(np.array(logits), axis=-1).tolist()
    assert _draw(logits, [row] * len(MIX), list(range(len(MIX)))) == expected


def test_equal_logits_are_cut_by_token_id():
    """Half-precision logits tie often: top_k keeps exactly k, the lowest ids first."""
    logits = mx.zeros((1, _VOCAB_SIZE))
    for row in (_row(top_k=3), _row(top_k=3, top_p=0.999), _row(top_k=100)):
        tokens = {_draw(logits, [row], [position])[0] for position in range(300)}
        assert tokens <= set(range(row.top_k))
        assert len(tokens) > row.top_k / 2


def test_logprobs_are_those_of_the_raw_distribution():
    """Before temperature and truncation; likeliest first; only for the rows that ask."""
    rows = [_row(temperature=0.3, top_k=5, num_top_logprobs=4), _row(), _row(temperature=0.0, num_top_logprobs=0)]
    logits = _logits(3)
    draw = Draw(logits, rows, [1, 2, 3])
    mx.eval(*draw.outputs)
    tokens, logprobs = draw.token_ids(), draw.logprobs()
    raw = np.array(logits).astype(np.float64)
    expected = raw - np.log(np.exp(raw).sum(axis=-1, keepdims=True))
    assert set(logprobs) == {0, 2}
    assert [token for token, _ in logprobs[0].top] == np.argsort(-expected[0])[:4].tolist()
    assert logprobs[2].top == ()
    for row in (0, 2):
        assert logprobs[row].logprob == pytest.approx(expected[row][tokens[row]], abs=1e-5)
    for token, value in logprobs[0].top:
        assert value == pytest.approx(expected[0][token], abs=1e-5)
