"""`cidery lora list | load | unload`: adapters of a running fleet."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from cluster.cli_channel import DEFAULT_ADDRESS, channel
from protos.cidery.v1 import admin_pb2, admin_pb2_grpc

# Every Mac reads it from its disk; see cluster/adapter_admin.py for what the gateway allows.
_LOAD_TIMEOUT_S = 150
_TIMEOUT_S = 10
_address = click.option("--address", default=DEFAULT_ADDRESS, show_default=True, help="The gateway's gRPC address.")
_json = click.option("--json", "as_json", is_flag=True, help="The admin API's answer.")


@click.group(
    epilog="""\b
Examples:
  cidery lora load pirate ./adapters/pirate
  cidery chat --model pirate
  cidery lora list
  cidery lora unload pirate
"""
)
def lora() -> None:
    """Adapters beside the model, loaded and unloaded while it serves."""


@lora.command("list", epilog="Example: cidery lora list --json | jq '.adapters[].name'")
@_address
@_json
def list_(address: str, as_json: bool) -> None:
    """Show every adapter, and where it is."""
    with channel(address) as connected:
        stub = admin_pb2_grpc.AdminServiceStub(connected)
        answer = stub.ListAdapters(admin_pb2.ListAdaptersRequest(), timeout=_TIMEOUT_S)
    if as_json:
        click.echo(_as_json(answer))
    else:
        _print(answer.adapters)


@lora.command(epilog="Example: cidery lora load pirate ./adapters/pirate")
@_address
@_json
@click.option("--model", default="", help="The model that it adapts, when several are served.")
@click.argument("name")
@click.argument("folder")
def load(address: str, as_json: bool, model: str, name: str, folder: str) -> None:
    """Load the adapter in FOLDER (mlx-lm's format) on every Mac; clients then ask for model NAME.

    FOLDER must be there, with the same content, on every Mac and on the gateway's machine.
    """
    request = admin_pb2.LoadAdapterRequest(name=name, path=str(Path(folder).expanduser().absolute()), model=model)
    with channel(address) as connected:
        answer = admin_pb2_grpc.AdminServiceStub(connected).LoadAdapter(request, timeout=_LOAD_TIMEOUT_S)
    _tell(answer.adapter, as_json)


@lora.command(epilog="Example: cidery lora unload pirate")
@_address
@_json
@click.argument("name")
def unload(address: str, as_json: bool, name: str) -> None:
    """Take no new requests for an adapter; it goes when those that run have ended."""
    with channel(address) as connected:
        stub = admin_pb2_grpc.AdminServiceStub(connected)
        answer = stub.UnloadAdapter(admin_pb2.UnloadAdapterRequest(name=name), timeout=_TIMEOUT_S)
    _tell(answer.adapter, as_json)


def _tell(adapter: admin_pb2.Adapter, as_json: bool) -> None:
    if as_json:
        click.echo(_as_json(adapter))
    else:
        _print([adapter])


def _as_json(message: Message) -> str:
    return json.dumps(
        MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    )


def _print(adapters: Sequence[admin_pb2.Adapter]) -> None:
    table = Table()
    for name in ("adapter", "model", "MiB", "digest", "Macs"):
        table.add_column(name, justify="right" if name == "MiB" else "left")
    for each in adapters:
        size = f"{each.num_bytes / 2**20:.1f}" if each.num_bytes else "-"
        macs = ", ".join(_on_mac(mac) for mac in each.macs) or "-"
        table.add_row(each.name, each.model or "-", size, each.digest[:12] or "-", macs)
    # Not cut to 80 columns where nobody looks at a terminal.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def _on_mac(mac: admin_pb2.AdapterOnMac) -> str:
    state = admin_pb2.AdapterState.Name(mac.state).removeprefix("ADAPTER_STATE_").lower()
    return f"{mac.mac} {state}" + (f" ({mac.problem})" if mac.problem else "")
