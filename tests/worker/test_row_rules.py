"""Rows with rules against a brute-force NumPy twin, one row at a time, whatever else is in the batch."""

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.cidery.v1.sampling_pb2 import SamplingParams, TokenSequence
from protos.cidery.worker.v1.worker_pb2 import NewSequence
from worker.errors import ProtocolError
from worker.evaluation import Inline
from worker.models import SamplingDefaults
from worker.row_rules import make_rules, shape
from worker.sampler import Draw, RowSampling, uniform
from worker.sequences import row_sampling

# Fewer tokens than the sampler takes as candidates, and more.
_VOCAB_SIZES = (40, 1500)
_EPSILON = 2e-5


@dataclass(frozen=True)
class Row:
    params: SamplingParams
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    stops: tuple[int, ...]

    @property
    def message(self) -> NewSequence:
        return NewSequence(
            seq_id=1,
            token_ids=self.prompt + self.answer,
            num_prompt_tokens=len(self.prompt),
            sampling=self.params,
            stop_token_ids=self.stops,
        )

    @property
    def sampling(self) -> RowSampling:
        return row_sampling(1, self.params, SamplingDefaults(), self.stops)

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.answer)


def shaped_by_twin(logits: np.ndarray, row: Row) -> np.ndarray:
    """By the definition, token by token."""
    params, answer = row.params, list(row.answer)
    result = logits.astype(np.float32).copy()
    for token, bias in params.logit_bias.items():
        result[token] += np.float32(bias)
    for token in params.banned_token_ids:
        result[token] = -np.inf
    for sequence in params.banned_sequences:
        ids = list(sequence.token_ids)
        if len(ids) == 1 or answer[-(len(ids) - 1) :] == ids[:-1]:
            result[ids[-1]] = -np.inf
    if len(answer) < params.min_tokens:
        for token in row.stops:
            result[token] = -np.inf
    repetition = np.float32(params.repetition_penalty if params.HasField("repetition_penalty") else 1.0)
    for token in range(len(result)):
        if token in row.prompt or token in answer:
            result[token] = result[token] / repetition if result[token] > 0 else result[token] * repetition
        times = answer.count(token)
        result[token] -= np.float32(params.frequency_penalty) * times
        result[token] -= np.float32(params.presence_penalty) * (times > 0)
    return result


def weights_by_twin(logits: np.ndarray, row: Row, *, loosened: float) -> tuple[list[int], np.ndarray]:
    """Tokens in the order in which they are drawn from, and what each weighs. Cuts are moved by `loosened`."""
    sampling = row.sampling
    scaled = (logits.astype(np.float64) - logits.max()) / sampling.temperature
    probs = np.exp(scaled)
    probs /= probs.sum()
    is_plain = sampling.top_k == 0 and sampling.top_p >= 1
    ids = range(len(probs)) if is_plain else sorted(range(len(probs)), key=lambda i: (-np.float32(probs[i]), i))
    weights = np.array([probs[i] for i in ids])
    if sampling.top_k:
        weights[sampling.top_k :] = 0
    weights[weights < sampling.min_p * probs.max() * (1 - loosened)] = 0
    if sampling.top_p < 1:
        before = np.cumsum(weights) - weights
        cut = before >= sampling.top_p * weights.sum() + loosened
        cut[0] = False
        weights[cut] = 0
    if uniform(sampling.seed, row.position, b"cidery-xtc-v1") < sampling.xtc_probability:
        plain = np.array([math.exp(logits[i] - logits.max()) for i in ids]) * (weights > 0)
        plain /= plain.sum()
        above = plain[plain > sampling.xtc_threshold * (1 + loosened)]
        if len(above):
            out = (plain > above.min() * (1 + 1e-6)) & ~np.isin(list(ids), row.stops)
            weights[out] = 0
    return list(ids), weights


def could_draw(token: int, logits: np.ndarray, row: Row, loosened: float) -> bool:
    ids, weights = weights_by_twin(logits, row, loosened=loosened)
    place = ids.index(token)
    reached = np.cumsum(weights) / weights.sum()
    before = reached[place] - weights[place] / weights.sum()
    drawn = uniform(row.sampling.seed, row.position)
    return weights[place] > 0 and before - _EPSILON <= drawn <= reached[place] + _EPSILON


def check_by_twin(token: int, raw: np.ndarray, row: Row) -> None:
    logits = shaped_by_twin(raw, row)
    assert logits[token] > -np.inf
    if row.sampling.temperature == 0 or row.sampling.top_k == 1:
        assert logits[token] == logits.max()
        return
    assert any(could_draw(token, logits, row, loosened) for loosened in (0.0, 3e-6, -3e-6)), row


