"""Requests aborted wherever they are, workers lost at any moment: every block comes back, the others are unharmed."""

from collections import Counter
from random import Random

import pytest

from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.request import Finish
from tests.cluster.scheduling.fake_worker import FakeWorker
from tests.sim.mac_sim import MODELS, MacSim, Tenant, fill

CONFIG = SchedulerConfig(
    max_model_len=500, max_num_seqs=8, max_num_batched_tokens=48, max_chunk_tokens=32, max_waiting=10_000
)
TENANTS = [
    Tenant("a", 4, (1, 16, 60, 200), (1, 5, 150, 400), stop_share=0.5),
    Tenant("b", 2, (20, 60), (200, 300), weight=3.0, num_stems=2, stem_tokens=96),
    Tenant("urgent", 0.5, (100, 300), (20, 100), priority=1),
]
PLACES = {"waiting", "preempted", "mid-prefill", "decoding", "all planned", "nothing in flight", "just finished"}


class Aborter:
    """Aborts at random times; of the places where somebody is just now, the one that had the fewest."""

    def __init__(self, seed, *, aborts_per_s, losses_per_s, until_s):
        self.random = Random(seed)
        self.aborts_per_s = aborts_per_s
        self.losses_per_s = losses_per_s
        self.until_s = until_s
        self.num_aborted = Counter()

    def begin(self, sim):
        self.again(sim, self.aborts_per_s, self.abort)
        self.again(sim, self.losses_per_s, self.lose)

    def again(self, sim, rate, action):
        time_s = sim.now_s + self.random.expovariate(rate)
        if time_s < self.until_s:
            sim.at(time_s, action)

    def lose(self, sim):
        sim.lose_worker()
        if self.random.random() < 0.5:
            self.abort_in(sim, "after a loss", [name for name, trace in sim.traces.items() if trace.finish is None])
        self.again(sim, self.losses_per_s, self.lose)

    def abort(self, sim):
        places = {}
        for name, trace in sim.traces.items():
            if trace.finish is None:
                places.setdefault(self.place_of(sim, name, trace), []).append(name)
        if sim.just_finished:
            places["just finished"] = sim.just_finished
        if places:
            place = min(places, key=lambda each: self.num_aborted[each])
            self.abort_in(sim, place, places[place])
        self.again(sim, self.aborts_per_s, self.abort)

    def place_of(self, sim, name, trace):
        if trace.first_work is None:
            return "waiting"
        if name not in sim.running:
            return "preempted"
        if not sim.results:
            return "nothing in flight"
        if trace.is_all_planned:
            return "all planned"
        return "mid-prefill" if trace.others is None else "decoding"

    def abort_in(self, sim, place, names):
        if names:
            self.num_aborted[place] += 1
            sim.abort(self.random.choice(names))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("num_longest", [1, 3])
def test_aborts_and_losses_at_every_point_conserve_blocks(model, num_longest):
    """Every read of every row is checked, every invariant after every event; the rest get their undisturbed tokens."""
    sim = MacSim(MODELS[model], CONFIG, num_longest=num_longest, worker=FakeWorker, check_every=1, late_share=0.2)
    fill(sim, TENANTS, 40, seed=num_longest)
    aborter = Aborter(5, aborts_per_s=8, losses_per_s=0.4, until_s=42)
    aborter.begin(sim)
    sim.run()
    sim.verify()
    ends = Counter(trace.finish for trace in sim.traces.values())
    assert ends[Finish.LENGTH] > 5
    assert ends[Finish.STOP] > 2
    assert sim.num_lost > 0
    missed = PLACES - set(aborter.num_aborted)
    assert not missed, f"nobody was aborted when {', '.join(sorted(missed))}"


@pytest.mark.parametrize("model", MODELS)
def test_every_other_request_is_aborted_when_it_has_just_been_preempted(model):
    """Between the plan that took its blocks and anything else: its rows are still in flight."""
    sim = MacSim(MODELS[model], CONFIG, num_longest=1.2, worker=FakeWorker, check_every=1)
    fill(sim, [Tenant("low", 4, (10, 50), (200, 400)), Tenant("high", 1, (10,), (300,), priority=1)], 8, seed=6)
    num_aborted = 0

    def abort_one(sim):
        nonlocal num_aborted
        if num_aborted <= sim.scheduler.stats().num_preemptions // 2:
            sim.abort(sim.just_preempted[0])
            num_aborted += 1

    sim.on_preempted = abort_one
    sim.run()
    sim.verify()
    assert num_aborted > 2
    assert sim.scheduler.stats().num_preemptions > num_aborted


@pytest.mark.parametrize("model", MODELS)
def test_a_queue_that_is_aborted_altogether_leaves_nothing(model):
    sim = MacSim(MODELS[model], CONFIG, num_longest=2)
    fill(sim, TENANTS, 5, seed=9)
    sim.run(5)
    assert sim.running
    for name in [name for name, trace in sim.traces.items() if trace.finish is None]:
        sim.abort(name)
    assert sim.kv.used_bytes == 0
    assert not sim.scheduler.has_work()
    sim.run()
    sim.verify()
