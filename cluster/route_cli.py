"""`cidery route explain`: why a request went to a Mac, or where one would go."""

import json
import sys
from typing import Any, TextIO

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster.cli_channel import DEFAULT_ADDRESS, channel, checked_utf8
from protos.cidery.v1 import admin_pb2, admin_pb2_grpc

# Seconds by term, as the router adds them up.
_TERMS = ("wait_s", "shared_s", "prefill_s", "decode_s", "stall_s", "pressure_s", "total_s")


@click.group()
def route() -> None:
    """Look into routing."""


@route.command(
    epilog="""\b
Examples:
  cidery route explain chatcmpl-3f2a91      a past request, by the id in its answer
  cidery route explain --prompt 'Once upon a time'
  cidery route explain --prompt-file prompt.txt --model tiny --json | jq '.candidates[].total_s'
"""
)
@click.argument("request_id", required=False)
@click.option("--prompt", default=None, help="What if this text were sent now? Nothing is booked.")
@click.option("--prompt-file", default=None, type=click.File(), help="The same, from a file; - is standard input.")
@click.option("--model", default="", help="For what-if: which model, when several are served.")
@click.option("--address", default=DEFAULT_ADDRESS, show_default=True, help="The gateway's gRPC address.")
@click.option("--json", "as_json", is_flag=True, help="The admin API's answer.")
def explain(
    request_id: str | None, prompt: str | None, prompt_file: TextIO | None, model: str, address: str, as_json: bool
) -> None:
    """Show what every Mac would have cost a request, in predicted seconds, and why one was chosen.

    Give the REQUEST_ID of one of the last 1,000 requests, or a prompt for a hypothetical one.

    A row is one Mac: prompt tokens that it holds (and will hold, once prompts under way there have been computed), how
    far each group of KV layers lets the prompt be resumed, and the terms. The total is wait - shared + prefill + decode
    + stall + pressure; the last three are weighted, as others bear them or they come after the first token.
    """
    if sum(each is not None for each in (request_id, prompt, prompt_file)) != 1:
        raise click.UsageError("give one of REQUEST_ID, --prompt and --prompt-file")
    if request_id is not None:
        if model:
            raise click.UsageError("--model is for a prompt; a past request has had its model")
        request = admin_pb2.ExplainRequest(request_id=checked_utf8(request_id, "REQUEST_ID"))
    else:
        text = prompt if prompt_file is None else prompt_file.read()
        request = admin_pb2.ExplainRequest(
            text=checked_utf8(text or "", "the prompt"), model=checked_utf8(model, "--model")
        )
    with channel(address) as connected:
        explained = admin_pb2_grpc.AdminServiceStub(connected).Explain(request, timeout=10)
    if as_json:
        options: dict[str, Any] = {"preserving_proto_field_name": True, "always_print_fields_with_no_presence": True}
        click.echo(json.dumps(MessageToDict(explained, **options)))
        return
    # Not cut to 80 columns where nobody looks at a terminal.
    show(explained, Console(width=None if sys.stdout.isatty() else 160))


def show(explained: admin_pb2.ExplainResponse, console: Console) -> None:
    """The table, the cheapest Mac first and those that were excluded last, and the reason."""
    candidates = sorted(explained.candidates, key=lambda each: (bool(each.excluded), each.total_s, each.mac))
    kinds = [(depth.group, depth.kind) for depth in candidates[0].groups] if candidates else []
    table = Table()
    for name in ("Mac", "held", "will hold", "to prefill", *(f"{kind} {group}" for group, kind in kinds)):
        table.add_column(name, justify="left" if name == "Mac" else "right")
    for name in _TERMS:
        table.add_column(name.removesuffix("_s"), justify="right")
    table.add_column("")
    for each in candidates:
        note = "chosen" if each.mac == explained.chosen else each.excluded
        numbers = (each.num_held_tokens, each.num_matched_tokens, each.num_prefill_tokens)
        table.add_row(
            escape(each.mac),
            *(str(number) for number in (*numbers, *(depth.num_tokens for depth in each.groups))),
            *(f"{getattr(each, name):.3f}" for name in _TERMS),
            escape(note),
        )
    console.print(f"{escape(explained.request_id)}: {explained.num_prompt_tokens} prompt tokens, {explained.policy}")
    console.print(table)
    console.print(escape(explained.reason), soft_wrap=True)
