"""Guessed tokens on a real fleet: the same answers, told in usage and metrics, chosen by request."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.config import bundled_model
from protos.cidery.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture(scope="module")
def guessing(start):
    with start(
        "--speculative-method", "ngram", "--num-speculative-tokens", "6", "--kv-cache-memory", "64MiB"
    ) as served:
        yield served


def retold(served, **fields):
    """A story, and the same once more: the second time it stands in the conversation."""
    told = served.chat(STORY, temperature=0, max_tokens=60, speculation="off")["choices"][0]["message"]
    return served.chat([*STORY, told, *STORY], temperature=0, max_tokens=60, **fields)


def test_an_answer_that_repeats_is_guessed_and_is_the_same(guessing, oracle):
    plain, guessed = retold(guessing, speculation="off"), retold(guessing)
    assert guessed["choices"] == plain["choices"]
    details = guessed["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 20
    assert details["rejected_prediction_tokens"] >= 0
    assert plain["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 0,
    }
    metrics = guessing.client.get("/metrics").text
    accepted = float(re.search(r'cidery_accepted_tokens_total\{model="[^"]+"\} ([0-9.]+)', metrics)[1])
    drafted = float(re.search(r'cidery_drafted_tokens_total\{model="[^"]+"\} ([0-9.]+)', metrics)[1])
    assert drafted >= accepted >= details["accepted_prediction_tokens"]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
def test_tokens_are_those_without_guesses_also_after_the_worker_is_lost(guessing, fields):
    prompt, asked = [9, 8, 7] * 12, {"max_tokens": 600, "ignore_eos": True, **fields}
    alone = guessing.complete(prompt, speculation="off", **asked)
    body = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, **asked}
    text, has_killed, usage = "", False, None
    with guessing.client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            usage = event.get("usage") or usage
            text += event["choices"][0]["text"] if event["choices"] else ""
            if len(text) > 100 and not has_killed:
                has_killed = True
                (mac,) = guessing.fleet().values()
                os.kill(mac["worker_pid"], signal.SIGKILL)
    assert has_killed
    assert text == alone["choices"][0]["text"]
    assert usage["completion_tokens"] == 600


def test_a_stop_string_ends_an_answer_between_two_tokens_of_a_step(guessing):
    whole = retold(guessing)["choices"][0]["message"]["content"]
    stop = whole.split()[9]
    plain, guessed = (retold(guessing, stop=[stop], speculation=how) for how in ("off", "ngram"))
    assert guessed["choices"] == plain["choices"]
    assert guessed["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"]
    assert stop not in guessed["choices"][0]["message"]["content"]


def test_grpc_chooses_too_and_tells(guessing):
    with guessing.channel() as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        counts = {}
        for how in (sampling_pb2.SPECULATION_OFF, sampling_pb2.SPECULATION_NGRAM):
            sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, speculation=how)
            request = inference_pb2.GenerateRequest(
                token_ids=inference_pb2.TokenIds(ids=[9, 8, 7] * 12), sampling=sampling
            )
            *chunks, last = stub.Generate(request)
            tokens = [token for each in chunks for token in each.chunk.token_ids]
            counts[how] = tokens, last.completion.usage
    (plain, none), (tokens, usage) = counts.values()
    assert tokens == plain
    assert none.num_drafted_tokens == 0
    assert 0 < usage.num_accepted_tokens <= usage.num_drafted_tokens


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("draft", "this model is served with off, auto, ngram, got draft"),
        ("fast", "must be off, auto, ngram or draft, got"),
        (3, "speculation"),
    ],
)
def test_what_there_is_not_is_refused(guessing, value, words):
    response = guessing.client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2, "speculation": value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert words in error["message"]
    assert error["param"] == "speculation"


@pytest.fixture(scope="module")
def drafting(start):
    """The bundled model guesses for itself: every guess of a greedy answer comes true."""
    options = ("--speculative", "auto", "--draft-model", bundled_model(), "--num-speculative-tokens", "4")
    with start(*options, "--kv-cache-memory", "64MiB") as served:
        yield served


def test_auto_serves_many_at_once(drafting):
    """Greedy and seeded requests together, with the tokens that they have without guesses."""
    asked = [
        {"prompt": [n, 5, 6, 7] * 9, "max_tokens": 40, "ignore_eos": True, "seed": n, "temperature": n % 2}
        for n in range(12)
    ]
    with ThreadPoolExecutor(12) as pool:
        off = list(pool.map(lambda fields: drafting.complete(**fields, speculation="off"), asked))
        auto = list(pool.map(lambda fields: drafting.complete(**fields), asked))
    assert [each["choices"] for each in off] == [each["choices"] for each in auto]


def test_a_draft_model_guesses_for_a_fleet(drafting):
    plain, guessed = (drafting.chat(STORY, temperature=0, max_tokens=60, speculation=how) for how in ("off", "draft"))
    assert guessed["choices"] == plain["choices"]
    details = guessed["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 20
    assert details["rejected_prediction_tokens"] <= 4


def test_a_draft_model_with_other_tokens_ends_the_start(tmp_path):
    folder = tmp_path / "other"
    shutil.copytree(bundled_model(), folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = ("--speculative-method", "draft", "--draft-model", str(folder), "--grpc-port", "0", "--http-port", "0")
    ended = subprocess.run(
        [sys.executable, "-m", "cluster", "serve", *options], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 1
    assert "2 of its 1536 tokens are not those of" in ended.stderr
