"""The command line: `cidery serve | chat | generate | status | kv | lora | models | route | simulate`."""

import json
import logging
import subprocess
import sys
from typing import Any

import click
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from cluster import ray_environment
from cluster.cli_channel import DEFAULT_ADDRESS, channel, checked_utf8
from cluster.cli_types import Bytes, NamedFolder, TenantWeight, quantization_options
from cluster.config import (
    MAX_SPECULATIVE_TOKENS,
    SPECULATION_METHODS,
    BatchConfig,
    GatewayConfig,
    KVConfig,
    MacConfig,
    ModelConfig,
    SpeculationConfig,
    bundled_model,
    default_model_name,
)
from cluster.errors import CideryError
from cluster.kv.policies import POLICIES
from cluster.kv_plan import kv
from cluster.lora_cli import lora
from cluster.models_cli import models
from cluster.route_cli import route
from cluster.routing.config import POLICIES as ROUTING_POLICIES
from cluster.routing.config import RoutingConfig
from cluster.simulate import simulate
from protos.cidery.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, sampling_pb2

# What the wire can carry; the gateway says what it allows.
_INT32 = click.IntRange(-(2**31), 2**31 - 1)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="cidery")
def main() -> None:
    """Serve LLMs from a fleet of Macs.

    \b
    cidery serve                      one Mac, the bundled model
    cidery serve --macs 3             three logical Macs on this machine
    cidery chat                       talk to it
    cidery status                     what the fleet is doing
    cidery kv plan ./Qwen3-8B         how its KV memory would be cut
    cidery route explain REQUEST_ID   why a request went where it went
    cidery simulate trace.jsonl       what a fleet would do with these requests
    cidery models supported           which model families run, and how
    cidery lora load pirate ./pirate  an adapter beside the model
    """


main.add_command(kv)
main.add_command(simulate)
main.add_command(models)
main.add_command(route)
main.add_command(lora)


