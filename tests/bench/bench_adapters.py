"""Sixteen requests over several adapters in one batch, beside mlx-lm, which runs one adapter at a time.

    python -m tests.bench.bench_adapters
    python -m tests.bench.bench_adapters --requests 16 --rounds 3 --kinds full moe

One JSON line on stdout, a table on stderr. Each side runs in processes of its own, in turns, both over the same BLAS.
The peer is mlx-lm's BatchGenerator: with one adapter loaded, all requests in one batch; with several, a batch for each
adapter, one after the other. `base beside` is what requests without an adapter pay for the adapters that are loaded.
Rank 8 on every linear layer; random float32 weights: speed doesn't ask what they say. Best of the rounds.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench import sides
from tests.bench.bench_engine import KINDS

# Case -> how many adapters are loaded, and how many the requests are spread over (0: they use none).
CASES = {"no adapter": (0, 0), "base beside 4": (4, 0), "1 adapter": (1, 1), "4 adapters": (4, 4), "8 adapters": (8, 8)}
SIDES = ("cidery", "mlx-lm")
_RANK = 8
_PROMPT_TOKENS = 64
_NEW_TOKENS = 32

Row = dict[str, Any]


def main() -> None:
    """Run all cases, or, as a child, those of one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=("full", "moe"), default=["full", "moe"])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        sides.begin_side()
        sides.tell(_measured(options.side, options.kinds[0], options.requests))
        return
    best: dict[tuple[str, str, str], Row] = {}
    for _ in range(options.rounds):
        for kind in options.kinds:
            for side in SIDES:
                arguments = ["--kinds", kind, "--requests", str(options.requests)]
                for row in sides.run_side("bench_adapters", side, arguments):
                    key = (kind, side, row["case"])
                    known = best.get(key, row)
                    best[key] = row if row["tokens_per_cpu_s"] >= known["tokens_per_cpu_s"] else known
    sides.print_report("adapters", list(best.values()), requests=options.requests, rounds=options.rounds)
    _show(best, options.kinds)


def _measured(side: str, kind: str, num_requests: int) -> Iterator[Row]:
    from tests.bench.engine_sides import make_model
    from tests.worker.adapter_folders import write_adapter
    from worker import machine

    machine.prepare()
    rng = random.Random(0)
    prompts = [[rng.randrange(1, 8192) for _ in range(_PROMPT_TOKENS)] for _ in range(num_requests)]
    with tempfile.TemporaryDirectory() as root:
        folders = [
            write_adapter(Path(root) / str(seed), make_model(KINDS[kind]), rank=_RANK, seed=seed) for seed in range(8)
        ]
        for case, (num_loaded, num_used) in CASES.items():
            run = _cidery if side == "cidery" else _mlx_lm
            seconds, cpu_s, num_tokens = run(kind, folders[:num_loaded], num_used, prompts)
            row = {"tokens_per_s": num_tokens / seconds, "tokens_per_cpu_s": num_tokens / cpu_s}
            yield {"kind": kind, "side": side, "case": case} | row


def _cidery(kind: str, folders: list[Path], num_used: int, prompts: list[list[int]]) -> tuple[float, float, int]:
    from protos.cidery.worker.v1 import worker_pb2
    from tests.bench.engine_sides import make_model
    from tests.golden.in_process import InProcessMac

    mac = InProcessMac(
        make_model(KINDS[kind]), KINDS[kind][1], kv_budget_bytes=1 << 28, max_num_batched_tokens=512, max_num_seqs=64
    )
    for number, folder in enumerate(folders):
        loaded = mac.engine.load_adapter(worker_pb2.LoadAdapter(digest=f"a{number}", folder=str(folder)))
        assert not loaded.refusal, loaded.refusal

    def run(name: str) -> int:
        for at, prompt in enumerate(prompts):
            adapter = f"a{at % num_used}" if num_used else ""
            tokens = [at + 1, *prompt] if name == "warm" else prompt
            mac.add(f"{name}-{at}", tokens, _NEW_TOKENS, num_top_logprobs=None, adapter=adapter)
        mac.run()
        return sum(len(answer.tokens) for key, answer in mac.answers.items() if key.startswith(name))

    run("warm")
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    num_tokens = run("timed")
    return time.perf_counter() - started_s, time.process_time() - started_cpu_s, num_tokens


def _mlx_lm(kind: str, folders: list[Path], num_used: int, prompts: list[list[int]]) -> tuple[float, float, int]:
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.tuner.utils import load_adapters

    from tests.bench.engine_sides import make_model

    models = [load_adapters(make_model(KINDS[kind]), str(folder)) for folder in folders[:num_used]]
    models = models or [make_model(KINDS[kind])]
    for model in models:
        model.eval()

    def run() -> int:
        num_tokens = 0
        for number, model in enumerate(models):
            mine = prompts[number :: len(models)]
            generator = BatchGenerator(model, prefill_step_size=512, completion_batch_size=64)
            generator.insert(mine, max_tokens=[_NEW_TOKENS] * len(mine))
            while num_tokens < _NEW_TOKENS * sum(len(prompts[each :: len(models)]) for each in range(number + 1)):
                num_tokens += len(generator.next()[1])
        return num_tokens

    run()
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    num_tokens = run()
    return time.perf_counter() - started_s, time.process_time() - started_cpu_s, num_tokens


def _show(best: dict[tuple[str, str, str], Row], kinds: list[str]) -> None:
    table = Table("kind", "case", "tok/s", "mlx-lm", "tok/cpu s", "mlx-lm", "ratio")
    for kind in kinds:
        for case in CASES:
            ours, theirs = (best[kind, side, case] for side in SIDES)
            cells = [f"{row['tokens_per_s']:.0f}" for row in (ours, theirs)]
            cells += [f"{row['tokens_per_cpu_s']:.0f}" for row in (ours, theirs)]
            table.add_row(kind, case, *cells, f"{ours['tokens_per_cpu_s'] / theirs['tokens_per_cpu_s']:.2f}")
    Console(stderr=True).print(table)


if __name__ == "__main__":
    main()
