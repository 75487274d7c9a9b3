"""OpenAI bodies: what is understood, what is refused, and nothing ignored that would change the answer."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InvalidRequest
from cluster.grammars import Grammar, json_schema
from cluster.handling import Handling
from cluster.openai_requests import parse_body, parse_common, parse_messages, parse_prompt
from cluster.scheduling.request import Speculation

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "n"]
FIELDS += ["logit_bias", "response_format", "structured_outputs", "guided_json", "guided_choice", "bad_words"]
FIELDS += ["frequency_penalty", "min_tokens", "banned_token_ids", "xtc_probability", "repetition_penalty"]
FIELDS += ["max_completion_tokens", "stream", "stream_options", "logprobs", "top_logprobs", "stop_token_ids", "tools"]


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6), st.booleans())
def test_any_json_is_parsed_or_refused_by_name_and_never_crashes(body, is_chat):
    for parse in (
        lambda: parse_common(body, is_chat=is_chat),
        lambda: parse_messages(body),
        lambda: parse_prompt(body),
    ):
        try:
            parse()
        except InvalidRequest as error:
            assert error.field


@given(st.binary(max_size=40))
def test_any_bytes_are_an_object_or_refused(data):
    try:
        assert isinstance(parse_body(data), dict)
    except InvalidRequest as error:
        assert error.field == "body"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 2),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("suffix", "tail"),
    ],
)
def test_what_would_change_the_answer_is_refused(field, value):
    with pytest.raises(InvalidRequest, match=f"{field}: is not supported"):
        parse_common({field: value}, is_chat=True)


def test_the_same_fields_are_fine_where_they_mean_nothing():
    body = {"n": 1, "logit_bias": {}, "tools": [], "response_format": {"type": "text"}, "bad_words": []}
    extended = body | {"user": "someone", "unknown": 1}
    assert parse_common(extended, is_chat=True) == parse_common({}, is_chat=True)


def test_all_of_a_request_is_understood():
    body = {
        "model": "m",
        "temperature": 1,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "seed": 9,
        "max_tokens": 5,
        "max_completion_tokens": 6,
        "stop": "x",
        "stop_token_ids": [3],
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        "tenant": "research",
        "priority": -3,
        "retention_priority": 2,
        "pin_s": 60,
        "cache_salt": "c",
        "n": 3,
        "frequency_penalty": 0.5,
        "presence_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"7": -100, "8": 2.5},
        "min_tokens": 4,
        "banned_token_ids": [9],
        "bad_words": ["no"],
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "speculation": "ngram",
    }
    common = parse_common(parse_body(json.dumps(body).encode()), is_chat=True)
    sampling = common.sampling
    assert (common.model, common.stream, common.include_usage) == ("m", True, True)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0.5, 4, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.stop, sampling.stop_token_ids) == (9, 6, ("x",), (3,))
    assert (sampling.ignore_eos, sampling.num_top_logprobs) == (True, 2)
    assert common.handling == Handling("research", -3, 2, 60.0, cache_salt="c")
    assert common.num_answers == 3
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (0.5, -1.0, 1.1)
    assert (sampling.logit_bias, sampling.min_tokens) == (((7, -100.0), (8, 2.5)), 4)
    assert (sampling.banned_token_ids, sampling.bad_words) == ((9,), ("no",))
    assert (sampling.xtc_probability, sampling.xtc_threshold, sampling.grammar) == (0.5, 0.2, None)
    assert sampling.speculation is Speculation.NGRAM


@pytest.mark.parametrize("value", ["default", "", "NGRAM", "medusa", 1, True, ["ngram"]])
def test_a_way_to_guess_that_there_is_not_is_refused(value):
    with pytest.raises(InvalidRequest, match=r"speculation: must be (off, auto, ngram or draft|a string), got"):
        parse_common({"speculation": value}, is_chat=True)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
GRAMMARS = {
    "response_format": ({"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, "json_schema.schema"),
    "structured_outputs": ({"json": SCHEMA}, "json"),
    "guided_json": (SCHEMA, ""),
}


@pytest.mark.parametrize("field", GRAMMARS)
def test_a_schema_is_the_same_grammar_wherever_it_is(field):
    value, path = GRAMMARS[field]
    grammar = parse_common({field: value}, is_chat=True).sampling.grammar
    assert grammar == Grammar(f"{field}.{path}".rstrip("."), json_schema("", SCHEMA).source)
    text = parse_common({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_chat=True).sampling.grammar
    assert text.source == grammar.source


@pytest.mark.parametrize("prefix", ["guided_", ""])
def test_the_other_kinds_of_grammar(prefix):
    for name, value in (("regex", "a+"), ("choice", ["a", "b"]), ("grammar", 'start: "a"'), ("json_object", True)):
        body = {f"guided_{name}": value} if prefix else {"structured_outputs": {name: value}}
        grammar = parse_common(body, is_chat=False).sampling.grammar
        assert grammar.field == (f"guided_{name}" if prefix else f"structured_outputs.{name}")
        assert grammar.source
    assert parse_common({"response_format": {"type": "json_object"}}, is_chat=True).sampling.grammar is not None
    assert parse_common({"guided_json_object": False}, is_chat=True).sampling.grammar is None


BAD_GRAMMARS = {
    "response_format: must be an object": {"response_format": "json"},
    "response_format.type: must be text, json_object or json_schema": {"response_format": {"type": "xml"}},
    "response_format.json_schema.schema: is missing": {"response_format": {"type": "json_schema"}},
    "response_format.json_schema.schema: must be a JSON schema": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}
    },
    "structured_outputs: must have exactly one of json, .* got none": {"structured_outputs": {}},
    "structured_outputs: must have exactly one of json, .* got regex, choice": {
        "structured_outputs": {"regex": "a", "choice": ["b"]}
    },
    "structured_outputs: must have exactly one of json, .* got structural_tag": {
        "structured_outputs": {"structural_tag": "{}"}
    },
    "structured_outputs.json: is not JSON": {"structured_outputs": {"json": "{"}},
    "guided_json: is nested too deeply": {"guided_json": "[" * 100_000},
    "guided_regex: can't be combined with response_format": {
        "response_format": {"type": "json_object"},
        "guided_regex": "a",
    },
    "guided_regex: must be a string, got a number": {"guided_regex": 5},
    "guided_regex: is empty": {"guided_regex": ""},
    "guided_regex: may have at most 262144 characters, got 262145": {"guided_regex": "a" * 262_145},
    "guided_regex: is not valid Unicode": {"guided_regex": "\ud800"},
    "guided_choice: must have from 1 to 1024 texts, got 0": {"guided_choice": []},
    r"guided_choice\[1\]: is empty": {"guided_choice": ["a", ""]},
    "guided_choice: must be a list of strings": {"guided_choice": ["a", 1]},
    "guided_json_object: must be true or false": {"guided_json_object": "yes"},
    "logit_bias: keys must be token ids, got '-1'": {"logit_bias": {"-1": 1}},
    "logit_bias.5: must be a number, got null": {"logit_bias": {"5": None}},
    "bad_words: must be a list of strings": {"bad_words": [1]},
    "banned_token_ids: must be a list of token ids": {"banned_token_ids": [1.5]},
    "n: must be from 1 to 16, got 17": {"n": 17},
    "n: must be from 1 to 16, got 0": {"n": 0},
}


@pytest.mark.parametrize("message", BAD_GRAMMARS)
def test_what_is_wrong_is_said(message):
    with pytest.raises(InvalidRequest, match=message):
        parse_common(BAD_GRAMMARS[message], is_chat=True)


def test_content_parts_are_joined_and_other_parts_refused():
    text = {"type": "text", "text": "a"}
    assert parse_messages({"messages": [{"role": "user", "content": [text, text]}]})[0]["content"] == "aa"
    with pytest.raises(InvalidRequest, match="text parts only"):
        parse_messages({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})


@pytest.mark.parametrize(
    ("prompt", "expected"), [("a", "a"), ([1, 2], (1, 2)), (["a"], "a"), ([[1, 2]], (1, 2)), ([], ())]
)
def test_prompts_are_text_or_tokens(prompt, expected):
    assert parse_prompt({"prompt": prompt}) == expected


@pytest.mark.parametrize("prompt", [None, 5, ["a", "b"], [1, "a"], [True], {}])
def test_other_prompts_are_refused(prompt):
    with pytest.raises(InvalidRequest, match="prompt"):
        parse_prompt({"prompt": prompt})


def test_echo_makes_logprobs_those_of_the_prompt_too():
    common = parse_common({"echo": True, "logprobs": 3, "max_tokens": 0}, is_chat=False)
    assert common.echo
    assert not common.tells_prompt
    assert common.sampling.num_prompt_logprobs == common.sampling.num_top_logprobs == 3
    assert common.sampling.may_draw_none
    plain = parse_common({"echo": True}, is_chat=False)
    assert plain.echo
    assert plain.sampling.num_prompt_logprobs is None
    told = parse_common({"prompt_logprobs": 0}, is_chat=True)
    assert told.tells_prompt
    assert told.sampling.num_prompt_logprobs == 0


@pytest.mark.parametrize(
    ("body", "is_chat", "field"),
    [
        ({"echo": True}, True, "echo"),
        ({"echo": 1}, False, "echo"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, False, "prompt_logprobs"),
        ({"prompt_logprobs": "2"}, False, "prompt_logprobs"),
    ],
)
def test_bad_echoes_are_refused(body, is_chat, field):
    with pytest.raises(InvalidRequest) as refused:
        parse_common(body, is_chat=is_chat)
    assert refused.value.field == field