@main.command(epilog="Example: cidery serve --macs 3 --model ./Qwen3-0.6B-4bit --kv-cache-memory 4GiB")
@click.option("--model", default=None, help="Folder or hub id of an mlx-lm model.  [default: the bundled one]")
@click.option("--model-name", default=None, help="What clients call it.  [default: folder name or hub id]")
@click.option("--macs", default=1, show_default=True, help="Logical Macs on this machine, each with its own worker.")
@click.option("--address", default=None, help="Join a running Ray (auto, or host:port) and serve from its Macs.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where the gateway listens.")
@click.option("--grpc-port", default=50051, show_default=True, help="0: any free port.")
@click.option("--http-port", default=8000, show_default=True, help="0: any free port.")
@click.option("--max-model-len", default=None, type=int, help="Longest context in tokens.  [default: the model's]")
@click.option("--dtype", default="auto", show_default=True, help="auto, float32, float16 or bfloat16.")
@click.option(
    "--kv-cache-memory-bytes", "--kv-cache-memory", default=None, type=Bytes(), help="KV cache of one Mac, e.g. 4GiB."
)
@click.option(
    "--gpu-memory-utilization",
    default=0.92,
    show_default=True,
    help="Share of the working set that weights, activations and KV cache may reach together.",
)
@click.option("--block-size", default=16, show_default=True, help="Tokens of a KV block: 16 or 32.")
@quantization_options
@click.option(
    "--kv-retention",
    type=click.Choice(sorted(POLICIES)),
    default="value",
    show_default=True,
    help="What is forgotten first: what is least likely wanted again for its bytes, or least recently used.",
)
@click.option("--no-prefix-caching", is_flag=True, help="Compute every prompt from its start.")
@click.option(
    "--disable-hybrid-kv-cache-manager", is_flag=True, help="Layers with a window keep everything, as full attention."
)
@click.option(
    "--tenant-weight",
    "tenant_weights",
    multiple=True,
    type=TenantWeight(),
    metavar="NAME=WEIGHT",
    help="Share of a busy Mac, in proportion to others' (1 unless given); may be repeated.",
)
@click.option(
    "--routing-policy",
    type=click.Choice(ROUTING_POLICIES),
    default=ROUTING_POLICIES[0],
    show_default=True,
    help="How a Mac is chosen; all but the first are there to be compared with.",
)
@click.option(
    "--lora",
    "adapters",
    multiple=True,
    type=NamedFolder(),
    metavar="NAME=DIR",
    help="An adapter in mlx-lm's format, served as model NAME; DIR must be there on every Mac. May be repeated.",
)
@click.option(
    "--lora-memory", default="256MiB", show_default=True, type=Bytes(), help="What adapters of one Mac may take."
)
@click.option("--max-num-seqs", default=64, show_default=True, help="Requests that one Mac runs at once.")
@click.option("--max-num-batched-tokens", default=512, show_default=True, help="Tokens of one step of one Mac.")
@click.option(
    "--speculative-method",
    "--speculative",
    type=click.Choice(SPECULATION_METHODS),
    default="off",
    show_default=True,
    help="Guess tokens and verify several in a step: by look-up in the text so far (ngram), by a draft model, or "
    "whichever pays at the time (auto). A request may choose otherwise.",
)
@click.option("--draft-model", default=None, help="Folder or hub id of a smaller model with the same tokens.")
@click.option(
    "--num-speculative-tokens",
    default=8,
    show_default=True,
    type=click.IntRange(1, MAX_SPECULATIVE_TOKENS),
    help="Guessed tokens of one request in a step, at most.",
)
@click.option(
    "--request-log",
    default=None,
    type=click.Path(dir_okay=False),
    help="Append lengths and keyed hashes of every request to this file, for `cidery simulate`; no text.",
)
@click.option("--json", "prints_json", is_flag=True, help="When ready, print the addresses as one JSON line.")
@click.option("--verbose", is_flag=True, help="Log every request.")
def serve(**options: Any) -> None:
    """Start a fleet and its gateway; Ctrl-C ends them."""
    ray_environment.prepare(is_local=options["address"] is None)
    from cluster.fleet import FleetConfig
    from cluster.serve import ServeConfig, run

    logging.basicConfig(
        level=logging.INFO if options["verbose"] else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        path = bundled_model() if options["model"] is None else options["model"]
        if not path:
            raise ValueError("--model is empty; give a folder or a hub id, or leave it out for the bundled one")
        name = options["model_name"] or default_model_name(path)
        mac = MacConfig(
            ModelConfig(path, name, options["max_model_len"], options["dtype"]),
            KVConfig(
                options["block_size"],
                options["kv_cache_memory_bytes"],
                options["gpu_memory_utilization"],
                not options["no_prefix_caching"],
                options["kv_retention"],
                not options["disable_hybrid_kv_cache_manager"],
                options["kv_bits"],
                options["kv_group_size"],
                options["lora_memory"],
            ),
            BatchConfig(options["max_num_seqs"], options["max_num_batched_tokens"]),
            SpeculationConfig(options["speculative_method"], options["num_speculative_tokens"], options["draft_model"]),
        )
        gateway = GatewayConfig(
            options["host"],
            options["grpc_port"],
            options["http_port"],
            dict(options["tenant_weights"]),
            options["request_log"],
        )
        routing = RoutingConfig(policy=options["routing_policy"])
        fleet = FleetConfig(mac, options["address"], options["macs"], routing)
        config = ServeConfig(fleet, gateway, options["adapters"], options["prints_json"])
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        run(config, Console(stderr=True))
    except CideryError as error:
        raise click.ClickException(str(error)) from error


@main.command(epilog="Example: cidery chat --system 'You are Pip, a helpful assistant.'")
@click.option("--address", default=DEFAULT_ADDRESS, show_default=True, help="The gateway's gRPC address.")
@click.option("--model", default="", help="Which model, when several are served.")
@click.option("--system", default=None, help="System prompt.")
@click.option("--temperature", default=None, type=float, help="0 is greedy.  [default: the model's]")
@click.option("--max-tokens", default=None, type=_INT32, help="Longest answer in tokens.")
@click.argument("message", required=False)
def chat(
    address: str, model: str, system: str | None, temperature: float | None, max_tokens: int | None, message: str | None
) -> None:
    """Talk to the model: one MESSAGE, or a conversation line by line until an empty one or Ctrl-D."""
    sampling = sampling_pb2.SamplingParams(temperature=temperature, max_tokens=max_tokens)
    history = [_message("system", system)] if system else []
    with channel(address) as connected:
        stub = inference_pb2_grpc.InferenceServiceStub(connected)
        if message is not None:
            _turn(stub, model, history, message, sampling)
            return
        while line := _ask():
            try:
                _turn(stub, model, history, line, sampling)
            except KeyboardInterrupt:
                click.echo()


@main.command(epilog="Example: cidery generate --max-tokens 40 'Once upon a time'")
@click.option("--address", default=DEFAULT_ADDRESS, show_default=True, help="The gateway's gRPC address.")
@click.option("--model", default="", help="Which model, when several are served.")
@click.option("--temperature", default=None, type=float, help="0 is greedy.  [default: the model's]")
@click.option("--seed", default=None, type=click.IntRange(0, 2**64 - 1), help="Repeats an answer.")
@click.option("--max-tokens", default=64, show_default=True, type=_INT32, help="Longest answer in tokens.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object with text, tokens and usage.")
@click.argument("prompt")
def generate(
    address: str,
    model: str,
    temperature: float | None,
    seed: int | None,
    max_tokens: int,
    as_json: bool,
    prompt: str,
) -> None:
    """Continue PROMPT as plain text."""
    sampling = sampling_pb2.SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    model, prompt = checked_utf8(model, "--model"), checked_utf8(prompt, "PROMPT")
    request = inference_pb2.GenerateRequest(model=model, text=prompt, sampling=sampling)
    with channel(address) as connected:
        responses = inference_pb2_grpc.InferenceServiceStub(connected).Generate(request)
        text, token_ids, completion = [], [], {}
        for response in responses:
            if response.HasField("completion"):
                completion = MessageToDict(
                    response.completion, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
                )
                continue
            text.append(response.chunk.text)
            token_ids.extend(response.chunk.token_ids)
            if not as_json:
                click.echo(response.chunk.text, nl=False)
    click.echo(json.dumps({"text": "".join(text), "token_ids": token_ids} | completion) if as_json else "")


@main.command(epilog="Example: cidery status --json | jq '.macs[].blocks'")
@click.option("--address", default=DEFAULT_ADDRESS, show_default=True, help="The gateway's gRPC address.")
@click.option("--json", "as_json", is_flag=True, help="The admin API's answer.")
def status(address: str, as_json: bool) -> None:
    """Show every Mac: state, requests, KV blocks, cache hits."""
    with channel(address) as connected:
        fleet = admin_pb2_grpc.AdminServiceStub(connected).GetFleet(admin_pb2.GetFleetRequest(), timeout=10)
    if as_json:
        click.echo(
            json.dumps(
                MessageToDict(fleet, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
            )
        )
        return
    table = Table()
    for name in ("Mac", "state", "model", "running", "waiting", "KV used", "cached", "free", "cache hits", "tokens"):
        table.add_column(name, justify="left" if name in ("Mac", "state", "model") else "right")
    for mac in fleet.macs:
        table.add_row(*_row(mac))
    # Not cut to 80 columns where nobody looks at a terminal.
    Console(width=None if sys.stdout.isatty() else 160).print(table)


@main.group()
def worker() -> None:
    """A worker by itself, without a cluster."""


@worker.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    epilog="Example: cidery worker selftest --head-dim 128 --dtype float16",
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def selftest(options: tuple[str, ...]) -> None:
    """Test every Metal kernel against plain MLX on this machine's GPU."""
    sys.exit(subprocess.call([sys.executable, "-m", "worker.selftest", *options]))


def _row(mac: admin_pb2.Mac) -> list[str]:
    state = admin_pb2.MacState.Name(mac.state).removeprefix("MAC_STATE_").lower()
    if not mac.HasField("blocks"):
        return [mac.name, state, mac.model, *["-"] * 7]
    blocks, scheduling = mac.blocks, mac.scheduling
    prompt = scheduling.num_prompt_tokens
    hits = f"{scheduling.num_cached_tokens / prompt:.0%}" if prompt else "-"
    numbers = (blocks.num_used, blocks.num_cached, blocks.num_free)
    return [
        *(mac.name, state, mac.model, str(scheduling.num_running), str(scheduling.num_waiting)),
        *(str(number) for number in numbers),
        *(hits, str(scheduling.num_generated_tokens)),
    ]


def _ask() -> str:
    try:
        return input("you> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _message(role: str, text: str) -> inference_pb2.ChatMessage:
    return inference_pb2.ChatMessage(role=role, content=checked_utf8(text, "the message"))


def _turn(
    stub: inference_pb2_grpc.InferenceServiceStub,
    model: str,
    history: list[inference_pb2.ChatMessage],
    line: str,
    sampling: sampling_pb2.SamplingParams,
) -> None:
    """One question and its answer, both kept in `history`."""
    history.append(_message("user", line))
    answer = []
    request = inference_pb2.ChatRequest(model=checked_utf8(model, "--model"), messages=history, sampling=sampling)
    for response in stub.Chat(request):
        if response.HasField("chunk"):
            answer.append(response.chunk.text)
            click.echo(response.chunk.text, nl=False)
    click.echo()
    history.append(inference_pb2.ChatMessage(role="assistant", content="".join(answer)))
