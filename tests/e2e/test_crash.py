"""Requests survive the loss of a worker and of a Mac: one stream, no token lost or doubled, the same tokens."""

import json
import os
import random
import signal
import threading
import time

import psutil
import pytest

from protos.cidery.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPT = [9] * 50
NUM_TOKENS = 700


@pytest.fixture(scope="module")
def fleet(start):
    """Two Macs of this module's own, because their processes are ended here."""
    with start("--macs", "2", "--kv-cache-memory", "64MiB") as served:
        yield served


def stream(served, fields: dict, on_tokens) -> dict:
    """One streamed completion; `on_tokens(mac-independent count)` is called as it grows."""
    text, extension, num_chunks = "", {}, 0
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, **fields}
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            if event["choices"]:
                text += event["choices"][0]["text"]
            extension = event.get("cidery") or extension
            num_chunks += 1
            on_tokens(num_chunks)
    return {"text": text} | extension


def wait_for(condition, seconds: float = 60.0):
    give_up_s = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < give_up_s, "waited in vain"
        time.sleep(0.1)
    return value


@pytest.mark.parametrize("fields", [{"temperature": 0}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "seeded"])
def test_a_killed_worker_costs_no_token(fleet, fields):
    undisturbed = stream(fleet, fields, lambda count: None)
    killed = []

    def kill_once(count: int) -> None:
        if count == 20:
            busy = next(mac for mac in fleet.fleet().values() if mac["scheduling"]["num_running"])
            killed.append((busy["name"], busy["worker_pid"]))
            os.kill(busy["worker_pid"], signal.SIGKILL)

    disturbed = stream(fleet, fields, kill_once)
    assert killed
    assert disturbed["text"] == undisturbed["text"]
    name, pid = killed[0]
    wait_for(lambda: fleet.fleet()[name]["state"] == "MAC_STATE_READY")
    assert fleet.fleet()[name]["worker_pid"] not in (0, pid)
    assert int(fleet.fleet()[name]["blocks"]["num_used"]) == 0


def test_a_killed_mac_costs_no_token_and_it_comes_back(fleet):
    """The manager is killed, and its worker ends with it."""
    undisturbed = stream(fleet, {"temperature": 0}, lambda count: None)
    killed = []

    def kill_once(count: int) -> None:
        if count == 20:
            busy = next(mac for mac in fleet.fleet().values() if mac["scheduling"]["num_running"])
            worker = psutil.Process(busy["worker_pid"])
            killed.append((busy["name"], worker))
            worker.parent().kill()

    disturbed = stream(fleet, {"temperature": 0}, kill_once)
    name, worker = killed[0]
    assert disturbed["text"] == undisturbed["text"]
    assert disturbed["mac"] != name
    wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)
    wait_for(lambda: fleet.fleet()[name]["state"] == "MAC_STATE_READY")
    cold = [{"prompt": [30 + number] * 20, "max_tokens": 2} for number in range(8)]
    assert {stream(fleet, fields, lambda count: None)["mac"] for fields in cold} == set(fleet.macs)


@pytest.mark.parametrize("kills_manager", [False, True], ids=["worker", "Mac"])
def test_a_prompt_that_is_scored_is_told_once_whoever_dies(fleet, oracle, kills_manager):
    """Long enough for several steps; killed when the first log-probabilities are there."""
    rng = random.Random(int(kills_manager))
    prompt = [rng.randrange(3, 1500) for _ in range(3000)]
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=8, num_prompt_logprobs=1, ignore_eos=True)
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), sampling=sampling)
    told, tokens, killed = [], [], False
    with fleet.channel() as channel:
        for response in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
            told += response.chunk.prompt_logprobs
            tokens += response.chunk.token_ids
            if told and not tokens and not killed:
                killed = True
                busy = max(fleet.fleet().values(), key=lambda mac: mac["scheduling"]["num_running"])
                process = psutil.Process(busy["worker_pid"])
                (process.parent() if kills_manager else process).kill()
    assert killed
    assert [each.token_id for each in told] == prompt[1:]
    assert tokens == oracle(prompt, 8, ignore_eos=True)[0]
    wait_for(lambda: len([mac for mac in fleet.fleet().values() if mac["worker_pid"]]) == 2)


def test_many_requests_survive_a_killed_mac(fleet):
    """Sixteen at once over two Macs; one Mac is killed under them."""
    prompts = [[20 + number] * (10 + number) for number in range(16)]
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answer = fleet.complete(prompts[number], max_tokens=120, temperature=0, ignore_eos=True)
        answers[number] = answer["choices"][0]["text"]

    for number in range(len(prompts)):
        ask(number)
    expected, answers = answers, {}

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    busy = wait_for(lambda: next((mac for mac in fleet.fleet().values() if mac["scheduling"]["num_running"]), None))
    psutil.Process(busy["worker_pid"]).parent().kill()
    for thread in threads:
        thread.join()
    assert answers == expected
    wait_for(lambda: all(mac["load"]["num_requests"] == 0 for mac in fleet.fleet().values()))
    wait_for(lambda: all(mac["state"] == "MAC_STATE_READY" for mac in fleet.fleet().values()))


