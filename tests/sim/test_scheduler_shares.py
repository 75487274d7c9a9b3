"""Who gets how much of a busy Mac, and what those are told who find its queue full."""

from dataclasses import replace
from random import Random

import pytest

from cluster.scheduling.config import SchedulerConfig
from tests.sim.mac_sim import DENSE, MODELS, MacSim, Tenant, fill, shares

CONFIG = SchedulerConfig(
    max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=256, max_chunk_tokens=128, max_waiting=100_000
)
SMALL = Tenant("small", 10, (50, 100, 400), (10, 50))
DECODES = Tenant("decodes", 15, (10, 30), (60, 100), weight=2.0)
HUGE = Tenant("huge", 2, (2000, 1000), (20,), weight=4.0)

# Each keeps all tenants backlogged; what differs is why the work done differs from the work expected.
CASES = {
    "as expected": (SMALL, DECODES, HUGE),
    "early stops": (replace(SMALL, stop_share=1.0), replace(DECODES, max_tokens=(200,), stop_share=0.5), HUGE),
    "shared prefixes": (replace(SMALL, num_stems=3, stem_tokens=300), DECODES, HUGE),
}


def saturated_shares(sim, tenants, seed, until_s=60.0):
    """Each tenant's share of the work in proportion to its weight, once all of them queue."""
    fill(sim, tenants, until_s, seed)
    sim.run(until_s)
    waiting = {t.request.tenant for t in sim.traces.values() if t.finish is None and t.first_work is None}
    assert waiting == {tenant.name for tenant in tenants}, "all tenants were meant to be backlogged"
    work = shares(sim, until_s / 10, until_s)
    weights = sum(tenant.weight for tenant in tenants)
    return {t.name: work[t.name] / work.total() / (t.weight / weights) for t in tenants}


class TestShares:
    """Of the tokens that are run, those after a preemption apart, within 5 % of the weights."""

    @pytest.mark.parametrize("case", CASES)
    @pytest.mark.parametrize("seed", range(2))
    def test_they_follow_the_weights(self, case, seed):
        found = saturated_shares(MacSim(DENSE, CONFIG, num_longest=20), CASES[case], seed)
        assert found == pytest.approx(dict.fromkeys(found, 1.0), abs=0.05)

    @pytest.mark.parametrize("model", MODELS)
    def test_whatever_kind_of_memory_is_short(self, model):
        sim = MacSim(MODELS[model], CONFIG, num_longest=1.5)
        found = saturated_shares(sim, CASES["as expected"], seed=3)
        assert found == pytest.approx(dict.fromkeys(found, 1.0), abs=0.05)

    @pytest.mark.parametrize("tenant", ["decodes", "huge"])
    def test_requests_that_are_aborted_halfway_cost_what_was_run_of_them(self, tenant):
        sim = MacSim(DENSE, CONFIG, num_longest=20)
        random = Random(0)

        def abort_one(sim):
            running = [name for name in sim.running if name.startswith(tenant)]
            if running:
                sim.abort(random.choice(running))
            sim.at(sim.now_s + random.expovariate(3), abort_one)

        sim.at(1.0, abort_one)
        found = saturated_shares(sim, CASES["as expected"], seed=4)
        assert found == pytest.approx(dict.fromkeys(found, 1.0), abs=0.05)

    def test_a_tenant_that_was_away_gets_its_share_at_once_and_no_more(self):
        """It comes at half time; nothing that it did not use before is owed to it."""
        sim = MacSim(DENSE, CONFIG, num_longest=20)
        fill(sim, [SMALL], 80, seed=5)
        for time_s, request in DECODES.requests(40, Random(6)):
            sim.at(40 + time_s, request)
        sim.run(80)
        before, after = shares(sim, 0, 40), shares(sim, 44, 80)
        assert before["small"] == before.total()
        assert after["decodes"] / after.total() == pytest.approx(2 / 3, rel=0.05)

    def test_a_higher_tier_comes_first_and_the_rest_is_shared(self):
        sim = MacSim(DENSE, CONFIG, num_longest=20)
        urgent = Tenant("urgent", 3, (50, 100), (20,), priority=1)
        rest = (SMALL, DECODES)
        fill(sim, (urgent, *rest), 80, seed=7)
        sim.run(80)
        work = shares(sim, 8, 80)
        offered = sum(t.cost_tokens - 1 for n, t in sim.traces.items() if n.startswith("urgent") and t.arrival_s >= 8)
        assert work["urgent"] == pytest.approx(offered, rel=0.05), "it was meant to get all it asked for"
        assert work["decodes"] / (work["decodes"] + work["small"]) == pytest.approx(2 / 3, rel=0.05)


# What a refused request is told depends on what those before it look like.
QUEUES = {
    "prefills": (Tenant("a", 30, (500, 1000), (1, 2)),),
    "decodes": (Tenant("a", 30, (5, 10), (100, 200)),),
    "all kinds": (SMALL, DECODES, HUGE),
    "shared prefixes": (Tenant("a", 30, (50, 100), (10, 50), num_stems=2, stem_tokens=500),),
    "early stops": (Tenant("a", 30, (50, 100), (300,), stop_share=1.0),),
}


class TestRetryHint:
    @pytest.mark.parametrize("queue", QUEUES)
    @pytest.mark.parametrize(("max_waiting", "slowness"), [(20, 1.0), (100, 4.0)])
    def test_it_is_the_time_that_the_waiting_ones_take_within_a_factor_of_2(self, queue, max_waiting, slowness):
        for until_s in (15, 30):
            sim = MacSim(DENSE, replace(CONFIG, max_waiting=max_waiting), num_longest=20, slowness=slowness)
            fill(sim, QUEUES[queue], until_s, seed=until_s)
            sim.run(until_s)
            one_more = (request for _, request in replace(QUEUES[queue][0], name="late").requests(9e9, Random(0)))
            assert not all(sim.arrive(next(one_more)) for _ in range(max_waiting + 1)), "nobody was refused"
            waiting = [t for t in sim.traces.values() if t.finish is None and t.first_work is None]
            assert len(waiting) == max_waiting
            _, hint_s, refused_at_s = sim.refusals[-1]
            sim.run()
            sim.verify()
            took_s = max(trace.end_s for trace in waiting) - refused_at_s
            assert took_s / 2 < hint_s < took_s * 2

    def test_a_refused_request_changes_nothing_and_is_taken_when_there_is_room(self):
        sim = MacSim(DENSE, replace(CONFIG, max_waiting=5), num_longest=20)
        fill(sim, (SMALL,), 5, seed=0)
        sim.run(5)
        request, hint_s, _ = sim.refusals[-1]
        sim.scheduler.check()
        assert request.request_id not in sim.traces
        sim.at(sim.now_s + hint_s, request)
        sim.run()
        assert sim.traces[request.request_id].finish is not None
        sim.verify()
