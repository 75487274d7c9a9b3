"""Every turn of a conversation goes where its prefix is, and the admin endpoint says so."""

import json
import subprocess
import sys
import time

import grpc
import pytest

from protos.cidery.v1 import inference_pb2, inference_pb2_grpc

pytestmark = [pytest.mark.ray, pytest.mark.slow]

FACTS = " ".join(f"Rule {number}: the answer to question {number} is {number * 7 % 10}." for number in range(40))
SYSTEMS = {
    "pip": f"You are Pip, a helpful assistant. {FACTS}",
    "max": f"You are Max, a friendly assistant. Remember this. {FACTS}",
}
QUESTIONS = ("Hello!", "What is the capital of Italy?", "What is 3 + 4?", "Count from 1 to 5.")


def explain(served, request_id: str) -> dict:
    response = served.client.get("/admin/explain", params={"request_id": request_id})
    assert response.status_code == 200, response.text
    return response.json()


def turn(served, history: list[dict[str, str]], question: str) -> dict:
    history.append({"role": "user", "content": question})
    answer = served.chat(history, temperature=0, max_tokens=24)
    history.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    return answer


def test_every_next_turn_goes_where_its_prefix_is_cached(three_macs):
    """Two conversations, interleaved: one Mac each, > 90 % of the prompt cached from the second turn on."""
    histories = {name: [{"role": "system", "content": text}] for name, text in SYSTEMS.items()}
    macs: dict[str, list[str]] = {name: [] for name in SYSTEMS}
    for number, question in enumerate(QUESTIONS):
        for name, history in histories.items():
            answer = turn(three_macs, history, question)
            usage = answer["usage"]
            decision = explain(three_macs, answer["id"])
            macs[name].append(answer["cidery"]["mac"])
            assert decision["chosen"] == answer["cidery"]["mac"]
            if number:
                cached = usage["prompt_tokens_details"]["cached_tokens"]
                matched = {each["mac"]: each["num_matched_tokens"] for each in decision["candidates"]}
                assert cached > 0.9 * usage["prompt_tokens"]
                assert matched[decision["chosen"]] == max(matched.values()) == cached
    assert all(len(set(chosen)) == 1 for chosen in macs.values()), macs


def test_the_index_knows_the_blocks_that_macs_hold(three_macs):
    three_macs.chat([{"role": "user", "content": "Tell me a story about Lily and a fox. " * 4}], max_tokens=8)
    give_up_s = time.monotonic() + 10
    while True:  # the last events may still be on their way
        index = three_macs.client.get("/admin/index").json()["macs"]
        known = {each["mac"]: each["num_blocks"] for each in index}
        held = {name: mac["blocks"]["num_cached"] for name, mac in three_macs.fleet().items()}
        if known == held:
            break
        assert time.monotonic() < give_up_s, (known, held)
        time.sleep(0.1)
    assert sum(known.values()) > 0
    assert all(each["num_gaps"] == "0" for each in index)


def test_a_drained_mac_gets_nothing_new_until_it_is_resumed(three_macs):
    drained = three_macs.macs[0]
    answer = three_macs.client.post("/admin/drain", json={"mac": drained})
    assert answer.json()["mac"]["state"] == "MAC_STATE_DRAINING"
    try:
        used = {
            three_macs.chat([{"role": "user", "content": f"Question {number}?"}], max_tokens=2)["cidery"]["mac"]
            for number in range(12)
        }
        what_if = three_macs.client.post("/admin/explain", json={"text": "Hello there"}).json()
    finally:
        assert three_macs.client.post("/admin/resume", json={"mac": drained}).status_code == 200
    assert drained not in used
    excluded = {each["mac"]: each["excluded"] for each in what_if["candidates"]}
    assert excluded[drained] == "draining"
    assert what_if["chosen"] != drained
    assert three_macs.fleet()[drained]["state"] == "MAC_STATE_READY"


def test_the_command_line_explains_a_past_request_and_a_prompt(three_macs):
    answer = three_macs.chat([{"role": "user", "content": "Hello!"}], max_tokens=4)

    def explain_command(*args: str) -> str:
        command = [sys.executable, "-m", "cluster", "route", "explain", "--address", three_macs.grpc, *args]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout

    assert json.loads(explain_command(answer["id"], "--json"))["chosen"] == answer["cidery"]["mac"]
    table = explain_command(answer["id"])
    assert all(mac in table for mac in three_macs.fleet())
    what_if = json.loads(explain_command("--prompt", "Hello there, how are you?", "--json"))
    assert what_if["chosen"] in three_macs.fleet()
    with pytest.raises(subprocess.CalledProcessError) as unknown:
        explain_command(what_if["request_id"])
    assert "not among the last" in unknown.value.stderr, "nothing was booked"


def test_unknown_macs_and_requests_are_named(three_macs):
    drain = three_macs.client.post("/admin/drain", json={"mac": "mac-99"})
    unknown = three_macs.client.get("/admin/explain", params={"request_id": "nope"})
    missing = three_macs.client.get("/admin/explain")
    assert drain.status_code == 404
    assert "mac-99" in drain.json()["error"]["message"]
    assert unknown.status_code == 404
    assert missing.status_code == 400


def test_what_is_cached_under_one_salt_is_not_found_under_another(three_macs):
    """The prompt is shorter than a block, so the first block is filled, and hashed, by a worker."""
    prompt = [7, 8, 9, 10, 11]
    fields = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    tokens = three_macs.complete(prompt, cache_salt="one", logprobs=0, **fields)
    assert tokens["usage"]["completion_tokens"] == 40
    answer = oracle_tokens(three_macs, prompt)

    def cached(salt: str) -> int:
        usage = three_macs.complete([*prompt, *answer[:30]], cache_salt=salt, **fields)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached("two"), cached("one"), cached("")] == [0, 32, 0]
    assert [cached("two"), cached("one"), cached("")] == [32, 32, 32]


def oracle_tokens(served, prompt: list[int]) -> list[int]:
    """The greedy continuation, as ids, by gRPC, which has them; under a salt of its own."""
    with grpc.insecure_channel(served.grpc) as channel:
        request = inference_pb2.GenerateRequest(
            token_ids={"ids": prompt},
            sampling={"max_tokens": 40, "temperature": 0, "ignore_eos": True},
            handling={"cache_salt": "oracle"},
        )
        chunks = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        return [token for chunk in chunks for token in chunk.chunk.token_ids]
