"""What a client leaves out comes from the model; what it gets wrong is named."""

import json
import re

import pytest

from cluster import grammars
from cluster.config import SpeculationConfig
from cluster.errors import InvalidRequest
from cluster.sampling import (
    Defaults,
    SamplingRequest,
    check_bad_words,
    check_token_ids,
    resolve,
    seed_of_answer,
    with_speculation,
)
from cluster.scheduling.request import NO_RULES, LogitRules, SamplingParams, Speculation

BAD = {
    "temperature": (float("nan"), float("inf"), -0.1, 101.0),
    "top_p": (0.0, -1.0, 1.1, float("nan")),
    "min_p": (-0.1, 1.1, float("nan")),
    "top_k": (-1, 2**31),
    "seed": (-1, 2**64),
    "max_tokens": (0, -1),
    "num_top_logprobs": (-1, 21),
    "frequency_penalty": (-2.1, 2.1, float("nan")),
    "presence_penalty": (-2.1, 2.1, float("inf")),
    "repetition_penalty": (0.0, -1.0, 10.5, float("nan")),
    "logit_bias": (((5, 101.0),), ((5, float("nan")),), tuple((token, 1.0) for token in range(1025))),
    "min_tokens": (-1,),
    "banned_token_ids": (tuple(range(1025)),),
    "xtc_probability": (-0.1, 1.1, float("nan")),
    "xtc_threshold": (0.0, 0.51, float("nan")),
    "stop": (("",), ("a",) * 17, ("a" * 1025,)),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_a_value_out_of_range_is_refused_by_field_and_value(field, value):
    with pytest.raises(InvalidRequest) as caught:
        resolve(SamplingRequest(**{field: value}), Defaults())
    assert re.split(r"[\[.]", caught.value.field)[0] in (field, "top_logprobs")


def test_the_client_wins_over_the_model_and_the_model_over_ours():
    defaults = Defaults(temperature=0.6, top_k=20)
    params = resolve(SamplingRequest(temperature=0.0, seed=3), defaults)
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.0, 20, 1.0, 3)


GRAMMAR = grammars.regex("guided_regex", "a+")


@pytest.mark.parametrize("field", ["banned_token_ids", "bad_words", "ignore_eos"])
def test_what_could_leave_a_grammar_without_a_token_is_refused(field):
    value = {"banned_token_ids": (5,), "bad_words": ("no",), "ignore_eos": True}[field]
    asked = SamplingRequest(grammar=GRAMMAR, banned_sequences=(), **{field: value})
    with pytest.raises(InvalidRequest, match=f"{field}: can't be combined with guided_regex"):
        resolve(asked, Defaults())


def test_rules_are_resolved():
    asked = SamplingRequest(
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias=((9, 1.0), (5, -2.0)),
        min_tokens=3,
        banned_token_ids=(4,),
        bad_words=("no",),
        banned_sequences=((7, 8),),
    )
    rules = LogitRules(0.5, 0.0, 1.2, ((5, -2.0), (9, 1.0)), 3, ((4,), (7, 8)), "")
    assert resolve(asked, Defaults()).rules == rules
    assert resolve(SamplingRequest(), Defaults()).rules == NO_RULES
    assert resolve(SamplingRequest(), Defaults(repetition_penalty=1.05)).rules.repetition_penalty == 1.05
    assert resolve(SamplingRequest(grammar=GRAMMAR, banned_sequences=()), Defaults()).rules.grammar == GRAMMAR.source


@pytest.mark.parametrize("words", [("",), (" ",), ("a" * 257,), ("a",) * 129])
def test_bad_words_that_cannot_be(words):
    with pytest.raises(InvalidRequest, match="bad_words"):
        check_bad_words(words)


def test_seeds_of_several_answers_are_frozen_and_differ():
    """An answer can be had again alone, by any version, with the seed that was reported for it."""
    assert [seed_of_answer(42, index) for index in range(3)] == FROZEN
    seeds = {seed_of_answer(seed, index) for seed in range(50) for index in range(16)}
    assert len(seeds) == 50 * 16
    assert all(0 <= seed < 2**63 for seed in seeds)


FROZEN = [42, 1682509227552892816, 5322441521470109821]


def test_without_a_seed_each_request_gets_its_own():
    assert len({resolve(SamplingRequest(), Defaults()).seed for _ in range(20)}) == 20


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Defaults(1.0, 0, 1.0, 0.0)),
        ({"do_sample": False, "temperature": 0.7}, Defaults(temperature=0.0)),
        ({"do_sample": False, "top_k": 5, "repetition_penalty": 1.1}, Defaults(0.0, repetition_penalty=1.1)),
        ({"temperature": 0.6, "top_k": 20, "top_p": 0.95}, Defaults(0.6, 20, 0.95, 0.0)),
        ({"top_k": None}, Defaults()),
        ({"repetition_penalty": 1.05}, Defaults(repetition_penalty=1.05)),
    ],
)
def test_defaults_come_from_generation_config(tmp_path, config, expected):
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert Defaults.of_model(tmp_path) == expected


def test_a_model_without_generation_config_has_plain_defaults(tmp_path):
    assert Defaults.of_model(tmp_path) == Defaults()


def test_the_first_token_outside_the_vocabulary_is_named():
    check_token_ids("prompt", (0, 99), 100)
    with pytest.raises(InvalidRequest, match=r"prompt\[1\]: must be a token id from 0 to 99, got 100"):
        check_token_ids("prompt", (0, 100, 200), 100)


_SERVED = {
    "off": SpeculationConfig(),
    "ngram": SpeculationConfig("ngram"),
    "auto": SpeculationConfig("auto"),
    "auto, draft": SpeculationConfig("auto", draft_model="small"),
    "draft": SpeculationConfig("draft", draft_model="small"),
}


@pytest.mark.parametrize(
    ("served", "asked", "expected"),
    [
        ("off", "default", "off"),
        ("off", "off", "off"),
        ("off", "auto", "off"),
        ("off", "ngram", "served with off, auto, got ngram"),
        ("ngram", "default", "ngram"),
        ("ngram", "off", "off"),
        ("ngram", "auto", "auto"),
        ("ngram", "draft", "served with off, auto, ngram, got draft"),
        ("auto", "default", "auto"),
        ("auto", "draft", "served with off, auto, ngram, got draft"),
        ("auto, draft", "draft", "draft"),
        ("draft", "default", "draft"),
        ("draft", "ngram", "ngram"),
    ],
)
def test_a_request_is_guessed_as_it_asks_or_as_its_mac_was_started(served, asked, expected):
    asked_for = resolve(SamplingRequest(speculation=Speculation(asked)), Defaults())
    assert asked_for.speculation == asked
    if " " in expected:
        with pytest.raises(InvalidRequest, match=expected):
            with_speculation(asked_for, _SERVED[served])
    else:
        assert with_speculation(asked_for, _SERVED[served]).speculation == expected
    assert SamplingParams().speculation is Speculation.DEFAULT