def run(logits: mx.array, rows: list[Row]):
    rules = [make_rules(row.message, logits.shape[-1], None) for row in rows]
    draw = Draw(
        logits,
        [row.sampling for row in rows],
        [row.position for row in rows],
        shape(logits, rules, None, Inline().start),
    )
    mx.eval(*draw.outputs)
    return draw.token_ids(), draw.logprobs()


def rows_of(vocab_size: int):
    tokens = st.integers(0, vocab_size - 1)
    few = st.lists(tokens, max_size=4)
    numbers = {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 0, 1, 5, 60, 1200]),
        "top_p": st.sampled_from([1.0, 1.0, 0.3, 0.9, 0.999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.7, -1.5]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.1, -0.4]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.7]),
        "min_tokens": st.sampled_from([0, 0, 3]),
        "xtc_probability": st.sampled_from([0.0, 0.0, 0.5, 1.0]),
        "xtc_threshold": st.sampled_from([0.02, 0.1, 0.4]),
        "seed": st.integers(0, 2**64 - 1),
        "num_top_logprobs": st.sampled_from([None, None, 3]),
    }
    params = st.builds(
        lambda bias, banned, sequences, **fields: SamplingParams(
            logit_bias=bias,
            banned_token_ids=banned,
            banned_sequences=[TokenSequence(token_ids=ids) for ids in sequences],
            **fields,
        ),
        bias=st.dictionaries(tokens, st.sampled_from([-100.0, -2.5, 1.0, 5.0]), max_size=3),
        banned=few,
        sequences=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=4),
        **numbers,
    )
    plain = st.builds(SamplingParams, temperature=st.sampled_from([0.0, 1.0]), seed=numbers["seed"])
    # Few different tokens, so that penalties and banned sequences meet what they are about.
    text = st.lists(st.integers(0, 4), max_size=12).map(tuple)
    return st.builds(Row, params=plain | params, prompt=text, answer=text, stops=few.map(tuple))


@pytest.mark.parametrize("seed", range(8))
def test_xtc_weighs_tokens_that_a_low_temperature_makes_vanish(seed):
    """At 0.3 most of the sixty add nothing to a running sum in single precision; at 1, as XTC weighs, they do."""
    raw = np.random.RandomState(999).randn(1500).astype(np.float32) * 6
    params = SamplingParams(temperature=0.3, top_k=60, xtc_probability=1.0, xtc_threshold=0.1, seed=seed)
    row = Row(params, (), (), ())
    (token,), _ = run(mx.array(raw[None]), [row])
    check_by_twin(token, raw, row)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_rows_are_drawn_as_the_twin_says_and_alone_as_together(data):
    vocab_size = data.draw(st.sampled_from(_VOCAB_SIZES))
    rows = data.draw(st.lists(rows_of(vocab_size), min_size=1, max_size=6))
    rng = np.random.RandomState(data.draw(st.integers(0, 1000)))
    # From nearly sure to nearly flat; and rounded, as half precision is, with many ties.
    raw = rng.randn(len(rows), vocab_size).astype(np.float32) * data.draw(st.sampled_from([0.3, 2.0, 6.0]))
    if data.draw(st.booleans()):
        raw = np.round(raw * 4) / 4
    logits = mx.array(raw)
    tokens, logprobs = run(logits, rows)
    for index, row in enumerate(rows):
        check_by_twin(tokens[index], raw[index], row)
        alone, its_logprobs = run(logits[index : index + 1], [row])
        assert alone == [tokens[index]]
        assert its_logprobs.get(0) == logprobs.get(index)
        if row.params.HasField("num_top_logprobs"):
            own = raw[index].astype(np.float64)
            expected = own[tokens[index]] - own.max() - math.log(np.exp(own - own.max()).sum())
            assert logprobs[index].logprob == pytest.approx(expected, abs=1e-4)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_logits_are_changed_as_the_twin_says(data):
    vocab_size = data.draw(st.sampled_from(_VOCAB_SIZES))
    rows = data.draw(st.lists(rows_of(vocab_size), min_size=1, max_size=5))
    raw = np.random.RandomState(data.draw(st.integers(0, 1000))).randn(len(rows), vocab_size).astype(np.float32)
    rules = [make_rules(row.message, vocab_size, None) for row in rows]
    shaped = shape(mx.array(raw), rules, None, Inline().start)
    by_row = {} if shaped is None else dict(zip(shaped.rows, np.array(shaped.logits), strict=True))
    for index, row in enumerate(rows):
        ours = by_row.get(index, raw[index])
        np.testing.assert_allclose(ours, shaped_by_twin(raw[index], row), rtol=1e-6, atol=1e-6)


