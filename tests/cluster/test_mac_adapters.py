"""A Mac's adapters: the worker ends up with what is wanted, and never loses one that a request still uses."""

import asyncio
import json
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster import mac_adapters
from cluster.adapter_files import adapter_bytes, adapter_digest, find_adapter
from cluster.adapters import AdapterList, AdapterSpec, AdapterState
from cluster.errors import AdapterNotLoaded, InvalidRequest
from cluster.mac_adapters import MacAdapters
from protos.cidery.worker.v1 import worker_pb2

DIGESTS = ("d0", "d1", "d2")


def spec_of(digest: str, name: str = "") -> AdapterSpec:
    return AdapterSpec(name or f"name-{digest}", "m", f"/adapters/{digest}", digest, 10, 0)


class Worker:
    """Answers in order when told to; fails as a real one would if it were asked for nonsense."""

    def __init__(self) -> None:
        self.waiting: deque[worker_pb2.ManagerMessage] = deque()
        self.loaded: set[str] = set()
        self.refuses: set[str] = set()

    def answer(self) -> worker_pb2.AdapterLoaded | None:
        message = self.waiting.popleft()
        if message.WhichOneof("message") == "unload_adapter":
            self.loaded.discard(message.unload_adapter.digest)
            return None
        digest = message.load_adapter.digest
        assert digest not in self.loaded, "loaded twice"
        if digest in self.refuses:
            return worker_pb2.AdapterLoaded(digest=digest, refusal="does not fit")
        self.loaded.add(digest)
        return worker_pb2.AdapterLoaded(digest=digest, num_bytes=10)


class Mac:
    """MacAdapters with a worker, requests and files of this test's."""

    def __init__(self, memory_bytes: int = 1000) -> None:
        self.worker: Worker | None = Worker()
        self.requests: list[str] = []
        self.given_up: list[str] = []
        self.adapters = MacAdapters("m", memory_bytes, self.send, lambda: None)

    def send(self, message: worker_pb2.ManagerMessage) -> bool:
        if self.worker is None:
            return False
        self.worker.waiting.append(message)
        return True

    async def follow(self, *digests: str) -> None:
        self.adapters.follow(
            AdapterList(self.adapters.followed.version + 1, tuple(spec_of(digest) for digest in digests))
        )
        self.let_go()

    async def settle_checks(self) -> None:
        while self.adapters._checks:
            await asyncio.gather(*self.adapters._checks)

    def let_go(self) -> None:
        self.adapters.let_go(lambda digest: digest in self.requests)

    def take_answer(self) -> None:
        if self.worker is not None and self.worker.waiting:
            answer = self.worker.answer()
            if answer is not None and not self.adapters.loaded(answer):
                self.requests = [each for each in self.requests if each != answer.digest]
                self.given_up.append(answer.digest)

    def begin(self, digest: str) -> bool:
        try:
            self.adapters.require(digest)
        except AdapterNotLoaded:
            return False
        self.requests.append(digest)
        return True

    def restart(self, refuses: set[str]) -> None:
        """As MacEngine does: a new worker has everything before it takes plans."""
        self.worker = None
        self.adapters.worker_lost()
        worker = Worker()
        worker.refuses = refuses
        while messages := self.adapters.take_unasked():
            for message in messages:
                worker.waiting.append(message)
                answer = worker.answer()
                assert answer is not None
                if not self.adapters.loaded(answer):
                    self.requests = [each for each in self.requests if each != answer.digest]
                    self.given_up.append(answer.digest)
        self.worker = worker

    def states(self) -> dict[str, AdapterState]:
        return {each.digest: each.state for each in self.adapters.report().statuses}

    def check(self) -> None:
        """Whatever runs can run, once the worker has done what it was told."""
        if self.worker is None:
            return
        will_have = set(self.worker.loaded)
        for message in self.worker.waiting:
            if message.WhichOneof("message") == "load_adapter":
                will_have.add(message.load_adapter.digest)
            else:
                will_have.discard(message.unload_adapter.digest)
        assert set(self.requests) <= will_have
        usable = {digest for digest, state in self.states().items() if state is AdapterState.READY}
        assert (
            usable
            <= self.worker.loaded
            - {
                message.unload_adapter.digest
                for message in self.worker.waiting
                if message.WhichOneof("message") == "unload_adapter"
            }
            or self.worker.waiting
        )


@pytest.fixture
def files_are_fine(monkeypatch):
    monkeypatch.setattr(mac_adapters, "_problem", lambda spec: ("", 10))


OPS = st.one_of(
    st.tuples(st.just("follow"), st.sets(st.sampled_from(DIGESTS))),
    st.tuples(st.just("answer"), st.none()),
    st.tuples(st.just("checks"), st.none()),
    st.tuples(st.just("begin"), st.sampled_from(DIGESTS)),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("restart"), st.sets(st.sampled_from(DIGESTS), max_size=1)),
)


