"""Routing policies on simulated fleets: hit rate, TTFT, end to end, every policy in one table.

    python -m tests.bench.bench_policies --traces FOLDER --quick
    python -m tests.bench.bench_policies --traces FOLDER --seeds 3 --rows rows.jsonl --json-out policies.json
    python -m tests.bench.bench_policies --traces FOLDER --only conversation:mixed:dense --policies round_robin

16 Macs on virtual time; the routers, schedulers and KV managers are the real ones (see `cidery simulate`). One set of
defaults for all cases. Policies were tuned on sessions with even numbers (`--half even`); the report is of the odd
ones. "-wrong" is our policy on a fleet that tells it wrong step times: those with prefill twice as long as they were;
"-skewed": all steps of every other Mac twice as long. `load` is the work of all requests, prefill and rows, by what
the fleet could do from the first arrival to the last. Every row is appended to the file `--rows` as soon as it is
there; runs that it has already are not run again, so a run that was cut goes on where it ended. One seed after the
other, so that every case has one first. One JSON line on stdout; progress and tables on stderr. It ends with 0 whatever
the figures are.
"""

import argparse
import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cluster.routing.config import RoutingConfig
from cluster.simulate import fewer_collections
from cluster.simulation.cost_model import CostModel
from cluster.simulation.errors import BadInput
from cluster.simulation.fleet import FleetSpec
from cluster.simulation.outcome import Outcome, hit_error, hit_rate
from cluster.simulation.report import distribution
from cluster.simulation.simulation import Options, Simulation
from cluster.simulation.trace import Trace
from tests.bench import policies_report, serve_report
from tests.bench.policies_cases import FLEETS, HALVES, MODELS, WORKLOADS, fleet_of, read_half, with_load

REPOSITORY = Path(__file__).resolve().parents[2]
OURS = "predicted_seconds"
WRONG = f"{OURS}-wrong"
SKEWED = f"{OURS}-skewed"
RIVALS = ("round_robin", "least_loaded", "prefix_affinity", "linear_block_cost", "weighted_scores")
POLICIES = (OURS, WRONG, SKEWED, *RIVALS)
QUICK_REQUESTS = 300

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    workload: str
    fleet: str
    model: str
    policy: str

    def run(self, trace: Trace, seed: int) -> Row:
        """Figures of one run."""
        fleet = fleet_of(self.fleet, self.model)
        policy = self.policy
        if self.policy in (WRONG, SKEWED):
            fleet, policy = misleading(fleet, self.policy), OURS
        options = Options(routing=RoutingConfig(policy=policy), seed=seed)
        started_s = time.process_time()
        with fewer_collections():
            outcome = Simulation(trace, fleet, options).run()
        served = outcome.served
        return {
            "workload": self.workload,
            "fleet": self.fleet,
            "model": self.model,
            "policy": self.policy,
            "seed": seed,
            "requests": len(outcome.requests),
            "rejected": len(outcome.requests) - len(served),
            "load": round(load_of(outcome, fleet), 3),
            "hit_rate": round(hit_rate(served), 4),
            "hit_error": round(hit_error(served), 5),
            "ttft_s": distribution([each.first_token_s for each in served if each.first_token_s is not None]),
            "e2e_s": distribution([each.total_s for each in served]),
            "cpu_s": round(time.process_time() - started_s, 1),
        }


