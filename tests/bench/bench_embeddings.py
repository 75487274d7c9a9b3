"""Pooled embeddings through the engine's batches, beside mlx-lm's models: texts and tokens a second.

    python -m tests.bench.bench_embeddings
    python -m tests.bench.bench_embeddings --kinds full mamba2 --texts 64 --rounds 3

One JSON line on stdout, a table on stderr. The peer is mlx-lm's own model, of which the output of the last layer is
averaged over a text: one text at a time, and in batches that are padded to their longest, in the order of arrival and
sorted by length, which a server could do only with texts that are there already. `short` are texts of 8 to 64 tokens,
`ragged` of 16 to 512. The engine computes 512 tokens a step, whatever texts they are of. Each side runs in processes of
its own, in turns. Wall time is the best of the rounds; so is CPU time, which a busy machine disturbs less. The vectors
of all are compared with those of one text at a time. Random float32 weights: speed doesn't ask what they say.
"""

import argparse
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench import sides

KIND_NAMES = ("full", "window", "delta", "mamba2", "moe")
SIDES = ("cidery", "mlx-lm")
# Name -> the least and the most tokens of a text.
LENGTHS = {"short": (8, 64), "ragged": (16, 512)}
# Of the largest element of a vector: what different batches may round differently.
_TOLERANCE = 1e-4

Row = dict[str, Any]


def main() -> None:
    """Run all cases, or, as a child, those of one side and kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KIND_NAMES, default=["full", "window", "mamba2"])
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=list(LENGTHS))
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--padded", type=int, default=16, help="texts of a padded batch")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        sides.begin_side()
        from tests.bench import embeddings_sides

        sides.tell(embeddings_sides.measure(options))
        return
    rows = _compare(options)
    same_vectors = all(row["error"] <= _TOLERANCE for row in rows)
    about = {"rounds": options.rounds, "texts": options.texts, "padded": options.padded}
    sides.print_report("embeddings", rows, same_vectors=same_vectors, **about)
    _show(rows)


def _compare(options: argparse.Namespace) -> list[Row]:
    """The best round of each case, with the largest difference of its vectors from those of one text at a time."""
    best: dict[tuple[str, str, str], Row] = {}
    vectors: dict[tuple[str, str, str], list[list[float]]] = {}
    for _ in range(options.rounds):
        for kind in options.kinds:
            for side in SIDES:
                for row in sides.run_side("bench_embeddings", side, _arguments(options, kind)):
                    key = (kind, row["lengths"], row["how"])
                    vectors[key] = row.pop("vectors")
                    known = best.setdefault(key, {"kind": kind} | row)
                    for name in ("texts_per_s", "tokens_per_s", "texts_per_cpu_s", "tokens_per_cpu_s"):
                        known[name] = max(known[name], row[name])
    for (kind, lengths, how), row in best.items():
        row["error"] = _error(vectors[kind, lengths, how], vectors[kind, lengths, "mlx-lm, one by one"])
    return list(best.values())


def _arguments(options: argparse.Namespace, kind: str) -> list[str]:
    lengths = ["--lengths", *options.lengths]
    return ["--kinds", kind, *lengths, "--texts", str(options.texts), "--padded", str(options.padded)]


def _error(ours: list[list[float]], theirs: list[list[float]]) -> float:
    """The largest difference, as a part of the largest element."""
    return max(
        abs(one - other) / max(map(abs, expected))
        for vector, expected in zip(ours, theirs, strict=True)
        for one, other in zip(vector, expected, strict=True)
    )


def _show(rows: list[Row]) -> None:
    columns = ("texts/s", "tok/s", "ratio", "texts/cpu s", "tok/cpu s", "ratio", "error")
    table = Table("kind", "texts", "how", *columns)
    ours = {(row["kind"], row["lengths"]): row for row in rows if row["how"] == "cidery"}
    for row in sorted(rows, key=lambda row: (row["kind"], row["lengths"])):
        cells = [row["kind"], row["lengths"], row["how"]]
        for unit in ("s", "cpu_s"):
            cells += [f"{row[f'texts_per_{unit}']:.1f}", f"{row[f'tokens_per_{unit}']:.0f}"]
            # Of the engine by this one.
            cells.append(f"{ours[row['kind'], row['lengths']][f'texts_per_{unit}'] / row[f'texts_per_{unit}']:.2f}")
        table.add_row(*cells, f"{row['error']:.0e}")
    Console(stderr=True, width=130).print(table)


if __name__ == "__main__":
    main()