def test_a_killed_router_learns_the_fleet_anew(fleet):
    """Requests wait for it; what the Macs hold is known again, so the next turn still finds its prefix."""
    fields = {"prompt": [77] * 200, "max_tokens": 8, "temperature": 0}
    first = fleet.complete(**fields)
    fleet.router().kill()
    second = fleet.complete(**fields)
    assert second["choices"] == first["choices"]
    wait_for(lambda: {mac["state"] for mac in fleet.fleet().values()} == {"MAC_STATE_READY"})
    third = fleet.complete(**fields)
    # The second may have gone by load alone, so two Macs may hold it now.
    assert third["cidery"]["mac"] in (first["cidery"]["mac"], second["cidery"]["mac"])
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
    decision = fleet.client.get("/admin/explain", params={"request_id": third["id"]}).json()
    assert {each["mac"]: each["num_matched_tokens"] for each in decision["candidates"]}[decision["chosen"]] == 192


def test_a_request_that_kills_every_worker_is_given_up(fleet):
    """Else it would keep the Mac from everyone for ever."""
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    kills, error = {20, 60, 100}, None
    with fleet.client.stream("POST", "/v1/completions", json=body) as response:
        for number, line in enumerate(response.iter_lines()):
            if number // 2 in kills and number % 2 == 0:  # an event and an empty line
                busy = wait_for(
                    lambda: next((m for m in fleet.fleet().values() if m["scheduling"]["num_running"]), None)
                )
                os.kill(busy["worker_pid"], signal.SIGKILL)
            if '"error"' in line:
                error = json.loads(line.removeprefix("data: "))["error"]
    assert error is not None
    assert "died 3 times while it ran this request" in error["message"]
    wait_for(lambda: {mac["state"] for mac in fleet.fleet().values()} == {"MAC_STATE_READY"})
    assert fleet.complete("Hello", max_tokens=2)["usage"]["completion_tokens"] >= 1


def test_a_mac_that_hangs_is_left_and_a_drain_outlives_the_router(fleet):
    """A stopped manager answers nobody, but its connections stand; its requests go on elsewhere all the same."""
    undisturbed = stream(fleet, {"temperature": 0}, lambda count: None)
    stopped = []

    def stop_once(count: int) -> None:
        if count == 20:
            busy = next(mac for mac in fleet.fleet().values() if mac["scheduling"]["num_running"])
            stopped.append((busy["name"], psutil.Process(busy["worker_pid"]).parent()))
            stopped[0][1].suspend()

    disturbed = stream(fleet, {"temperature": 0}, stop_once)  # it would never end if the Mac were not left
    name, manager = stopped[0]
    manager.resume()
    assert disturbed["text"] == undisturbed["text"]
    assert disturbed["mac"] != name
    wait_for(lambda: {mac["state"] for mac in fleet.fleet().values()} == {"MAC_STATE_READY"})
    wait_for(lambda: all(mac["blocks"]["num_used"] == 0 for mac in fleet.fleet().values()))

    fleet.client.post("/admin/drain", json={"mac": name})
    fleet.router().kill()
    wait_for(lambda: fleet.client.get("/admin/fleet").status_code == 200 and len(fleet.fleet()) == 2)
    wait_for(lambda: fleet.fleet()[name]["state"] == "MAC_STATE_DRAINING")
    fleet.client.post("/admin/resume", json={"mac": name})
    wait_for(lambda: {mac["state"] for mac in fleet.fleet().values()} == {"MAC_STATE_READY"})


def test_new_requests_wait_for_macs_that_come_back(fleet):
    """All Macs are gone for a moment; nobody is sent away."""
    for mac in fleet.fleet().values():
        psutil.Process(mac["worker_pid"]).parent().kill()
    time.sleep(1.0)
    assert fleet.complete("Hello", max_tokens=2)["usage"]["completion_tokens"] >= 1
    wait_for(lambda: {mac["state"] for mac in fleet.fleet().values()} == {"MAC_STATE_READY"})


def test_the_ray_node_of_a_mac_may_die(start):
    """The first Mac's: the router must not die with it. Last, because such a node does not come back."""
    with start("--macs", "2", "--kv-cache-memory", "64MiB") as served:
        undisturbed = served.complete(PROMPT, max_tokens=20, temperature=0)
        first = sorted(served.macs)[0]
        worker = psutil.Process(served.fleet()[first]["worker_pid"])
        # The node first, or it would start another manager at once.
        node = next(parent for parent in worker.parents() if "raylet" in parent.name())
        manager = worker.parent()
        node.kill()
        manager.kill()
        wait_for(lambda: served.fleet()[first]["state"] == "MAC_STATE_LOST")
        assert served.client.get("/health").status_code == 200
        again = served.complete(PROMPT, max_tokens=20, temperature=0)
        assert again["choices"] == undisturbed["choices"]
        assert again["cidery"]["mac"] != first
