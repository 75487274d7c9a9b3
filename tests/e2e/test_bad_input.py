"""Bad input gets the right code and a message that says what, got and allowed, on both faces; nobody else is harmed."""

import threading

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from protos.cidery.v1 import inference_pb2, inference_pb2_grpc

pytestmark = [pytest.mark.ray, pytest.mark.slow]

USER = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
TOO_LONG = "4090 prompt tokens + 50 max_tokens = 4140"
BAD_ARGUMENT = grpc.StatusCode.INVALID_ARGUMENT

HTTP_CASES = {
    "unknown model": (CHAT, {"model": "gpt-9", "messages": USER}, 404, "served: cidery-tiny"),
    "no messages": (CHAT, {"messages": []}, 400, "at least one message"),
    "messages missing": (CHAT, {}, 400, "messages: is missing"),
    "role refused by the template": (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, "wizard"),
    "empty prompt": (TEXT, {"prompt": ""}, 400, "is empty"),
    "empty token list": (TEXT, {"prompt": []}, 400, "is empty"),
    "token out of range": (TEXT, {"prompt": [5, 999_999]}, 400, "prompt[1]: must be a token id from 0 to"),
    "negative token": (TEXT, {"prompt": [-1]}, 400, "got -1"),
    "max_tokens 0": (CHAT, {"messages": USER, "max_tokens": 0}, 400, "max_tokens: must be at least 1, got 0"),
    "max_tokens negative": (CHAT, {"messages": USER, "max_tokens": -5}, 400, "got -5"),
    "max_tokens text": (CHAT, {"messages": USER, "max_tokens": "ten"}, 400, "must be an integer"),
    "temperature too high": (CHAT, {"messages": USER, "temperature": 1e9}, 400, "temperature: must be a number from 0"),
    "top_p 0": (CHAT, {"messages": USER, "top_p": 0}, 400, "top_p"),
    "too many logprobs": (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 99}, 400, "from 0 to 20, got 99"),
    "empty stop": (CHAT, {"messages": USER, "stop": [""]}, 400, "stop[0]"),
    "too many answers": (CHAT, {"messages": USER, "n": 17}, 400, "n: must be from 1 to 16, got 17"),
    "no answers": (CHAT, {"messages": USER, "n": 0}, 400, "n: must be from 1 to 16, got 0"),
    "frequency_penalty too high": (CHAT, {"messages": USER, "frequency_penalty": 3}, 400, "from -2 to 2, got 3"),
    "presence_penalty text": (CHAT, {"messages": USER, "presence_penalty": "x"}, 400, "presence_penalty: must be a"),
    "repetition_penalty 0": (CHAT, {"messages": USER, "repetition_penalty": 0}, 400, "from 0.01 to 10, got 0"),
    "logit_bias too high": (CHAT, {"messages": USER, "logit_bias": {"5": 101}}, 400, "logit_bias.5: must be a number"),
    "logit_bias of no token": (CHAT, {"messages": USER, "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    "logit_bias of a word": (CHAT, {"messages": USER, "logit_bias": {"no": 1}}, 400, "keys must be token ids"),
    "min_tokens over max_tokens": (
        CHAT,
        {"messages": USER, "min_tokens": 9, "max_tokens": 8},
        400,
        "min_tokens: must be at most max_tokens, which is 8, got 9",
    ),
    "banned token out of range": (CHAT, {"messages": USER, "banned_token_ids": [9**9]}, 400, "banned_token_ids[0]"),
    "most of the vocabulary banned": (CHAT, {"messages": USER, "banned_token_ids": list(range(900))}, 400, "half of"),
    "empty bad word": (CHAT, {"messages": USER, "bad_words": [""]}, 400, "bad_words[0]: is empty"),
    "xtc_threshold too high": (CHAT, {"messages": USER, "xtc_threshold": 0.6}, 400, "from 0 to 0.5, got 0.6"),
    "unknown response_format": (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, 400, "json_schema, got"),
    "bad schema": (
        CHAT,
        {"messages": USER, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}},
        400,
        "response_format.json_schema.schema: can't be compiled: Invalid type: objekt",
    ),
    "bad regex": (TEXT, {"prompt": "x", "guided_regex": "(a"}, 400, "unclosed group"),
    "bad lark": (TEXT, {"prompt": "x", "structured_outputs": {"grammar": "start: b"}}, 400, 'unknown name: "b"'),
    "two grammars": (TEXT, {"prompt": "x", "guided_regex": "a", "guided_choice": ["b"]}, 400, "can't be combined"),
    "grammar without an end": (
        TEXT,
        {"prompt": "x", "guided_regex": "a", "ignore_eos": True},
        400,
        "ignore_eos: can't",
    ),
    "priority too high": (
        CHAT,
        {"messages": USER, "priority": 101},
        400,
        "priority: must be from -100 to 100, got 101",
    ),
    "tenant too long": (CHAT, {"messages": USER, "tenant": "t" * 129}, 400, "tenant: may have at most 128 characters"),
    "not an object": (CHAT, [1, 2], 400, "must be a JSON object, got a list"),
    "too many messages": (CHAT, {"messages": USER * 5000}, 400, "at most 4096 messages"),
    "a batch": (TEXT, {"prompt": ["a", "b"]}, 400, "is one prompt a request, not a batch; got 2"),
    "millions of ids": (TEXT, {"prompt": [5] * 1_100_000}, 400, "at most 1048576 token ids, got 1100000"),
    "speech": (CHAT, {"messages": USER, "modalities": ["audio"]}, 400, "modalities: is not supported"),
    "a chain of rules": (
        TEXT,
        {"prompt": "x", "guided_grammar": "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(3000))},
        400,
        "at most 1000 rules",
    ),
    "what if nothing": ("/admin/explain", {"text": ""}, 400, "text: is empty"),
    "prompt too long": (TEXT, {"prompt": [5] * 4090, "max_tokens": 50}, 400, TOO_LONG),
}
RAW_CASES = {
    "NaN": (b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400, "got nan"),
    "invalid UTF-8": (b'{"prompt": "\xff"}', 400, "not valid UTF-8: byte 12 is 0xff"),
    "lone surrogate": (rb'{"messages": [{"role": "user", "content": "\ud800"}]}', 400, "lone surrogate"),
    "lone surrogate in a tenant": (rb'{"prompt": "x", "tenant": "\ud800"}', 400, "lone surrogate"),
    "not JSON": (b"{", 400, "is not JSON"),
    "ten megabytes": (b'{"prompt": "' + b"a" * 10_000_000 + b'"}', 413, "at most 8388608 bytes"),
    "endless number": (b'{"prompt": "x", "seed": ' + b"1" * 5000 + b"}", 400, "can't be read"),
    "lone surrogate in a role": (rb'{"messages": [{"role": "\ud800", "content": "x"}]}', 400, "lone surrogate"),
    "deeply nested": (b"[" * 100_000, 400, "nested too deeply"),
}
GRPC_CASES = {
    "unknown model": ({"model": "gpt-9", "text": "x"}, grpc.StatusCode.NOT_FOUND, "served: cidery-tiny"),
    "empty prompt": ({"text": ""}, BAD_ARGUMENT, "is empty"),
    "no prompt": ({}, BAD_ARGUMENT, "prompt: is missing"),
    "token out of range": ({"token_ids": {"ids": [999_999]}}, BAD_ARGUMENT, "got 999999"),
    "pin without end": ({"text": "x", "handling": {"pin_s": float("inf")}}, BAD_ARGUMENT, "pin_s: must be from 0 to"),
    "max_tokens 0": ({"text": "x", "sampling": {"max_tokens": 0}}, BAD_ARGUMENT, "at least 1, got 0"),
    "max_tokens negative": ({"text": "x", "sampling": {"max_tokens": -1}}, BAD_ARGUMENT, "got -1"),
    "NaN": ({"text": "x", "sampling": {"temperature": float("nan")}}, BAD_ARGUMENT, "got nan"),
    "too long": (
        {"token_ids": {"ids": [5] * 4090}, "sampling": {"max_tokens": 50}},
        BAD_ARGUMENT,
        TOO_LONG,
    ),
    "too many answers": ({"text": "x", "n": 17}, BAD_ARGUMENT, "n: must be from 1 to 16, got 17"),
    "min_tokens negative": ({"text": "x", "sampling": {"min_tokens": -1}}, BAD_ARGUMENT, "at least 0, got -1"),
    "penalty NaN": ({"text": "x", "sampling": {"presence_penalty": float("nan")}}, BAD_ARGUMENT, "got nan"),
    "bad schema": (
        {"text": "x", "sampling": {"grammar": {"json_schema": '{"type": "objekt"}'}}},
        BAD_ARGUMENT,
        "grammar.json_schema: can't be compiled: Invalid type: objekt",
    ),
    "schema that is no JSON": (
        {"text": "x", "sampling": {"grammar": {"json_schema": "{"}}},
        BAD_ARGUMENT,
        "is not JSON",
    ),
    "bad regex": ({"text": "x", "sampling": {"grammar": {"regex": "(a"}}}, BAD_ARGUMENT, "unclosed group"),
    "no choice": ({"text": "x", "sampling": {"grammar": {"choice": {}}}}, BAD_ARGUMENT, "from 1 to 1024 texts, got 0"),
    "a field of the cluster's own": (
        {"text": "x", "sampling": {"compiled_grammar": "{}"}},
        BAD_ARGUMENT,
        "compiled_grammar: is the cluster's own",
    ),
    "ten megabytes": ({"text": "a" * 10_000_000}, grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
}


@pytest.fixture(scope="module", autouse=True)
def a_running_request_stays_unharmed(three_macs):
    """One request runs before, one through and one after all the bad ones: the same answer each time."""

    def ask() -> str:
        return three_macs.complete([7] * 40, max_tokens=200, temperature=0, ignore_eos=True)["choices"][0]["text"]

    before = ask()
    during: list[str] = []
    stop = threading.Event()

    def keep_asking() -> None:
        while not stop.is_set():
            during.append(ask())

    asker = threading.Thread(target=keep_asking)
    asker.start()
    yield
    stop.set()
    asker.join()
    assert during
    assert {before, *during, ask()} == {before}


@pytest.mark.parametrize("case", HTTP_CASES)
def test_http_says_what_is_wrong(three_macs, case):
    path, body, status, message = HTTP_CASES[case]
    response = three_macs.client.post(path, json=body)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


def test_unknown_routes_and_methods_answer_in_the_usual_shape(three_macs):
    for path, status, code in (("/v1/nothing", 404, "no_such_route"), (CHAT, 405, "method_not_allowed")):
        response = three_macs.client.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("case", RAW_CASES)
def test_http_survives_broken_bodies(three_macs, case, streams):
    body, status, message = RAW_CASES[case]
    if streams:
        body = body.replace(b"{", b'{"stream": true, ', 1)
        message = message.replace("byte 12", "byte 28")
    response = three_macs.client.post(CHAT if b"messages" in body else TEXT, content=body)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("case", GRPC_CASES)
def test_grpc_says_what_is_wrong(three_macs, case):
    fields, code, message = GRPC_CASES[case]
    with three_macs.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest(**fields)))
    assert caught.value.code() is code
    assert message in caught.value.details()


