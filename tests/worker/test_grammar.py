"""Grammars with the bundled model and its tokenizer: answers match, alone, in a mix, and after a preemption."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from llguidance import LLParserLimits

import worker.grammar
from cluster import grammars
from cluster.config import bundled_model
from cluster.tokenizer import Tokenizer
from protos.cidery.v1.sampling_pb2 import SamplingParams
from tests.worker.driver import Driver, Request, configure_of
from worker import models
from worker.engine import Engine
from worker.grammar import GrammarTable
from worker.metal.dispatch import twin_kernels

_END = 2
_POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}
SCHEMAS = {
    "flat": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "nested": {"type": "array", "items": _POINT | {"additionalProperties": False}, "minItems": 1, "maxItems": 3},
    "enum": {"enum": ["red", "green", "blue", 7, None]},
    "const": {"const": {"a": [1, 2]}},
    "optional": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "number"}, "c": {"type": "null"}},
        "additionalProperties": False,
    },
    "any of": {
        "anyOf": [{"type": "integer", "minimum": 10, "maximum": 99}, {"type": "string", "pattern": "^[a-f]{3}$"}]
    },
    "reference": {
        "$defs": {"leaf": {"type": "object", "properties": {"v": {"type": "boolean"}}, "required": ["v"]}},
        "type": "object",
        "properties": {"l": {"$ref": "#/$defs/leaf"}, "r": {"$ref": "#/$defs/leaf"}},
        "required": ["l", "r"],
        "additionalProperties": False,
    },
    "format": {"type": "string", "format": "date"},
    "text": {
        "type": "object",
        "properties": {'ü "quoted"': {"type": "string", "maxLength": 5}},
        "required": ['ü "quoted"'],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(Path(bundled_model()))


@pytest.fixture(scope="module")
def loaded():
    return models.load(bundled_model(), dtype="float32")


@pytest.fixture
def driver(loaded):
    table = GrammarTable(Path(bundled_model()), loaded.vocab_size, loaded.eos_token_ids)
    engine = Engine(loaded, twin_kernels(), memory_limit_bytes=1 << 30, grammars=table)
    engine.configure(configure_of(engine, num_blocks=512))
    return Driver(engine, num_blocks=512)


def asking(tokenizer, text, grammar="", max_tokens=400, **fields) -> Request:
    prompt = list(tokenizer.encode_chat([{"role": "user", "content": text}]).token_ids)
    sampling = SamplingParams(**({"temperature": 1.0} | fields), compiled_grammar=grammar)
    return Request(prompt, max_tokens, sampling, stop_token_ids=(_END,))


def text_of(tokenizer, request: Request) -> str:
    """Of an answer that has come to its end."""
    assert not request.failure
    assert request.stopped, tokenizer.decode(request.generated)
    assert request.generated[-1] == _END
    return tokenizer.decode(request.generated[:-1])


def test_every_answer_is_json_of_its_schema(driver, tokenizer):
    """All schemas in one batch, several seeds each, temperature 1 and far from it."""
    requests = []
    for schema in SCHEMAS.values():
        source = grammars.json_schema("schema", schema).source
        for seed, temperature in ((1, 1.0), (2, 1.0), (3, 0.0), (4, 3.0)):
            request = asking(tokenizer, "Give me JSON.", source, seed=seed, temperature=temperature)
            requests.append((driver.add(request), schema))
    driver.run()
    num_complete = 0
    for request, schema in requests:
        if request.stopped:
            num_complete += 1
            jsonschema.validate(json.loads(text_of(tokenizer, request)), schema)
        else:
            assert len(request.generated) == request.max_tokens
    # Numbers may go on for as long as they like; little else may.
    assert num_complete >= 0.9 * len(requests)


def test_any_json_object(driver, tokenizer):
    source = grammars.json_object("response_format").source
    requests = [
        driver.add(asking(tokenizer, "Give me JSON for Leo.", source, seed=seed, temperature=0.3)) for seed in range(6)
    ]
    driver.run()
    complete = [text_of(tokenizer, request) for request in requests if request.stopped]
    assert complete
    assert all(isinstance(json.loads(text), dict) for text in complete)


@pytest.mark.parametrize("seed", range(4))
def test_regex_choice_and_lark(driver, tokenizer, seed):
    pattern, texts = r"(\d{3}-){1,3}[A-F]?x{2,4}", ["yes", "no", 'with "quotes"', "tab\there", "ünïcode 😀"]
    lark = 'start: "(" start ")" | WORD\nWORD: /[a-c]{1,3}/'
    by_regex = driver.add(asking(tokenizer, "Hello", grammars.regex("r", pattern).source, seed=seed))
    by_choice = driver.add(asking(tokenizer, "Hello", grammars.choice("c", texts).source, seed=seed, temperature=5.0))
    by_lark = driver.add(asking(tokenizer, "Hello", grammars.lark("l", lark).source, seed=seed))
    driver.run()
    assert re.fullmatch(pattern, text_of(tokenizer, by_regex))
    assert text_of(tokenizer, by_choice) in texts
    assert re.fullmatch(r"(\(*)[a-c]{1,3}(\)*)", text_of(tokenizer, by_lark))
    assert text_of(tokenizer, by_lark).count("(") == text_of(tokenizer, by_lark).count(")")


def test_neighbours_change_nothing_and_are_not_changed(driver, tokenizer):
    """Plain rows and rows with a schema that join and leave at different steps: as each of them alone."""
    source = grammars.json_schema("schema", SCHEMAS["flat"]).source

    def all_of_them() -> list[Request]:
        plain = [asking(tokenizer, f"Tell me a story about {name}.", max_tokens=40, seed=5) for name in ("Mia", "Leo")]
        held = [asking(tokenizer, "Give me JSON.", source, max_tokens=60, seed=seed) for seed in (5, 6)]
        ruled = [asking(tokenizer, "Count from 1 to 9.", max_tokens=40, seed=7, frequency_penalty=1.0, min_tokens=30)]
        return [*plain, *held, *ruled]

    alone = all_of_them()
    for request in alone:
        driver.add(request)
        driver.run()
    together = all_of_them()
    for request in together:
        driver.add(request)
        driver.step()
    driver.run()
    for one, other in zip(alone, together, strict=True):
        assert one.generated == other.generated
    assert len(together[-1].generated) >= 30


@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_a_preempted_answer_goes_on_where_it_was(driver, tokenizer, after):
    """Grammar, penalties, banned sequences and min_tokens are rebuilt from tokens."""
    source = grammars.json_schema("schema", SCHEMAS["nested"]).source
    rules = {"seed": 3, "temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5, "min_tokens": 20}

    def both() -> list[Request]:
        return [asking(tokenizer, "Hello", source, 60, **rules), asking(tokenizer, "Hello", "", 60, **rules)]

    whole, cut = both(), both()
    for request in whole:
        driver.add(request)
    driver.run()
    for request in cut:
        driver.add(request)
    while len(cut[0].generated) < after:
        driver.step()
    for request in cut:
        driver.preempt(request)
    driver.run()
    assert [request.generated for request in cut] == [request.generated for request in whole]


def test_a_complete_answer_may_end_before_min_tokens(driver, tokenizer):
    """Nothing but an end token can follow it."""
    source = grammars.choice("c", ["yes"]).source
    request = driver.add(asking(tokenizer, "Hello", source, min_tokens=50))
    driver.run()
    assert text_of(tokenizer, request) == "yes"


def test_masks_have_no_bits_beyond_the_vocabulary(loaded):
    for vocab_size in (1536, 1537, 1550, 1567):
        table = GrammarTable(Path(bundled_model()), vocab_size, loaded.eos_token_ids)
        masks = table.masks([table.begin(grammars.regex("r", r"(.|\n)*").source, ()), broken_state(table)])
        assert masks.shape == (2, -(-vocab_size // 32))
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        assert bits[0, :1536].sum() > 1000
        assert not bits[:, vocab_size:].any()


def broken_state(table):
    return table.begin("start: no_such_rule", ())


@pytest.mark.parametrize("grammar", ["start: nothing_of_that_name", "start: start"])
def test_a_grammar_that_fails_here_ends_its_own_row_alone(driver, tokenizer, grammar):
    """The gateway compiles first, so this takes two versions that disagree."""
    broken = driver.add(asking(tokenizer, "Hello", grammars.lark("l", grammar).source))
    other = driver.add(asking(tokenizer, "Hello", max_tokens=5, temperature=0.0))
    alone = asking(tokenizer, "Hello", max_tokens=5, temperature=0.0)
    driver.run()
    driver.add(alone)
    driver.run()
    assert broken.failure
    assert broken.generated == []
    assert other.generated == alone.generated


def test_a_grammar_that_breaks_off_midway_ends_its_own_row_alone(driver, tokenizer, monkeypatch):
    """A regular expression whose automaton grows with the answer, until it is too large."""
    monkeypatch.setattr(worker.grammar, "_LIMITS", LLParserLimits(verbose_errors=False, max_lexer_states=1000))
    source = grammars.regex("r", "[ab]*a[ab]{16}x").source
    ends = {token: -100.0 for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token).endswith(b"x")}
    broken = driver.add(asking(tokenizer, "Hello", source, 900, temperature=5.0, seed=1, logit_bias=ends))
    other = driver.add(asking(tokenizer, "Hello", max_tokens=5, temperature=0.0))
    alone = asking(tokenizer, "Hello", max_tokens=5, temperature=0.0)
    driver.run()
    driver.add(alone)
    driver.run()
    assert "too many states: 1000" in broken.failure
    assert len(broken.generated) > 20
    assert other.generated == alone.generated


def test_both_sides_have_the_same_limits():
    """Else what compiles at the gateway need not compile on a Mac."""
    names = [name for name in dir(LLParserLimits) if not name.startswith("_")]
    assert "max_lexer_states" in names
    for name in names:
        assert getattr(grammars._LIMITS, name) == getattr(worker.grammar._LIMITS, name)


def test_without_a_usable_tokenizer_the_row_says_so(loaded, tokenizer, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    table = GrammarTable(tmp_path, loaded.vocab_size, loaded.eos_token_ids)
    engine = Engine(loaded, twin_kernels(), memory_limit_bytes=1 << 30, grammars=table)
    engine.configure(configure_of(engine, num_blocks=512))
    driver = Driver(engine, num_blocks=512)
    request = driver.add(asking(tokenizer, "Hello", grammars.choice("c", ["yes"]).source))
    driver.run()
    assert "table could not be built" in request.failure
