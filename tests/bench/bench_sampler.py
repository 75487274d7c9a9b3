"""What sampling costs a step: 32 rows over a vocabulary of 152 thousand tokens, feature by feature and in a mix.

    python -m tests.bench.bench_sampler
    python -m tests.bench.bench_sampler --quick

One JSON line on stdout, a table on stderr. `host_ms` is until the graph stands, `cpu_ms` the CPU time of the whole
process until the tokens are known; the least of several repetitions in shuffled order. Beside it in the same run:
the plain path (temperature 1, nothing else) and mlx-lm's samplers and logits processors, one closure a row as its
BatchGenerator runs them where rows differ. On a Mac a GPU does the vocabulary's part; these are figures of a CPU.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from rich.console import Console
from rich.table import Table

from cluster import grammars
from cluster.config import bundled_model
from protos.cidery.v1.sampling_pb2 import SamplingParams
from protos.cidery.worker.v1.worker_pb2 import NewSequence
from tests.bench import serve_report
from worker.evaluation import Inline
from worker.grammar import GrammarTable
from worker.models import SamplingDefaults
from worker.row_rules import RowRules, make_rules, shape
from worker.sampler import Draw, RowSampling
from worker.sequences import row_sampling

REPOSITORY = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 151_936
PROMPT_TOKENS = 2_000
ANSWER_TOKENS = 500
END = 2

Row = tuple[RowSampling, RowRules | None]


def wide_tokenizer(folder: Path) -> Path:
    """The bundled tokenizer with joined pairs of its tokens up to the size of a large model's vocabulary."""
    definition = json.loads((Path(bundled_model()) / "tokenizer.json").read_text())
    vocab, merges = definition["model"]["vocab"], definition["model"]["merges"]
    rng = random.Random(0)
    pieces = [token for token in vocab if not token.startswith("<|") and len(token) <= 6]
    while len(vocab) < VOCAB_SIZE:
        left, right = rng.choice(pieces), rng.choice(pieces)
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right] if isinstance(merges[0], list) else f"{left} {right}")
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    return folder


def logits_like_a_models(rows: int) -> mx.array:
    """A few likely tokens and a long tail: nine tenths of the probability on the first hundred."""
    rng = np.random.RandomState(0)
    ranked = -1.7 * np.log(np.arange(1, VOCAB_SIZE + 1))
    logits = np.stack([ranked[rng.permutation(VOCAB_SIZE)] + rng.randn(VOCAB_SIZE) * 0.5 for _ in range(rows)])
    return mx.array(logits.astype(np.float32)).astype(mx.bfloat16)


class Cases:
    """Rows with the features of each case, and the histories that their rules need."""

    def __init__(self, num_rows: int, grammar_table: GrammarTable) -> None:
        self.num_rows = num_rows
        self.grammar_table = grammar_table
        self._rng = random.Random(1)

    def rows(self, kinds: Sequence[dict[str, Any]]) -> list[Row]:
        """As many as a step has, the kinds in turn."""
        return [self._row(at, kinds[at % len(kinds)]) for at in range(self.num_rows)]

    def _row(self, seed: int, fields: dict[str, Any]) -> Row:
        params = SamplingParams(**({"temperature": 1.0, "seed": seed} | fields))
        # Text repeats itself: so many tokens have about a third of them different.
        tokens = [int(VOCAB_SIZE * self._rng.random() ** 3) for _ in range(PROMPT_TOKENS + ANSWER_TOKENS)]
        if params.compiled_grammar:
            tokens = tokens[:PROMPT_TOKENS]
        message = NewSequence(
            seq_id=1, token_ids=tokens, num_prompt_tokens=PROMPT_TOKENS, sampling=params, stop_token_ids=[END]
        )
        return row_sampling(1, params, SamplingDefaults(), [END]), make_rules(message, VOCAB_SIZE, self.grammar_table)


def features() -> dict[str, list[dict[str, Any]]]:
    """Kinds of rows by case."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    held = {"compiled_grammar": grammars.json_schema("f", schema).source}
    text = {"compiled_grammar": grammars.regex("f", r"(.|\n)*").source}
    biased = {"logit_bias": {at * 11: 1.0 for at in range(300)}}
    penalised = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
    truncated = {"top_k": 20, "top_p": 0.95}
    mix = [{}, {"temperature": 0.0}, truncated, penalised | {"top_p": 0.9}, biased, held | {"temperature": 0.7}]
    mix += [{"min_p": 0.05}, {"xtc_probability": 0.5, "top_p": 0.95}]
    return {
        "plain": [{}],
        "greedy": [{"temperature": 0.0}],
        "top_k 20, top_p 0.95": [truncated],
        "top_p 0.9": [{"top_p": 0.9}],
        "top_p 0.9999: beyond the candidates": [{"top_p": 0.9999}],
        "min_p 0.05": [{"min_p": 0.05}],
        "xtc": [{"xtc_probability": 1.0}],
        "three penalties": [penalised],
        "one row of 32 with penalties": [penalised, *[{}] * 31],
        "300 biases": [biased],
        "grammar, few tokens allowed": [held],
        "grammar, most tokens allowed": [text],
        "top 5 log-probabilities": [{"num_top_logprobs": 5}],
        "mix of 8 kinds": mix,
    }


def draw(logits: mx.array, rows: Sequence[Row], table: GrammarTable) -> float:
    """One step's sampling; returns seconds until the graph stood. Masks are computed afresh."""
    for _, rules in rows:
        matcher = rules.grammar.matcher() if rules is not None and rules.grammar is not None else None
        if matcher is not None:
            matcher.reset()
    started_s = time.perf_counter()
    positions = [PROMPT_TOKENS + ANSWER_TOKENS] * len(rows)
    shaped = shape(logits, [rules for _, rules in rows], table, Inline().start)
    drawn = Draw(logits, [row for row, _ in rows], positions, shaped)
    host_s = time.perf_counter() - started_s
    mx.eval(*drawn.outputs)
    drawn.token_ids()
    drawn.logprobs()
    return host_s


