"""Adapters on a real fleet: loaded from disk, served as models, exact beside each other, and gone when told to go."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest

from cluster.config import bundled_model
from protos.cidery.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, sampling_pb2

pytestmark = [pytest.mark.ray, pytest.mark.slow]

BASE = "cidery-tiny"
TOLERANCE = 1e-4
VOCABULARY = range(3, 1500)


def bundled():
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm import load

    model, _ = load(bundled_model())
    model.update(tree_map(lambda weights: weights.astype(mx.float32), model.parameters()))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Two LoRA adapters and a DoRA of the bundled model, of different ranks, by mlx-lm's tuner."""
    from tests.worker.adapter_folders import write_adapter

    root = tmp_path_factory.mktemp("adapters")
    return {
        "one": write_adapter(root / "one", bundled(), rank=4, scale=0.5, seed=1),
        "two": write_adapter(root / "two", bundled(), rank=8, scale=0.3, seed=2, num_layers=2),
        "three": write_adapter(root / "three", bundled(), rank=2, scale=0.2, seed=3, is_dora=True),
    }


@pytest.fixture(scope="module")
def fleet(start, folders):
    with start("--macs", "2", "--kv-cache-memory", "32MiB", "--lora", f"one={folders['one']}") as served:
        yield served


@pytest.fixture(scope="module")
def oracles(folders):
    """Greedy tokens and their log-probabilities by mlx-lm with each adapter loaded."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.tuner.utils import load_adapters

    models = {BASE: bundled()} | {name: load_adapters(bundled(), str(path)) for name, path in folders.items()}

    def generate(name: str, prompt: list[int], max_tokens: int) -> tuple[list[int], list[float]]:
        models[name].eval()
        steps = list(generate_step(mx.array(prompt), models[name], max_tokens=max_tokens))
        return [int(token) for token, _ in steps], [float(np.array(row)[int(token)]) for token, row in steps]

    return generate


def tokens_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.choice(VOCABULARY) for _ in range(length)]


def ask(served, model: str, prompt: list[int], max_tokens: int = 12, **fields) -> dict:
    fields = {"temperature": 0, "logprobs": 0, "ignore_eos": True} | fields
    return served.complete(prompt, model=model, max_tokens=max_tokens, **fields)


def generated(served, model: str, prompt: list[int], max_tokens: int, on_tokens=lambda count: None) -> list[int]:
    """Ids by gRPC, as they come."""
    sampling = sampling_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    request = inference_pb2.GenerateRequest(
        model=model, token_ids=inference_pb2.TokenIds(ids=prompt), sampling=sampling
    )
    tokens: list[int] = []
    with served.channel() as channel:
        for response in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request):
            tokens += response.chunk.token_ids
            on_tokens(len(tokens))
    return tokens


def load(served, name: str, path) -> None:
    response = served.client.post("/admin/lora/load", json={"name": name, "path": str(path)})
    assert response.status_code == 200, response.text
    assert {mac["state"] for mac in response.json()["adapter"]["macs"]} == {"ADAPTER_STATE_READY"}


def unload(served, name: str) -> None:
    response = served.client.post("/admin/lora/unload", json={"name": name})
    assert response.status_code == 200, response.text


def adapters(served) -> dict[str, dict]:
    return {each["name"]: each for each in served.client.get("/admin/lora").json()["adapters"]}


def wait_for(condition, seconds: float = 60.0):
    give_up_s = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < give_up_s
        time.sleep(0.1)
    return result


def cached(answer: dict) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_an_adapter_of_the_start_is_a_model_of_its_own(fleet, oracles):
    models = {each["id"]: each for each in fleet.client.get("/v1/models").json()["data"]}
    assert set(models) == {BASE, "one"}
    assert (models["one"]["parent"], models[BASE]["parent"]) == (BASE, None)
    assert models["one"]["num_macs"] == 2
    prompt = tokens_of(1, 40)
    answer = ask(fleet, "one", prompt)
    assert answer["model"] == "one"
    expected = oracles("one", prompt, 12)
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(expected[1], abs=TOLERANCE)
    assert expected != oracles(BASE, prompt, 12)


def test_all_adapters_at_once_are_each_exact_and_share_no_block(fleet, folders, oracles):
    load(fleet, "two", folders["two"])
    load(fleet, "three", folders["three"])
    names = (BASE, "one", "two", "three")
    prompts = [tokens_of(seed, length) for seed, length in ((2, 5), (3, 100), (4, 700))]
    jobs = [(name, prompt) for prompt in prompts for name in names]
    for turn in range(2):
        with ThreadPoolExecutor(len(jobs)) as pool:
            answers = list(pool.map(lambda job: ask(fleet, *job), jobs))
        for (name, prompt), answer in zip(jobs, answers, strict=True):
            _, logprobs = oracles(name, prompt, 12)
            told = answer["choices"][0]["logprobs"]["token_logprobs"]
            assert told == pytest.approx(logprobs, abs=TOLERANCE), (name, len(prompt))
            assert (cached(answer) > 0) == (turn == 1 and len(prompt) > 16), (name, len(prompt))
        assert [generated(fleet, name, prompts[1], 12) for name in names] == [
            oracles(name, prompts[1], 12)[0] for name in names
        ]
    unload(fleet, "two")
    unload(fleet, "three")
    wait_for(lambda: set(adapters(fleet)) == {"one"})


def test_blocks_are_found_by_adapter_and_explain_says_so(fleet):
    text = "It was a dark and stormy night; the rain fell in torrents. " * 4
    answer = fleet.complete(text, model="one", max_tokens=2, temperature=0)
    mac = answer["cidery"]["mac"]

    def held(model: str) -> dict[str, int]:
        explained = fleet.client.post("/admin/explain", json={"text": text, "model": model}).json()
        return {each["mac"]: each["num_held_tokens"] for each in explained["candidates"]}

    wait_for(lambda: held("one")[mac] > 0, 10)
    assert set(held(BASE).values()) == {0}
    again = fleet.complete(text, model="one", max_tokens=2, temperature=0)
    assert again["cidery"]["mac"] == mac
    assert cached(again) > 0


def test_an_unloaded_adapter_finishes_what_runs_and_takes_nothing_new(fleet, folders, oracles):
    load(fleet, "two", folders["two"])
    prompt = tokens_of(5, 30)
    refused: list[tuple[int, dict]] = []
    seen: list[set[str]] = []

    def unload_once(count: int) -> None:
        if count >= 10 and not refused:
            unload(fleet, "two")
            response = fleet.client.post("/v1/completions", json={"prompt": "x", "model": "two"})
            refused.append((response.status_code, response.json()["error"]))
            seen.append({mac["state"] for mac in adapters(fleet)["two"]["macs"]})

    tokens = generated(fleet, "two", prompt, 400, unload_once)
    assert tokens == oracles("two", prompt, 400)[0]
    ((status, error),) = refused
    assert status == 404
    assert "'two' is not served; served: cidery-tiny, one" in error["message"]
    assert seen[0] == {"ADAPTER_STATE_LEAVING"}
    wait_for(lambda: "two" not in adapters(fleet))
    load(fleet, "two", folders["two"])
    assert generated(fleet, "two", prompt, 8) == tokens[:8]
    unload(fleet, "two")


def broken(folder: Path, target: Path, change) -> Path:
    shutil.copytree(folder, target)
    change(target)
    return target


def _edit_config(**changes):
    def edit(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return edit


def _truncate(folder: Path) -> None:
    file = folder / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


BAD = {
    "no weights": (lambda folder: (folder / "adapters.safetensors").unlink(), "no adapters.safetensors"),
    "no config": (lambda folder: (folder / "adapter_config.json").unlink(), "no adapter_config.json"),
    "config that is no JSON": (lambda folder: (folder / "adapter_config.json").write_text("{"), "is not JSON"),
    "half a file": (_truncate, "can't be read"),
    "full weights": (_edit_config(fine_tune_type="full"), "a model of its own weights"),
    "unknown kind": (_edit_config(fine_tune_type="ia3"), "'ia3'; supported are lora, dora"),
    "another rank": (_edit_config(lora_parameters={"rank": 5, "scale": 1.0}), "with rank 5 it must be"),
    "no scale": (_edit_config(lora_parameters={"rank": 4}), "scale must be a number, got None"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_adapters_are_refused_with_what_is_wrong_and_harm_nobody(fleet, folders, tmp_path, kind, oracles):
    change, words = BAD[kind]
    folder = broken(folders["one"], tmp_path / "bad", change)
    prompt, beside = tokens_of(6, 20), []
    asker = threading.Thread(target=lambda: beside.append(generated(fleet, "one", prompt, 40)))
    asker.start()
    response = fleet.client.post("/admin/lora/load", json={"name": "bad", "path": str(folder)})
    asker.join()
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]
    assert "bad" not in adapters(fleet)
    assert beside == [oracles("one", prompt, 40)[0]]


def test_names_that_are_taken_or_unknown_are_refused(fleet, folders):
    for body, status, param in (
        ({"name": BASE, "path": str(folders["two"])}, 400, "name"),
        ({"name": "one", "path": str(folders["two"])}, 400, "name"),
        ({"name": "a b", "path": str(folders["two"])}, 400, "name"),
        ({"name": "x", "path": "/nowhere"}, 400, "path"),
        ({"name": "x", "path": str(folders["two"]), "model": "one"}, 400, "model"),
        ({"name": "x", "path": str(folders["two"]), "model": "other"}, 404, None),
        ({"name": "x"}, 400, "path"),
    ):
        response = fleet.client.post("/admin/lora/load", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text
    response = fleet.client.post("/admin/lora/unload", json={"name": "x"})
    assert response.status_code == 404
    assert "loaded: one" in response.json()["error"]["message"]
    with fleet.channel() as channel, pytest.raises(grpc.RpcError) as refused:
        admin_pb2_grpc.AdminServiceStub(channel).LoadAdapter(admin_pb2.LoadAdapterRequest(name="x", path="/nowhere"))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_the_command_line_lists_loads_and_unloads(fleet, folders):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "cluster", "lora", arguments[0], "--address", fleet.grpc, *arguments[1:]]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    loaded = run("load", "--json", "two", str(folders["two"]))
    assert loaded.returncode == 0, loaded.stderr
    assert json.loads(loaded.stdout)["name"] == "two"
    listed = json.loads(run("list", "--json").stdout)["adapters"]
    assert [each["name"] for each in listed] == ["one", "two"]
    assert "one" in run("list").stdout
    assert run("unload", "two").returncode == 0
    failed = run("unload", "two")
    assert failed.returncode == 1
    assert "no adapter is named 'two'" in failed.stderr


def test_a_killed_worker_loads_them_again_and_no_token_is_lost(fleet, oracles):
    prompt, killed = tokens_of(7, 50), []

    def kill_once(count: int) -> None:
        if count >= 20 and not killed:
            busy = max(fleet.fleet().values(), key=lambda mac: mac["scheduling"]["num_running"])
            killed.append(busy["name"])
            os.kill(busy["worker_pid"], signal.SIGKILL)

    assert generated(fleet, "one", prompt, 80, kill_once) == oracles("one", prompt, 80)[0]
    assert killed


def test_a_mac_and_a_router_that_begin_anew_learn_of_them(fleet, folders, oracles):
    load(fleet, "two", folders["two"])
    prompt = tokens_of(8, 50)
    mac = next(iter(fleet.fleet().values()))
    psutil.Process(mac["worker_pid"]).parent().kill()

    def all_ready() -> bool:
        found = adapters(fleet)
        return set(found) == {"one", "two"} and all(
            [each["state"] for each in adapter["macs"]] == ["ADAPTER_STATE_READY"] * 2 for adapter in found.values()
        )

    wait_for(lambda: fleet.fleet().get(mac["name"], {}).get("worker_pid", 0) not in (0, mac["worker_pid"]))
    wait_for(all_ready)
    fleet.router().kill()
    assert generated(fleet, "two", prompt, 10) == oracles("two", prompt, 10)[0]
    wait_for(lambda: fleet.client.get("/admin/lora").status_code == 200 and all_ready())
    assert generated(fleet, "one", prompt, 10) == oracles("one", prompt, 10)[0]


def test_memory_for_adapters_is_bounded(start, folders):
    size = (folders["one"] / "adapters.safetensors").stat().st_size
    with start("--kv-cache-memory", "16MiB", "--lora-memory", str(size + 10)) as served:
        load(served, "one", folders["one"])
        response = served.client.post("/admin/lora/load", json={"name": "two", "path": str(folders["two"])})
        assert response.status_code == 400
        assert "of --lora-memory 10 are left" in response.json()["error"]["message"]
        unload(served, "one")
        wait_for(lambda: not adapters(served))
