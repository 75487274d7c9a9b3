"""Benchmarks whose sides run in processes of their own, because the engine replaces functions of MLX."""

import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.bench import serve_report
from worker import blas

REPOSITORY = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


def run_side(benchmark: str, side: str, arguments: Sequence[str]) -> list[Row]:
    """What `tests.bench.<benchmark>` tells as a child of one side. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", f"tests.bench.{benchmark}", "--side", side, *arguments]
    child = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in child.stdout.splitlines()]


def begin_side() -> None:
    """In the child, before MLX is imported: both sides have the same BLAS, and as many threads as there are cores."""
    blas.load(num_threads=None)


def tell(rows: Iterable[Row]) -> None:
    """From the child, each row as soon as it is there."""
    for row in rows:
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()


def print_report(benchmark: str, rows: Sequence[Row], **about: Any) -> None:
    """The benchmark's one JSON line."""
    commit, is_dirty = serve_report.commit(REPOSITORY)
    report = {"benchmark": benchmark, "commit": commit, "dirty": is_dirty, "seed": 0, **about}
    sys.stdout.write(json.dumps(report | {"machine": serve_report.machine(), "rows": list(rows)}) + "\n")
