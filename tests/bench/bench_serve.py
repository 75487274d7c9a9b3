"""`cidery serve` against `mlx_lm.server`, in one run on one machine: throughput, time to first token, inter-token gaps.

    python -m tests.bench.bench_serve --quick

One JSON line on stdout; progress and a table on stderr. It measures and judges nothing: it ends with 0 whatever the
figures are. See README.md beside it.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.bench import serve_load, serve_models, serve_products, serve_report, serve_servers
from tests.bench.serve_load import Answer, Chats, Target, Writer
from tests.bench.serve_report import Measured, Row
from tests.bench.serve_servers import Server, Setting

REPOSITORY = Path(__file__).resolve().parents[2]
MODELS = ("tiny", "large")
SCENARIOS = ("a", "b")
EQUALITY_PROMPTS = 4
IDLE_S = 2.0
_WARM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Size:
    """How much one round of a model asks for; more clients ask for more in all."""

    rounds: int
    prompts_each: int
    prompts_least: int
    turns: int
    conversations_least: int
    prompt_max_tokens: int = 64
    chat_max_tokens: int = 32


FULL = {"tiny": Size(3, 4, 16, 5, 4), "large": Size(2, 2, 6, 3, 2)}
QUICK = {"tiny": Size(1, 1, 4, 2, 1), "large": Size(1, 1, 2, 2, 1, 24, 8)}
FULL_CLIENTS = (1, 4, 16)
QUICK_CLIENTS = (1, 16)


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the plan."""

    model: str
    scenario: str
    clients: int
    size: Size

    @property
    def num_prompts(self) -> int:
        """Of one round of scenario (a)."""
        return max(self.clients * self.size.prompts_each, self.size.prompts_least)

    @property
    def num_conversations(self) -> int:
        """Of one round of scenario (b)."""
        return max(self.clients, self.size.conversations_least)

    @property
    def max_tokens(self) -> int:
        """Of every answer."""
        return self.size.prompt_max_tokens if self.scenario == "a" else self.size.chat_max_tokens


class ModelBench:
    """All cases of one model over two running servers."""

    def __init__(self, servers: list[Server], words: list[str], seed: int, *, restores_space: bool) -> None:
        self._servers = servers
        self._words = words
        self._seed = seed
        self._restores_space = restores_space

    def idle_cpu_share(self) -> dict[str, float]:
        """Cores that each server takes while nobody asks anything: what it costs the other one's rounds."""
        before = [server.cpu_s() for server in self._servers]
        time.sleep(IDLE_S)
        pairs = zip(self._servers, before, strict=True)
        return {server.name: round((server.cpu_s() - used) / IDLE_S, 3) for server, used in pairs}

    def equality(self, max_tokens: int) -> dict[str, int]:
        """How many greedy answers, asked one at a time, are the same text on both servers, but for a leading space."""
        prompts = self._writer("equality").prompts(EQUALITY_PROMPTS)
        texts = []
        for server in self._servers:
            answers = asyncio.run(serve_load.run_prompts(_target(server), prompts, 1, max_tokens))
            texts.append([answer.text.lstrip() for answer in answers])
        return {"equal": sum(ours == theirs for ours, theirs in zip(*texts, strict=True)), "total": len(prompts)}

    def run(self, case: Case) -> list[Row]:
        """Both servers by turns, the first one changing every round."""
        measured = {server.name: Measured(case.max_tokens) for server in self._servers}
        for server in self._servers:
            asyncio.run(self._warm_up(server, case))
        for index in range(case.size.rounds):
            order = self._servers if index % 2 == 0 else self._servers[::-1]
            for server in order:
                writer = self._writer(f"{case.scenario}-{case.clients}-{index}")
                asyncio.run(_round(server, case, writer, measured[server.name]))
        head = {"model": case.model, "scenario": case.scenario, "clients": case.clients}
        return [head | {"server": name} | figures.row() for name, figures in measured.items()]

    async def _warm_up(self, server: Server, case: Case) -> None:
        writer = self._writer(f"warm-{case.scenario}-{case.clients}")
        prompts = writer.prompts(max(case.clients, 2))
        await serve_load.run_prompts(_target(server), prompts, case.clients, _WARM_TOKENS)

    def _writer(self, purpose: str) -> Writer:
        """The same prompts for both servers, and no prompt of one purpose in another."""
        return Writer(self._words, f"{self._seed}-{purpose}", restores_space=self._restores_space)


