"""Embeddings, echoed prompts and their log-probabilities on a real fleet, against mlx-lm's own forward."""

import base64
import json
import math
import random
import struct
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

from cluster.config import bundled_model
from protos.cidery.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

pytestmark = [pytest.mark.ray, pytest.mark.slow]

VOCABULARY = range(3, 1500)
TOLERANCE = 1e-4


def tokens_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice(VOCABULARY) for _ in range(length)]


@pytest.fixture(scope="module")
def forward():
    """(log-probabilities `[tokens, vocab]`, normed outputs `[tokens, hidden]`) of a prompt, by mlx-lm in float32."""
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm import load

    model, _ = load(bundled_model())
    model.update(tree_map(lambda weights: weights.astype(mx.float32), model.parameters()))

    def run(prompt: list[int]) -> tuple[np.ndarray, np.ndarray]:
        logits = model(mx.array([prompt]))[0]
        return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True)), np.array(
            model.model(mx.array([prompt]))[0]
        )

    return run


def chosen(logprobs: np.ndarray, prompt: list[int]) -> list[float]:
    return [float(row[token]) for row, token in zip(logprobs, prompt[1:], strict=False)]


def embed(served, given, **fields) -> dict:
    response = served.client.post("/v1/embeddings", json={"input": given, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def unit(vector: np.ndarray) -> list[float]:
    return (vector / np.linalg.norm(vector)).tolist()


def test_echo_without_an_answer_scores_the_prompt_also_when_it_is_cached(three_macs, forward):
    prompt = tokens_of(1, 150)
    expected = chosen(forward(prompt)[0], prompt)
    for _ in range(2):
        body = three_macs.complete(prompt, echo=True, logprobs=2, max_tokens=0)
        (choice,) = body["choices"]
        told = choice["logprobs"]
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        assert told["token_logprobs"][1:] == pytest.approx(expected, abs=TOLERANCE)
        assert len(told["tokens"]) == len(prompt)
        assert all(1 <= len(top) <= 2 for top in told["top_logprobs"][1:])
        assert choice["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 0
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_echo_with_an_answer_is_prompt_and_answer(three_macs, forward):
    text = "What is the capital of France? It is"
    body = three_macs.complete(text, echo=True, logprobs=0, max_tokens=4, temperature=0)
    plain = three_macs.complete(text, logprobs=0, max_tokens=4, temperature=0)
    assert body["choices"][0]["text"] == text + plain["choices"][0]["text"]
    num_prompt = body["usage"]["prompt_tokens"]
    told = body["choices"][0]["logprobs"]
    assert told["tokens"][num_prompt:] == plain["choices"][0]["logprobs"]["tokens"]
    assert told["token_logprobs"][num_prompt:] == pytest.approx(
        plain["choices"][0]["logprobs"]["token_logprobs"], abs=TOLERANCE
    )
    assert three_macs.complete(text, echo=True, max_tokens=0)["choices"][0]["text"] == text


def test_a_streamed_echo_tells_the_same(three_macs):
    prompt = tokens_of(2, 700)  # more than one step
    fields = {"prompt": prompt, "echo": True, "logprobs": 1, "prompt_logprobs": 1, "max_tokens": 3, "temperature": 0}
    whole = three_macs.client.post("/v1/completions", json=fields).json()["choices"][0]
    with three_macs.client.stream("POST", "/v1/completions", json=fields | {"stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    choices = [json.loads(line)["choices"][0] for line in lines]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name in ("tokens", "token_logprobs"):
        assert [each for c in choices if c["logprobs"] for each in c["logprobs"][name]] == whole["logprobs"][name]
    assert [each for c in choices for each in c.get("prompt_logprobs", [])] == whole["prompt_logprobs"]
    assert len(whole["prompt_logprobs"]) == len(prompt)


def test_a_conversation_can_be_scored_too(three_macs):
    messages = [{"role": "user", "content": "Who are you?"}]
    answer = three_macs.chat(messages, prompt_logprobs=0, max_tokens=2, temperature=0)
    told = answer["choices"][0]["prompt_logprobs"]
    assert len(told) == answer["usage"]["prompt_tokens"]
    assert told[0] is None
    assert all(len(each) == 1 for each in told[1:])


def test_grpc_scores_a_prompt_of_the_whole_context_and_draws_nothing(tiny_pool, forward):
    prompt = tokens_of(3, 512)
    sampling = sampling_pb2.SamplingParams(max_tokens=0, num_prompt_logprobs=0)
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), sampling=sampling)
    with tiny_pool.channel() as channel:
        events = list(inference_pb2_grpc.InferenceServiceStub(channel).Generate(request))
    told = [each for event in events for each in event.chunk.prompt_logprobs]
    assert [each.token_id for each in told] == prompt[1:]
    assert [each.logprob for each in told] == pytest.approx(chosen(forward(prompt)[0], prompt), abs=TOLERANCE)
    assert events[-1].completion.usage.num_completion_tokens == 0


def test_readers_and_answers_share_steps_and_blocks_that_are_too_few(tiny_pool, forward, oracle):
    """Chunks of 64 tokens and memory for a few requests: everyone is preempted now and then, nobody is wrong."""
    prompts = [tokens_of(seed, 40 + 37 * (seed % 9)) for seed in range(36)]
    before = tiny_pool.fleet()

    def run(at: int):
        if at % 3 == 0:
            return tiny_pool.complete(prompts[at], max_tokens=160, temperature=0, logprobs=0, ignore_eos=True)
        if at % 3 == 1:
            return tiny_pool.complete(prompts[at], max_tokens=0, echo=True, logprobs=0)
        return embed(tiny_pool, prompts[at], pooling="mean", normalize=False)

    with ThreadPoolExecutor(36) as pool:
        answers = list(pool.map(run, range(36)))
    for at, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        logprobs, hidden = forward(prompt)
        if at % 3 == 0:
            expected = oracle(prompt, 160, ignore_eos=True)[1]
            assert answer["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=TOLERANCE)
        elif at % 3 == 1:
            told = answer["choices"][0]["logprobs"]["token_logprobs"][1:]
            assert told == pytest.approx(chosen(logprobs, prompt), abs=TOLERANCE)
        else:
            assert answer["data"][0]["embedding"] == pytest.approx(hidden.mean(axis=0).tolist(), abs=TOLERANCE)
    after = tiny_pool.fleet()
    assert sum(int(mac["scheduling"]["num_preemptions"]) for mac in after.values()) > sum(
        int(mac["scheduling"]["num_preemptions"]) for mac in before.values()
    )
    assert all(mac["blocks"]["num_used"] == 0 for mac in after.values())


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_vectors_equal_mlx_lms_outputs_over_both_faces(three_macs, forward, pooling):
    prompts = [tokens_of(5, 1), tokens_of(6, 16), tokens_of(7, 600)]
    rows = [forward(prompt)[1] for prompt in prompts]
    pooled = {"mean": lambda r: r.mean(axis=0), "last": lambda r: r[-1], "cls": lambda r: r[0]}[pooling]
    for _ in range(2):  # the second time from a cache where that may be
        body = embed(three_macs, prompts, pooling=pooling)
        assert [each["index"] for each in body["data"]] == [0, 1, 2]
        for each, row in zip(body["data"], rows, strict=True):
            assert each["embedding"] == pytest.approx(unit(pooled(row)), abs=TOLERANCE)
        assert body["usage"]["prompt_tokens"] == 617
        if pooling != "last":
            assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    if pooling == "last":
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    request = inference_pb2.EmbedRequest(
        inputs=[inference_pb2.EmbedInput(token_ids=inference_pb2.TokenIds(ids=prompt)) for prompt in prompts],
        pooling=f"POOLING_{pooling.upper()}",
        normalize=False,
        dimensions=8,
    )
    with three_macs.channel() as channel:
        answer = inference_pb2_grpc.InferenceServiceStub(channel).Embed(request)
    for each, row in zip(answer.embeddings, rows, strict=True):
        assert list(each.values) == pytest.approx(pooled(row)[:8].tolist(), abs=TOLERANCE)


def test_openais_forms_of_input_and_encoding(three_macs):
    whole = embed(three_macs, "Hello there")["data"][0]["embedding"]
    assert math.fsum(value * value for value in whole) == pytest.approx(1.0, abs=1e-5)
    (other, again) = embed(three_macs, ["Bye", "Hello there"])["data"]
    assert again["embedding"] == pytest.approx(whole, abs=1e-6)
    assert other["embedding"] != whole
    packed = embed(three_macs, "Hello there", encoding_format="base64")["data"][0]["embedding"]
    assert list(struct.unpack(f"<{len(whole)}f", base64.b64decode(packed))) == pytest.approx(whole, abs=1e-6)
    cut = embed(three_macs, "Hello there", dimensions=10)["data"][0]["embedding"]
    assert cut == pytest.approx(unit(np.array(whole[:10])), abs=1e-6)


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({}, "input", "missing"),
        ({"input": []}, "input", "got 0"),
        ({"input": ""}, "input[0]", "empty"),
        ({"input": ["ok", 5]}, "input[1]", "a number"),
        ({"input": [[1, 99999999]]}, "input[0][1]", "got 99999999"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "'hex'"),
        ({"input": "x", "pooling": "max"}, "pooling", "cls, last, mean"),
        ({"input": "x", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "x", "dimensions": 100000}, "dimensions", "at most"),
        ({"input": [[5] * 9000]}, "prompt", "context"),
        ({"input": "x", "normalize": "yes"}, "normalize", "true or false"),
        ({"input": ["x"] * 2049}, "input", "2,048"),
    ],
)
def test_bad_embedding_requests_are_refused_with_the_field(three_macs, body, param, word):
    response = three_macs.client.post("/v1/embeddings", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert word in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("completions", {"prompt": "x", "echo": "yes"}, "echo"),
        ("completions", {"prompt": "x", "prompt_logprobs": 21}, "prompt_logprobs"),
        ("completions", {"prompt": "x", "prompt_logprobs": -1}, "prompt_logprobs"),
        ("completions", {"prompt": "x", "echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "echo": True}, "echo"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}, "max_tokens"),
    ],
)
def test_bad_scoring_requests_are_refused_with_the_field(three_macs, path, body, param):
    response = three_macs.client.post(f"/v1/{path}", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_bad_embed_calls_are_invalid_arguments(three_macs):
    with three_macs.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for request, word in (
            (inference_pb2.EmbedRequest(), "inputs"),
            (inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput()]), "inputs[0]"),
            (inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="")]), "inputs[0]"),
            (inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="x")], pooling=77), "pooling"),
            (inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="x")], dimensions=0), "dimensions"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                stub.Embed(request)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert word in refused.value.details()
