"""Nobody waits longer than the rules say: for a first token, for the next one, after a preemption."""

from dataclasses import replace

import pytest

from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.request import Finish
from tests.sim.mac_sim import DENSE, MODELS, MacSim, Tenant, fill, make_request

CONFIG = SchedulerConfig(
    max_model_len=4096, max_num_seqs=12, max_num_batched_tokens=256, max_chunk_tokens=128, max_waiting=10_000
)


class TestNextToken:
    """`MacSim` asserts at every row that others had at most one budget since the newest token."""

    @pytest.mark.parametrize("model", MODELS)
    def test_a_huge_prompt_among_small_ones_stalls_no_decode(self, model):
        sim = MacSim(MODELS[model], replace(CONFIG, max_chunk_tokens=256), num_longest=40)
        small = Tenant("small", 6, (1, 15, 16, 17, 60), (30, 90))
        huge = Tenant("huge", 0.5, (3900,), (2, 40))
        fill(sim, [small, huge], 20, seed=1)
        sim.run()
        sim.verify()
        assert sim.num_sat_out == sim.scheduler.stats().num_preemptions == 0, "memory was meant to be ample"
        busy = [plan for plan in sim.plans if plan.num_decodes and plan.num_tokens > CONFIG.max_num_batched_tokens - 16]
        assert len(busy) > 40, "decodes were meant to run beside full budgets"

    @pytest.mark.parametrize("model", MODELS)
    def test_without_memory_only_the_lowest_in_line_waits(self, model):
        """Without a block a decode sits out, or is preempted; never one that could take it from somebody lower."""
        config = replace(CONFIG, max_model_len=700, max_num_batched_tokens=64, max_chunk_tokens=32)
        sim = MacSim(MODELS[model], config, num_longest=1)
        tenants = [
            Tenant("urgent", 1, (20, 60), (40, 200), priority=1),
            Tenant("chat", 4, (16, 50), (40, 200), num_stems=2, stem_tokens=64),
        ]
        fill(sim, tenants, 30, seed=2)
        sim.run()
        sim.verify()
        assert sim.num_sat_out + sim.scheduler.stats().num_preemptions > 10, "memory was meant to be short"


def bound_on_waiting(sim, trace, costs):
    """Tokens that the Mac may run before a request's first one, from the rules of the queue alone.

    Whatever runs ends first. Its own tenant's earlier requests go before it, a higher tier's all; and each other tenant
    of the tier has what is due to it by weight while those go, a request more for being in the middle of one, and as
    much as its own tenant was ahead by: one request.
    """
    request, largest = trace.request, max(costs.values())
    own, others, above = 0, {}, 0
    bound = 0
    for each in sim.traces.values():
        if each is trace or each.arrival_work > trace.first_work or each.end_work <= trace.arrival_work:
            continue
        peer, cost = each.request, costs[each.request.request_id]
        is_first = each.arrival_order < trace.arrival_order
        if each.first_work is not None and each.first_work <= trace.arrival_work and is_first:
            bound += cost
        elif peer.priority > request.priority:
            above += cost
        elif peer.priority == request.priority and peer.tenant != request.tenant:
            others[peer.tenant] = (others.get(peer.tenant, (0, 0))[0] + cost, peer.tenant_weight)
        elif peer.priority == request.priority and is_first:
            own += cost
    for waiting, weight in others.values():
        bound += min(waiting, weight / request.tenant_weight * (own + largest) + largest)
    return bound + own + above


class TestFirstToken:
    def sim(self, seed, num_longest=40):
        """A flood, and trickles that are entitled to much more than they ask for."""
        sim = MacSim(DENSE, replace(CONFIG, max_num_seqs=4), num_longest=num_longest)
        tenants = [
            Tenant("flood", 12, (20, 100, 300), (5, 30)),
            Tenant("trickle", 0.4, (30, 200), (10,), weight=2.0),
            Tenant("huge", 0.1, (3000,), (20,)),
            Tenant("urgent", 0.3, (100,), (10,), priority=1),
            Tenant("idle", 1, (50,), (5,), priority=-1),
        ]
        fill(sim, tenants, 40, seed)
        sim.run()
        sim.verify()
        return sim

    @pytest.mark.parametrize("seed", range(3))
    def test_it_comes_within_the_bound_that_the_rules_give(self, seed):
        sim = self.sim(seed)
        assert all(trace.finish is Finish.LENGTH for trace in sim.traces.values()), "nobody starves"
        costs = {name: trace.cost_tokens for name, trace in sim.traces.items()}
        for name, trace in sim.traces.items():
            waited = trace.first_work - trace.arrival_work
            bound = bound_on_waiting(sim, trace, costs)
            assert waited <= bound + len(sim.traces), f"{name} waited for {waited} tokens, {bound} are its due"
        trickle = [t for n, t in sim.traces.items() if n.startswith("trickle")]
        flood = [t for n, t in sim.traces.items() if n.startswith("flood")]
        assert max(t.first_work - t.arrival_work for t in trickle) < 3_000
        assert max(t.first_work - t.arrival_work for t in flood) > 20_000, "the flood was meant to queue up"

    def test_without_tenants_and_priorities_equal_prompts_are_served_as_they_come(self):
        sim = MacSim(DENSE, replace(CONFIG, max_num_seqs=4), num_longest=2)
        fill(sim, [Tenant("all", 20, (300,), (1, 40))], 20, seed=3)
        sim.run()
        sim.verify()
        by_start = sorted(sim.traces.values(), key=lambda t: t.first_order)
        assert by_start == sorted(sim.traces.values(), key=lambda t: t.arrival_order)

    def test_one_that_waits_for_its_siblings_is_not_forgotten(self):
        """Forty requests of one prefix among a flood of others; each waits for the one that computes it, once."""
        sim = MacSim(DENSE, CONFIG, num_longest=10)
        fill(sim, [Tenant("flood", 8, (100, 300), (20,))], 20, seed=4)
        stem = tuple(range(1600))
        for i in range(40):
            sim.at(0.01 * i, make_request(f"sibling{i}", (*stem, 60_000 + i), 4, tenant="siblings"))
        sim.run()
        sim.verify()
        siblings = [t for n, t in sim.traces.items() if n.startswith("sibling")]
        assert sum(t.num_run for t in siblings) < 1600 + 40 * 40, "the prefix was meant to be computed once"
        flood = [t for n, t in sim.traces.items() if n.startswith("flood")]
        last = max(t.first_work for t in siblings)
        assert last < max(t.first_work for t in flood), "they had half of the Mac"


class TestPreempted:
    @pytest.mark.parametrize("model", MODELS)
    def test_they_finish_with_their_undisturbed_tokens(self, model):
        config = replace(CONFIG, max_model_len=700, max_num_batched_tokens=64, max_chunk_tokens=32)
        sim = MacSim(MODELS[model], config, num_longest=1.2, check_every=50)
        tenants = [
            Tenant("low", 3, (10, 50), (200, 400), priority=0),
            Tenant("high", 1, (10, 50), (200, 400), priority=1),
            Tenant("stems", 2, (1, 40), (100, 300), num_stems=2, stem_tokens=96),
        ]
        fill(sim, tenants, 15, seed=0)
        sim.run()
        sim.verify()
        preempted = [trace for trace in sim.traces.values() if trace.num_preemptions]
        assert len(preempted) > 2, "memory was meant to be short"
        assert max(t.num_preemptions for t in preempted) <= 20
