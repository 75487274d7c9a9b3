"""Hybrid models: the router's prediction is what the Mac then finds, whatever each group has evicted."""

from collections.abc import Iterator

import pytest

from cluster.kv.hashing import join_hashes
from cluster.kv.spec import FullAttentionSpec, LayerSpec, RecurrentStateSpec, SlidingWindowSpec, StateTensor
from cluster.routing.config import RoutingConfig
from cluster.routing.decision import RouteQuery
from cluster.simulation.fleet import FleetSpec
from cluster.simulation.outcome import hit_error, hit_rate
from cluster.simulation.simulated_mac import SimulatedMac
from cluster.simulation.simulation import Options, Simulation
from tests.cluster.simulation.worlds import conversations, tiny_fleet

FULL = FullAttentionSpec(num_kv_heads=1, head_dim=8)
WINDOW = SlidingWindowSpec(num_kv_heads=1, head_dim=8, window=40)
STATE = RecurrentStateSpec("gated_delta_net", (StateTensor((4, 16), 4),))
MODELS: dict[str, tuple[LayerSpec, ...]] = {
    "states": (STATE, STATE, STATE, FULL),
    "windows": (WINDOW, WINDOW, FULL),
    "both": (STATE, WINDOW, FULL, WINDOW),
}


def crowded(model: str, seed: int = 1, **options: object) -> Simulation:
    """Two Macs whose memory holds a few of the conversations."""
    fleet: FleetSpec = tiny_fleet(2, 5_000, MODELS[model])
    trace = conversations(seed, num_sessions=40, num_turns=5, closed=True)
    return Simulation(trace, fleet, Options(**options))  # type: ignore[arg-type]


def macs(simulation: Simulation) -> Iterator[SimulatedMac]:
    for slot in simulation._slots.values():
        assert slot.mac is not None
        yield slot.mac


@pytest.mark.parametrize("model", MODELS)
def test_hits_are_as_predicted_though_every_group_evicts(model: str) -> None:
    simulation = crowded(model)
    outcome = simulation.run()
    simulation.check()
    num_evicted = [0] * len(next(macs(simulation)).kv.layout.groups)
    for mac in macs(simulation):
        for group, counts in enumerate(mac.kv.stats().groups):
            num_evicted[group] += counts.num_evicted_left_behind + counts.num_evicted_ranked
            num_evicted[group] += counts.num_evicted_orphaned
    assert all(num_evicted), f"a group has evicted nothing: {num_evicted}"
    assert hit_rate(outcome.requests) > 0.2
    assert hit_error(outcome.requests) < 0.01


@pytest.mark.parametrize("model", MODELS)
def test_a_mac_whose_state_or_window_was_evicted_is_not_credited(model: str) -> None:
    """Every prompt of the trace against every Mac at the end: what the router says is what the Mac can resume."""
    simulation = crowded(model)
    end_s = simulation.run().duration_s
    # The last reports are on their way.
    simulation._timeline.run(lambda: simulation._timeline.now_s > end_s + 2.0)
    num_uncredited = 0
    for index, request in enumerate(simulation._trace.requests):
        hashes = simulation._trace.prompt_hashes(request)
        query = RouteQuery(
            f"ask-{index}", "simulated", simulation._root, hashes, request.num_prompt_tokens, request.max_tokens
        )
        candidates = {each.mac: each for each in simulation.router.what_if(query, 0.0).candidates}
        for mac in macs(simulation):
            computed = mac.kv.get_computed_blocks(join_hashes(hashes), request.num_prompt_tokens)
            assert candidates[mac.name].num_held_tokens == computed.num_tokens
            num_uncredited += computed.num_matched_tokens > computed.num_tokens
    assert num_uncredited > 0, "nowhere was content that can't be resumed"


def test_a_router_that_hears_late_is_off_by_little() -> None:
    simulation = crowded("both", event_lag_s=0.2, routing=RoutingConfig())
    outcome = simulation.run()
    assert hit_error(outcome.requests) < 0.01, "clients pause for a second, so the news is there first"
