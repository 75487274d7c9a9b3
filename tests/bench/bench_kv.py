"""What the KV manager costs: CPU time a block, a request and a step, beside the raw hash in the same run.

    python -m tests.bench.bench_kv
    python -m tests.bench.bench_kv --quick

One JSON line on stdout, a table on stderr. CPU time of this process, the best of several repetitions. `reference_us` is
what vLLM 0.33.0 took for the same case on a machine of this kind, best of several: it is no run of this program.
"""

import argparse
import hashlib
import json
import random
import sys
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cluster.event_wire import Batch, pack
from cluster.kv.hashing import HASH_BYTES, hash_blocks, join_hashes, root_hash
from cluster.kv.manager import KVCacheManager
from cluster.kv.planner import plan_layout
from cluster.kv.points import PointKind
from cluster.kv.spec import FullAttentionSpec, LayerSpec, SlidingWindowSpec
from tests.bench import serve_report

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = root_hash(model="m", tokenizer="t", kv_format="f", block_size=16)
FULL = FullAttentionSpec(1, 8)
MODELS: dict[str, list[LayerSpec]] = {
    "full": [FULL],
    "full+window": [FULL, SlidingWindowSpec(1, 8, 1024)],
    "full+5window": [FULL, *[SlidingWindowSpec(1, 8, 1024)] * 5],
}
# Growth in groups, of one window and of windows that each begin elsewhere.
GROUPS = {
    **MODELS,
    "full+3window": [FULL, *[SlidingWindowSpec(1, 8, 1024)] * 3],
    "full+3 own windows": [FULL, *[SlidingWindowSpec(1, 8, 1024 + 16 * i) for i in range(3)]],
    "full+5 own windows": [FULL, *[SlidingWindowSpec(1, 8, 1024 + 16 * i) for i in range(5)]],
}
PROMPT = 32_768
CHUNK = 2048

Row = dict[str, Any]
KEPT: list["Prompts"] = []


def ledger(model: str, num_blocks: int) -> KVCacheManager:
    """With so many blocks for each group."""
    specs = GROUPS[model]
    budget = num_blocks * 16 * FULL.token_bytes * len(specs)
    return KVCacheManager(plan_layout(specs, kv_budget_bytes=budget, max_model_len=64, max_in_flight_tokens=2 * CHUNK))


def best_of(repetitions: int, run: Callable[[], None], prepare: Callable[[], None] = lambda: None) -> float:
    """Least CPU seconds of a run."""
    least = float("inf")
    for _ in range(repetitions):
        prepare()
        started = time.process_time()
        run()
        least = min(least, time.process_time() - started)
    return least


def floor_and_hash(repetitions: int) -> list[Row]:
    """The chain's own digests over packed tokens, and the product's."""
    tokens = list(range(PROMPT))
    packed = array("I", tokens).tobytes()

    def floor() -> None:
        parent = bytes(ROOT)
        for at in range(0, len(packed), 64):
            parent = hashlib.blake2b(parent + packed[at : at + 64], digest_size=16).digest()

    num_blocks = PROMPT // 16
    rows = [
        {"case": "hash 32k prompt: floor", "us": best_of(repetitions, floor) / num_blocks * 1e6, "reference_us": None},
        {
            "case": "hash 32k prompt",
            "us": best_of(repetitions, lambda: void(hash_blocks(ROOT, tokens, 16))) / num_blocks * 1e6,
            "reference_us": 3.4,
        },
    ]
    return [row | {"unit": "block"} for row in rows]


def void(_: object) -> None:
    """Throws a value away."""


