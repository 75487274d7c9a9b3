"""Cases of the policy benchmark: three traces, two fleets, two models, at loads that leave some Macs waiting.

Sessions with an even number are for tuning, those with an odd one for the report. Half of the sessions at twice the
rate are the load of all of them. Loads are set so that round robin is overloaded and the best policy is not.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from cluster.kv.spec import FullAttentionSpec, LayerSpec, RecurrentStateSpec, SlidingWindowSpec, StateTensor
from cluster.simulation import arrivals
from cluster.simulation.cost_model import CostModel
from cluster.simulation.fleet import DENSE_8B, FleetSpec, MacSpec, uniform_fleet
from cluster.simulation.trace import Trace
from cluster.simulation.trace_files import read_trace

NUM_MACS = 16
NUM_SLOW = 4
SLOW_SPEED = 0.4
GIB = 2**30
# Longer ones fit no Mac of the hybrid cases.
MAX_LENGTH = 200_000
LONGEST_PAUSE_S = 300.0

_STATE = RecurrentStateSpec("gated_delta_net", (StateTensor((32, 128, 128), 4), StateTensor((3, 8192), 2)))
_WINDOW = SlidingWindowSpec(num_kv_heads=16, head_dim=128, window=1024)


@dataclass(frozen=True, slots=True)
class Model:
    """Layers, and the KV memory of one Mac."""

    layers: tuple[LayerSpec, ...]
    kv_bytes: int


MODELS = {
    # 600,000 tokens a Mac.
    "dense": Model(DENSE_8B, 600_000 * 36 * 4096),
    # 600,000 tokens and about a hundred states.
    "hybrid": Model((*(_STATE,) * 3, FullAttentionSpec(num_kv_heads=2, head_dim=256)) * 12, 22 * GIB),
    # A window of 1,024 tokens in five layers of six.
    "window": Model((*(_WINDOW,) * 5, FullAttentionSpec(num_kv_heads=16, head_dim=128)) * 10, 96 * GIB),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace and its load: `rate` scales arrivals, `starts_per_s` is that of sessions whose clients wait."""

    file: Path
    rate: float = 0.0
    starts_per_s: float = 0.0
    # The clock of the trace: arrivals of one tick are spread over it.
    tick_s: float = 0.0


WORKLOADS = {
    "conversation": Workload(Path("mooncake/conversation_trace.jsonl.gz"), rate=0.55, tick_s=3.0),
    "synthetic": Workload(Path("mooncake/synthetic_trace.jsonl.gz"), rate=0.5),
    "agents": Workload(Path("agentic/claude_code_sessions.rle.jsonl.gz"), starts_per_s=0.03),
}
# `mixed-eased`: arrivals take the same share of the mixed fleet's capacity as of the uniform one's.
FLEETS = ("uniform", "mixed", "mixed-eased")
MIXED_CAPACITY = (NUM_MACS - NUM_SLOW * (1 - SLOW_SPEED)) / NUM_MACS
HALVES = {"even": 0, "odd": 1}


def read_half(name: str, folder: Path, half: str) -> Trace:
    """The sessions of one half. Raises BadInput if the trace is not there."""
    trace = read_trace(folder / WORKLOADS[name].file)
    return trace.select(lambda r: r.session % 2 == HALVES[half] and r.num_tokens <= MAX_LENGTH)


def with_load(name: str, half: Trace, seed: int, num_requests: int | None, fleet: str = "uniform") -> Trace:
    """Arrivals by the seed: when sessions start, or where within a tick of the trace's clock a request comes."""
    workload, share = WORKLOADS[name], MIXED_CAPACITY if fleet == "mixed-eased" else 1.0
    if workload.starts_per_s:
        trace = arrivals.started(arrivals.with_pauses(half, LONGEST_PAUSE_S), workload.starts_per_s * share, seed)
    else:
        # Equal moments would make all seeds equal.
        trace = arrivals.scaled(arrivals.jittered(half, workload.tick_s or 1.0, seed), 2 * workload.rate * share)
    return trace if num_requests is None else trace.first(num_requests)


def fleet_of(fleet: str, model: str) -> FleetSpec:
    """16 Macs, all equal or 4 of them slow."""
    kind = MODELS[model]
    mac = MacSpec("mac", CostModel(), kind.kv_bytes)
    spec = uniform_fleet(NUM_MACS, mac, layers=kind.layers)
    if fleet == "uniform":
        return spec
    slow = CostModel(speed=SLOW_SPEED)
    # Spread over the fleet, as names or order must not matter.
    every = NUM_MACS // NUM_SLOW
    macs = tuple(replace(each, costs=slow) if i % every == 1 else each for i, each in enumerate(spec.macs))
    return replace(spec, macs=macs)
