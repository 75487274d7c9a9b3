"""KV reuse under equal memory: how much of what could be reused our cache keeps, by policy, shape and memory size.

    python -m tests.bench.bench_reuse --quick
    python -m tests.bench.bench_reuse --traces FOLDER --plots plots

Requests go one at a time through the real scheduler and KV manager; no model runs. One JSON line on stdout; progress
and a table on stderr. Figures are hit tokens in percent of those of an unbounded cache that hits at any token. Beside
them: a bound that no cache of that size can beat even if it knows the future (reuse_clairvoyant.py), and what vLLM
reached in the same cyclic workload. vLLM's figures belong to its own model dims, default retention and code; they
are no run of this program. It ends with 0 whatever the figures are.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.bench import reuse_driver, reuse_report, serve_report
from tests.bench.reuse_clairvoyant import Infeasible, upper_bound
from tests.bench.reuse_prefixes import Reusable, reusable_prefixes, unbounded_hits
from tests.bench.reuse_report import Row
from tests.bench.reuse_shapes import GIB, REFERENCE, SHAPES, Shape
from tests.bench.reuse_workloads import TRACE_FILE, Agentic, Cyclic, Workload, agentic, cyclic

REPOSITORY = Path(__file__).resolve().parents[2]
CYCLIC = {"cyclic": Cyclic(), "cyclic-long": Cyclic("cyclic-long", user=550, answer=350)}
WORKLOADS = (*CYCLIC, "agentic")
DEFAULT_WORKLOADS = ("cyclic", "agentic")
POLICIES = ("value", "lru")
QUICK_AGENTIC = Agentic(num_sessions=16, max_requests=10, max_context=60_000, span_s=600.0)


@dataclass(frozen=True, slots=True)
class Case:
    """One workload, with what is known of its reuse."""

    workload: Workload
    paths: list[list[Reusable]]
    unbounded: list[int]


def load(name: str, options: argparse.Namespace) -> Case | None:
    """None, and a message, if the traces are not there."""
    if name == "agentic":
        if options.traces is None or not (options.traces / TRACE_FILE).exists():
            _say(f"agentic: skipped, there is no {TRACE_FILE} in the folder that --traces names")
            return None
        workload = agentic(options.traces, QUICK_AGENTIC if options.quick else Agentic(), options.seed)
    else:
        workload = cyclic(CYCLIC[name], options.seed)
    turns = workload.turns
    paths = reusable_prefixes([turn.token_ids for turn in turns], [turn.num_prompt_tokens for turn in turns])
    return Case(workload, paths, unbounded_hits(paths))


def measure(case: Case, shape: Shape, size: int, options: argparse.Namespace, progress: Progress) -> Row:
    """One line of the table: all policies at one size, and the bound."""
    workload, unbounded = case.workload, sum(case.unbounded)
    sizes = shape.sizes_gib[workload.name]
    reference = shape.reference[sizes.index(size)] if workload.name == "cyclic" else None
    try:
        lengths = [len(turn.token_ids) for turn in workload.turns]
        bound = upper_bound(case.paths, lengths, shape.costs(), size * GIB).num_tokens
        layout = reuse_driver.layout_of(shape, size, workload.max_length, options.chunk_tokens)
    except (Infeasible, ValueError) as error:
        raise Infeasible(f"{workload.name}, {shape.name}, {size} GiB: {error}") from error
    row: Row = {
        "workload": workload.name,
        "shape": shape.name,
        "gib": size,
        "unbounded_tokens": unbounded,
        "clairvoyant_percent": round(100 * bound / unbounded, 2),
        "reference_percent": reference,
        "reuse_percent": {},
        "of_clairvoyant": {},
        "num_steps": {},
        "cpu_s": {},
    }
    for policy in options.policies:
        label = f"{workload.name} {shape.name} {size} GiB {policy}"
        task = progress.add_task(label, total=len(workload.turns))
        outcome = reuse_driver.run(workload, layout, policy, options.chunk_tokens, partial(progress.advance, task))
        progress.remove_task(task)
        num_hit = sum(outcome.hits)
        over = [i for i, (hit, most) in enumerate(zip(outcome.hits, case.unbounded, strict=True)) if hit > most]
        assert not over, f"{label}: requests {over} hit more than there is"
        row["reuse_percent"][policy] = round(100 * num_hit / unbounded, 2)
        row["of_clairvoyant"][policy] = round(num_hit / bound, 4)
        row["num_steps"][policy] = outcome.num_steps
        row["cpu_s"][policy] = round(outcome.cpu_s, 2)
    return row


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark."""
    commit, dirty = serve_report.commit(REPOSITORY)
    started_s = time.monotonic()
    rows: list[Row] = []
    about: dict[str, Any] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        for name in options.workloads:
            case = load(name, options)
            if case is None:
                continue
            about[name] = _about(case)
            for shape_name in options.shapes:
                shape = SHAPES[shape_name]
                sizes = shape.sizes_gib[name]
                rows += [measure(case, shape, size, options, progress) for size in _sizes(sizes, options.quick)]
    return {
        "bench": "reuse",
        "commit": commit,
        "dirty": dirty,
        "seed": options.seed,
        "quick": options.quick,
        "machine": serve_report.machine(),
        "chunk_tokens": options.chunk_tokens,
        "reference": REFERENCE,
        "workloads": about,
        "shapes": {name: asdict(SHAPES[name].costs()) for name in options.shapes},
        "duration_s": round(time.monotonic() - started_s, 1),
        "rows": rows,
    }


def main() -> int:
    """Command line."""
    options = _parse()
    try:
        if options.plots:
            reuse_report.check_plots()
        result = run(options)
    except (Infeasible, reuse_report.NoMatplotlib) as error:
        _say(f"failed: {error}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    _say(reuse_report.table(result["rows"], options.policies))
    if options.plots:
        for path in reuse_report.plot(result["rows"], options.policies, options.plots):
            _say(f"plot: {path}")
    line = json.dumps(result)
    if options.json_out:
        options.json_out.write_text(line + "\n")
    print(line)
    return 0


def _sizes(sizes: tuple[int, ...], quick: bool) -> tuple[int, ...]:
    return sizes[:2] if quick else sizes


def _about(case: Case) -> dict[str, Any]:
    turns = case.workload.turns
    return case.workload.about | {
        "requests": len(turns),
        "prompt_tokens": sum(turn.num_prompt_tokens for turn in turns),
        "answer_tokens": sum(len(turn.token_ids) - turn.num_prompt_tokens for turn in turns),
        "longest_tokens": case.workload.max_length,
        "unbounded_tokens": sum(case.unbounded),
    }


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
    parser.add_argument("--quick", action="store_true", help="two sizes a shape and a small agentic sample")
    parser.add_argument("--shapes", type=listed(tuple(SHAPES)), default=list(SHAPES), help=",".join(SHAPES))
    workloads = list(DEFAULT_WORKLOADS)
    parser.add_argument("--workloads", type=listed(WORKLOADS), default=workloads, help=",".join(WORKLOADS))
    parser.add_argument("--policies", type=listed(POLICIES), default=list(POLICIES), help=",".join(POLICIES))
    parser.add_argument("--seed", type=int, default=0, help="of the workloads")
    parser.add_argument("--traces", type=Path, help=f"folder that holds {TRACE_FILE}")
    parser.add_argument("--chunk-tokens", type=int, default=2048, help="of a prompt in one step")
    parser.add_argument("--json-out", type=Path, help="write the JSON line to this file too")
    parser.add_argument("--plots", type=Path, help="write PNGs to this folder; needs matplotlib")
    return parser.parse_args()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
