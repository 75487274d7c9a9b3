"""Constraints and several answers over both faces, on a real fleet."""

import json
import os
import signal
import threading
import time

import jsonschema
import pytest

from cluster.sampling import seed_of_answer
from protos.cidery.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

pytestmark = [pytest.mark.ray, pytest.mark.slow]

USER = [{"role": "user", "content": "Give me JSON for Leo, 33 years old, who likes pink."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


def events_of(served, body):
    """The JSON of each server-sent event."""
    with served.client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def texts_of(events) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["delta"].get("content", "")
    return texts


@pytest.mark.parametrize("seed", range(5))
def test_answers_are_json_of_the_schema_also_beside_plain_ones(three_macs, seed):
    """Plain requests run beside and get what they get alone."""
    prompt = f"Tell me a story about {seed}."
    alone = three_macs.complete(prompt, max_tokens=60, seed=seed)["choices"][0]["text"]
    beside: list[str] = []
    asker = threading.Thread(
        target=lambda: beside.append(three_macs.complete(prompt, max_tokens=60, seed=seed)["choices"][0]["text"])
    )
    asker.start()
    answer = three_macs.chat(USER, response_format=FORMAT, seed=seed, temperature=1.0)["choices"][0]
    asker.join()
    assert answer["finish_reason"] == "stop"
    jsonschema.validate(json.loads(answer["message"]["content"]), SCHEMA)
    assert beside == [alone]


def test_a_streamed_answer_is_the_same_json(three_macs):
    body = {"messages": USER, "response_format": FORMAT, "seed": 4, "temperature": 0.8}
    whole = three_macs.chat(**body)["choices"][0]["message"]["content"]
    assert texts_of(events_of(three_macs, body)) == {0: whole}


def test_max_tokens_ends_json_early_and_says_so(three_macs):
    answer = three_macs.chat(USER, response_format=FORMAT, max_tokens=4)["choices"][0]
    assert answer["finish_reason"] == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer["message"]["content"])


def test_the_other_grammars(three_macs):
    assert three_macs.complete("x", structured_outputs={"regex": "[0-9]{4}"})["choices"][0]["text"].isdigit()
    assert three_macs.complete("x", guided_choice=["left", "right"])["choices"][0]["text"] in ("left", "right")
    lark = three_macs.complete("x", structured_outputs={"grammar": 'start: "a" start | "b"'}, max_tokens=200, seed=1)
    assert set(lark["choices"][0]["text"]) <= {"a", "b"}
    any_object = three_macs.chat(USER, response_format={"type": "json_object"})["choices"][0]
    assert isinstance(json.loads(any_object["message"]["content"]), dict)


def test_grpc_has_the_same(three_macs):
    grammar = sampling_pb2.Grammar(json_schema=json.dumps(SCHEMA))
    asked = inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(**USER[0])], sampling={"grammar": grammar, "seed": 4, "temperature": 0.8}
    )
    with three_macs.channel() as channel:
        responses = list(inference_pb2_grpc.InferenceServiceStub(channel).Chat(asked))
    text = "".join(response.chunk.text for response in responses)
    same = three_macs.chat(USER, response_format=FORMAT, seed=4, temperature=0.8)["choices"][0]["message"]["content"]
    assert text == same


def test_rules_reach_the_rows(three_macs):
    """Each of them changes a greedy answer in the way that it says."""
    prompt = [7] * 30
    plain = three_macs.complete(prompt, temperature=0, max_tokens=30, ignore_eos=True, logprobs=0)["choices"][0]

    def ask(**fields):
        asked = {"temperature": 0, "max_tokens": 30, "ignore_eos": True, "logprobs": 0} | fields
        return three_macs.complete(prompt, **asked)["choices"][0]

    first = three_macs.client.post(
        "/v1/completions", json={"prompt": prompt, "temperature": 0, "max_tokens": 1, "logprobs": 1}
    ).json()["choices"][0]["logprobs"]["tokens"][0]
    token = _token_id(three_macs, first)
    assert ask(logit_bias={str(token): -100})["logprobs"]["tokens"][0] != first
    assert first not in ask(banned_token_ids=[token])["logprobs"]["tokens"]
    always = ask(logit_bias={"70": 100})["logprobs"]["tokens"]
    assert len(set(always)) == 1
    penalised = ask(logit_bias={"70": 30}, frequency_penalty=2.0, presence_penalty=2.0)["logprobs"]["tokens"]
    assert len(set(penalised)) > 1
    assert ask(repetition_penalty=5.0)["text"] != plain["text"]
    assert (
        ask(xtc_probability=1.0, xtc_threshold=0.05, temperature=1.0, seed=1)["text"]
        != ask(temperature=1.0, seed=1)["text"]
    )


