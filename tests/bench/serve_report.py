"""Figures of the serving benchmark: rows, ratios, the issue's targets, the table, and where it ran."""

import math
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from tests.bench.serve_load import Answer

Row = dict[str, Any]

_TABLE = (
    ("model", 6, "model"),
    ("sc", 3, "scenario"),
    ("cl", 3, "clients"),
    ("server", 7, "server"),
    ("req", 4, "requests"),
    ("tok/s", 8, "output_tokens_per_s"),
    ("ttft50", 8, "ttft_p50_ms"),
    ("ttft99", 8, "ttft_p99_ms"),
    ("warm50", 8, "ttft_warm_p50_ms"),
    ("itl50", 7, "inter_token_p50_ms"),
    ("itl99", 8, "inter_token_p99_ms"),
    ("cached", 7, "cached_share"),
    ("cpu_s", 7, "server_cpu_s"),
    ("client", 7, "client_cpu_s"),
)


@dataclass(slots=True)
class Measured:
    """All rounds of one server in one case."""

    max_tokens: int
    answers: list[Answer] = field(default_factory=list)
    # Answers to the requests that made the system prompt known.
    openings: list[Answer] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    server_cpu_s: float = 0.0
    client_cpu_s: float = 0.0
    load_1m: float = 0.0

    def add(self, answers: list[Answer], wall_s: float, server_cpu_s: float, client_cpu_s: float) -> None:
        """One more round."""
        self.answers.extend(answers)
        self.wall_s.append(wall_s)
        self.tokens_per_s.append(sum(answer.num_output_tokens for answer in answers) / wall_s)
        self.server_cpu_s += server_cpu_s
        self.client_cpu_s += client_cpu_s
        self.load_1m = max(self.load_1m, os.getloadavg()[0])

    def row(self) -> Row:
        """The figures; None where there is nothing to measure."""
        answers, wall_s = self.answers, sum(self.wall_s)
        gaps = [gap for answer in answers for gap in answer.gaps_s]
        num_output = sum(answer.num_output_tokens for answer in answers)
        num_prompt = sum(answer.num_prompt_tokens for answer in answers)
        warm = [answer.ttft_s for answer in answers if answer.turn > 1]
        first = [answer.ttft_s for answer in answers if answer.turn == 1]
        return {
            "requests": len(answers),
            "wall_s": round(wall_s, 3),
            "output_tokens_per_s": round(num_output / wall_s, 2),
            "output_tokens_per_s_rounds": [round(value, 2) for value in self.tokens_per_s],
            "requests_per_s": round(len(answers) / wall_s, 3),
            "prompt_tokens_per_s": round(num_prompt / wall_s, 1),
            **_percentiles("ttft", [answer.ttft_s for answer in answers], (50, 90, 99)),
            **_percentiles("inter_token", gaps, (50, 99)),
            **_percentiles("ttft_first_turn", first, (50, 99)),
            **_percentiles("ttft_warm", warm, (50, 90, 99)),
            **_percentiles("ttft_opening", [answer.ttft_s for answer in self.openings], (50,)),
            "cached_share": round(sum(answer.num_cached_tokens for answer in answers) / num_prompt, 4),
            "chunks_per_token": round((len(gaps) + len(answers)) / num_output, 3),
            "short_answers": sum(answer.num_output_tokens != self.max_tokens for answer in answers),
            "server_cpu_s": round(self.server_cpu_s, 2),
            "client_cpu_s": round(self.client_cpu_s, 2),
            "load_1m": round(self.load_1m, 2),
        }


def ratios(rows: Sequence[Row]) -> dict[str, dict[str, float | None]]:
    """Cidery against mlx_lm in each case; above 1 Cidery is better, for times too."""
    by_case = {(row["model"], row["scenario"], row["clients"], row["server"]): row for row in rows}
    result = {}
    for (model, scenario, clients, server), ours in by_case.items():
        theirs = by_case.get((model, scenario, clients, "mlx_lm"))
        if server != "cidery" or theirs is None:
            continue
        result[f"{model}/{scenario}/{clients}"] = {
            "throughput": _ratio(ours["output_tokens_per_s"], theirs["output_tokens_per_s"]),
            "ttft_p50": _ratio(theirs["ttft_p50_ms"], ours["ttft_p50_ms"]),
            "ttft_warm_p50": _ratio(theirs["ttft_warm_p50_ms"], ours["ttft_warm_p50_ms"]),
            "inter_token_p50": _ratio(theirs["inter_token_p50_ms"], ours["inter_token_p50_ms"]),
            "inter_token_p99": _ratio(theirs["inter_token_p99_ms"], ours["inter_token_p99_ms"]),
            "server_cpu": _ratio(theirs["server_cpu_s"], ours["server_cpu_s"]),
            # The throughput ratio of a server that did nothing but the model's matrix products.
            "throughput_bound": theirs["products_s"] and _ratio(theirs["wall_s"], theirs["products_s"]),
        }
    return result


def targets(found: dict[str, dict[str, float | None]]) -> list[dict[str, Any]]:
    """The first targets and whether this run meets them, for each model that was measured."""
    wanted = (("a/1", "throughput", 1.0), ("a/16", "throughput", 1.5), ("b/16", "ttft_warm_p50", 3.0))
    result = []
    for model in dict.fromkeys(case.split("/")[0] for case in found):
        for case, figure, least in wanted:
            value = found.get(f"{model}/{case}", {}).get(figure)
            if value is not None:
                name = f"{model}/{case} {figure}"
                result.append({"target": name, "at_least": least, "measured": value, "met": value >= least})
    return result


def table(rows: Sequence[Row]) -> str:
    """Rows for people."""
    lines = ["  ".join(title.rjust(width) for title, width, _ in _TABLE)]
    lines += ["  ".join(_cell(row[key]).rjust(width) for _, width, key in _TABLE) for row in rows]
    return "\n".join(lines)


def machine() -> dict[str, Any]:
    """What it ran on."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "mlx": metadata.version("mlx"),
        "mlx_lm": metadata.version("mlx-lm"),
        "load_1m_at_start": round(os.getloadavg()[0], 2),
    }


def commit(repository: Path) -> tuple[str | None, bool | None]:
    """Hash of the checked out commit and whether anything differs from it; None outside a repository."""
    try:
        head = _git(repository, "rev-parse", "HEAD")
        return head, bool(_git(repository, "--no-optional-locks", "status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):
        return None, None


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Nearest rank; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def _percentiles(name: str, values_s: Sequence[float], percents: Iterable[int]) -> dict[str, float | None]:
    figures = {percent: percentile(values_s, percent) for percent in percents}
    return {f"{name}_p{p}_ms": None if value is None else round(value * 1e3, 3) for p, value in figures.items()}


def _ratio(above: float | None, below: float | None) -> float | None:
    return round(above / below, 3) if above is not None and below else None


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