async def _round(server: Server, case: Case, writer: Writer, measured: Measured) -> None:
    target = _target(server)
    chats: Chats | None = None
    prompts: list[str] = []
    if case.scenario == "a":
        prompts = writer.prompts(case.num_prompts)
    else:
        chats = writer.chats(case.num_conversations, case.size.turns)
        measured.openings.append(await serve_load.open_chats(target, chats, case.max_tokens))
    server_cpu_s, client_cpu_s, started_s = server.cpu_s(), time.process_time(), time.perf_counter()
    answers: list[Answer]
    if chats is None:
        answers = await serve_load.run_prompts(target, prompts, case.clients, case.max_tokens)
    else:
        answers = await serve_load.run_chats(target, chats, case.clients, case.max_tokens)
    wall_s, client_cpu_s = time.perf_counter() - started_s, time.process_time() - client_cpu_s
    measured.add(answers, wall_s, server.cpu_s() - server_cpu_s, client_cpu_s)


def _target(server: Server) -> Target:
    return Target(server.port, server.model)


def run_model(name: str, options: argparse.Namespace, setting: Setting) -> tuple[list[Row], dict[str, Any]]:
    """Rows of one model and what else is known of it."""
    words = list(serve_models.word_tokens(Tokenizer.from_file(str(setting.model_folder / "tokenizer.json"))))
    size = (QUICK if options.quick else FULL)[name]
    rows: list[Row] = []
    with ExitStack() as stack:
        servers = []
        for make in (serve_servers.cidery, serve_servers.peer):
            server = make(setting)
            _say(f"{name}: starting {server.name} on port {server.port}")
            servers.append(stack.enter_context(server))
        bench = ModelBench(servers, words, options.seed, restores_space=name == "large")
        equality = bench.equality(size.prompt_max_tokens)
        _say(f"{name}: {equality['equal']} of {equality['total']} greedy answers are equal")
        notes = {"equality": equality, "idle_cpu_share": bench.idle_cpu_share()}
        for scenario in options.scenarios:
            for clients in options.clients:
                case = Case(name, scenario, clients, size)
                _say(f"{name}: scenario {scenario}, {clients} clients")
                found = bench.run(case)
                _say(serve_report.table(found))
                rows += found
        notes["rss_mib"] = {server.name: round(server.rss_bytes() / 2**20) for server in servers}
    for row in rows:
        row["products_s"] = _products_s(row, setting) if row["scenario"] == "a" else None
    return rows, notes