def test_grpc_errors_carry_the_field_for_machines(three_macs):
    request = inference_pb2.GenerateRequest(text="x", sampling={"top_p": 2})
    with three_macs.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request))
    details = rpc_status.from_call(caught.value).details
    info, violations = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    assert details[0].Unpack(info)
    assert details[1].Unpack(violations)
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "cidery.v1")
    assert violations.field_violations[0].field == "top_p"


def test_grpc_answers_invalid_utf8_as_the_callers_mistake(three_macs):
    """protobuf's own handler would answer INTERNAL."""
    field_2_is_text = b"\x12\x01\xff"
    with three_macs.channel() as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream("/cidery.v1.InferenceService/Generate")(field_2_is_text))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "not a cidery.v1.GenerateRequest" in caught.value.details()


def test_the_fleet_is_not_steered_from_a_web_page(three_macs):
    """A browser sends such a request for any page that is open."""
    (mac, *_) = three_macs.macs
    headers = {"origin": "http://evil.example", "content-type": "text/plain"}
    answer = three_macs.client.post("/admin/drain", content=f'{{"mac": "{mac}"}}', headers=headers)
    assert answer.status_code == 403
    assert "http://evil.example" in answer.json()["error"]["message"]
    states = {each["state"] for each in three_macs.client.get("/admin/fleet").json()["macs"]}
    assert states == {"MAC_STATE_READY"}
