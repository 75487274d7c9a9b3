"""`cidery serve`: fleet and gateway together, from start to Ctrl-C."""

import asyncio
import json
import signal
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import uvloop
from rich.console import Console

from cluster.config import GatewayConfig, ModelConfig
from cluster.errors import StartupFailed
from cluster.fleet import Fleet, FleetConfig
from cluster.gateway import Addresses, Gateway, require_free_ports
from cluster.model_files import check_model, find_model
from cluster.request_log import RequestLog
from cluster.tokenizer import Tokenizer

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """All of one `cidery serve`."""

    fleet: FleetConfig
    gateway: GatewayConfig
    # (name, folder) of each adapter to start with.
    adapters: tuple[tuple[str, str], ...] = ()
    # One line on standard output once it serves, for programs that start it.
    prints_json: bool = False

    @property
    def model(self) -> ModelConfig:
        """What is served."""
        return self.fleet.mac.model


def run(config: ServeConfig, console: Console) -> None:
    """Serves until SIGINT or SIGTERM. Raises StartupFailed. Main thread only: Ray installs signal handlers."""
    require_free_ports(config.gateway)
    # What is wrong with files is told before Ray has been started.
    if config.gateway.request_log is not None:
        RequestLog(config.gateway.request_log).close()
    if config.fleet.address is None:
        folder = find_model(config.model.path)
        check_model(folder)
        Tokenizer(folder)
    fleet = Fleet(config.fleet)
    try:
        with console.status("starting …"):
            fleet.start(console.print)
        uvloop.run(_serve(config, fleet, console))
    finally:
        fleet.stop()


async def _serve(config: ServeConfig, fleet: Fleet, console: Console) -> None:
    stop = asyncio.Event()
    with _stopping_at_signals(stop):
        gateway = Gateway(config.gateway, config.model)
        with console.status(f"loading {config.model.name} …"):
            if not await _unless_stopped(stop, fleet.wait_ready(console.print)):
                return
        async with gateway.running() as addresses:
            await gateway.refresh()
            for name, path in config.adapters:
                with console.status(f"loading adapter {name} …"):
                    await gateway.load_adapter(name, path)
            click.echo(_welcome(config, addresses), err=True)  # not rich: a pasted command must not be wrapped
            if config.prints_json:
                click.echo(json.dumps({"http": addresses.http, "grpc": addresses.grpc, "macs": fleet.macs}))
            if await _unless_stopped(stop, gateway.broken()):
                raise StartupFailed("the gateway failed; its log says why")
            console.print("stopping")


async def _unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """True when `work` was done, False when the signal came first."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False
    stopped.cancel()
    await task
    return True


def _welcome(config: ServeConfig, addresses: Addresses) -> str:
    name = config.model.name
    # As it was called, so that the line can be pasted without an activated environment.
    command = sys.argv[0] if Path(sys.argv[0]).name == "cidery" else "cidery"
    return f"""
Cidery serves {name}
  HTTP (OpenAI)  {addresses.http}/v1
  gRPC           {addresses.grpc}
  admin          {addresses.http}/admin/fleet

Try it:
  curl -s {addresses.http}/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
  {command} chat --address {addresses.grpc}

Ctrl-C stops it."""


@contextmanager
def _stopping_at_signals(stop: asyncio.Event) -> Iterator[None]:
    """A first Ctrl-C stops in order; a second one ends at once, even if the event loop is stuck."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int, frame: object) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.default_int_handler)
        loop.call_soon_threadsafe(stop.set)

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
