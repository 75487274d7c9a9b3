"""Multi-turn sessions on three Macs hit almost what one unbounded cache would, and a killed router costs nobody."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

BLOCK = 16
SYSTEM = [11 + number % 90 for number in range(256)]
NUM_SESSIONS, NUM_TURNS, TURN_TOKENS = 9, 9, 160


@pytest.fixture(scope="module")
def fleet(start):
    """Three Macs of this module's own, because its router is killed."""
    with start("--macs", "3", "--kv-cache-memory", "64MiB") as served:
        yield served


def prompt_of(session: int, turn: int) -> list[int]:
    """The shared system prompt and all turns so far; what was answered is not repeated."""
    said = [
        20 + (session * 7 + each * 3 + number * (session + 2)) % 200
        for each in range(turn + 1)
        for number in range(TURN_TOKENS)
    ]
    return SYSTEM + said


class UnboundedCache:
    """What one Mac with all the memory in the world would have found, request by request in order of arrival."""

    def __init__(self) -> None:
        self._known: set[tuple[int, ...]] = set()

    def hit(self, prompt: list[int]) -> int:
        most = (len(prompt) - 1) // BLOCK
        depth = next((d for d in range(most) if tuple(prompt[: (d + 1) * BLOCK]) not in self._known), most)
        self._known.update(tuple(prompt[: d * BLOCK]) for d in range(1, len(prompt) // BLOCK + 1))
        return depth * BLOCK


def run_turn(fleet, turn: int, meanwhile: Callable[[], None] = lambda: None) -> int:
    """Every session's turn, three at a time; returns the tokens that were cached. Fails if any request does.

    All at once a session would rather move to an idle Mac and compute a turn again than wait for three others.
    """

    def ask(session: int) -> int:
        answer = fleet.complete(prompt_of(session, turn), max_tokens=4, temperature=0, ignore_eos=True)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(ask, session) for session in range(NUM_SESSIONS)]
        meanwhile()
        return sum(each.result() for each in asked)


def wait_for(condition, seconds: float = 30.0):
    give_up_s = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < give_up_s, "waited in vain"
        time.sleep(0.1)
    return value


def is_exact(fleet) -> bool:
    """Whether the index knows just what the Macs hold."""
    index = fleet.client.get("/admin/index").json()["macs"]
    held = {name: mac["blocks"]["num_cached"] for name, mac in fleet.fleet().items()}
    return all(mac["is_synced"] for mac in index) and {mac["mac"]: mac["num_blocks"] for mac in index} == held


def test_sessions_hit_what_one_unbounded_cache_would_and_a_killed_router_loses_nothing(fleet):
    ideal, cache = [], UnboundedCache()
    for turn in range(NUM_TURNS):
        ideal.append(sum(cache.hit(prompt_of(session, turn)) for session in range(NUM_SESSIONS)))

    before = [run_turn(fleet, turn) for turn in range(5)]
    assert sum(before) >= 0.95 * sum(ideal[:5]), (before, ideal)
    wait_for(lambda: is_exact(fleet))

    run_turn(fleet, 5, lambda: fleet.router().kill())
    wait_for(lambda: fleet.client.get("/admin/fleet").status_code == 200 and len(fleet.fleet()) == 3)
    wait_for(lambda: {mac["state"] for mac in fleet.fleet().values()} == {"MAC_STATE_READY"})
    wait_for(lambda: is_exact(fleet))
    after = [run_turn(fleet, turn) for turn in (6, 7, 8)]
    assert sum(after) >= 0.95 * sum(ideal[6:]), (after, ideal)
    for name, mac in fleet.fleet().items():
        drift = mac.get("drift", {})
        assert not drift.get("is_alarming"), (name, drift)
        assert mac["load"]["num_requests"] == 0 or wait_for(
            lambda name=name: fleet.fleet()[name]["load"]["num_requests"] == 0
        )


def test_a_cordoned_host_gets_nothing_and_placement_says_who_serves_what(fleet):
    name = fleet.macs[0]
    answer = fleet.client.post("/admin/cordon", json={"mac": name, "note": "new memory"})
    assert answer.json()["mac"]["state"] == "MAC_STATE_CORDONED"
    assert answer.json()["mac"]["note"] == "new memory"
    try:
        used = {fleet.complete([30 + number] * 20, max_tokens=2)["cidery"]["mac"] for number in range(6)}
        what_if = fleet.client.post("/admin/explain", json={"text": "Hello there"}).json()
        (model,) = fleet.client.get("/admin/placement").json()["models"]
    finally:
        assert fleet.client.post("/admin/resume", json={"mac": name}).status_code == 200
    assert name not in used
    assert {each["mac"]: each["excluded"] for each in what_if["candidates"]}[name] == "cordoned: new memory"
    assert {each["mac"]: each["state"] for each in model["macs"]} == {
        each: "MAC_STATE_CORDONED" if each == name else "MAC_STATE_READY" for each in fleet.macs
    }
    assert all(group["kind"] == "FullAttention" for each in what_if["candidates"] for group in each["groups"])