def _token_id(served, text) -> int:
    asked = inference_pb2.TokenizeRequest(text=text)
    with served.channel() as channel:
        ids = inference_pb2_grpc.InferenceServiceStub(channel).Tokenize(asked).token_ids
    assert len(ids) == 1
    return ids[0]


def test_bad_words_are_not_said(three_macs):
    text = three_macs.chat(USER, temperature=0)["choices"][0]["message"]["content"]
    assert "name" in text
    other = three_macs.chat(USER, temperature=0, bad_words=["name"])["choices"][0]["message"]["content"]
    assert other != text


def test_min_tokens_holds_off_end_tokens_and_stop_strings(three_macs):
    short = three_macs.chat(USER, temperature=0)
    assert short["usage"]["completion_tokens"] < 90
    long = three_macs.chat(USER, temperature=0, min_tokens=90, max_tokens=100)
    assert long["usage"]["completion_tokens"] >= 90
    stopped = three_macs.chat(USER, temperature=0, stop=["e"], min_tokens=12)
    assert stopped["usage"]["completion_tokens"] > 12
    assert "e" in stopped["choices"][0]["message"]["content"]


class TestSeveralAnswers:
    def test_each_is_what_its_seed_gives_alone(self, three_macs):
        body = {"max_tokens": 24, "temperature": 1.0}
        together = three_macs.chat(USER, n=4, seed=11, **body)
        assert [choice["index"] for choice in together["choices"]] == [0, 1, 2, 3]
        seeds = [seed_of_answer(11, index) for index in range(4)]
        assert together["cidery"]["seeds"] == seeds
        for choice, seed in zip(together["choices"], seeds, strict=True):
            alone = three_macs.chat(USER, seed=seed, **body)["choices"][0]
            assert alone["message"] == choice["message"]

    def test_the_prompt_is_counted_once_and_computed_once(self, three_macs):
        prompt = list(range(3, 1403))
        answer = three_macs.complete(prompt, n=4, max_tokens=5, ignore_eos=True, seed=1)
        assert answer["usage"]["prompt_tokens"] == 1400
        assert answer["usage"]["completion_tokens"] == 20
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        with three_macs.channel() as channel:
            asked = inference_pb2.GenerateRequest(
                token_ids={"ids": list(reversed(prompt))}, n=3, sampling={"max_tokens": 4, "ignore_eos": True}
            )
            responses = list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(asked))
        completions = {r.index: r.completion for r in responses if r.HasField("completion")}
        assert sorted(completions) == [0, 1, 2]
        assert len({completion.mac for completion in completions.values()}) == 1
        cached = sorted(completion.usage.num_cached_tokens for completion in completions.values())
        assert cached[0] == 0
        assert cached[1] >= 1384

    def test_streams_are_interleaved_and_add_up(self, three_macs):
        body = {"messages": USER, "n": 3, "seed": 5, "max_tokens": 40, "temperature": 1.0}
        whole = three_macs.client.post("/v1/chat/completions", json=body).json()
        events = events_of(three_macs, body | {"stream_options": {"include_usage": True}})
        usage = events.pop()
        assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
        assert texts_of(events) == {c["index"]: c["message"]["content"] for c in whole["choices"]}
        ends = [c["index"] for event in events for c in event["choices"] if c["finish_reason"]]
        assert sorted(ends) == [0, 1, 2]
        order = [c["index"] for event in events for c in event["choices"] if c["delta"].get("content")]
        assert order != sorted(order)

    def test_leaving_ends_all_of_them(self, three_macs):
        body = {"messages": USER, "n": 5, "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with three_macs.client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.iter_lines()  # whose end would close the stream
            next(lines)
            assert _num_running(three_macs) > 1
        give_up_s = time.monotonic() + 20
        while _num_running(three_macs):
            assert time.monotonic() < give_up_s
            time.sleep(0.1)


def _num_running(served) -> int:
    return sum(mac["scheduling"]["num_running"] for mac in served.fleet().values())


def test_json_goes_on_after_the_loss_of_its_worker(start):
    """Grammar, penalties and draws are rebuilt from tokens by a new worker: the same answer."""
    schema = {"type": "array", "items": {"type": "integer", "maximum": 9999}, "minItems": 60, "maxItems": 80}
    body = {"messages": USER, "seed": 3, "temperature": 1.0, "presence_penalty": 0.4}
    body["structured_outputs"] = {"json": schema}
    with start("--macs", "1") as served:
        expected = served.chat(**body)["choices"][0]["message"]["content"]
        jsonschema.validate(json.loads(expected), schema)
        (mac,) = served.fleet().values()
        text, is_killed = "", False
        with served.client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    text += "".join(texts_of([json.loads(line.removeprefix("data: "))]).values())
                if len(text) > 40 and not is_killed:
                    is_killed = True
                    os.kill(mac["worker_pid"], signal.SIGKILL)
        assert is_killed
        assert text == expected
        (after,) = served.fleet().values()
        assert after["worker_pid"] != mac["worker_pid"]