@settings(max_examples=150, deadline=None)
@given(ops=st.lists(OPS, max_size=40))
def test_in_any_order_the_worker_ends_up_with_what_is_wanted(ops):
    async def run() -> None:
        mac, wanted = Mac(), set()
        refused: set[str] = set()
        for op, value in ops:
            if op == "follow":
                wanted = value
                refused -= value  # asked for again, from a worker that takes it
                if mac.worker is not None:
                    mac.worker.refuses.clear()
                await mac.follow(*sorted(value))
            elif op == "answer":
                mac.take_answer()
            elif op == "checks":
                await mac.settle_checks()
            elif op == "begin":
                was_ready = mac.states().get(value) is AdapterState.READY
                assert mac.begin(value) == was_ready
            elif op == "end" and mac.requests:
                mac.requests.pop(value % len(mac.requests))
                mac.let_go()
            elif op == "restart":
                mac.restart(value)
            mac.check()
        assert mac.worker is not None
        mac.worker.refuses.clear()
        await mac.follow(*sorted(wanted))
        await mac.settle_checks()
        mac.requests.clear()
        mac.let_go()
        while mac.worker.waiting:
            mac.take_answer()
        assert mac.worker.loaded == wanted
        assert mac.states() == dict.fromkeys(wanted, AdapterState.READY)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mac_adapters, "_problem", lambda spec: ("", 10))
        asyncio.run(run())


async def test_one_that_is_in_use_stays_until_the_last_request_has_ended(files_are_fine):
    mac = Mac()
    await mac.follow("d0")
    await mac.settle_checks()
    mac.take_answer()
    assert mac.begin("d0")
    await mac.follow()
    assert mac.states() == {"d0": AdapterState.LEAVING}
    with pytest.raises(AdapterNotLoaded, match="adapter name-d0 is leaving here; it takes no new requests"):
        mac.adapters.require("d0")
    assert not mac.worker.waiting
    mac.requests.clear()
    mac.let_go()
    mac.take_answer()
    assert mac.worker.loaded == set()
    with pytest.raises(AdapterNotLoaded, match="with digest d0 is not loaded here"):
        mac.adapters.require("d0")


async def test_a_new_worker_that_cannot_load_one_again_gives_its_requests_up(files_are_fine):
    mac = Mac()
    await mac.follow("d0", "d1")
    await mac.settle_checks()
    mac.take_answer()
    mac.take_answer()
    assert mac.begin("d0")
    assert mac.begin("d1")
    mac.restart({"d0"})
    assert mac.given_up == ["d0"]
    assert mac.requests == ["d1"]
    assert mac.states() == {"d0": AdapterState.FAILED, "d1": AdapterState.READY}


async def test_memory_is_counted(files_are_fine):
    mac = Mac(memory_bytes=25)
    await mac.follow(*DIGESTS)
    await mac.settle_checks()
    statuses = mac.adapters.report().statuses
    failed = [each for each in statuses if each.state is AdapterState.FAILED]
    assert [each.problem for each in failed] == ["it takes 10 bytes; of the 25 of --lora-memory 5 are left"]


async def test_two_names_of_one_content_are_loaded_once(files_are_fine):
    mac = Mac()
    mac.adapters.follow(AdapterList(1, (spec_of("d0", "one"), spec_of("d0", "two"))))
    await mac.settle_checks()
    mac.take_answer()
    assert not mac.worker.waiting
    assert [each.name for each in mac.adapters.report().statuses] == ["one", "two"]
    mac.adapters.follow(AdapterList(2, (spec_of("d0", "two"),)))
    assert mac.states() == {"d0": AdapterState.READY}


async def test_adapters_of_other_models_are_not_this_macs(files_are_fine):
    mac = Mac()
    mac.adapters.follow(AdapterList(1, (replace(spec_of("d0"), model="other"),)))
    assert mac.adapters.report() == mac.adapters.report().__class__(1, ())


def folder_of(tmp_path, content: bytes = b"weights", **config):
    folder = tmp_path / "adapter"
    folder.mkdir(exist_ok=True)
    (folder / "adapters.safetensors").write_bytes(content)
    (folder / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"rank": 2}} | config))
    return folder


async def test_files_that_are_not_those_of_the_gateway_are_refused(tmp_path):
    folder = folder_of(tmp_path)
    for path, digest, problem in (
        (tmp_path / "nowhere", "d", "is no folder on this machine"),
        (folder, "d", "here has the digest"),
        (folder, adapter_digest(folder), ""),
    ):
        mac = Mac()
        spec = replace(spec_of(digest), path=str(path))
        mac.adapters.follow(AdapterList(1, (spec,)))
        await mac.settle_checks()
        (status,) = mac.adapters.report().statuses
        assert problem in status.problem
        assert bool(problem) == (status.state is AdapterState.FAILED)


def test_a_digest_is_of_what_matters(tmp_path):
    digest = adapter_digest(folder_of(tmp_path))
    assert adapter_digest(folder_of(tmp_path, data="elsewhere", iters=7)) == digest
    assert adapter_bytes(tmp_path / "adapter") == 7
    for folder in (
        {"content": b"Weights"},
        {"lora_parameters": {"rank": 3}},
        {"fine_tune_type": "dora"},
    ):
        assert adapter_digest(folder_of(tmp_path, **folder)) != digest


def test_folders_that_hold_no_adapter_are_refused(tmp_path):
    with pytest.raises(InvalidRequest, match="is no folder"):
        find_adapter(str(tmp_path / "nowhere"))
    folder = folder_of(tmp_path)
    assert find_adapter(str(folder)) == folder
    for text, words in (("[]", "must hold an object"), ("{", "is not JSON")):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(InvalidRequest, match=words):
            adapter_digest(folder)
    (folder / "adapters.safetensors").unlink()
    with pytest.raises(InvalidRequest, match=r"has no adapters\.safetensors"):
        find_adapter(str(folder))
