"""Guessing tokens, beside the same engine without and mlx-lm's own speculative generation: tokens a second.

    python -m tests.bench.bench_speculation
    python -m tests.bench.bench_speculation --modes off auto --batches 1 --rounds 3

One JSON line on stdout, a table on stderr. The model is the bundled one in the body of a larger one (see
`speculation_models`); what guesses for it is the bundled model with noise in its weights. Texts: `copy` asks again for
a story that stands in the conversation, so that the answer repeats it; `unrelated` draws an answer at temperature 1
after random tokens. Each side runs in processes of its own, in turns. mlx-lm has no speculation for batches, so it has
rows for one request only; where one runs at a time, four do so in turn. Measured is decoding: of one request from when
its first guesses have been verified, so that its prompt has run in both models; of several from when all have a first
token. Wall time is the best of the rounds; so is CPU time, which a busy machine disturbs less. Greedy tokens of all
modes are compared with mlx-lm's.
"""

import argparse
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench import sides

MODES = ("off", "ngram", "draft", "auto")
SIDES = ("cidery", "mlx-lm")
TEXTS = ("copy", "unrelated")
BATCHES = (1, 4, 16)

_PER_STEP = ("tokens_per_step", "cpu_ms_per_step")
Row = dict[str, Any]


def main() -> None:
    """Run all cases, or, as a child, those of one side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--guesses", nargs="+", type=int, default=[8], help="of a request in a step, at most")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        sides.begin_side()
        from tests.bench import speculation_sides

        sides.tell(speculation_sides.measure(options))
        return
    rows = _compare(sys.argv[1:], options.rounds)
    told = [{name: value for name, value in row.items() if name != "tokens"} for row in rows]
    sides.print_report("speculation", told, rounds=options.rounds, same_tokens_as_mlx_lm=_same_tokens(rows))
    _show(rows)


def _compare(arguments: list[str], rounds: int) -> list[Row]:
    """The best round of each case."""
    best: dict[tuple[Any, ...], Row] = {}
    for _ in range(rounds):
        for side in SIDES:
            for row in sides.run_side("bench_speculation", side, arguments):
                key = _case(row | {"side": side})
                known = best.setdefault(key, {"side": side} | row)
                for name in ("tokens_per_s", "tokens_per_cpu_s"):
                    known[name] = max(known[name], row[name])
                known["cpu_ms_per_step"] = min(known["cpu_ms_per_step"], row["cpu_ms_per_step"])
    return list(best.values())


def _case(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("text", "batch", "side", "mode", "guesses"))


def _same_tokens(rows: list[Row]) -> bool:
    """Of the greedy answers, whatever the mode and the batch."""
    answers: dict[int, list[int]] = {}
    for row in rows:
        for number, tokens in enumerate(row["tokens"] if row["text"] == "copy" else []):
            if answers.setdefault(number, tokens) != tokens:
                return False
    return True


def _show(rows: list[Row]) -> None:
    columns = (
        "guesses",
        "tok/s",
        "by off",
        "by mlx-lm",
        "tok/cpu s",
        "by off",
        "by mlx-lm",
        "true",
        "tok/step",
        "ms/step",
    )
    table = Table("text", "batch", "side", "mode", *columns)
    by_case = {_case(row): row for row in rows}
    for row in sorted(rows, key=lambda row: (row["text"], row["batch"])):
        cells = [row["text"], str(row["batch"]), row["side"], row["mode"], str(row["guesses"])]
        plain = by_case.get((row["text"], row["batch"], row["side"], "off", 0))
        # Of the same mode, or, where it has none, of its own best: by a draft model.
        peer = next(
            (
                by_case[key]
                for mode in (row["mode"], "draft")
                if (key := (row["text"], row["batch"], "mlx-lm", mode, row["guesses"])) in by_case
            ),
            None,
        )
        for name in ("tokens_per_s", "tokens_per_cpu_s"):
            cells += [f"{row[name]:.1f}", *(f"{row[name] / base[name]:.2f}" if base else "-" for base in (plain, peer))]
        true = row["came_true"]
        cells += ["-" if true is None else f"{true:.2f}", *(f"{row[name]:.1f}" for name in _PER_STEP)]
        table.add_row(*cells)
    Console(stderr=True, width=130).print(table)


if __name__ == "__main__":
    main()
