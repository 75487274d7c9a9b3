"""PNG plots of runs; needs matplotlib, which the extra `plots` brings."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from cluster.simulation.errors import SimulationError
from cluster.simulation.outcome import SLICE_S, Outcome, hit_rate


class NoMatplotlib(SimulationError):
    """Plots were asked for, and matplotlib is not installed."""


def check_plots() -> None:
    """Raises NoMatplotlib, with what to do; to be called before hours of simulation."""
    try:
        import_module("matplotlib")
    except ImportError as error:
        raise NoMatplotlib("--plots needs matplotlib, which is not installed: pip install 'cidery[plots]'") from error


def plot(outcomes: Mapping[str, Outcome], folder: Path) -> list[Path]:
    """TTFT distribution of all runs, and for each run its load over time and the hit rate of its Macs."""
    check_plots()
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    folder.mkdir(parents=True, exist_ok=True)
    paths = [_save(pyplot, _ttft(pyplot, outcomes), folder / "ttft.png")]
    for label, outcome in outcomes.items():
        paths.append(_save(pyplot, _load(pyplot, label, outcome), folder / f"load-{label}.png"))
        paths.append(_save(pyplot, _hits(pyplot, label, outcome), folder / f"hits-{label}.png"))
    return paths


def _ttft(pyplot: Any, outcomes: Mapping[str, Outcome]) -> Any:
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for label, outcome in outcomes.items():
        times = sorted(each.first_token_s for each in outcome.served if each.first_token_s is not None)
        axes.plot(times, [(i + 1) / len(times) for i in range(len(times))], label=label)
    axes.set_xscale("log")
    axes.set_xlabel("seconds to the first token")
    axes.set_ylabel("share of requests")
    axes.legend()
    return figure


def _load(pyplot: Any, label: str, outcome: Outcome) -> Any:
    figure, (busy, waiting) = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True)
    for name, usage in outcome.usage.items():
        moments = [i * SLICE_S for i in range(len(usage.busy_s))]
        busy.plot(moments, [min(1.0, each / SLICE_S) for each in usage.busy_s], linewidth=0.7, label=name)
        waiting.plot(moments, usage.num_waiting, linewidth=0.7)
    busy.set_ylabel("busy share")
    busy.set_title(label)
    waiting.set_ylabel("most waiting")
    waiting.set_xlabel("seconds")
    if len(outcome.usage) <= 16:
        busy.legend(fontsize="x-small", ncols=4)
    return figure


def _hits(pyplot: Any, label: str, outcome: Outcome) -> Any:
    figure, axes = pyplot.subplots(figsize=(max(6.0, 0.4 * len(outcome.usage)), 4))
    names = list(outcome.usage)
    axes.bar(names, [100 * hit_rate([each for each in outcome.served if each.mac == name]) for name in names])
    axes.set_ylabel("hit tokens, % of prompt tokens")
    axes.set_title(label)
    axes.tick_params(axis="x", rotation=60)
    return figure


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
