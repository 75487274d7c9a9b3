"""Brings a fleet up: Ray (started here, or one that exists), the router, and a KVManager on every Mac.

`ray_environment.prepare` must have run before this is imported.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.cluster_utils import Cluster

from cluster.config import NAMESPACE, ROUTER_NAME, MacConfig
from cluster.errors import ActorAway, StartupFailed
from cluster.kv_manager import KVManager, ManagerStatus
from cluster.ray_calls import ActorCaller, manager_name, router
from cluster.router_actor import RouterActor
from cluster.routing.config import RoutingConfig

log = logging.getLogger(__name__)

# Ray's store carries no KV; this is near its minimum.
_OBJECT_STORE_BYTES = 100_000_000
_MAC_RESOURCE = "mac:"
# A share of the per-Mac resource, so that other actors of ours fit beside it.
_PIN = 0.001
_POLL_S = 0.2
_SHUTDOWN_TIMEOUT_S = 15.0
_CONNECT_TIMEOUT_S = 10.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Where the Macs are: `address` of a running Ray, or None for `num_macs` logical Macs on this machine."""

    mac: MacConfig
    address: str | None = None
    num_macs: int = 1
    routing: RoutingConfig = field(default_factory=RoutingConfig)

    def __post_init__(self) -> None:
        if not 1 <= self.num_macs <= 16:
            raise ValueError(f"macs must be from 1 to 16 on one machine, got {self.num_macs}")


class Fleet:
    """A running fleet. On a Ray of its own, `stop` ends everything; on a Ray that it found, the Macs go on."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self._cluster: Cluster | None = None
        self.macs: tuple[str, ...] = ()

    def start(self, say: Callable[[str], None]) -> None:
        """Ray, router and managers; the models load in the background (see `wait_ready`). Blocks for seconds.

        Raises StartupFailed.
        """
        if self._config.address is None:
            say(f"starting Ray with {self._config.num_macs} logical Mac(s) on this machine")
            self._start_local()
        else:
            say(f"joining Ray at {self._config.address}")
            self._join(self._config.address)
        nodes = _mac_nodes()
        if not nodes:
            raise StartupFailed("no Mac: no Ray node offers a resource named mac:<host>; see deploy/README.md")
        self.macs = tuple(sorted(nodes))
        say(f"starting the router and a KV manager on {', '.join(self.macs)}")
        _start_router(self._config.routing)
        for mac, host in nodes.items():
            # On one machine nobody else needs the node service.
            self._start_manager(mac, host if self._cluster is None else _LOOPBACK)

    async def wait_ready(self, say: Callable[[str], None], timeout_s: float = 900.0) -> None:
        """Until every Mac has its model. Raises StartupFailed with the first Mac's own words, or at the time-out."""
        managers = {mac: ActorCaller(manager_name(mac)) for mac in self.macs}
        waiting = set(self.macs)
        give_up_s = time.monotonic() + timeout_s
        call = router()
        while waiting:
            for mac in sorted(waiting):
                status: ManagerStatus = await managers[mac]("status")
                if status.failure:
                    raise StartupFailed(status.failure)
                if status.is_ready and await _has_joined(call, mac):
                    waiting.discard(mac)
                    say(f"{mac} is ready: {status.device}, {status.kernels}, {status.num_blocks} KV blocks")
            if time.monotonic() > give_up_s:
                raise StartupFailed(f"not ready after {timeout_s:.0f} s: {', '.join(sorted(waiting))}")
            await asyncio.sleep(_POLL_S)

    def stop(self) -> None:
        """Ends what this object started; a fleet that was not started yet, or only half, too."""
        if self._cluster is not None and ray.is_initialized():
            _shut_down_managers(self.macs)
        ray.shutdown()
        if self._cluster is not None:
            self._cluster.shutdown()

    def _start_local(self) -> None:
        logging.getLogger("ray").setLevel(logging.WARNING)
        is_single = self._config.num_macs == 1
        names = [socket.gethostname()] if is_single else _logical_names(self._config.num_macs)
        common = {
            "num_cpus": max(4, os.cpu_count() or 1),
            "num_gpus": 0,
            "object_store_memory": _OBJECT_STORE_BYTES,
        }
        # Several Macs get a head apart from them, as in a real fleet: the router must outlive each of them.
        of_head = {"head": 1} | (_mac_resources(names.pop()) if is_single else {})
        self._cluster = Cluster(
            initialize_head=True, head_node_args=common | {"resources": of_head, "include_dashboard": False}
        )
        for name in names:
            self._cluster.add_node(wait=False, **common, resources=_mac_resources(name))
        self._join(self._cluster.address)
        self._cluster.wait_for_nodes()

    def _join(self, address: str) -> None:
        if self._cluster is None:
            _require_answer(address)
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise StartupFailed(f"Ray at {address} can't be joined: {error}") from error

    def _start_manager(self, mac: str, host: str) -> None:
        """Finds the Mac's manager or makes it; one that runs with other settings is replaced."""
        config = self._config.mac.to_dict()
        name = manager_name(mac)
        try:
            running: Any = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            running = None
        if running is not None:
            status: Any = ray.get(running.status.remote())
            if status.config == config and not status.failure:
                return
            log.warning("replacing manager mac=%s: its settings differ or it had failed", mac)
            ray.get(running.shutdown.remote())
            ray.kill(running)
        options: dict[str, Any] = {
            "name": name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "num_cpus": 0,
            "resources": {_MAC_RESOURCE + mac: _PIN},
            "max_restarts": -1,
            "max_task_retries": 0,
        }
        ray.remote(KVManager).options(**options).remote(mac, config, host)


