"""`cidery simulate`: what a fleet would do with a trace, without a Mac."""

import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cluster.cli_types import Bytes
from cluster.kv.policies import POLICIES as RETENTIONS
from cluster.routing.config import POLICIES, RoutingConfig
from cluster.simulation import arrivals, plots, report
from cluster.simulation.cost_model import CostModel
from cluster.simulation.errors import SimulationError
from cluster.simulation.failures import Failure, parse_failure
from cluster.simulation.fleet import DEFAULT_KV_BYTES, FleetSpec, MacSpec, read_fleet, read_layers, uniform_fleet
from cluster.simulation.outcome import Outcome
from cluster.simulation.simulation import Options, Simulation
from cluster.simulation.trace import Trace
from cluster.simulation.trace_files import read_trace

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_POSITIVE = click.FloatRange(min=0, min_open=True)


class _Failure(click.ParamType[Failure]):
    """mac-3@600+120."""

    name = "failure"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Failure:
        """A Failure."""
        try:
            return parse_failure(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command(
    epilog="""\b
Examples:
  cidery simulate conversation_trace.jsonl.gz --macs 16 --rate 0.6
  cidery simulate requests.jsonl --fleet fleet.json --json
  cidery simulate requests.jsonl --macs 4 --fail mac-2@600+120 --plots plots
  cidery simulate requests.jsonl --policy predicted_seconds --policy weighted_scores

\b
A fleet file (a class must say the two first fields, the others have defaults):
  {"classes": {"studio": {"prefill_tokens_per_s": 2000, "kv_memory": "88GiB", "step_s": 0.012},
               "mini": {"prefill_tokens_per_s": 300, "kv_memory": "8GiB", "step_s": 0.05}},
   "macs": [{"class": "studio", "count": 12}, {"class": "mini", "count": 4}]}"""
)
@click.argument("trace", type=_FILE)
@click.option("--fleet", "fleet_file", default=None, type=_FILE, help="JSON file of the Macs.  [default: equal ones]")
@click.option("--macs", default=16, show_default=True, type=click.IntRange(min=1), help="Equal Macs, mac-1 to mac-n.")
@click.option("--prefill-speed", default=2000.0, show_default=True, type=_POSITIVE, help="Of each, in tokens a second.")
@click.option("--kv-cache-memory", default=DEFAULT_KV_BYTES, type=Bytes(), help="Of each.  [default: 82.4GiB]")
@click.option(
    "--model", default=None, type=click.Path(exists=True, path_type=Path), help="A config.json, or its folder."
)
@click.option("--max-model-len", default=262_144, show_default=True, type=click.IntRange(min=2), help="In tokens.")
@click.option("--rate", default=1.0, show_default=True, type=_POSITIVE, help="Times as many arrivals a second.")
@click.option("--starts", default=0.05, show_default=True, type=_POSITIVE, help="Agent sessions: starts a second.")
@click.option("--longest-pause", default=600.0, show_default=True, type=_POSITIVE, help="Agent sessions: in seconds.")
@click.option("--requests", "num_requests", default=None, type=click.IntRange(min=1), help="Only the first so many.")
@click.option("--seed", default=0, show_default=True, help="Of session starts, lost events and jitter.")
@click.option(
    "--jitter", default=0.0, show_default=True, type=click.FloatRange(min=0), help="Arrivals up to so much later."
)
@click.option("--event-lag", default=0.001, show_default=True, type=click.FloatRange(min=0), help="In seconds.")
@click.option(
    "--event-loss", default=0.0, show_default=True, type=click.FloatRange(0, 1, max_open=True), help="A share."
)
@click.option("--fail", "failures", multiple=True, type=_Failure(), help="MAC@S, or MAC@S+T: gone at S, back after T.")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(POLICIES),
    help="How the router chooses; several are run one after the other.  [default: predicted_seconds]",
)
@click.option("--kv-retention", type=click.Choice(sorted(RETENTIONS)), default="value", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object, or one a line.")
@click.option(
    "--plots", "plot_folder", default=None, type=click.Path(file_okay=False, path_type=Path), help="For PNGs."
)
@click.pass_context
def simulate(context: click.Context, /, trace: Path, as_json: bool, plot_folder: Path | None, **options: Any) -> None:
    """Run TRACE on a simulated fleet, and show times, hit rates and loads.

    The router, the KV managers and the schedulers are those that serve; only the model is replaced by a cost model
    of each class of Macs. TRACE is JSONL, plain or gzip: a Mooncake trace, agent sessions, or what `cidery serve
    --request-log` writes. Equal options give equal results. Speeds are yours to give: the defaults are arithmetic for
    an 8B model, nobody measured them.
    """
    _refuse_both(context, options)
    try:
        if plot_folder is not None:
            plots.check_plots()
        fleet, requests = _fleet(options), _trace(trace, options)
        outcomes = {
            policy: _run(requests, fleet, _options(options, policy), policy)
            for policy in dict.fromkeys(options["policies"] or (RoutingConfig().policy,))
        }
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except SimulationError as error:
        raise click.ClickException(str(error)) from error
    if plot_folder is not None:
        for path in plots.plot(outcomes, plot_folder):
            click.echo(f"plot: {path}", err=True)
    summaries = {label: report.summary(each) for label, each in outcomes.items()}
    if as_json:
        for label, run in summaries.items():
            click.echo(json.dumps({"policy": label} | run))
    else:
        report.print_summaries(summaries, Console(width=None if sys.stdout.isatty() else 160))


def _refuse_both(context: click.Context, options: dict[str, Any]) -> None:
    """A fleet file tells all of the Macs."""
    if options["fleet_file"] is None:
        return
    for name in ("macs", "prefill_speed", "kv_cache_memory", "model", "max_model_len"):
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            option = f"--{name.replace('_', '-')}"
            raise click.UsageError(f"{option} and --fleet: the fleet file says what its Macs are; give one of them")


def _fleet(options: dict[str, Any]) -> FleetSpec:
    if options["fleet_file"] is not None:
        return read_fleet(options["fleet_file"])
    mac = MacSpec("mac", CostModel(options["prefill_speed"]), options["kv_cache_memory"])
    fleet = uniform_fleet(options["macs"], mac, max_model_len=options["max_model_len"])
    return replace(fleet, layers=read_layers(options["model"])) if options["model"] else fleet


def _trace(path: Path, options: dict[str, Any]) -> Trace:
    trace = read_trace(path)
    if any(request.after is not None for request in trace.requests):
        trace = arrivals.with_pauses(trace, options["longest_pause"])
        trace = arrivals.started(trace, options["starts"] * options["rate"], options["seed"])
    else:
        trace = arrivals.scaled(trace, options["rate"])
    if options["jitter"]:
        trace = arrivals.jittered(trace, options["jitter"], options["seed"])
    return trace if options["num_requests"] is None else trace.first(options["num_requests"])


def _options(options: dict[str, Any], policy: str) -> Options:
    return Options(
        routing=RoutingConfig(policy=policy),
        seed=options["seed"],
        event_lag_s=options["event_lag"],
        event_loss=options["event_loss"],
        failures=options["failures"],
        retention=options["kv_retention"],
    )


def _run(trace: Trace, fleet: FleetSpec, options: Options, label: str) -> Outcome:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress, fewer_collections():
        task = progress.add_task(label, total=len(trace.requests))
        done: Callable[[], object] = lambda: progress.advance(task)  # noqa: E731
        return Simulation(trace, fleet, options, done).run()


@contextmanager
def fewer_collections() -> Iterator[None]:
    """A simulation makes millions of objects and few cycles: looking for these less often saves a sixth of the time."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