def misleading(fleet: FleetSpec, how: str) -> FleetSpec:
    """Macs whose step times seem to be twice as long: those with prefill on all Macs, or all on every other Mac."""
    if how == WRONG:
        return replace(fleet, macs=tuple(replace(mac, told_prefill_factor=2.0) for mac in fleet.macs))
    return replace(
        fleet,
        macs=tuple(
            replace(mac, told_factor=1.0 + i % 2, told_prefill_factor=1.0 + i % 2) for i, mac in enumerate(fleet.macs)
        ),
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark."""
    commit, dirty = serve_report.commit(REPOSITORY)
    started_s = time.monotonic()
    cases = [
        Case(workload, fleet, model, policy)
        for model in options.models
        for fleet in options.fleets
        for workload in options.workloads
        for policy in options.policies
        if not options.only or f"{workload}:{fleet}:{model}" in options.only
    ]
    seeds = range(options.seed, options.seed + options.seeds)
    rows = _rows_of(options.rows)
    done = {_run_of(row) for row in rows}
    runs = [(case, seed) for seed in seeds for case in cases if (case, seed, options.requests) not in done]
    halves: dict[str, Trace] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(runs))
        for case, seed in () if options.report_only else runs:
            progress.update(task, description=" ".join((case.workload, case.fleet, case.model, case.policy)))
            if case.workload not in halves:
                halves[case.workload] = read_half(case.workload, options.traces, options.half)
            trace = with_load(case.workload, halves[case.workload], seed, options.requests, case.fleet)
            rows.append({**case.run(trace, seed), "asked": options.requests})
            if options.rows:
                with options.rows.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            progress.advance(task)
    return {
        "bench": "policies",
        "commit": commit,
        "dirty": dirty,
        "half": options.half,
        "seeds": list(seeds),
        "requests": options.requests,
        "machine": serve_report.machine(),
        "duration_s": round(time.monotonic() - started_s, 1),
        "bars": policies_report.bars(rows, OURS, WRONG, SKEWED),
        "rows": rows,
    }


def load_of(outcome: Outcome, fleet: FleetSpec) -> float:
    """Prefill that no cache spared, and the answers' rows, by what the Macs can do until the last arrival."""
    costs, work_s = CostModel(), 0.0
    for each in outcome.served:
        new, cached = each.num_prompt_tokens - each.num_cached_tokens, each.num_cached_tokens
        work_s += new * (1 + (cached + new / 2) / costs.context_doubling_tokens) / costs.prefill_tokens_per_s
        context = each.num_prompt_tokens + each.num_output_tokens / 2
        work_s += each.num_output_tokens * (costs.row_s + costs.context_token_s * context)
    until_s = max(each.arrived_s for each in outcome.requests)
    return work_s / until_s / sum(mac.costs.speed for mac in fleet.macs)


def _rows_of(file: Path | None) -> list[Row]:
    """What earlier runs have left there. A last line that was cut is run again."""
    if file is None or not file.exists():
        return []
    *lines, rest = file.read_text().split("\n")
    if rest:
        file.write_text("".join(f"{line}\n" for line in lines))
    return [json.loads(line) for line in lines]


def _run_of(row: Row) -> tuple[Case, int, int]:
    return Case(row["workload"], row["fleet"], row["model"], row["policy"]), row["seed"], row["asked"]


def main() -> int:
    """Command line."""
    options = _parse()
    try:
        result = run(options)
    except BadInput as error:
        _say(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    _say(policies_report.table(result["rows"]))
    for bar in result["bars"]:
        _say(f"{'met   ' if bar['is_met'] else 'MISSED'} {bar['what']}: {bar['figures']}")
    line = json.dumps(result)
    if options.json_out:
        options.json_out.write_text(line + "\n")
    print(line)
    return 0


def _parse() -> argparse.Namespace:
    def listed(allowed: tuple[str, ...]) -> Any:
        def parse(text: str) -> list[str]:
            values = text.split(",")
            for value in values:
                if value not in allowed:
                    raise argparse.ArgumentTypeError(f"{value} is none of {', '.join(allowed)}")
            return values

        return parse

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--traces", type=Path, required=True, help="folder that holds mooncake/ and agentic/")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_REQUESTS} requests of each trace, one seed")
    parser.add_argument("--workloads", type=listed(tuple(WORKLOADS)), default=list(WORKLOADS), help=",".join(WORKLOADS))
    parser.add_argument("--fleets", type=listed(FLEETS), default=list(FLEETS), help=",".join(FLEETS))
    parser.add_argument("--models", type=listed(tuple(MODELS)), default=["dense", "hybrid"], help=",".join(MODELS))
    parser.add_argument("--policies", type=listed(POLICIES), default=list(POLICIES), help=",".join(POLICIES))
    parser.add_argument("--half", choices=list(HALVES), default="odd", help="sessions: even ones are for tuning")
    parser.add_argument("--requests", type=int, default=700, help="of each trace, at the most")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--json-out", type=Path, help="write the JSON line to this file too")
    parser.add_argument("--only", type=lambda text: text.split(","), help="cases: workload:fleet:model,...")
    parser.add_argument("--rows", type=Path, help="file of rows: those there are not run again, new ones are appended")
    parser.add_argument("--report-only", action="store_true", help="run nothing, report the rows that are there")
    options = parser.parse_args()
    if options.quick:
        options.requests, options.seeds = QUICK_REQUESTS, 1
    return options


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
