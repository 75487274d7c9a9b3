"""KVManager: the Ray actor of one Mac. Hosts the node service for gateways and keeps the router informed.

The control face only: Ray calls and gRPC streams end here, MacEngine does the work.
"""

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from cluster.config import LINK_HEARTBEAT_S, MAX_NODE_MESSAGE_BYTES, MacConfig
from cluster.errors import StartupFailed
from cluster.kv.stats import KVStats
from cluster.mac_engine import MacEngine
from cluster.model_files import find_model
from cluster.ray_calls import router
from cluster.reporter import Reporter
from cluster.scheduling.stats import SchedulerStats
from cluster.vital import run_or_exit
from protos.cidery.node.v1 import node_pb2, node_pb2_grpc

log = logging.getLogger(__name__)

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
    worker_pid: int | None
    device: str
    kernels: str
    kernel_failures: dict[str, int]
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
    kv: KVStats | None


class GatewayStream:
    """The way back to one gateway; `task` is the call that carries it."""

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        self.messages: asyncio.Queue[node_pb2.ConnectResponse] = asyncio.Queue(_MAX_STREAM_BACKLOG)
        self.request_ids: set[str] = set()
        self._task = task

    def deliver(self, updates: list[node_pb2.Update]) -> None:
        """One message a step. A gateway that doesn't read loses its stream, and with it its requests."""
        for update in updates:
            if update.finish_reason or update.HasField("failure"):
                self.request_ids.discard(update.request_id)
        try:
            self.messages.put_nowait(node_pb2.ConnectResponse(updates=updates))
        except asyncio.QueueFull:
            log.error("gateway does not read messages=%d: ending its stream", _MAX_STREAM_BACKLOG)
            self._task.cancel()

    def end_if_failed(self, reader: "asyncio.Task[None]") -> None:
        """A stream whose requests are no longer read must not look alive."""
        if not reader.cancelled() and reader.exception() is not None:
            log.error("reading from a gateway failed", exc_info=reader.exception())
            self._task.cancel()


class NodeServicer(node_pb2_grpc.NodeServiceServicer):
    """One stream a gateway; its end aborts what came in by it."""

    def __init__(self, engine: MacEngine) -> None:
        self._engine = engine

    async def Connect(  # noqa: N802 - the name of the rpc
        self, requests: AsyncIterator[node_pb2.ConnectRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[node_pb2.ConnectResponse]:
        """See node.proto."""
        task = asyncio.current_task()
        assert task is not None
        stream = GatewayStream(task)
        reader = asyncio.create_task(self._read(requests, stream))
        reader.add_done_callback(stream.end_if_failed)
        try:
            while True:
                try:
                    yield await asyncio.wait_for(stream.messages.get(), LINK_HEARTBEAT_S)
                except TimeoutError:
                    # An empty message says that this Mac lives.
                    yield node_pb2.ConnectResponse()
        finally:
            reader.cancel()
            for request_id in tuple(stream.request_ids):
                self._engine.abort(request_id, stream)

    async def _read(self, requests: AsyncIterator[node_pb2.ConnectRequest], stream: GatewayStream) -> None:
        async for message in requests:
            if message.WhichOneof("message") == "open":
                stream.request_ids.add(message.open.request_id)
                self._engine.open(message.open, stream)
            else:
                stream.request_ids.discard(message.abort.request_id)
                self._engine.abort(message.abort.request_id, stream)


class KVManager:
    """See the module. Starts by itself when Ray (re)starts the actor, and reports its phase through `status`."""

    def __init__(self, mac: str, config: dict[str, Any], host: str) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        self._mac = mac
        self._config = MacConfig.from_dict(config)
        self._host = host
        self._log_path = _log_folder() / f"worker-{mac}-{os.getpid()}.log"
        self._engine: MacEngine | None = None
        self._address = ""
        self._failure = ""
        self._reporter: Reporter | None = None
        self._task = run_or_exit(self._run(), "kv-manager")

    async def status(self) -> ManagerStatus:
        """Answers in every phase."""
        engine = self._engine
        kv = engine.kv if engine else None
        described = engine.described if engine else None
        return ManagerStatus(
            mac=self._mac,
            is_ready=engine is not None and engine.is_ready,
            failure=self._failure or (self._reporter.failure if self._reporter else ""),
            address=self._address,
            config=self._config.to_dict(),
            worker_pid=engine.worker_pid if engine else None,
            device=described.device if described else "",
            kernels=described.kernels if described else "",
            kernel_failures=dict(engine.kernel_failures) if engine else {},
            worker_memory_bytes=engine.worker_memory_bytes if engine else 0,
            num_worker_restarts=engine.num_worker_restarts if engine else 0,
            num_blocks=kv.num_blocks if kv else 0,
            num_used_blocks=kv.num_used_blocks if kv else 0,
            num_cached_blocks=kv.num_cached_blocks if kv else 0,
            num_free_blocks=kv.num_free_blocks if kv else 0,
            block_bytes=kv.block_bytes if kv else 0,
            num_steps=engine.num_steps if engine else 0,
            num_generated_tokens=engine.num_generated_tokens if engine else 0,
            scheduler=engine.scheduler.stats() if engine and engine.scheduler else None,
            kv=kv.stats() if kv else None,
        )

    async def set_marks(self, is_draining: bool, cordon: str | None) -> None:
        """What to tell a router that has forgotten it; `cordon` is the note of one, None if there is none."""
        if self._reporter is not None:
            self._reporter.is_draining, self._reporter.cordon = is_draining, cordon

    async def shutdown(self) -> None:
        """Leaves the fleet and ends the worker."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._engine is not None:
            await router()("leave", self._mac, self._engine.epoch)

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
            reporter = Reporter(self._mac, self._config.model.name)
            self._engine = MacEngine(self._mac, self._config, folder, self._log_path, reporter.hurry)
            self._reporter = reporter
            node_pb2_grpc.add_NodeServiceServicer_to_server(NodeServicer(self._engine), server)
            self._address = f"{self._host}:{server.add_insecure_port(f'{self._host}:0')}"
            await server.start()
            reports = run_or_exit(reporter.run(self._engine, self._address), "reporter")
            try:
                await self._engine.supervise()
            finally:
                reports.cancel()
        except StartupFailed as error:
            self._failure = str(error)
            log.error("mac failed mac=%s error=%s", self._mac, error)
        finally:
            await server.stop(0)


def _log_folder() -> Path:
    """On the Mac itself, for its user alone."""
    folder = Path(tempfile.gettempdir()) / f"cidery-logs-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
