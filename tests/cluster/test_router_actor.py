"""The router actor without Ray: what Macs and gateways say to it, and what they hear."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cluster import reporter as reporter_module
from cluster import router_actor
from cluster.adapters import AdapterList, AdapterReport, AdapterSpec, AdapterState, AdapterStatus
from cluster.errors import InvalidRequest, MacsAway, ModelNotFound, NoMacReady, NotFound, Overloaded, RequestTooLong
from cluster.event_wire import Batch, pack
from cluster.kv.hashing import hash_blocks, join_hashes, root_hash
from cluster.kv.manager import KVCacheManager
from cluster.kv.planner import plan_layout
from cluster.kv.spec import FullAttentionSpec, SlidingWindowSpec
from cluster.mac_adapters import MacAdapters
from cluster.reporter import Reporter
from cluster.router_actor import MacReport, ReportAnswer, RequestNotes, RouterActor
from cluster.routing.config import RoutingConfig
from cluster.routing.decision import RouteQuery
from cluster.routing.mac import MacInfo, MacState
from cluster.routing.speed import StepSample

ROOT = root_hash(model="m", tokenizer="t", kv_format="f", block_size=16)
SPECS = [FullAttentionSpec(1, 8), SlidingWindowSpec(1, 8, 32)]


@pytest.fixture
async def actor():
    async with running(RouterActor()) as actor:
        yield actor


@asynccontextmanager
async def running(actor: RouterActor):
    try:
        yield actor
    finally:
        actor._ticker.cancel()
        await asyncio.gather(actor._ticker, return_exceptions=True)


def new_kv() -> KVCacheManager:
    return KVCacheManager(plan_layout(SPECS, kv_budget_bytes=1 << 17, max_model_len=512))


def info_of(kv: KVCacheManager, name: str = "a", epoch: int = 1, **changes) -> MacInfo:
    values = {"name": name, "epoch": epoch, "model": "m", "root_hash": ROOT, "block_size": 16, "address": f"{name}:1"}
    sizes = {"max_model_len": 512, "num_blocks": kv.num_blocks, "groups": kv.layout.groups, "token_capacity": 1_000}
    return MacInfo(**(values | sizes | changes))


def report(mac: str = "a", epoch: int = 1, seq: int = 0, **fields) -> MacReport:
    values = {"batches": (), "next_seq": seq, "digests": None, "steps": (), "num_requests": 0}
    return MacReport(mac, epoch, **(values | fields))


def query(num_tokens: int = 100, request_id: str = "r", **fields) -> RouteQuery:
    hashes = tuple(hash_blocks(ROOT, range(num_tokens), 16))
    return RouteQuery(request_id, fields.pop("model", "m"), ROOT, hashes, num_tokens, 10, **fields)


async def ready(actor: RouterActor, *names: str, **changes) -> None:
    for name in names:
        await actor.join(info_of(new_kv(), name, **changes), "digest", is_draining=False, cordon=None)
        assert await actor.check_digests(name, 1, 0, (0, 0)) == ()


class TestMacs:
    async def test_one_that_was_never_heard_of_is_told_to_join(self, actor) -> None:
        assert await actor.report(report()) is ReportAnswer.JOIN
        assert await actor.check_digests("a", 1, 0, (0, 0)) is None
        assert await actor.differing_buckets("a", 1, {}) is None
        assert await actor.load_difference("a", 1, 0, {}, (0, 0)) is ReportAnswer.JOIN

    async def test_one_that_does_not_fit_is_refused_with_the_reason(self, actor) -> None:
        await ready(actor, "a")
        with pytest.raises(InvalidRequest, match="another block size"):
            await actor.join(info_of(new_kv(), "b", block_size=32), "digest", is_draining=False, cordon=None)

    async def test_marks_come_back_with_the_mac(self, actor) -> None:
        for name, is_draining, cordon in (("a", True, None), ("b", False, "dusty")):
            answer = await actor.join(info_of(new_kv(), name), "digest", is_draining=is_draining, cordon=cordon)
            assert answer is ReportAnswer.RESYNC
        states = {mac.info.name: (mac.state, mac.note) for mac in await actor.fleet()}
        assert states == {"a": (MacState.DRAINING, ""), "b": (MacState.CORDONED, "dusty")}
        await actor.resume("a")
        await actor.drain("b")
        await actor.cordon("a", "")
        assert await actor.models() == {"m": {"a": MacState.CORDONED, "b": MacState.DRAINING}}
        assert await actor.tokenizer_digests() == {"m": "digest"}
        for action in (actor.drain, actor.resume, lambda mac: actor.cordon(mac, "")):
            with pytest.raises(NotFound, match="no Mac is named 'c'"):
                await action("c")

    async def test_a_gap_and_a_wrong_digest_ask_for_a_resync(self, actor, caplog) -> None:
        await ready(actor, "a")
        late = report(batches=(pack(Batch("a", 1, 5, ())),))
        assert await actor.report(late) is ReportAnswer.RESYNC
        assert await actor.check_digests("a", 1, 6, (0, 0)) == ()
        assert await actor.report(report(seq=6, digests=(0, 0))) is ReportAnswer.OK
        assert await actor.report(report(seq=6, digests=(0, 7))) is ReportAnswer.RESYNC
        assert "index and mac differ mac=a epoch=1 groups=(1,)" in caplog.text
        assert await actor.load_difference("a", 1, 6, {}, (0, 7)) is ReportAnswer.RESYNC
        (stats,) = (await actor.index_stats()).macs
        assert (stats.content.num_gaps, stats.content.num_digest_mismatches) == (1, 1)

    async def test_a_silent_or_broken_one_is_lost_and_reports_bring_it_back(self, actor, monkeypatch) -> None:
        await ready(actor, "a", "b")
        await actor.lost("a", 2)
        assert {mac.state for mac in await actor.fleet()} == {MacState.READY}
        await actor.lost("a", 1)
        assert await actor.report(report()) is ReportAnswer.JOIN
        monkeypatch.setattr(router_actor, "SILENCE_S", -1.0)
        await asyncio.sleep(1.2)
        assert {mac.state for mac in await actor.fleet()} == {MacState.LOST}
        with pytest.raises(MacsAway):
            await actor.route(query())
        await actor.leave("a", 1)
        await actor.leave("b", 1)
        with pytest.raises(ModelNotFound):
            await actor.route(query())

    async def test_speeds_and_loads_arrive(self, actor) -> None:
        await ready(actor, "a")
        steps = tuple(StepSample(512, 256.0, 0, 0, 0.1) for _ in range(5))
        await actor.report(report(steps=steps, num_requests=2))
        (mac,) = await actor.fleet()
        assert mac.prefill_tokens_per_s == pytest.approx(5_120, rel=0.01)


class TestRequests:
    async def test_refusals_have_their_reasons(self, actor) -> None:
        with pytest.raises(ModelNotFound):
            await actor.what_if(query())
        await ready(actor, "a")
        with pytest.raises(RequestTooLong):
            await actor.route(query(600))
        slow = StepSample(64, 32.0, 0, 0, 1.0)
        await actor.report(report(steps=(slow,) * 5))
        with pytest.raises(Overloaded, match="deadline") as refused:
            await actor.route(query(deadline_s=0.0001))
        assert refused.value.retry_after_s >= 1.0
        await actor.drain("a")
        with pytest.raises(NoMacReady):
            await actor.route(query())
        with pytest.raises(NotFound):
            await actor.explain("unknown")

    async def test_what_is_decided_can_be_explained(self, actor) -> None:
        await ready(actor, "a")
        supposed = await actor.what_if(query())
        decision = await actor.route(query())
        explained = await actor.explain("r")
        assert supposed.decision is not None
        assert explained.decision == decision
        assert supposed.decision.mac == decision.mac == "a"

    async def test_predictions_that_do_not_come_true_are_alarmed_once(self, actor, caplog) -> None:
        await ready(actor, "a")
        for number in range(10):
            request_id = f"r{number}"
            await actor.route(query(request_id=request_id))
            await actor.note(RequestNotes(((request_id, 64),), ()))
            await actor.note(RequestNotes((), ((request_id, 5),)))
        assert caplog.text.count("cache hits on a mac are not as predicted mac=a") == 1
        (mac,) = await actor.fleet()
        assert mac.drift.is_alarming
        assert mac.load.num_requests == 0

    async def test_leases_end(self, monkeypatch) -> None:
        async with running(RouterActor(RoutingConfig(lease_s=0.1))) as actor:
            await ready(actor, "a")
            await actor.route(query())
            await asyncio.sleep(1.3)
            (mac,) = await actor.fleet()
            assert mac.load.num_requests == 0


class TestWaiting:
    @pytest.fixture
    async def busy(self):
        """One Mac with more than enough to do, and one place to wait."""
        async with running(RouterActor(RoutingConfig(max_backlog_s=0.001, max_waiting=1))) as actor:
            await ready(actor, "a")
            await actor.route(query(request_id="running"))
            yield actor

    async def test_a_turn_comes_when_another_ends(self, busy) -> None:
        waiting = asyncio.create_task(busy.route(query(request_id="next")))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="1 requests for 'm' are waiting"):
            await busy.route(query(request_id="late"))
        assert not waiting.done()
        await busy.note(RequestNotes((), (("running", 3),)))
        assert (await waiting).mac == "a"

    async def test_a_higher_priority_takes_the_place(self, busy) -> None:
        waiting = asyncio.create_task(busy.route(query(request_id="next")))
        await asyncio.sleep(0)
        urgent = asyncio.create_task(busy.route(query(request_id="urgent", priority=1)))
        with pytest.raises(Overloaded):
            await waiting
        await busy.note(RequestNotes((), (("running", 3),)))
        assert (await urgent).mac == "a"

    async def test_who_goes_away_waits_no_longer(self, busy) -> None:
        waiting = asyncio.create_task(busy.route(query(request_id="next")))
        await asyncio.sleep(0)
        await busy.note(RequestNotes((), (("next", None),)))
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await busy.note(RequestNotes((), (("running", 3),)))
        (mac,) = await busy.fleet()
        assert mac.load.num_requests == 0


class TestAdapters:
    SPEC = AdapterSpec("pirate", "m", "/adapters/pirate", "d1", 100, 5)

    def reported(self, version: int, state: AdapterState = AdapterState.READY) -> AdapterReport:
        return AdapterReport(version, (AdapterStatus("pirate", "d1", state),))

    async def test_a_mac_that_is_behind_is_told_and_one_that_lacks_it_gets_no_request_for_it(self, actor) -> None:
        await ready(actor, "a", "b")
        assert await actor.report(report()) is ReportAnswer.OK
        await actor.load_adapter(self.SPEC)
        wanted = await actor.adapters()
        assert wanted.specs == (self.SPEC,)
        assert await actor.report(report()) is ReportAnswer.ADAPTERS
        with pytest.raises(MacsAway, match="a: has not loaded the adapter; b: has not loaded the adapter"):
            await actor.route(query(adapter="d1"))
        loading = self.reported(wanted.version, AdapterState.LOADING)
        assert await actor.report(report(adapters=loading)) is ReportAnswer.OK
        assert await actor.report(report("b", adapters=self.reported(wanted.version))) is ReportAnswer.OK
        for number in range(3):
            assert (await actor.route(query(adapter="d1", request_id=f"r{number}"))).mac == "b"
        explained = await actor.what_if(query(adapter="d1"))
        assert {each.mac: each.excluded for each in explained.candidates}["a"] == "has not loaded the adapter"
        await actor.unload_adapter("pirate")
        assert await actor.report(report("b", adapters=self.reported(wanted.version))) is ReportAnswer.ADAPTERS
        with pytest.raises(NotFound):
            await actor.unload_adapter("pirate")

    async def test_what_no_mac_could_load_is_not_waited_for(self, actor) -> None:
        await ready(actor, "a")
        await actor.load_adapter(self.SPEC)
        wanted = await actor.adapters()
        await actor.report(report(adapters=self.reported(wanted.version, AdapterState.FAILED)))
        with pytest.raises(NoMacReady):
            await actor.route(query(adapter="d1"))
        with pytest.raises(NoMacReady):
            await actor.route(query(adapter="unknown"))

    async def test_a_router_that_begins_anew_takes_the_list_of_a_mac(self, actor) -> None:
        """Until the Mac has told that it has them loaded, requests for them wait."""
        brought = AdapterList(77, (self.SPEC,))
        info = info_of(new_kv())
        await actor.join(info, "digest", is_draining=False, cordon=None, adapters=brought)
        assert await actor.adapters() == brought
        with pytest.raises(MacsAway):
            await actor.route(query(adapter="d1"))
        await actor.leave("a", 1)
        assert (await actor.adapter_view()).by_mac == {}

    async def test_a_mac_that_begins_anew_has_none_until_it_says_so(self, actor) -> None:
        await ready(actor, "a")
        await actor.load_adapter(self.SPEC)
        wanted = await actor.adapters()
        await actor.report(report(adapters=self.reported(wanted.version)))
        assert (await actor.route(query(adapter="d1"))).mac == "a"
        await actor.join(replace(info_of(new_kv()), epoch=2), "digest", is_draining=False, cordon=None)
        assert (await actor.adapter_view()).by_mac == {}
        with pytest.raises(MacsAway):
            await actor.route(query(adapter="d1", request_id="next"))

    async def test_a_router_whose_macs_bring_no_list_lets_requests_wait_for_one(self, actor) -> None:
        """The first that joins may have begun anew itself."""
        await ready(actor, "b")
        with pytest.raises(MacsAway):
            await actor.route(query(adapter="d1"))
        await actor.join(
            info_of(new_kv()), "digest", is_draining=False, cordon=None, adapters=AdapterList(77, (self.SPEC,))
        )
        with pytest.raises(MacsAway):
            await actor.route(query(adapter="d1"))
        with pytest.raises(NoMacReady):
            await actor.route(query(adapter="unknown"))

    async def test_who_waits_goes_where_the_adapter_is_by_then(self) -> None:
        """What a Mac has loaded counts when it is the request's turn, not when it came."""
        async with running(RouterActor(RoutingConfig(max_backlog_s=0.001))) as busy:
            await ready(busy, "a", "b")
            await busy.load_adapter(self.SPEC)
            wanted = await busy.adapters()
            await busy.report(report(adapters=self.reported(wanted.version)))
            await busy.route(query(adapter="d1", request_id="running"))
            other = replace(query(adapter="d1", request_id="next"), block_hashes=hash_blocks(ROOT, [7] * 100, 16))
            waiting = asyncio.create_task(busy.route(other))
            await asyncio.sleep(0)
            assert not waiting.done()
            await busy.report(report("b", adapters=self.reported(wanted.version)))
            assert (await asyncio.wait_for(waiting, 5)).mac == "b"


