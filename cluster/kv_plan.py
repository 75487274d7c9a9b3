"""`cidery kv plan`: how the KV memory of a model would be cut, without a Mac and without its weights."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from cluster.cli_types import Bytes, quantization_options
from cluster.config import bundled_model, check_block_size
from cluster.kv.layout import KVGroup, KVLayout
from cluster.kv.planner import KVBudgetTooSmall, describe, kind_name, min_match_tokens, plan_layout
from cluster.kv.spec import AttentionSpec, ChunkedLocalSpec, LayerSpec, SharedKVSpec, SlidingWindowSpec
from cluster.model_kv import specs_from_config

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
# As an engine runs: windows keep their blocks until the plans under way have been processed.
_MAX_PLANS_IN_FLIGHT = 2


@click.group()
def kv() -> None:
    """Look into KV memory."""


@kv.command(epilog="Example: cidery kv plan ./gemma-3-27b-it-4bit --memory 24GiB --max-model-len 32768")
@click.argument("model", required=False)
@click.option("--memory", default="24GiB", show_default=True, type=Bytes(), help="For the KV cache, e.g. 24GiB.")
@click.option(
    "--gpu-memory-utilization",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Share of --memory that the KV cache may take.",
)
@click.option("--max-model-len", default=None, type=int, help="Longest context in tokens.  [default: the model's]")
@click.option("--block-size", default=16, show_default=True, help="Tokens of a KV block: 16 or 32.")
@click.option(
    "--max-num-batched-tokens",
    default=512,
    show_default=True,
    type=click.IntRange(min=1),
    help="Tokens of one step of one Mac: windows stay so much longer.",
)
@quantization_options
@click.option(
    "--disable-hybrid-kv-cache-manager", is_flag=True, help="Keep every token of sliding windows and chunks too."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def plan(model: str | None, as_json: bool, **options: Any) -> None:
    """Show how the KV memory of MODEL would be cut into pools, and what fits in.

    MODEL is a folder with a config.json or such a file; without it, the bundled model. Nothing else of it is read.
    """
    config = _read_config(Path(model or bundled_model()).expanduser())
    max_model_len = options["max_model_len"]
    try:
        check_block_size(options["block_size"])
        specs = specs_from_config(
            config,
            kv_bits=options["kv_bits"],
            kv_group_size=options["kv_group_size"],
            dtype_bytes=_dtype_bytes(config),
        )
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    try:
        layout = plan_layout(
            specs,
            kv_budget_bytes=int(options["memory"] * options["gpu_memory_utilization"]),
            max_model_len=_max_model_len(config) if max_model_len is None else max_model_len,
            block_size=options["block_size"],
            max_in_flight_tokens=_MAX_PLANS_IN_FLIGHT * options["max_num_batched_tokens"],
            hybrid=not options["disable_hybrid_kv_cache_manager"],
        )
    except KVBudgetTooSmall as error:
        raise click.ClickException(str(error)) from error
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    report = _report(layout, specs, str(_text(config).get("model_type", "")))
    if options["kv_bits"] is not None:
        report["reasons"].append(_quantised(specs))
    if options["disable_hybrid_kv_cache_manager"]:
        report["reasons"].append("Windows and chunks keep every token, as --disable-hybrid-kv-cache-manager asks.")
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print(report)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise click.UsageError(f"MODEL {path}: neither a folder with a config.json nor such a file") from error
    except (OSError, ValueError, RecursionError) as error:
        raise click.ClickException(f"{file}: can't be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise click.ClickException(f"{file}: expected a JSON object, got {type(config).__name__}")
    return config


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of the language model, over those of what it is a part of."""
    text = config.get("text_config")
    return config | text if isinstance(text, dict) else config


def _dtype_bytes(config: dict[str, Any]) -> int:
    fields = _text(config)
    return _DTYPE_BYTES.get(str(fields.get("dtype") or fields.get("torch_dtype")), 2)


def _max_model_len(config: dict[str, Any]) -> int:
    length = _text(config).get("max_position_embeddings")
    if not isinstance(length, int):
        raise click.UsageError("the model doesn't tell its longest context; give --max-model-len")
    return length


