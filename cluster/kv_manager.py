"""KVManager: the Ray actor of one Mac. Hosts the node service for gateways and keeps the router informed.

The control face only: Ray calls and gRPC streams end here, MacEngine does the work.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cluster.config import MAX_NODE_MESSAGE_BYTES, MacConfig
from cluster.errors import CideryError, StartupFailed
from cluster.event_wire import PendingEvents, pack, pack_keys
from cluster.mac_engine import MacEngine
from cluster.model_files import find_model
from cluster.ray_calls import router
from cluster.router_actor import MacReport, ReportAnswer
from cluster.routing.mac import MacInfo
from cluster.scheduling.scheduler import SchedulerStats
from protos.cidery.node.v1 import node_pb2, node_pb2_grpc

log = logging.getLogger(__name__)

REPORT_PERIOD_S = 1.0
# Beyond this a gateway reads too slowly to be alive; its requests are aborted.
_MAX_STREAM_BACKLOG = 10_000


@dataclass(frozen=True, slots=True)
class ManagerStatus:
    """What the admin endpoint shows of a Mac beside the router's own numbers."""

    mac: str
    is_ready: bool
    failure: str
    address: str
    config: dict[str, Any]
    manager_pid: int
    worker_pid: int | None
    device: str
    kernels: str
    worker_memory_bytes: int
    num_worker_restarts: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    block_bytes: int
    num_steps: int
    num_generated_tokens: int
    # None until the worker has described its model.
    scheduler: SchedulerStats | None


class GatewayStream:
    """The way back to one gateway."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[node_pb2.ConnectResponse] = asyncio.Queue(_MAX_STREAM_BACKLOG)
        self.request_ids: set[str] = set()

    def deliver(self, updates: list[node_pb2.Update]) -> None:
        """One message a step. Raises asyncio.QueueFull when the gateway doesn't read."""
        for update in updates:
            if update.finish_reason or update.HasField("failure"):
                self.request_ids.discard(update.request_id)
        self.messages.put_nowait(node_pb2.ConnectResponse(updates=updates))