def closures(logits: mx.array, kinds: Sequence[dict[str, Any]], num_rows: int) -> Callable[[], float]:
    """mlx-lm's way with the same features, as far as it has them."""
    history = mx.array(np.random.RandomState(0).randint(0, VOCAB_SIZE, PROMPT_TOKENS + ANSWER_TOKENS))
    rows = []
    for at in range(num_rows):
        fields = kinds[at % len(kinds)]
        sampler = make_sampler(
            temp=fields.get("temperature", 1.0),
            top_p=fields.get("top_p", 0.0),
            min_p=fields.get("min_p", 0.0),
            top_k=fields.get("top_k", 0),
            xtc_probability=fields.get("xtc_probability", 0.0),
            xtc_threshold=0.1,
        )
        processors = make_logits_processors(
            logit_bias=fields.get("logit_bias"),
            repetition_penalty=fields.get("repetition_penalty"),
            repetition_context_size=PROMPT_TOKENS + ANSWER_TOKENS,
            presence_penalty=fields.get("presence_penalty"),
            frequency_penalty=fields.get("frequency_penalty"),
        )
        rows.append((sampler, processors))

    def run() -> float:
        started_s = time.perf_counter()
        tokens = []
        for at, (sampler, processors) in enumerate(rows):
            own = logits[at : at + 1]
            for processor in processors:
                own = processor(history, own)
            tokens.append(sampler(own - mx.logsumexp(own, axis=-1, keepdims=True)))
        host_s = time.perf_counter() - started_s
        mx.eval(tokens)
        return host_s

    return run


def measure(runs: dict[str, Callable[[], float]], repetitions: int) -> dict[str, dict[str, float]]:
    """Least figures of each, in an order that changes."""
    least: dict[str, dict[str, float]] = {}
    rng = random.Random(2)
    for repetition in range(repetitions + 1):
        for name in rng.sample(list(runs), len(runs)):
            cpu_s, started_s = time.process_time(), time.perf_counter()
            host_s = runs[name]()
            wall_s = time.perf_counter() - started_s
            found = {"host_ms": host_s * 1e3, "cpu_ms": (time.process_time() - cpu_s) * 1e3, "wall_ms": wall_s * 1e3}
            if repetition:  # the first warms up
                before = least.get(name, found)
                least[name] = {key: min(value, before[key]) for key, value in found.items()}
    return least


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rows and repetitions")
    parser.add_argument("--folder", type=Path, default=Path("/tmp"), help="for a tokenizer of this size")
    options = parser.parse_args()
    num_rows = 8 if options.quick else 32
    table = GrammarTable(wide_tokenizer(options.folder), VOCAB_SIZE, [END])
    cases = Cases(num_rows, table)
    logits = logits_like_a_models(num_rows)
    mx.eval(logits)
    runs: dict[str, Callable[[], float]] = {}
    for name, kinds in features().items():
        runs[name] = partial(draw, logits, cases.rows(kinds), table)
        if name in ("plain", "top_k 20, top_p 0.95", "top_p 0.9", "three penalties", "300 biases"):
            runs[f"mlx-lm: {name}"] = closures(logits, kinds, num_rows)
    found = measure(runs, 2 if options.quick else 7)
    plain = found["plain"]["cpu_ms"]
    report = Table(title=f"sampling, {num_rows} rows x {VOCAB_SIZE} tokens")
    for head in ("case", "host ms", "cpu ms", "of plain"):
        report.add_column(head, justify="left" if head == "case" else "right")
    rows = []
    for name in runs:
        ratio = found[name]["cpu_ms"] / plain
        rows.append({"case": name} | {key: round(value, 3) for key, value in found[name].items()} | {"of_plain": ratio})
        report.add_row(name, f"{found[name]['host_ms']:.2f}", f"{found[name]['cpu_ms']:.1f}", f"{ratio:.2f}")
    Console(stderr=True, width=100).print(report)
    commit, is_dirty = serve_report.commit(REPOSITORY)
    about = {"commit": commit, "dirty": is_dirty, "seed": 0, "machine": serve_report.machine()}
    sys.stdout.write(json.dumps({"bench": "sampler", **about, "num_rows": num_rows, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
