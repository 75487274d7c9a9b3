"""OpenAI bodies: what is understood, what is refused, and nothing ignored that would change the answer."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import InvalidRequest
from cluster.handling import Handling
from cluster.openai_requests import parse_body, parse_common, parse_messages, parse_prompt

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["model", "messages", "prompt", "temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop", "n"]
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
        ("n", 2),
        ("presence_penalty", 0.5),
        ("frequency_penalty", -1),
        ("logit_bias", {"5": 1}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("suffix", "tail"),
        ("echo", True),
    ],
)
def test_what_would_change_the_answer_is_refused(field, value):
    with pytest.raises(InvalidRequest, match=f"{field}: is not supported"):
        parse_common({field: value}, is_chat=True)


def test_the_same_fields_are_fine_where_they_mean_nothing():
    body = {"n": 1, "presence_penalty": 0.0, "logit_bias": {}, "tools": [], "response_format": {"type": "text"}}
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
    }
    common = parse_common(parse_body(json.dumps(body).encode()), is_chat=True)
    sampling = common.sampling
    assert (common.model, common.stream, common.include_usage) == ("m", True, True)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0.5, 4, 0.1)
    assert (sampling.seed, sampling.max_tokens, sampling.stop, sampling.stop_token_ids) == (9, 6, ("x",), (3,))
    assert (sampling.ignore_eos, sampling.num_top_logprobs) == (True, 2)
    assert common.handling == Handling("research", -3, 2, 60.0)


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