def _products_s(row: Row, setting: Setting) -> float:
    """The least that matrix products alone take for what the row counts."""
    num_output = row["output_tokens_per_s"] * row["wall_s"]
    num_prompt = row["prompt_tokens_per_s"] * row["wall_s"] * (1 - row["cached_share"])
    environment = serve_servers.peer_environment(setting, serve_servers.most_threads(setting))
    return round(
        serve_products.least_wall_s(setting.model_folder, row["clients"], num_prompt, num_output, environment), 2
    )


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The whole benchmark."""
    commit, dirty = serve_report.commit(REPOSITORY)
    result: dict[str, Any] = {
        "bench": "serve",
        "commit": commit,
        "dirty": dirty,
        "seed": options.seed,
        "quick": options.quick,
        "machine": serve_report.machine(),
    }
    started_s = time.monotonic()
    rows: list[Row] = []
    models: dict[str, Any] = {}
    library = _blas()
    with tempfile.TemporaryDirectory(prefix="cidery-bench-") as scratch:
        for name in options.models:
            folder = Path(scratch) / name
            if name == "tiny":
                num_parameters = serve_models.make_tiny(options.bundled, folder)
            else:
                num_parameters = serve_models.make_large(options.bundled, folder, options.seed)
            setting = Setting(
                model_folder=folder,
                log_folder=Path(scratch),
                blas=library,
                peer_threads=options.peer_threads,
                kv_cache_memory=options.kv_cache_memory,
                peer_compiles=options.peer_compile == "on",
            )
            found, notes = run_model(name, options, setting)
            rows += found
            models[name] = {"parameters": num_parameters} | notes
    ratios = serve_report.ratios(rows)
    return result | {
        "blas": {"library": library.name if library else None, "peer_threads": options.peer_threads},
        "peer": {"options": " ".join(serve_servers.PEER_OPTIONS), "compile": options.peer_compile},
        "models": models,
        "duration_s": round(time.monotonic() - started_s, 1),
        "rows": rows,
        "ratios": ratios,
        "targets": serve_report.targets(ratios),
    }


def main() -> int:
    """Command line."""
    options = _parse()
    # Whoever ends us, the servers end too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        result = run(options)
    except (serve_servers.ServerFailed, ExceptionGroup, serve_load.RequestFailed, TimeoutError) as error:
        # Clients of one group fail alike: the first tells it all.
        _say(f"failed: {error.exceptions[0] if isinstance(error, ExceptionGroup) else error!r}")
        return 1
    except KeyboardInterrupt:
        _say("interrupted")
        return 130
    _say(serve_report.table(result["rows"]))
    for case, figures in result["ratios"].items():
        _say(f"cidery / mlx_lm  {case}: " + "  ".join(f"{k} {v}" for k, v in figures.items() if v is not None))
    for target in result["targets"]:
        _say(f"target {target['target']} >= {target['at_least']}: {target['measured']} {_met(target['met'])}")
    line = json.dumps(result)
    if options.json_out:
        options.json_out.write_text(line + "\n")
    print(line)
    return 0


def _parse() -> argparse.Namespace:
    def listed(kind: type, allowed: tuple[str, ...] | None = None) -> Any:
        def parse(text: str) -> list[Any]:
            values = [kind(value) for value in text.split(",")]
            for value in values:
                if allowed is not None and value not in allowed:
                    raise argparse.ArgumentTypeError(f"{value} is none of {', '.join(allowed)}")
            return values

        return parse

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run of less than two minutes; poor statistics")
    parser.add_argument("--models", type=listed(str, MODELS), default=list(MODELS), help="tiny,large")
    parser.add_argument("--clients", type=listed(int), help="1,4,16; 1,16 with --quick")
    parser.add_argument("--scenarios", type=listed(str, SCENARIOS), default=list(SCENARIOS), help="a,b")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and of the random model")
    parser.add_argument("--json-out", type=Path, help="write the JSON line to this file too")
    parser.add_argument("--peer-threads", type=int, default=1, help="OPENBLAS_NUM_THREADS of mlx_lm.server")
    parser.add_argument("--peer-compile", choices=("on", "off"), default="on", help="mx.compile in mlx_lm.server")
    parser.add_argument("--kv-cache-memory", default="1GiB", help="Cidery's KV cache")
    bundled = REPOSITORY / "cluster" / "bundled" / "cidery-tiny"
    parser.add_argument("--bundled", type=Path, default=bundled, help="folder of the bundled model")
    options = parser.parse_args()
    options.clients = options.clients or list(QUICK_CLIENTS if options.quick else FULL_CLIENTS)
    return options


def _blas() -> Path | None:
    """The library that Cidery's worker loads, for the peer to preload; None where MLX brings a fast one."""
    if sys.platform != "linux":
        return None
    from worker import blas

    return blas.library_path()


def _met(met: bool) -> str:
    return "met" if met else "MISSED"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