def _require_answer(address: str) -> None:
    """Raises StartupFailed at once where nobody listens: Ray itself would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        return  # auto, or a name of Ray's
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise StartupFailed(
            f"no Ray answers at {address}: {error}; start it there with `ray up` or `ray start`"
        ) from error


def _shut_down_managers(macs: Sequence[str]) -> None:
    """All at once, and in order, so that the workers end before Ray does."""
    calls: list[Any] = []
    for mac in macs:
        try:
            manager: Any = ray.get_actor(manager_name(mac), namespace=NAMESPACE)
            calls.append(manager.shutdown.remote())
        except ValueError as error:
            log.warning("manager is not there mac=%s error=%s", mac, error)
    try:
        ray.get(calls, timeout=_SHUTDOWN_TIMEOUT_S)
    except ray.exceptions.RayError as error:
        log.warning("a manager does not shut down error=%s", error)


def _start_router(config: RoutingConfig) -> None:
    options: dict[str, Any] = {
        "name": ROUTER_NAME,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "resources": {"head": _PIN},
        "max_restarts": -1,
        "max_task_retries": 0,
        # Requests that wait in the router are calls that are under way.
        "max_concurrency": max(1_000, 4 * config.max_waiting),
    }
    handle: Any = ray.remote(RouterActor).options(**options).remote(config)
    try:
        ray.get(handle.ping.remote(), timeout=60)
    except ray.exceptions.GetTimeoutError as error:
        raise StartupFailed("the router did not start in 60 s: no live Ray node offers the resource 'head'") from error


def _mac_nodes() -> dict[str, str]:
    """Address of each live node that is a Mac, by the Mac's name."""
    return {
        resource.removeprefix(_MAC_RESOURCE): node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"]
        for resource in node["Resources"]
        if resource.startswith(_MAC_RESOURCE)
    }


async def _has_joined(call: ActorCaller, mac: str) -> bool:
    try:
        fleet = await call("fleet")
    except ActorAway:
        return False
    return any(each.info.name == mac and each.state.name in ("READY", "DRAINING") for each in fleet)


def _logical_names(num_macs: int) -> list[str]:
    return [f"mac-{number}" for number in range(1, num_macs + 1)]


def _mac_resources(name: str) -> dict[str, int]:
    return {"mac": 1, _MAC_RESOURCE + name: 1}