class Prompts:
    """Runs fresh or known 32k prompts through one ledger."""

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv
        self.num_started = 0
        self.hashes = b""
        self.num_event_bytes = 0

    def fresh(self) -> None:
        first = self.num_started * PROMPT
        self.hashes = join_hashes(hash_blocks(ROOT, range(first, first + PROMPT), 16))

    def run(self) -> None:
        kv, hashes = self.kv, self.hashes
        self.num_started += 1
        computed = kv.get_computed_blocks(hashes, PROMPT)
        assert kv.can_allocate(computed, PROMPT)
        kv.start(self.num_started, computed, hashes)
        kv.release_sources()
        position = computed.num_tokens
        while position < PROMPT - 1:
            end = min(position + CHUNK, PROMPT)
            assert kv.allocate(self.num_started, end, position) is not None
            kv.register(self.num_started, position // 16, hashes[position:end])
            position = end
        kv.free(self.num_started, PROMPT)

    def run_and_send(self) -> None:
        self.run()
        self.num_event_bytes = len(pack(Batch("mac", 1, 0, self.kv.take_events())))


def prompts(repetitions: int) -> list[Row]:
    """Allocate, register, evict; and the same prompt again."""
    rows: list[Row] = []
    references = {"full": (3.3, 1.7), "full+window": (2.7, 0.8), "full+5window": (2.3, 0.22)}
    for model in MODELS:
        work = Prompts(ledger(model, 6000))
        for _ in range(4):
            work.fresh()
            work.run()
        num_blocks = PROMPT // 16 * len(MODELS[model])
        seconds = best_of(repetitions, work.run, work.fresh)
        evicting, hit = references[model]
        rows.append(_per_block(f"32k prompt, evicting, {model}", seconds, num_blocks, evicting))
        rows.append(_per_block(f"32k prompt again, {model}", best_of(repetitions, work.run), num_blocks, hit))
        work.kv.take_events()
        with_events = best_of(repetitions, work.run_and_send, work.fresh) - seconds
        row = _per_block(f"its events, {model}", max(0.0, with_events), num_blocks, 17.7)
        rows.append(row | {"wire_bytes": work.num_event_bytes / (2 * num_blocks)})
    return rows


def _per_block(case: str, seconds: float, num_blocks: int, reference_us: float) -> Row:
    return {"case": case, "us": seconds / num_blocks * 1e6, "unit": "block", "reference_us": reference_us}


def decode(counts: Sequence[int]) -> list[Row]:
    """A step of running requests that each need room for one token more: every sixteen steps a block in every group,
    and a block that has left its window in every window group."""
    references = {"full": 12.0, "full+window": 32.0, "full+5window": 66.0}
    rows: list[Row] = []
    for model in GROUPS:
        for num_running in counts:
            kv = ledger(model, 220 * num_running)
            for seq_id in range(num_running):
                kv.start(seq_id, kv.get_computed_blocks(b"", 3000))
                for length in (1500, 3000, 3016, 3032):
                    kv.allocate(seq_id, length, length - 16)
            started = time.process_time()
            for length in range(3033, 3033 + 64):
                for seq_id in range(num_running):
                    kv.allocate(seq_id, length, length - 2)
            seconds = (time.process_time() - started) / 64 / num_running
            reference = references.get(model) if num_running == 256 else None
            case = f"decode, {num_running} running, {model}"
            rows.append({"case": case, "us": seconds * 1e6, "unit": "request", "reference_us": reference})
    return rows


def growth(sizes: Sequence[int]) -> list[Row]:
    """A ledger of so many blocks, all cached: the cost of one more prompt, and bytes a block."""
    rows: list[Row] = []
    for num_blocks in sizes:
        tracemalloc.start()
        filled(num_blocks)
        num_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        work = filled(num_blocks)
        seconds = best_of(3, work.run, work.fresh)
        row = _per_block(f"32k prompt, evicting, {num_blocks} blocks", seconds, PROMPT // 16, 3.3)
        rows.append(row | {"bytes_per_block": num_bytes / num_blocks})
    return rows


def sessions(counts: Sequence[int]) -> list[Row]:
    """As many cached sessions of 960 tokens of their own after a shared prefix: one more evicts one.

    Every so often what is cached is ranked anew; the worst request pays for that.
    """
    rows: list[Row] = []
    for model in MODELS:
        for num_sessions in counts:
            work = Sessions(model, num_sessions)
            for _ in range(num_sessions + 8):
                work.run()
            times: list[float] = []
            for _ in range(max(256, num_sessions // 16)):
                started = time.process_time()
                work.run()
                times.append(time.process_time() - started)
            case = f"session of 60 new blocks, {num_sessions} cached, {model}"
            us = sum(times) / len(times) * 1e6
            rows.append({"case": case, "us": us, "unit": "request", "worst_us": max(times) * 1e6})
    return rows


class Sessions:
    """Short requests with a shared system prompt."""

    def __init__(self, model: str, num_sessions: int) -> None:
        self.kv = ledger(model, 60 * num_sessions + 400)
        self.num_started = 0
        self.random = random.Random(0)
        self.system = self.random.randbytes(100 * HASH_BYTES)

    def run(self) -> None:
        kv, hashes = self.kv, self.system + self.random.randbytes(60 * HASH_BYTES)
        self.num_started += 1
        num_tokens = 160 * 16
        computed = kv.get_computed_blocks(hashes, num_tokens + 1)
        assert kv.can_allocate(computed, num_tokens)
        kv.start(self.num_started, computed, hashes, points={1600: PointKind.HEAD, num_tokens: PointKind.PROMPT_END})
        kv.release_sources()
        assert kv.allocate(self.num_started, num_tokens, computed.num_tokens) is not None
        kv.register(self.num_started, computed.num_tokens // 16, hashes[computed.num_tokens :])
        kv.free(self.num_started, num_tokens)
        kv.take_events()


def filled(num_blocks: int) -> Prompts:
    """A ledger whose every block is cached; kept, or its memory would be gone when it is measured."""
    work = Prompts(ledger("full", num_blocks))
    for _ in range(num_blocks // (PROMPT // 16) + 1):
        work.fresh()
        work.run()
        work.kv.take_events()
    work.hashes = b""
    KEPT[:] = [work]
    return work


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions")
    options = parser.parse_args()
    repetitions = 3 if options.quick else 9
    rows = [
        *floor_and_hash(repetitions),
        *prompts(repetitions),
        *decode((1, 256) if options.quick else (1, 32, 256, 1024)),
        *sessions((100,) if options.quick else (100, 1_000, 10_000)),
        *growth((4_000, 40_000) if options.quick else (4_000, 40_000, 400_000, 1_000_000)),
    ]
    table = Table(title="KV manager, CPU time")
    for head in ("case", "us", "per", "worst us", "vLLM 0.33 us", "bytes"):
        table.add_column(head, justify="left" if head in ("case", "per") else "right")
    for row in rows:
        reference = row.get("reference_us")
        size = row.get("wire_bytes") or row.get("bytes_per_block")
        cells = ("" if reference is None else f"{reference:.2f}", f"{size:.0f}" if size else "")
        worst = f"{row['worst_us']:.0f}" if "worst_us" in row else ""
        table.add_row(row["case"], f"{row['us']:.2f}", row["unit"], worst, *cells)
    Console(stderr=True, width=110).print(table)
    commit, is_dirty = serve_report.commit(REPOSITORY)
    about = {"commit": commit, "dirty": is_dirty, "machine": serve_report.machine()}
    sys.stdout.write(json.dumps({"bench": "kv", **about, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
