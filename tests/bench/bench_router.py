"""What the router costs: a look-up, a whole decision with its booking, events, memory, a rebuild after a restart.

    python -m tests.bench.bench_router
    python -m tests.bench.bench_router --quick

One JSON line on stdout, a table on stderr. Decisions are timed one by one, with block hashes that were just made, as a
message's are; every Mac holds a prompt whose first half all share, and half of what is asked is known to somebody. p50
and p99 are of wall time, `cpu_us` is the mean of CPU time. Memory is what the process grew by.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from cluster.event_wire import Batch, pack, unpack
from cluster.kv.events import BlocksRemoved, BlocksStored
from cluster.kv.hashing import HASH_BYTES, root_hash
from cluster.kv.planner import plan_layout
from cluster.kv.spec import (
    FullAttentionSpec,
    LayerSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    StateTensor,
)
from cluster.routing.config import RoutingConfig
from cluster.routing.decision import RouteQuery
from cluster.routing.digests import hashes_in
from cluster.routing.mac import MacInfo
from cluster.routing.router import Router
from tests.bench import serve_report

REPOSITORY = Path(__file__).resolve().parents[2]
ROOT = root_hash(model="m", tokenizer="t", kv_format="f", block_size=16)
FULL = FullAttentionSpec(1, 8)
MODELS: dict[str, list[LayerSpec]] = {
    "full": [FULL],
    "full+window": [FULL, SlidingWindowSpec(1, 8, 1024)],
    "full+window+state": [FULL, SlidingWindowSpec(1, 8, 1024), RecurrentStateSpec("s", (StateTensor((64,), 2),))],
}
SEED = 1
# Live bookings of each Mac while decisions are timed.
BOOKED = 6

Row = dict[str, Any]


class Fleet:
    """A router whose Macs hold one prompt each, the first half of it shared by all."""

    def __init__(self, model: str, num_macs: int, num_blocks: int, num_others: int = 0, policy: str = "") -> None:
        self.random = random.Random(SEED)
        layout = plan_layout(MODELS[model], kv_budget_bytes=1 << 30, max_model_len=1 << 20)
        self.router = Router(RoutingConfig(policy=policy) if policy else None)
        shared = self.random.randbytes(num_blocks // 2 * HASH_BYTES)
        self.held: list[bytes] = []
        self.num_blocks = num_blocks
        for number in range(num_macs):
            info = MacInfo(f"mac-{number}", 1, "m", ROOT, 16, "a:1", 1 << 20, 1 << 20, layout.groups, 1_600_000)
            self.router.macs.join(info)
            own = shared + self.random.randbytes((num_blocks - num_blocks // 2) * HASH_BYTES)
            others = self.random.randbytes(num_others * HASH_BYTES)
            self.router.macs.load_snapshot(info.name, 1, 0, [own + others] * len(layout.groups))
            self.held.append(own)
        self.num_routed = 0
        self.booked: list[str] = []

    def query(self) -> RouteQuery:
        """Three quarters of some Mac's prompt and something new; none of the hash objects has been seen before."""
        num_known = self.num_blocks * 3 // 4
        known = self.random.choice(self.held)[: num_known * HASH_BYTES]
        hashes = hashes_in(known + self.random.randbytes((self.num_blocks - num_known) * HASH_BYTES))
        self.num_routed += 1
        return RouteQuery(f"r{self.num_routed}", "m", ROOT, hashes, self.num_blocks * 16 + 5, 300)

    def finish_oldest(self) -> None:
        """Keep so many requests under way on each Mac."""
        self.booked.append(f"r{self.num_routed}")
        if len(self.booked) > BOOKED * len(self.held):
            oldest = self.booked.pop(0)
            self.router.first_token(oldest, 0)
            self.router.release(oldest)


