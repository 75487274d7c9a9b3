"""Gateway and Mac over a real stream: what each does when the other leaves, breaks off or refuses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import grpc
import pytest

from cluster import kv_manager, wire
from cluster.errors import MacLost, Overloaded
from cluster.kv.hashing import BlockHash
from cluster.kv_manager import NodeServicer
from cluster.mac_link import MacLink, MacLinks
from cluster.routing.decision import Decision
from cluster.scheduling.request import Finish, Request, SamplingParams, Update
from protos.cidery.node.v1 import node_pb2_grpc

ROOT = BlockHash(b"r" * 16)


class FakeEngine:
    """Answers nothing by itself: a test says what happens."""

    def __init__(self) -> None:
        self.sinks = {}
        self.aborted = []
        self.changed = asyncio.Event()

    def open(self, message, sink) -> None:
        self.sinks[message.request_id] = sink
        self.changed.set()

    def abort(self, request_id: str, sink) -> None:
        self.aborted.append(request_id)
        self.changed.set()

    def update(self, request_id: str, token: int, finish: Finish | None = None) -> None:
        update = Update(request_id, (token,), (), finish, num_cached_tokens=16, queue_s=0.5)
        self.sinks[request_id].deliver([wire.update_to_proto(update)])

    async def until(self, condition) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


def request(request_id: str) -> Request:
    return Request(request_id, (1, 2, 3), 3, (), 8, SamplingParams())


@asynccontextmanager
async def node(engine: FakeEngine) -> AsyncIterator[tuple[grpc.aio.Server, str]]:
    server = grpc.aio.server()
    node_pb2_grpc.add_NodeServiceServicer_to_server(NodeServicer(engine), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield server, address
    finally:
        await server.stop(0)


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[FakeEngine, MacLink, list[MacLink]]]:
    engine, lost = FakeEngine(), []
    async with node(engine) as (_, address):
        link = MacLink("mac-1", 1, address, lost.append)
        try:
            yield engine, link, lost
        finally:
            await link.close()


async def collect(link: MacLink, request_id: str) -> list[Update]:
    return [update async for update in link.run(request(request_id), ROOT, ignore_eos=False)]


async def test_updates_of_many_requests_reach_their_own():
    async with linked() as (engine, link, _):
        runs = {name: asyncio.create_task(collect(link, name)) for name in ("a", "b")}
        await engine.until(lambda: len(engine.sinks) == 2)
        engine.update("b", 21)
        engine.update("a", 11)
        engine.update("b", 22, Finish.LENGTH)
        engine.update("a", 12, Finish.STOP)
        updates = {name: await run for name, run in runs.items()}
    assert [update.token_ids for update in updates["a"]] == [(11,), (12,)]
    assert [update.token_ids for update in updates["b"]] == [(21,), (22,)]
    assert (updates["a"][-1].finish, updates["a"][-1].num_cached_tokens) == (Finish.STOP, 16)
    assert engine.aborted == []


async def test_leaving_early_aborts_on_the_mac():
    async with linked() as (engine, link, _):
        async with aclosing(link.run(request("a"), ROOT, ignore_eos=False)) as updates:
            first = asyncio.create_task(anext(updates))
            await engine.until(lambda: "a" in engine.sinks)
            engine.update("a", 1)
            await first
        await engine.until(lambda: bool(engine.aborted))
    assert engine.aborted == ["a"]


async def test_cancelling_while_waiting_aborts_on_the_mac():
    async with linked() as (engine, link, _):
        run = asyncio.create_task(collect(link, "a"))
        await engine.until(lambda: "a" in engine.sinks)
        run.cancel()
        await engine.until(lambda: bool(engine.aborted))
    assert engine.aborted == ["a"]


async def test_the_end_of_a_gateway_aborts_its_requests_and_no_others():
    engine = FakeEngine()
    async with node(engine) as (_, address):
        leaving, staying = (MacLink("mac-1", 1, address, lambda link: None) for _ in range(2))
        runs = [asyncio.create_task(collect(link, name)) for link, name in ((leaving, "a"), (staying, "b"))]
        await engine.until(lambda: len(engine.sinks) == 2)
        await leaving.close()
        await engine.until(lambda: engine.aborted == ["a"])
        with pytest.raises(MacLost):
            await runs[0]
        engine.update("b", 1, Finish.STOP)
        assert len(await runs[1]) == 1
        await staying.close()


async def test_a_broken_stream_fails_its_requests_and_says_so_once():
    engine, lost = FakeEngine(), []
    async with node(engine) as (server, address):
        link = MacLink("mac-1", 1, address, lost.append)
        runs = [asyncio.create_task(collect(link, name)) for name in ("a", "b")]
        await engine.until(lambda: len(engine.sinks) == 2)
        await server.stop(0)
        for run in runs:
            with pytest.raises(MacLost, match="mac-1 was lost"):
                await run
        assert lost == [link]
        with pytest.raises(MacLost, match="not reachable"):
            await collect(link, "c")


async def test_a_refusal_keeps_its_kind_and_is_not_aborted():
    async with linked() as (engine, link, _):
        run = asyncio.create_task(collect(link, "a"))
        await engine.until(lambda: "a" in engine.sinks)
        engine.sinks["a"].deliver([wire.failure_to_proto("a", Overloaded("1024 wait"))])
        with pytest.raises(Overloaded, match="1024 wait"):
            await run
    assert engine.aborted == []


async def test_a_broken_link_is_replaced_and_its_mac_reported_lost():
    engine, lost = FakeEngine(), []
    links = MacLinks(lambda mac, epoch: lost.append((mac, epoch)))
    async with node(engine) as (server, address):
        decision = Decision("a", "mac-1", 7, address, 3, 0, 0.0)
        link = links.get(decision)
        assert links.get(decision) is link
        run = asyncio.create_task(collect(link, "a"))
        await engine.until(lambda: "a" in engine.sinks)
        await server.stop(0)
        with pytest.raises(MacLost):
            await run
    assert lost == [("mac-1", 7)]
    assert links.get(decision) is not link
    await links.close()


async def test_a_gateway_that_does_not_read_loses_its_stream_and_nobody_else_notices(monkeypatch):
    monkeypatch.setattr(kv_manager, "_MAX_STREAM_BACKLOG", 3)
    task = asyncio.create_task(asyncio.sleep(60))
    stream = kv_manager.GatewayStream(task)
    update = wire.update_to_proto(Update("a", (1,), (), None, num_cached_tokens=0, queue_s=0.0))
    for _ in range(5):
        stream.deliver([update])
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stream.messages.qsize() == 3


class SilentServicer(node_pb2_grpc.NodeServiceServicer):
    """A Mac that has stopped: the connection stands, nothing comes."""

    async def Connect(self, requests, context):  # noqa: N802
        await asyncio.sleep(60)
        yield


async def test_a_mac_that_says_nothing_is_lost():
    """Its machine hangs or sleeps: TCP and gRPC notice nothing for minutes."""
    server = grpc.aio.server()
    node_pb2_grpc.add_NodeServiceServicer_to_server(SilentServicer(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    link = MacLink("mac-1", 1, address, lambda link: None, silence_s=0.3)
    with pytest.raises(MacLost, match="nothing was heard"):
        await collect(link, "a")
    await server.stop(0)


async def test_an_idle_mac_is_not_lost(monkeypatch):
    monkeypatch.setattr(kv_manager, "LINK_HEARTBEAT_S", 0.05)
    engine = FakeEngine()
    async with node(engine) as (_, address):
        link = MacLink("mac-1", 1, address, lambda link: None, silence_s=0.5)
        run = asyncio.create_task(collect(link, "a"))
        await engine.until(lambda: "a" in engine.sinks)
        await asyncio.sleep(1.0)
        engine.update("a", 1, Finish.STOP)
        assert len(await run) == 1
        await link.close()
