"""Figures of the policy benchmark for people: the table, and whether the bars are met."""

import io
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
_Key = tuple[str, str, str]

# Shares by which we may or must differ from the best other policy.
_TTFT_SLACK = 0.02
_MIXED_LEAD = 0.10
_E2E_SLACK = 0.03
_HIT_ERROR = 0.01


def table(rows: Sequence[Row], width: int = 170) -> str:
    """A line for each case and policy, means over the seeds; in brackets the lowest and the highest seed."""
    shown = Table()
    for name in ("workload", "fleet", "model", "policy"):
        shown.add_column(name, no_wrap=True)
    figures = "runs load hit-rate off-by TTFT-mean (seeds) p50 p90 e2e-mean (seeds) rejected"
    for name in figures.split():
        shown.add_column(name.replace("-", " "), justify="right")
    for key, by_policy in _cases(rows).items():
        shown.add_section()
        for policy, runs in by_policy.items():
            ttft, e2e = ([run[what]["mean"] for run in runs] for what in ("ttft_s", "e2e_s"))
            shown.add_row(
                *(*key, policy),
                f"{len(runs)} x {runs[0]['requests']}",
                f"{fmean(run['load'] for run in runs):.2f}",
                f"{fmean(run['hit_rate'] for run in runs):.3f}",
                f"{fmean(run['hit_error'] for run in runs):.2%}",
                *(f"{fmean(ttft):.2f}", f"{min(ttft):.2f}-{max(ttft):.2f}"),
                *(f"{fmean(run['ttft_s'][of] for run in runs):.2f}" for of in ("p50", "p90")),
                *(f"{fmean(e2e):.1f}", f"{min(e2e):.1f}-{max(e2e):.1f}"),
                str(sum(run["rejected"] for run in runs)),
            )
    text = io.StringIO()
    Console(file=text, width=width).print(shown)
    return text.getvalue().rstrip()


def bars(rows: Sequence[Row], ours: str, wrong: str, skewed: str) -> list[dict[str, Any]]:
    """Each bar in each case where both our policy and another one ran."""
    found: list[dict[str, Any]] = []
    for key, by_policy in _cases(rows).items():
        rivals = {policy: runs for policy, runs in by_policy.items() if policy not in (ours, wrong, skewed)}
        if ours not in by_policy or not rivals:
            continue
        ttft = {policy: _mean(runs, "ttft_s") for policy, runs in by_policy.items()}
        e2e = {policy: _mean(runs, "e2e_s") for policy, runs in by_policy.items()}
        best, quickest = min(rivals, key=ttft.__getitem__), min(rivals, key=e2e.__getitem__)
        most = ttft[best] * (1 - _MIXED_LEAD if key[1] != "uniform" else 1 + _TTFT_SLACK)
        name = " ".join(key)
        bound = "10 % below" if key[1] != "uniform" else "within 2 % of"
        found.append(_bar(f"{name}: mean TTFT {bound} the best other", ttft[ours], ttft[best], best, most))
        found.append(
            _bar(f"{name}: end to end within 3 %", e2e[ours], e2e[quickest], quickest, e2e[quickest] * (1 + _E2E_SLACK))
        )
        for misled in (wrong, skewed):
            if misled in by_policy:
                # Little worse than the best other one, which has no model to be wrong.
                what = f"{name}: mean TTFT within 2 %, {misled}"
                found.append(_bar(what, ttft[misled], ttft[best], best, ttft[best] * (1 + _TTFT_SLACK)))
        error = max(run["hit_error"] for run in by_policy[ours])
        found.append(
            {"what": f"{name}: hits predicted to 1 %", "is_met": error < _HIT_ERROR, "figures": f"off by {error:.2%}"}
        )
    return found


def _bar(what: str, own: float, best: float, policy: str, most: float) -> dict[str, Any]:
    figures = f"{own:.2f} s, {policy} {best:.2f} s ({own / best - 1:+.1%})"
    return {"what": what, "is_met": own <= most, "figures": figures}


def _mean(runs: Sequence[Row], what: str) -> float:
    return fmean(run[what]["mean"] for run in runs)


def _cases(rows: Sequence[Row]) -> dict[_Key, dict[str, list[Row]]]:
    cases: dict[_Key, dict[str, list[Row]]] = {}
    for row in rows:
        key = (row["workload"], row["fleet"], row["model"])
        cases.setdefault(key, {}).setdefault(row["policy"], []).append(row)
    return cases
