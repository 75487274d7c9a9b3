"""Figures of the reuse benchmark for people: the table and the plots."""

import io
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.reuse_shapes import REFERENCE

Row = dict[str, Any]


class NoMatplotlib(Exception):
    """Plots were asked for, and matplotlib is not installed."""


def table(rows: Sequence[Row], policies: Sequence[str], width: int = 118) -> str:
    """One line for each workload, shape and size; percent of what an unbounded cache hits."""
    shown = Table(title="hit tokens, % of an unbounded token-granular cache", caption=f"reference: {REFERENCE}")
    shown.add_column("workload")
    shown.add_column("shape")
    heads = ["GiB", *policies, "reference", "clairvoyant", *(f"{policy} / clairv." for policy in policies)]
    for head in heads:
        shown.add_column(head, justify="right")
    last = None
    for row in rows:
        case = (row["workload"], row["shape"])
        if last is not None and case != last:
            shown.add_section()
        reuse, of_bound = row["reuse_percent"], row["of_clairvoyant"]
        cells = [str(row["gib"])]
        cells += [_cell(reuse.get(policy)) for policy in policies]
        cells += [_cell(row["reference_percent"]), _cell(row["clairvoyant_percent"])]
        cells += [_cell(of_bound.get(policy), 3) for policy in policies]
        shown.add_row(*(case if case != last else ("", "")), *cells)
        last = case
    text = io.StringIO()
    Console(file=text, width=width).print(shown)
    return text.getvalue().rstrip()


def check_plots() -> None:
    """Raises NoMatplotlib, with what to do."""
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise NoMatplotlib("--plots needs matplotlib, which no extra brings: pip install matplotlib") from error


def plot(rows: Sequence[Row], policies: Sequence[str], folder: Path) -> list[Path]:
    """A PNG for each workload, a panel for each shape. Raises NoMatplotlib."""
    check_plots()
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for workload in dict.fromkeys(row["workload"] for row in rows):
        of_workload = [row for row in rows if row["workload"] == workload]
        shapes = list(dict.fromkeys(row["shape"] for row in of_workload))
        figure, panels = pyplot.subplots(1, len(shapes), figsize=(4 * len(shapes), 3.6), sharey=True, squeeze=False)
        for panel, shape in zip(panels[0], shapes, strict=True):
            _draw(panel, [row for row in of_workload if row["shape"] == shape], policies)
            panel.set_title(shape)
        panels[0][0].set_ylabel("hit tokens, % of unbounded")
        panels[0][-1].legend(loc="lower right", fontsize="small")
        figure.suptitle(workload)
        figure.tight_layout()
        path = folder / f"reuse-{workload}.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        paths.append(path)
    return paths


def _draw(panel: Any, rows: Sequence[Row], policies: Sequence[str]) -> None:
    sizes = [row["gib"] for row in rows]
    panel.plot(sizes, [row["clairvoyant_percent"] for row in rows], "k--", label="clairvoyant bound")
    for policy in policies:
        panel.plot(sizes, [row["reuse_percent"].get(policy) for row in rows], "o-", label=policy)
    if any(row["reference_percent"] is not None for row in rows):
        panel.plot(sizes, [row["reference_percent"] for row in rows], "s:", color="gray", label="vLLM 0.33")
    panel.set_xlabel("KV memory, GiB")
    panel.set_ylim(0, 102)
    panel.grid(alpha=0.3)


def _cell(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