class NodeServicer(node_pb2_grpc.NodeServiceServicer):
    """One stream a gateway; its end aborts what came in by it."""

    def __init__(self, engine: MacEngine) -> None:
        self._engine = engine

    async def Connect(  # noqa: N802 - the name of the rpc
        self, requests: AsyncIterator[node_pb2.ConnectRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[node_pb2.ConnectResponse]:
        """See node.proto."""
        stream = GatewayStream()
        reader = asyncio.create_task(self._read(requests, stream))
        try:
            while True:
                yield await stream.messages.get()
        finally:
            reader.cancel()
            for request_id in tuple(stream.request_ids):
                self._engine.abort(request_id)

    async def _read(self, requests: AsyncIterator[node_pb2.ConnectRequest], stream: GatewayStream) -> None:
        async for message in requests:
            if message.WhichOneof("message") == "open":
                stream.request_ids.add(message.open.request_id)
                self._engine.open(message.open, stream)
            else:
                stream.request_ids.discard(message.abort.request_id)
                self._engine.abort(message.abort.request_id)


class KVManager:
    """See the module. Starts by itself when Ray (re)starts the actor, and reports its phase through `status`."""

    def __init__(self, mac: str, config: dict[str, Any], host: str, log_folder: str) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        self._mac = mac
        self._config = MacConfig.from_dict(config)
        self._host = host
        self._log_path = Path(log_folder) / f"worker-{mac}.log"
        self._engine: MacEngine | None = None
        self._address = ""
        self._failure = ""
        self._router = router()
        self._pending = PendingEvents()
        self._changed = asyncio.Event()
        # Numbers batches without a gap; it goes on over epochs, because a snapshot says where the next epoch begins.
        self._seq = 0
        self._joined_epoch = 0
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def status(self) -> ManagerStatus:
        """Answers in every phase."""
        engine = self._engine
        kv = engine.kv if engine else None
        described = engine.described if engine else None
        return ManagerStatus(
            mac=self._mac,
            is_ready=engine is not None and engine.is_ready,
            failure=self._failure,
            address=self._address,
            config=self._config.to_dict(),
            manager_pid=os.getpid(),
            worker_pid=engine.worker_pid if engine else None,
            device=described.device if described else "",
            kernels=described.kernels if described else "",
            worker_memory_bytes=engine.worker_memory_bytes if engine else 0,
            num_worker_restarts=engine.num_worker_restarts if engine else 0,
            num_blocks=kv.layout.num_usable_blocks if kv else 0,
            num_used_blocks=kv.num_used_blocks if kv else 0,
            num_cached_blocks=kv.num_cached_blocks if kv else 0,
            num_free_blocks=kv.num_free_blocks if kv else 0,
            block_bytes=kv.layout.block_bytes if kv else 0,
            num_steps=engine.num_steps if engine else 0,
            num_generated_tokens=engine.num_generated_tokens if engine else 0,
            scheduler=engine.scheduler.stats() if engine and engine.scheduler else None,
        )

    async def check(self) -> None:
        """Raises AssertionError if scheduler and KV ledger disagree."""
        if self._engine is not None and self._engine.scheduler is not None:
            self._engine.scheduler.check()

    async def shutdown(self) -> None:
        """Leaves the fleet and ends the worker."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._engine is not None:
            await self._router("leave", self._mac, self._engine.epoch)

    async def _run(self) -> None:
        server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", MAX_NODE_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_NODE_MESSAGE_BYTES),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_ping_interval_without_data_ms", 1000),
            )
        )
        try:
            folder = find_model(self._config.model.path)
            self._engine = MacEngine(self._mac, self._config, folder, self._log_path, self._changed.set)
            node_pb2_grpc.add_NodeServiceServicer_to_server(NodeServicer(self._engine), server)
            self._address = f"{self._host}:{server.add_insecure_port(f'{self._host}:0')}"
            await server.start()
            reporter = asyncio.create_task(self._report_forever(self._engine))
            try:
                await self._engine.supervise()
            finally:
                reporter.cancel()
        except StartupFailed as error:
            self._failure = str(error)
            log.error("mac failed mac=%s error=%s", self._mac, error)
        finally:
            await server.stop(0)

    async def _report_forever(self, engine: MacEngine) -> None:
        while True:
            try:
                await self._report(engine)
            except CideryError as error:
                # The router is away or refuses us: keep serving what we have and ask again.
                self._failure = str(error)
                log.warning("report failed mac=%s error=%s", self._mac, error)
                self._joined_epoch = 0
                await asyncio.sleep(REPORT_PERIOD_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), REPORT_PERIOD_S)

    async def _report(self, engine: MacEngine) -> None:
        """One exchange with the router; what changes meanwhile goes into the next."""
        self._changed.clear()
        if not engine.is_ready or engine.kv is None:
            return
        if engine.epoch != self._joined_epoch:
            await self._join(engine)
            return
        self._pending.add(engine.kv.take_events())
        prefills, engine.prefill_observations = engine.prefill_observations, []
        batches: tuple[bytes, ...] = ()
        if self._pending:
            batches = (pack(self._pending.take(self._mac, engine.epoch, self._seq)),)
            self._seq += 1
        report = MacReport(
            self._mac, engine.epoch, batches, tuple((each.num_tokens, each.seconds) for each in prefills)
        )
        answer = await self._router("report", report)
        if answer is ReportAnswer.RESYNC:
            await self._send_snapshot(engine)
        elif answer is ReportAnswer.JOIN:
            self._joined_epoch = 0
            self._changed.set()

    async def _join(self, engine: MacEngine) -> None:
        assert engine.root is not None
        assert engine.kv is not None
        info = MacInfo(
            name=self._mac,
            epoch=engine.epoch,
            model=self._config.model.name,
            root_hash=engine.root,
            block_size=engine.kv.layout.block_size,
            address=self._address,
            max_model_len=engine.max_model_len,
            num_blocks=engine.kv.layout.num_usable_blocks,
        )
        answer = await self._router("join", info, engine.tokenizer_digest)
        if answer is ReportAnswer.RESYNC:
            await self._send_snapshot(engine)
        self._joined_epoch = info.epoch
        self._failure = ""

    async def _send_snapshot(self, engine: MacEngine) -> None:
        """The whole set as of now; pending transitions are part of it."""
        assert engine.kv is not None
        epoch = engine.epoch
        engine.kv.take_events()
        self._pending.clear()
        keys = pack_keys(engine.kv.snapshot())
        if await self._router("load_snapshot", self._mac, epoch, self._seq, keys) is ReportAnswer.JOIN:
            self._joined_epoch = 0
            self._changed.set()
