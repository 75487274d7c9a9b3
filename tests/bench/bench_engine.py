"""The engine, with its scheduler and KV manager, beside mlx-lm's BatchGenerator: tokens a second by kind of model.

    python -m tests.bench.bench_engine
    python -m tests.bench.bench_engine --kinds full delta --workloads decode-8 joins --rounds 3

One JSON line on stdout, a table on stderr. Each side runs in processes of its own, in turns, both over the same BLAS
and with its own defaults (chunks of prompts: 256 tokens of one and 512 of all, mlx-lm 2,048), because the engine
replaces functions of MLX. Wall time is the best of the rounds; so is CPU time, which a busy machine disturbs less.
Models have 30 to 41 million random float32 weights: speed doesn't ask what they say.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench import sides

SIDES = ("cidery", "mlx-lm")
_WIDTHS: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 10,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 8192,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_DELTA = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
_MAMBA2 = {
    "num_hidden_layers": 16,
    "num_heads": 16,
    "head_dim": 64,
    "intermediate_size": 1024,
    "state_size": 64,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_limit": [0.01, 10.0],
    "time_step_rank": "auto",
}
_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
# Kind -> module of mlx_lm.models and its config.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("qwen3", _WIDTHS),
    "window": ("gemma3_text", {**_WIDTHS, "sliding_window": 256, "sliding_window_pattern": 4}),
    "delta": ("qwen3_5", {"text_config": {**_WIDTHS, **_DELTA}}),
    "mamba2": ("mamba2", {**_WIDTHS, **_MAMBA2}),
    "moe": ("qwen3_moe", {**_WIDTHS, **_MOE}),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests as (step that they come at, prompt tokens, new tokens).

    Measured from when all that come at the beginning have their first token; if `is_steady`, until the first one ends,
    else until the last one does.
    """

    requests: list[tuple[int, int, int]]
    is_steady: bool = False


_RAGGED = (100, 400, 900, 1500, 2100, 2800, 3400, 4000)
WORKLOADS: dict[str, Workload] = {
    "decode-1": Workload([(0, 64, 64)], is_steady=True),
    "decode-8": Workload([(0, 64, 64)] * 8, is_steady=True),
    "decode-32": Workload([(0, 64, 48)] * 32, is_steady=True),
    "ragged-8": Workload([(0, length, 96) for length in _RAGGED], is_steady=True),
    # One short request after the other comes and goes: alone, and beside some that have been there for long.
    "joins": Workload([(3 * i, 64 + 5 * i, 24) for i in range(16)]),
    "joins-ragged": Workload(
        [*((0, length, 120) for length in _RAGGED[1:5]), *((20 + 4 * i, 48, 8) for i in range(20))]
    ),
    # Sixteen that decode, and a long prompt among them, of which no more than one token is wanted.
    "mixed": Workload([*[(0, 32, 64)] * 16, (8, 4000, 1)]),
}

Row = dict[str, Any]


def main() -> None:
    """Run all cases, or, as a child, one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        sides.begin_side()
        from tests.bench import engine_sides

        sides.tell(
            {"kind": kind, "workload": name} | engine_sides.measure(options.side, KINDS[kind], WORKLOADS[name])
            for kind in options.kinds
            for name in options.workloads
        )
        return
    rows = _compare(options.kinds, options.workloads, options.rounds)
    sides.print_report("engine", rows, rounds=options.rounds)
    _show(rows)


def _compare(kinds: list[str], workloads: list[str], rounds: int) -> list[Row]:
    """The best round of each side in each case."""
    best: dict[tuple[str, str, str], Row] = {}
    for _ in range(rounds):
        for kind in kinds:
            for side in SIDES:
                for row in sides.run_side("bench_engine", side, ["--kinds", kind, "--workloads", *workloads]):
                    key = (kind, row["workload"], side)
                    best[key] = _better(best.get(key), row | {"side": side})
    return list(best.values())


def _better(known: Row | None, row: Row) -> Row:
    if known is None:
        return row
    most = {name: max(known[name], row[name]) for name in ("tokens_per_s", "tokens_per_cpu_s", "joins_per_s")}
    return known | most | {"gap_p99_ms": min(known["gap_p99_ms"], row["gap_p99_ms"])}


def _show(rows: list[Row]) -> None:
    table = Table(
        "kind", "workload", "tok/s", "mlx-lm", "ratio", "tok/cpu s", "mlx-lm", "ratio", "gap p99 ms", "mlx-lm"
    )
    by_case = {(row["kind"], row["workload"], row["side"]): row for row in rows}
    for kind, workload in dict.fromkeys((row["kind"], row["workload"]) for row in rows):
        ours, theirs = (by_case[kind, workload, side] for side in SIDES)
        cells: list[str] = []
        for name in ("tokens_per_s", "tokens_per_cpu_s"):
            cells += [f"{ours[name]:.0f}", f"{theirs[name]:.0f}", f"{ours[name] / theirs[name]:.2f}"]
        gaps = [f"{ours['gap_p99_ms']:.0f}", f"{theirs['gap_p99_ms']:.0f}"]
        table.add_row(kind, workload, *cells, *gaps)
    Console(stderr=True).print(table)


if __name__ == "__main__":
    main()
