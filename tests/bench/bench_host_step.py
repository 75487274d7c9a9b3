"""What a step costs the host: from the plan to the graph of a model that costs nothing, without computing it.

    python -m tests.bench.bench_host_step
    python -m tests.bench.bench_host_step --rows 1 8 32 64 --layers 28 --profile hollow

One JSON line on stdout, a table on stderr. Two models: `hollow` has layers that only write keys and attend, so what it
takes is the engine's own; `qwen3` is mlx-lm's class with tiny widths, all of its Python and next to no arithmetic, and
beside it is what the graph of the same model and batch takes over mlx-lm's own batch cache. Times are CPU times of the
one thread that builds graphs, the median of many steps; evaluation is left out. A Mac builds other graphs: Metal
kernels instead of gathers.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench import serve_report
from worker import blas

REPOSITORY = Path(__file__).resolve().parents[2]
_CONTEXT_TOKENS = 40
_WARM_UP_STEPS = 8
_STEPS = 60
_MODELS = ("hollow", "qwen3")
_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 256,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
# In the order of a step.
_PARTS = ("schedule_ms", "wire_ms", "graph_ms", "report_ms")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--kv-bits", type=int, choices=(4, 8))
    parser.add_argument("--profile", choices=_MODELS, help="show where its time goes, for the last number of rows")
    options = parser.parse_args()
    # Before MLX.
    blas.load()
    rows = [
        _measure(model, num_rows, options.layers, options.kv_bits) for model in _MODELS for num_rows in options.rows
    ]
    commit, is_dirty = serve_report.commit(REPOSITORY)
    about = {"commit": commit, "dirty": is_dirty, "seed": 0, "machine": serve_report.machine()}
    sys.stdout.write(json.dumps({"benchmark": "host_step"} | about | {"rows": rows}) + "\n")
    _show(rows)
    if options.profile:
        _profile(options.profile, options.rows[-1], options.layers, options.kv_bits)


def _measure(model: str, num_rows: int, num_layers: int, kv_bits: int | None) -> dict[str, Any]:
    mac = _running_mac(model, num_rows, num_layers, kv_bits)
    steps = [mac.timed_step() for _ in range(_STEPS)]
    parts = {name: 1000 * statistics.median(step[name] for step in steps) for name in _PARTS}
    # The scheduler works in another process, a step ahead.
    to_graph = [1000 * (step["wire_ms"] + step["graph_ms"]) for step in steps]
    theirs = 1000 * statistics.median(_peer_graphs(num_rows, num_layers)) if model == "qwen3" else None
    about = {"model": model, "rows": num_rows, "layers": num_layers, "kv_bits": kv_bits}
    whole = {"plan_to_graph_ms": statistics.median(to_graph), "plan_to_graph_best_ms": min(to_graph)}
    return about | parts | whole | {"mlx_lm_graph_ms": theirs}


def _running_mac(model: str, num_rows: int, num_layers: int, kv_bits: int | None) -> Any:
    """So many requests that decode."""
    from tests.bench.host_step_mac import TimedMac, hollow_model, make_model

    config = _CONFIG | {"num_hidden_layers": num_layers}
    mac = TimedMac(
        hollow_model(config) if model == "hollow" else make_model(config),
        config,
        kv_budget_bytes=1 << 27,
        max_num_batched_tokens=512,
        max_chunk_tokens=512,
        max_num_seqs=max(64, num_rows),
        max_model_len=_CONTEXT_TOKENS + _WARM_UP_STEPS + 2 * _STEPS + 64,
        kv_bits=kv_bits,
    )
    for row in range(num_rows):
        # Nobody shares anything.
        prompt = [1 + (row * 37 + place * (row + 1)) % 250 for place in range(_CONTEXT_TOKENS)]
        mac.add(f"{row}", prompt, _WARM_UP_STEPS + 2 * _STEPS + 32, num_top_logprobs=None)
    for _ in range(_WARM_UP_STEPS):
        mac.step()
    return mac


def _peer_graphs(num_rows: int, num_layers: int) -> list[float]:
    from tests.bench.host_step_mac import peer_graphs

    return peer_graphs(_CONFIG | {"num_hidden_layers": num_layers}, num_rows, _CONTEXT_TOKENS, _STEPS)


def _profile(model: str, num_rows: int, num_layers: int, kv_bits: int | None) -> None:
    mac = _running_mac(model, num_rows, num_layers, kv_bits)
    profiler = cProfile.Profile(time.thread_time)
    for _ in range(_STEPS):
        profiler.runcall(mac.step)
    pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(30)


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table("model", "rows", "layers", "schedule", "wire", "graph", "report", "plan to graph", "best", "mlx-lm's")
    names: tuple[str, ...] = (*_PARTS, "plan_to_graph_ms", "plan_to_graph_best_ms", "mlx_lm_graph_ms")
    for row in rows:
        figures = ("-" if row[name] is None else f"{row[name]:.2f}" for name in names)
        table.add_row(row["model"], str(row["rows"]), str(row["layers"]), *figures)
    Console(stderr=True, width=120).print(table)


if __name__ == "__main__":
    main()