def timed(times: Sequence[int], cpu_ns: int) -> Row:
    """Percentiles in microseconds."""
    ordered = sorted(times)
    return {
        "p50_us": ordered[len(ordered) // 2] / 1e3,
        "p99_us": ordered[len(ordered) * 99 // 100] / 1e3,
        "cpu_us": cpu_ns / len(times) / 1e3,
        "per_s": len(times) * 1e9 / cpu_ns,
    }


def look_ups(fleet: Fleet, count: int) -> Row:
    """All Macs' resumable depths of a prompt."""
    index = fleet.router.macs._fleets["m"].index
    times, cpu_ns = [], 0
    for _ in range(count):
        query = fleet.query()
        cpu, started = time.thread_time_ns(), time.perf_counter_ns()
        index.match(query.block_hashes, query.num_tokens, -1)
        times.append(time.perf_counter_ns() - started)
        cpu_ns += time.thread_time_ns() - cpu
    return timed(times, cpu_ns)


def decide(fleet: Fleet, count: int) -> Row:
    """Look up, predict for every Mac, choose, book, keep for explain."""
    times, cpu_ns = [], 0
    for number in range(count):
        query = fleet.query()
        cpu, started = time.thread_time_ns(), time.perf_counter_ns()
        fleet.router.route(query, number * 0.01)
        times.append(time.perf_counter_ns() - started)
        cpu_ns += time.thread_time_ns() - cpu
        fleet.finish_oldest()
    return timed(times, cpu_ns)


def decisions(quick: bool) -> list[Row]:
    """The sizes of the bars, hybrid models, and the other policies at one size."""
    rows: list[Row] = []
    count = 500 if quick else 3_000
    sizes = [(blocks, macs) for blocks in (64, 512) for macs in ((8, 64) if quick else (8, 64, 512))]
    cases = [("full", blocks, macs, "") for blocks, macs in sizes]
    cases += [(model, 512, 64, "") for model in ("full+window", "full+window+state")]
    if not quick:
        cases += [("full", 512, 64, policy) for policy in ("round_robin", "linear_block_cost", "weighted_scores")]
    for model, blocks, macs, policy in cases:
        fleet = Fleet(model, macs, blocks, policy=policy)
        name = f"{blocks} blocks x {macs} Macs, {policy or model}"
        rows.append({"case": f"look-up {name}", **look_ups(fleet, count)})
        decide(fleet, min(count, BOOKED * macs))
        rows.append({"case": f"decision {name}", **decide(fleet, count)})
    return rows


def growth(quick: bool) -> list[Row]:
    """A decision at 512 blocks x 64 Macs as the index grows."""
    rows = []
    for num_others in (0, 10_000) if quick else (0, 10_000, 50_000, 100_000):
        fleet = Fleet("full", 64, 512, num_others)
        decide(fleet, 64 * BOOKED)
        row = decide(fleet, 500 if quick else 2_000)
        rows.append({"case": f"decision, {64 * (512 + num_others):,} blocks indexed", **row})
    return rows


def events(quick: bool) -> list[Row]:
    """Batches from 64 Macs: a prompt of 128 blocks comes, an old one goes."""
    num_prompts, per_prompt, num_macs = (20 if quick else 100), 128, 64
    fleet = Fleet("full", num_macs, 16)
    kept: list[list[bytes]] = [[] for _ in range(num_macs)]
    chance = random.Random(SEED)
    cpu_ns = unpack_ns = num_blocks = 0
    for seq in range(num_prompts):
        for mac in range(num_macs):
            new = chance.randbytes(per_prompt * HASH_BYTES)
            kept[mac].append(new)
            happened: list[BlocksStored | BlocksRemoved] = [BlocksStored(0, new, None, 0)]
            if len(kept[mac]) > 10:
                happened.append(BlocksRemoved(0, kept[mac].pop(0)))
            message = pack(Batch(f"mac-{mac}", 1, seq, happened))
            cpu = time.thread_time_ns()
            batch = unpack(message)
            unpack_ns += time.thread_time_ns() - cpu
            fleet.router.macs.apply_events(batch.mac, batch.epoch, batch.seq, batch.events)
            cpu_ns += time.thread_time_ns() - cpu
            num_blocks += per_prompt * len(happened)
    return [
        {
            "case": "events, unpacking included",
            "cpu_us": cpu_ns / num_blocks / 1e3,
            "per_s": num_blocks * 1e9 / cpu_ns,
            "unpack_share": unpack_ns / cpu_ns,
        }
    ]


def rss() -> int:
    """Bytes of this process."""
    gc.collect()
    return psutil.Process().memory_info().rss


def memory(quick: bool) -> list[Row]:
    """Blocks that one Mac holds, and blocks that eight hold, each in a process of its own."""
    rows = []
    total = 200_000 if quick else 2_000_000
    for num_holders in (1, 8):
        with get_context("spawn").Pool(1) as pool:
            (grown,) = pool.starmap(grown_by, [(total // num_holders, num_holders)])
        resident = total // num_holders * num_holders
        rows.append({"case": f"memory, {num_holders} holders a block", "bytes_per_block": grown / resident})
    return rows


def grown_by(num_blocks: int, num_holders: int) -> int:
    """Bytes that so many blocks take, in batches of 100, each batch on its own set of 16 Macs."""
    chance = random.Random(SEED)
    fleet = Fleet("full", 16, 16)
    before, seqs = rss(), [0] * 16
    for number in range(num_blocks // 100):
        event = BlocksStored(0, chance.randbytes(100 * HASH_BYTES), None, 0)
        for holder in range(num_holders):
            mac = (number + holder) % 16
            fleet.router.macs.apply_events(f"mac-{mac}", 1, seqs[mac], [event])
            seqs[mac] += 1
    return rss() - before


def churn(quick: bool) -> list[Row]:
    """Blocks come and go for ever; 64 Macs keep 400,000 of them at a time."""
    chance, per_batch, num_macs = random.Random(SEED), 512, 64
    fleet = Fleet("full", num_macs, 16)
    kept: list[bytes] = []
    sizes, num_blocks, seqs = [], 0, [0] * num_macs
    goal = 1_000_000 if quick else 10_000_000
    started = time.thread_time_ns()
    while num_blocks < goal:
        mac = len(kept) % num_macs
        index = num_blocks // per_batch
        mac = index % num_macs
        new = chance.randbytes(per_batch * HASH_BYTES)
        kept.append(new)
        happened: list[BlocksStored | BlocksRemoved] = [BlocksStored(0, new, None, 0)]
        if len(kept) > 12 * num_macs:
            happened.append(BlocksRemoved(0, kept.pop(0)))
        fleet.router.macs.apply_events(f"mac-{mac}", 1, seqs[mac], happened)
        seqs[mac] += 1
        num_blocks += per_batch
        if num_blocks % (goal // 10) < per_batch:
            sizes.append(rss())
    used_s = (time.thread_time_ns() - started) / 1e9
    fleet.router.check()
    return [
        {
            "case": f"churn of {goal:,} blocks",
            "cpu_us": used_s / num_blocks * 1e6,
            "per_s": num_blocks / used_s,
            "rss_mib": [round(size / 2**20, 1) for size in sizes],
            "growth_second_half": sizes[-1] / sizes[len(sizes) // 2] - 1.0,
        }
    ]


def rebuild(quick: bool) -> list[Row]:
    """A router that was just restarted, and what all Macs hold; and how long a decision has to wait meanwhile."""
    num_macs, num_blocks = (8, 20_000) if quick else (64, 100_000)
    chance = random.Random(SEED)
    snapshots = [chance.randbytes(num_blocks * HASH_BYTES) for _ in range(num_macs)]
    fleet = Fleet("full", 0, 16)
    layout = plan_layout(MODELS["full"], kv_budget_bytes=1 << 30, max_model_len=1 << 20)
    longest_s, started, cpu_started = 0.0, time.perf_counter(), time.thread_time()
    for number, joined in enumerate(snapshots):
        one = time.perf_counter()
        info = MacInfo(f"mac-{number}", 1, "m", ROOT, 16, "a:1", 1 << 20, 1 << 20, layout.groups, 1_600_000)
        fleet.router.macs.join(info)
        fleet.router.macs.load_snapshot(info.name, 1, 0, [joined])
        longest_s = max(longest_s, time.perf_counter() - one)
        fleet.router.route(RouteQuery(f"x{number}", "m", ROOT, hashes_in(joined[:8192]), 8_197, 100), 0.0)
    used_s, cpu_s = time.perf_counter() - started, time.thread_time() - cpu_started
    case = f"rebuild {num_macs} Macs x {num_blocks:,} blocks"
    return [{"case": case, "seconds": used_s, "cpu_s": cpu_s, "longest_pause_s": longest_s}]


def main() -> None:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, few repetitions")
    quick = parser.parse_args().quick
    rows = []
    for part in (decisions, growth, events, memory, churn, rebuild):
        rows += part(quick)
        gc.collect()
    table = Table(title="router")
    heads = ("case", "p50 us", "p99 us", "cpu us", "per s", "else")
    for head in heads:
        table.add_column(head, justify="left" if head in ("case", "else") else "right")
    for row in rows:
        cells = [f"{row[key]:,.1f}" if key in row else "" for key in ("p50_us", "p99_us", "cpu_us")]
        known = ("case", "p50_us", "p99_us", "cpu_us", "per_s")
        rest = ", ".join(
            f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
            if key not in known
        )
        table.add_row(row["case"], *cells, f"{row['per_s']:,.0f}" if "per_s" in row else "", rest)
    Console(stderr=True, width=150).print(table)
    commit, is_dirty = serve_report.commit(REPOSITORY)
    about = {"commit": commit, "dirty": is_dirty, "seed": SEED, "machine": serve_report.machine()}
    sys.stdout.write(json.dumps({"bench": "router", **about, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
