"""Figures of a run, as JSON and as tables."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.simulation.outcome import Outcome, RequestOutcome, Usage, hit_error, hit_rate, quantile


def summary(outcome: Outcome) -> dict[str, Any]:
    """Everything that is shown, in one JSON object; times in seconds."""
    served = outcome.served
    return {
        "trace": outcome.trace,
        "requests": len(outcome.requests),
        "served": len(served),
        "rejected": dict(Counter(each.rejected for each in outcome.requests if each.rejected)),
        "moved": sum(each.num_tries > 1 for each in outcome.requests),
        "duration_s": round(outcome.duration_s, 3),
        "prompt_tokens": sum(each.num_prompt_tokens for each in served),
        "output_tokens": sum(each.num_output_tokens for each in served),
        "hit_rate": round(hit_rate(served), 4),
        "hit_error": round(hit_error(served), 4),
        "ttft_s": distribution([each.first_token_s for each in served if each.first_token_s is not None]),
        "e2e_s": distribution([each.total_s for each in served]),
        "queue_s": distribution([each.queue_s for each in served]),
        "macs": [_mac(name, usage, served, outcome.duration_s) for name, usage in outcome.usage.items()],
    }


def distribution(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles."""
    ordered = sorted(values)
    figures = {"mean": sum(ordered) / len(ordered) if ordered else 0.0}
    figures |= {f"p{share}": quantile(ordered, share / 100) for share in (50, 90, 99)}
    return {name: round(value, 4) for name, value in figures.items()}


def print_summaries(summaries: dict[str, dict[str, Any]], console: Console) -> None:
    """One row for each run by its label, and the Macs of the only one."""
    table = Table()
    table.add_column("policy")
    for name in ("served", "rejected", "hit rate", "off by"):
        table.add_column(name, justify="right")
    for name in ("TTFT mean", "p50", "p90", "p99", "end to end mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for label, run in summaries.items():
        times = [f"{run[what][of]:.2f}" for what in ("ttft_s", "e2e_s") for of in ("mean", "p50", "p90", "p99")]
        rates = (f"{run['hit_rate']:.1%}", f"{run['hit_error']:.1%}")
        table.add_row(label, str(run["served"]), str(sum(run["rejected"].values())), *rates, *times)
    console.print(table)
    for run in summaries.values():
        for reason, count in run["rejected"].items():
            console.print(f"{count} requests rejected: {reason}")
    if len(summaries) == 1:
        _print_macs(next(iter(summaries.values()))["macs"], console)


def _print_macs(macs: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table()
    table.add_column("Mac")
    for name in ("requests", "hit rate", "busy", "prefilled", "generated", "most running", "most waiting"):
        table.add_column(name, justify="right")
    for mac in macs:
        table.add_row(
            mac["name"],
            str(mac["requests"]),
            f"{mac['hit_rate']:.1%}",
            f"{mac['busy']:.0%}",
            *(str(mac[name]) for name in ("prefill_tokens", "generated_tokens", "most_running", "most_waiting")),
        )
    console.print(table)


def _mac(name: str, usage: Usage, served: Sequence[RequestOutcome], duration_s: float) -> dict[str, Any]:
    own = [each for each in served if each.mac == name]
    return {
        "name": name,
        "requests": len(own),
        "hit_rate": round(hit_rate(own), 4),
        "busy": round(sum(usage.busy_s) / duration_s, 4) if duration_s else 0.0,
        "prefill_tokens": usage.num_prefill_tokens,
        "generated_tokens": usage.num_generated_tokens,
        "most_running": max(usage.num_running, default=0),
        "most_waiting": max(usage.num_waiting, default=0),
    }
