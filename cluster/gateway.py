"""The gateway: one process, one asyncio loop, both faces (gRPC and HTTP) on the same conductor."""

import asyncio
import errno
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import grpc
import uvicorn
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection

from cluster.admin import AdminServicer
from cluster.conductor import Conductor
from cluster.config import MAX_BODY_BYTES, GatewayConfig, ModelConfig
from cluster.errors import CideryError, StartupFailed
from cluster.grpc_server import add_service
from cluster.http_server import HttpServer
from cluster.inference import InferenceServicer
from cluster.metrics import Metrics
from cluster.ray_calls import router
from cluster.request_log import RequestLog
from cluster.served_models import ServedModels
from protos.cidery.v1 import admin_pb2, inference_pb2

log = logging.getLogger(__name__)

_REFRESH_PERIOD_S = 1.0
_STOP_GRACE_S = 3.0
_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"]


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the gateway listens, with the ports that were really bound."""

    grpc: str
    http: str


class Gateway:
    """Connects to the fleet's router through Ray, which must be initialised."""

    def __init__(self, config: GatewayConfig, model: ModelConfig) -> None:
        self._config = config
        self._model = model
        self._router = router()
        self._models = ServedModels(self._router)
        self._metrics = Metrics()
        self._request_log = RequestLog(config.request_log) if config.request_log is not None else None
        self._conductor = Conductor(self._router, self._metrics, config.tenant_weights, self._request_log)
        self._admin = AdminServicer(self._router, self._models)
        self._health = health_aio.HealthServicer()
        self._broken = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Addresses]:
        """Serves as long as the context is open; `wait_ready` tells when a Mac can take requests."""
        await self._models.load(self._model, int(time.time()))
        await self._models.refresh()
        # Bound here, because uvicorn ends the process when it can't bind.
        http_socket = _listen(self._config.host, self._config.http_port, "--http-port")
        grpc_server, grpc_port = self._grpc_server()
        http_server = self._http_server()
        await grpc_server.start()
        http_task = asyncio.create_task(http_server.serve(sockets=[http_socket]))
        tasks = [asyncio.create_task(self._refresh_forever()), asyncio.create_task(self._conductor.run_notes())]
        for task in tasks:
            task.add_done_callback(self._note_broken)
        try:
            http_port = http_socket.getsockname()[1]
            yield Addresses(f"{self._config.host}:{grpc_port}", f"http://{self._config.host}:{http_port}")
        finally:
            await self._health.enter_graceful_shutdown()
            http_server.should_exit = True
            await asyncio.gather(grpc_server.stop(_STOP_GRACE_S), http_task, return_exceptions=True)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._conductor.close()
            if self._request_log is not None:
                self._request_log.close()

    async def refresh(self) -> bool:
        """Asks the router once; True when a Mac is ready for every model."""
        await self._models.refresh()
        models = [model for model in self._models.all() if not model.parent]
        is_ready = all(model.num_macs for model in models) and bool(models)
        await self._tell_health(is_ready=is_ready)
        return is_ready

    async def _tell_health(self, *, is_ready: bool) -> None:
        state = health_pb2.HealthCheckResponse.SERVING if is_ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", _INFERENCE.full_name, _ADMIN.full_name):
            await self._health.set(service, state)

    async def load_adapter(self, name: str, path: str) -> None:
        """On every Mac. Raises StartupFailed if it can't be."""
        try:
            await self._admin.LoadAdapter(admin_pb2.LoadAdapterRequest(name=name, path=path), None)
        except CideryError as error:
            raise StartupFailed(f"--lora {name}={path}: {error}") from error

    async def broken(self) -> None:
        """Returns when the gateway can't go on: one of its tasks has failed, which is in the log."""
        await self._broken.wait()

    def _note_broken(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            log.critical("task failed, the gateway can't go on", exc_info=task.exception())
            self._broken.set()

    async def _refresh_forever(self) -> None:
        while True:
            try:
                await self.refresh()
            except CideryError as error:
                log.warning("fleet could not be refreshed error=%s", error)
                await self._tell_health(is_ready=False)
            await asyncio.sleep(_REFRESH_PERIOD_S)

    def _grpc_server(self) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(
            options=(
                ("grpc.max_receive_message_length", MAX_BODY_BYTES),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.so_reuseport", 0),
            )
        )
        add_service(server, _INFERENCE, InferenceServicer(self._models, self._conductor))
        add_service(server, _ADMIN, self._admin)
        health = health_pb2.DESCRIPTOR.services_by_name["Health"]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = (_INFERENCE.full_name, _ADMIN.full_name, health.full_name, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        address = f"{self._config.host}:{self._config.grpc_port}"
        try:
            return server, server.add_insecure_port(address)
        except RuntimeError as error:
            raise StartupFailed(
                f"gateway: {address} is taken; give another --grpc-port (0 for any free one)"
            ) from error

    def _http_server(self) -> uvicorn.Server:
        app = HttpServer(self._models, self._conductor, self._admin, self._metrics).app()
        config = uvicorn.Config(
            app,
            log_level="critical",  # it calls the end of open streams at a stop an error
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(_STOP_GRACE_S),
        )
        server = uvicorn.Server(config)
        # Ctrl-C belongs to the command line, which stops fleet and gateway in order.
        server.capture_signals = _no_signals  # type: ignore[method-assign]
        return server


def require_free_ports(config: GatewayConfig) -> None:
    """Raises StartupFailed for a port that is taken: better before the fleet has been started than after."""
    if config.http_port and config.http_port == config.grpc_port:
        raise StartupFailed(f"--http-port and --grpc-port are both {config.http_port}; they must differ")
    for option, port in (("--http-port", config.http_port), ("--grpc-port", config.grpc_port)):
        _listen(config.host, port, option).close()


def _listen(host: str, port: int, option: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        is_ours = error.errno != errno.EADDRNOTAVAIL
        advice = f"give another {option}" if is_ours else "give a --host that this machine has"
        raise StartupFailed(f"{host}:{port} can't be bound ({error.strerror}); {advice}") from error
    # Inherited by each connection: a chunk of a stream must not wait for the acknowledgement of the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


@contextmanager
def _no_signals() -> Iterator[None]:
    yield