@given(st.sampled_from(_VOCAB_SIZES), st.data())
@settings(max_examples=60, deadline=None)
def test_rules_that_followed_the_answer_equal_rules_rebuilt_from_tokens(vocab_size, data):
    """After a preemption, a crash or a move there are the tokens and nothing else."""
    row = data.draw(rows_of(vocab_size))
    logits = mx.array(np.random.RandomState(1).randn(1, vocab_size).astype(np.float32))
    followed = make_rules(Row(row.params, row.prompt, (), row.stops).message, vocab_size, None)
    for at, token in enumerate(row.answer):
        rebuilt = make_rules(Row(row.params, row.prompt, row.answer[:at], row.stops).message, vocab_size, None)
        assert (followed is None) == (rebuilt is None)
        if followed is None:
            return
        ours, theirs = (shape(logits, [rules], None, Inline().start).logits for rules in (followed, rebuilt))
        assert np.array_equal(np.array(ours), np.array(theirs))
        followed.take(token)


def test_rows_without_rules_are_not_copied():
    """The logits of the others are all that rules touch."""
    logits = mx.array(np.random.RandomState(0).randn(4, 30).astype(np.float32))
    ruled = make_rules(NewSequence(token_ids=[1], sampling=SamplingParams(logit_bias={3: 9.0})), 30, None)
    assert shape(logits, [None] * 4, None, Inline().start) is None
    shaped = shape(logits, [None, ruled, None, ruled], None, Inline().start)
    assert shaped.rows == [1, 3]
    assert shaped.logits.shape == (2, 30)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(repetition_penalty=1.0, temperature=0.5)])
def test_a_request_without_rules_has_none(params):
    assert make_rules(NewSequence(token_ids=[1], sampling=params), 30, None) is None


BAD = {
    "token id 30 of its rules is not below the vocabulary's 30": SamplingParams(banned_token_ids=[30]),
    "token id 31 of its rules": SamplingParams(logit_bias={31: 1.0}),
    "token id 32 of its rules": SamplingParams(banned_sequences=[TokenSequence(token_ids=[1, 32])]),
    "a banned sequence is empty": SamplingParams(banned_sequences=[TokenSequence()]),
    "repetition_penalty is 0.0; it must be greater than 0": SamplingParams(repetition_penalty=0.0),
    "this worker has no tokenizer": SamplingParams(compiled_grammar="x"),
}


@pytest.mark.parametrize("problem", BAD)
def test_rules_that_cannot_be_kept_are_named(problem):
    with pytest.raises(ProtocolError, match=problem):
        make_rules(NewSequence(token_ids=[1], sampling=BAD[problem]), 30, None)


def test_banned_tokens_never_come_and_biased_ones_always():
    logits = mx.zeros((200, 30))
    banned = Row(SamplingParams(temperature=1.0, banned_token_ids=range(28)), (1,), (), ())
    biased = Row(SamplingParams(temperature=1.0, logit_bias={7: 100.0}), (1,), (), ())
    for row, allowed in ((banned, {28, 29}), (biased, {7})):
        rows = [Row(row.params, (1,) * length, (), ()) for length in range(1, 201)]
        assert set(run(logits, rows)[0]) == allowed


def test_xtc_draws_follow_its_definition():
    """Half the time the likely tokens go but for the least likely of them; frequencies over many positions."""
    probs = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    logits = mx.array(np.log(probs).astype(np.float32))[None]
    params = SamplingParams(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.12, seed=3)
    rows = [Row(params, (0,) * length, (), ()) for length in range(1, 4001)]
    counts = np.bincount(run(mx.repeat(logits, 4000, axis=0), rows)[0], minlength=5) / 4000
    left = np.where(probs >= 0.15, 0, probs) + np.where(probs == 0.15, probs, 0)
    expected = (probs + left / left.sum()) / 2
    assert np.abs(counts - expected).max() < 0.03
    # A stop token stays.
    rows = [Row(params, (0,) * length, (), (0,)) for length in range(1, 2001)]
    counts = np.bincount(run(mx.repeat(logits, 2000, axis=0), rows)[0], minlength=5) / 2000
    assert counts[0] > 0.4
    assert counts[1] < 0.2


@pytest.mark.parametrize(
    "fields",
    [{"top_p": 0.9}, {"top_p": 0.95, "min_p": 0.01}, {"top_p": 0.97, "xtc_probability": 1.0, "xtc_threshold": 7e-4}],
)
def test_a_cut_beyond_the_candidates_is_drawn_from_the_whole_vocabulary(fields):
    """Nearly flat logits; the log-probabilities are those of the token that is drawn in the end."""
    raw = np.random.RandomState(0).randn(1500).astype(np.float32) * 0.3
    params = SamplingParams(temperature=1.0, seed=5, num_top_logprobs=0, **fields)
    rows = [Row(params, (1,) * length, (), ()) for length in range(1, 60)]
    tokens, logprobs = run(mx.array(np.tile(raw, (len(rows), 1))), rows)
    sure = raw.astype(np.float64) - np.log(np.exp(raw.astype(np.float64)).sum())
    for index, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        check_by_twin(token, raw, row)
        assert logprobs[index].logprob == pytest.approx(sure[token], abs=1e-4)