class Engine:
    """A Mac's engine as far as the reporter sees it, with a real KV cache."""

    is_ready = True
    root = ROOT
    tokenizer_digest = "digest"
    max_model_len = 512
    max_num_seqs = 4
    max_num_batched_tokens = 64
    max_chunk_tokens = 32
    num_requests = 0

    def __init__(self) -> None:
        self.kv = new_kv()
        self.epoch = 1
        self.step_samples: list[StepSample] = []
        self.adapters = MacAdapters("m", 1 << 20, lambda message: True, lambda: None)
        self._num = 0

    def follow_adapters(self, wanted: AdapterList) -> None:
        self.adapters.follow(wanted)

    def run(self, tokens) -> None:
        self._num += 1
        hashes = join_hashes(hash_blocks(ROOT, tokens, 16))
        computed = self.kv.get_computed_blocks(hashes, len(tokens))
        self.kv.start(self._num, computed, hashes)
        self.kv.release_sources()
        assert self.kv.allocate(self._num, len(tokens), computed.num_tokens) is not None
        first = self.kv.num_registered_blocks(self._num)
        self.kv.register(self._num, first, hashes[first * 16 :])
        self.kv.free(self._num, len(tokens))


class TestReporter:
    """A Mac's reporter against the router actor, with calls that can be lost."""

    @pytest.fixture
    def link(self, actor, monkeypatch):
        calls: list[tuple[str, tuple]] = []

        async def call(method: str, *arguments, **named):
            calls.append((method, arguments))
            if method == "report" and link.loses:
                return ReportAnswer.OK
            return await getattr(link.actor, method)(*arguments, **named)

        link = SimpleNamespace(actor=actor, calls=calls, loses=False)
        monkeypatch.setattr(reporter_module, "router", lambda: call)
        link.reporter = Reporter("a", "m")
        link.engine = Engine()
        return link

    async def step(self, link) -> None:
        link.reporter._reported_s = 0.0
        await link.reporter._report(link.engine, "a:1")

    def known(self, link) -> tuple[int, ...]:
        return link.actor._router.macs._fleets["m"].index.digests(0)

    async def test_joins_and_sends_what_changes(self, link) -> None:
        await self.step(link)
        link.engine.run(list(range(100)))
        await self.step(link)
        assert self.known(link) == link.engine.kv.digests() != (0, 0)
        assert [method for method, _ in link.calls] == ["join", "check_digests", "report"]

    async def test_follows_the_list_of_adapters_and_says_how_far_it_is(self, link) -> None:
        await self.step(link)
        await link.actor.load_adapter(AdapterSpec("pirate", "m", "/nowhere", "d1", 100, 5))
        await self.step(link)
        assert [method for method, _ in link.calls][-2:] == ["report", "adapters"]
        assert link.engine.adapters.followed == await link.actor.adapters()
        await asyncio.gather(*link.engine.adapters._checks)
        await link.reporter._report(link.engine, "a:1")  # not at its hour, but because something has changed
        ((status,),) = (await link.actor.adapter_view()).by_mac.values()
        assert (status.state, status.problem) == (AdapterState.FAILED, "'/nowhere' is no folder on this machine")
        calls = len(link.calls)
        await link.reporter._report(link.engine, "a:1")
        assert len(link.calls) == calls

    async def test_a_lost_report_is_mended_by_a_difference(self, link) -> None:
        await self.step(link)
        link.engine.run(list(range(400)))
        await self.step(link)
        link.loses = True
        link.engine.run(list(range(1_000, 1_040)))
        await self.step(link)
        link.loses = False
        link.engine.run(list(range(2_000, 2_040)))
        await self.step(link)
        assert self.known(link) == link.engine.kv.digests()
        assert [method for method, _ in link.calls][-3:] == ["check_digests", "differing_buckets", "load_difference"]
        sent = link.calls[-1][1][3]
        assert sum(len(joined) // 16 for _, joined in sent.values()) < 20, "the rest was known"
        await self.step(link)
        assert link.calls[-1][0] == "report"

    async def test_a_lost_report_is_found_though_nothing_follows(self, link, monkeypatch) -> None:
        """By the digest that comes every few seconds."""
        await self.step(link)
        link.loses = True
        link.engine.run(list(range(100)))
        await self.step(link)
        link.loses = False
        monkeypatch.setattr(reporter_module, "_DIGEST_S", 0.0)
        await self.step(link)
        assert self.known(link) == link.engine.kv.digests()

    async def test_a_restarted_router_learns_all_again(self, link) -> None:
        await self.step(link)
        link.engine.run(list(range(100)))
        await self.step(link)
        link.reporter.is_draining = True
        async with running(RouterActor()) as fresh:
            link.actor = fresh
            for _ in range(2):
                await self.step(link)
            assert self.known(link) == link.engine.kv.digests() != (0, 0)
            assert [mac.state for mac in await fresh.fleet()] == [MacState.DRAINING]

    async def test_a_new_epoch_begins_with_nothing(self, link) -> None:
        await self.step(link)
        link.engine.run(list(range(100)))
        await self.step(link)
        link.engine.epoch = 2
        link.engine.kv.reset()
        await self.step(link)
        assert self.known(link) == (0, 0)
        link.engine.run(list(range(50)))
        await self.step(link)
        assert self.known(link) == link.engine.kv.digests()

    async def test_a_router_that_forgets_between_two_messages_is_joined_again(self, link) -> None:
        await self.step(link)
        link.engine.run(list(range(100)))
        await link.actor.leave("a", 1)
        await link.reporter._resync(link.engine)
        for _ in range(2):
            await self.step(link)
        assert self.known(link) == link.engine.kv.digests() != (0, 0)