def _report(layout: KVLayout, specs: Sequence[LayerSpec], model_type: str) -> dict[str, Any]:
    """All that is shown, in one JSON object."""
    used_bytes = sum(pool.num_blocks * pool.page_bytes for pool in layout.pools)
    unused_bytes = layout.budget_bytes - used_bytes
    return {
        "model_type": model_type,
        "budget_bytes": layout.budget_bytes,
        "max_model_len": layout.max_model_len,
        "block_size": layout.block_size,
        "pools": [
            {
                "pool_id": pool.pool_id,
                "page_bytes": pool.page_bytes,
                "group_ids": list(pool.group_ids),
                "num_blocks": pool.num_blocks,
                "num_blocks_per_sequence": num_blocks,
            }
            for pool, num_blocks in zip(layout.pools, layout.num_blocks_for(layout.max_model_len), strict=True)
        ],
        "groups": [_group(group, layout.block_size) for group in layout.groups],
        "num_shared_layers": sum(isinstance(spec, SharedKVSpec) for spec in specs),
        "unused_bytes": unused_bytes,
        "waste_percent": 100 * unused_bytes / layout.budget_bytes,
        "null_block_bytes": layout.budget_bytes - layout.usable_bytes,
        "bytes_per_sequence": layout.bytes_for(layout.max_model_len),
        "token_capacity": layout.token_capacity,
        "max_concurrency": layout.max_concurrency,
        "min_match_tokens": min_match_tokens(layout),
        "reasons": describe(layout),
    }


def _quantised(specs: Sequence[LayerSpec]) -> str:
    formats = {spec.format for spec in specs if isinstance(spec, AttentionSpec)}
    kinds = " and ".join(sorted(f"{kind.bits} bits in groups of {kind.group_size}" for kind in formats))
    if not kinds:
        return "Nothing is quantised: recurrent states never are."
    return f"Keys and values are stored in {kinds}, a scale and a bias each; recurrent states never are."


def _group(group: KVGroup, block_size: int) -> dict[str, Any]:
    spec = group.spec
    window = spec.window if isinstance(spec, SlidingWindowSpec) else None
    return {
        "group_id": group.group_id,
        "pool_id": group.pool_id,
        "kind": kind_name(spec),
        "window": spec.chunk if isinstance(spec, ChunkedLocalSpec) else window,
        "is_state": group.is_state,
        "block_tokens": None if group.is_state else block_size,
        "layers": list(group.layer_indices),
        "page_bytes": group.page_bytes,
    }


def _print(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['model_type']}: {_size(report['budget_bytes'])} of KV memory")
    for name in ("pool", "blocks", "share", "group", "kind", "window", "layers", "page bytes"):
        table.add_column(name, justify="left" if name in ("kind", "layers") else "right")
    for pool in report["pools"]:
        share = pool["num_blocks"] * pool["page_bytes"] / report["budget_bytes"]
        first = [str(pool["pool_id"]), f"{pool['num_blocks']:,}", f"{share:.1%}"]
        for group_id in pool["group_ids"]:
            group = report["groups"][group_id]
            window = f"{group['window']:,}" if group["window"] else "-"
            layers = _ranges(group["layers"])
            table.add_row(*first, str(group_id), group["kind"], window, layers, f"{group['page_bytes']:,}")
            first = ["", "", ""]
    # Not cut to 80 columns where nobody looks at a terminal.
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(table)
    facts = {
        "waste": f"{report['waste_percent']:.3f} % ({report['unused_bytes']:,} bytes of the budget unused)",
        "null blocks": f"{_size(report['null_block_bytes'])}, one block a pool",
        "one sequence": f"{_size(report['bytes_per_sequence'])} for {report['max_model_len']:,} tokens",
        "max concurrency": f"{report['max_concurrency']:.2f} sequences of {report['max_model_len']:,} tokens",
        "token capacity": f"{report['token_capacity']:,} tokens",
        "minimum match": f"{report['min_match_tokens']} tokens",
    }
    if report["num_shared_layers"]:
        facts["shared layers"] = f"{report['num_shared_layers']} read what others keep and take no memory"
    for name, fact in facts.items():
        console.print(f"{name + ':':<17}{fact}")
    for reason in report["reasons"]:
        console.print(f"- {reason}")


def _size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} bytes"


def _ranges(layers: Sequence[int]) -> str:
    """How many, and the first few of them as ranges."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:4]]
    return f"{len(layers)}: {', '.join(shown)}{', …' if len(ranges) > 4 else ''}"
