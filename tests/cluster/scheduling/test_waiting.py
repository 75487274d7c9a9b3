"""Whose turn it is: priorities, shares of tenants, arrivals, and agreement with a queue written the slow way."""

import random
from collections import Counter
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import settings

from cluster.scheduling.waiting import PATIENCE_S, WaitingQueue
from tests.cluster.scheduling.waiting_machine import Entry, WaitingMachine, same

# No arrival is so old that a tier's patience is at its end.
NOW = 0.0


def queue_of(*entries):
    queue = WaitingQueue()
    for entry in entries:
        queue.push(entry)
    queue.check()
    return queue


def admit_next(queue):
    entry = next(queue.candidates(NOW))
    queue.admit(entry, NOW)
    return entry


def drain(queue):
    entries = []
    while len(queue):
        entries.append(admit_next(queue))
        queue.check()
    return entries


def test_one_tenant_is_served_first_come_first_served():
    entries = [Entry(arrival_s=i // 3, cost_tokens=(i * 37) % 500) for i in range(30)]
    assert same(drain(queue_of(*entries)), entries)


def test_a_late_push_of_an_early_arrival_goes_where_it_belongs():
    early, middle, late = (Entry(arrival_s=i) for i in range(3))
    assert same(queue_of(late, middle, early).candidates(NOW), [early, middle, late])


def test_a_higher_priority_goes_first_whatever_its_tenant_has_had():
    low, high, higher = Entry("b"), Entry("a", priority=1, cost_tokens=10**9), Entry("a", priority=7)
    queue = queue_of(low, high, higher)
    queue.charge("a", 10**6, priority=7)
    assert same(queue.candidates(NOW), [higher, high, low])
    assert same(drain(queue), [higher, high, low])


class TestPatience:
    """A flood of a higher priority leaves each lower tier a turn a minute."""

    def test_the_next_of_a_tier_that_had_no_turn_goes_first(self):
        low, lower, following = Entry(priority=-1), Entry(priority=-2), Entry(priority=-1, arrival_s=1)
        flood = [Entry(priority=5, arrival_s=i) for i in range(3)]
        queue = queue_of(*flood, following, lower, low)
        assert same(queue.candidates(PATIENCE_S - 0.01), [*flood, low, following, lower])
        # The flood's own tier had no turn either.
        assert same(queue.candidates(PATIENCE_S), [flood[0], low, lower, *flood[1:], following])

    def test_one_turn_is_all_until_as_much_time_has_passed_again(self):
        flood, lows = [Entry(priority=5)], [Entry(arrival_s=i) for i in range(3)]
        queue = queue_of(*flood, *lows)
        now_s = PATIENCE_S + 5
        assert queue.admit(lows[0], now_s)
        assert same(queue.candidates(now_s), [*flood, *lows[1:]])
        assert same(queue.candidates(now_s + PATIENCE_S), [flood[0], *lows[1:]])
        assert queue.admit(flood[0], now_s + 1), "the flood's tier had no turn for as long"
        assert not queue.admit(lows[1], now_s + PATIENCE_S - 0.01)
        assert queue.admit(lows[2], now_s + 2 * PATIENCE_S)

    def test_a_preempted_one_waits_from_its_admission_on(self):
        """Also if nothing else of its tier waits, so that the tier itself was forgotten."""
        old = Entry(priority=-1)
        queue = queue_of(old)
        assert queue.admit(old, 500.0)
        queue.push_front(old)
        high = Entry(priority=1, arrival_s=500.0)
        queue.push(high)
        assert same(queue.candidates(500.0 + PATIENCE_S - 1), [high, old])
        assert queue.admit(high, 500.0) is False
        queue.push(Entry(priority=1, arrival_s=530.0))
        assert next(queue.candidates(500.0 + PATIENCE_S)) is old

    def test_a_tier_whose_last_entry_went_is_asked_no_more(self):
        old, high = Entry(priority=-1), Entry(priority=1, arrival_s=PATIENCE_S)
        queue = queue_of(old, high)
        for entry in queue.candidates(PATIENCE_S):
            queue.remove(entry)
        assert len(queue) == 0
        # Accounts with a debt are all that is left of a tier.
        queue.charge("a", 100, priority=-1)
        queue.push(high)
        assert same(queue.candidates(500.0), [high])


def test_what_a_tenant_had_in_one_tier_is_no_debt_in_another():
    queue = queue_of(Entry("a", priority=1, cost_tokens=10**6), Entry("a", arrival_s=1), Entry("b", arrival_s=2))
    assert [(e.tenant, e.priority) for e in drain(queue)] == [("a", 1), ("a", 0), ("b", 0)]


def test_level_tenants_take_turns_by_cost():
    entries = [Entry("a", cost_tokens=100, arrival_s=i) for i in range(4)]
    entries += [Entry("b", cost_tokens=200, arrival_s=10 + i) for i in range(2)]
    queue = queue_of(*entries)
    assert "".join(e.tenant for e in queue.candidates(NOW)) == "abaaba"
    assert "".join(e.tenant for e in drain(queue)) == "abaaba"


def test_a_weight_of_two_has_two_turns():
    queue = queue_of(*(Entry(t, weight=w, arrival_s=i) for i in range(4) for t, w in (("a", 2.0), ("b", 1.0))))
    assert "".join(e.tenant for e in drain(queue)) == "ababaabb"


def test_the_last_weight_counts_for_what_waits_already():
    queue = queue_of(Entry("a", weight=1.0, cost_tokens=100), Entry("a", weight=10.0, cost_tokens=100))
    queue.push(Entry("b", arrival_s=1, cost_tokens=15))
    queue.push(Entry("b", arrival_s=1, cost_tokens=15))
    assert "".join(e.tenant for e in drain(queue)) == "abab"


def test_who_was_charged_more_waits():
    queue = queue_of(*(Entry(t, arrival_s=i) for i in range(3) for t in "ab"))
    queue.charge("a", 250)
    assert "".join(e.tenant for e in drain(queue)) == "bbbaaa"


def test_a_refund_brings_a_tenant_forward():
    queue = queue_of(Entry("a", cost_tokens=4096), *(Entry(t, arrival_s=1 + i) for i in range(2) for t in "ab"))
    assert admit_next(queue).tenant == "a"
    assert "".join(e.tenant for e in queue.candidates(NOW)) == "bbaa"
    queue.charge("a", -4090)
    assert "".join(e.tenant for e in queue.candidates(NOW)) == "baba"
    assert "".join(e.tenant for e in drain(queue)) == "baba"


def test_a_newcomer_need_not_wait_for_admissions_that_are_refunded():
    """Charged at a thousand tokens each but used ten: the clock must not stay where the charges took it."""
    queue = queue_of(*(Entry("a", arrival_s=i, cost_tokens=1000) for i in range(20)))
    for _ in range(10):
        admit_next(queue)
    queue.charge("a", -9900)
    queue.push(Entry("b", arrival_s=30))
    queue.push(Entry("b", arrival_s=31))
    assert [e.tenant for e in queue.candidates(NOW)][:3] == ["a", "b", "b"]


def test_a_newcomer_is_next_even_after_a_long_reign():
    queue = queue_of(*(Entry("a", arrival_s=i) for i in range(50)))
    for _ in range(40):
        admit_next(queue)
    queue.push(Entry("b", arrival_s=60))
    assert admit_next(queue).tenant == "b"


def test_idling_saves_no_credit():
    queue = queue_of(Entry("b"), *(Entry("a", arrival_s=1 + i) for i in range(50)))
    for _ in range(41):
        admit_next(queue)
    for i in range(10):
        queue.push(Entry("b", arrival_s=60 + i))
    assert "".join(e.tenant for e in drain(queue)) == "ba" * 10


def test_idling_does_not_pay_a_debt_while_nothing_is_served():
    queue = queue_of(Entry("a", cost_tokens=1000))
    admit_next(queue)
    queue.push(Entry("a", arrival_s=1))
    queue.push(Entry("b", arrival_s=2, cost_tokens=600))
    queue.push(Entry("b", arrival_s=3, cost_tokens=600))
    assert "".join(e.tenant for e in drain(queue)) == "bba"


def test_a_preempted_entry_goes_before_its_tenant_and_is_not_charged_again():
    first, second, third, other = Entry(arrival_s=0), Entry(arrival_s=1), Entry(arrival_s=2), Entry("b", arrival_s=9)
    queue = queue_of(first, second, third)
    for entry in (first, second):
        queue.admit(entry, NOW)
    # The latest arrival is preempted first.
    queue.push_front(second)
    queue.push_front(first)
    queue.push(other)
    assert same(queue.candidates(NOW), [other, first, second, third])
    assert same(drain(queue), [other, first, second, third])
    queue.push(Entry("b"))
    queue.push(Entry("a"))
    queue.push(Entry("c"))
    # a was charged 300, b 100, and c joins where the last one began.
    assert [e.tenant for e in queue.candidates(NOW)] == ["b", "c", "a"]


def test_a_preempted_entry_costs_its_tenant_no_turn():
    preempted, following, other = Entry(cost_tokens=1000), Entry(arrival_s=1), Entry("b", arrival_s=2)
    queue = WaitingQueue()
    queue.push_front(preempted)
    queue.push(following)
    queue.push(other)
    assert same(queue.candidates(NOW), [preempted, following, other])
    assert same(drain(queue), [preempted, following, other])


def test_a_new_arrival_never_overtakes_a_preempted_entry():
    preempted, early = Entry(arrival_s=5), Entry(arrival_s=1)
    queue = WaitingQueue()
    queue.push_front(preempted)
    queue.push(early)
    assert same(queue.candidates(NOW), [preempted, early])


def test_entries_may_be_admitted_and_removed_while_candidates_are_tried():
    entries = [Entry(t, arrival_s=i, priority=i % 2) for i in range(6) for t in "abc"]
    queue = queue_of(*entries)
    expected = list(queue.candidates(NOW))
    tried = []
    for i, entry in enumerate(queue.candidates(NOW)):
        tried.append(entry)
        if i % 3 == 0:
            queue.admit(entry, NOW)
        elif i % 3 == 1:
            queue.remove(entry)
        queue.check()
    assert same(tried, expected)
    assert len(queue) == 6


def test_iteration_and_length_are_of_all_entries():
    entries = [Entry(), Entry("b", priority=3), Entry()]
    queue = queue_of(*entries)
    assert same(queue, entries)
    queue.remove(entries[2])
    assert same(queue, entries[:2])
    assert len(queue) == 2


def test_an_aborted_entry_costs_nothing():
    gone, kept, other = Entry("a"), Entry("a", arrival_s=1), Entry("b", arrival_s=2)
    queue = queue_of(gone, kept, other)
    queue.remove(gone)
    assert same(drain(queue), [kept, other])


def test_tenants_that_fell_behind_are_forgotten():
    queue = WaitingQueue()
    for i in range(1000):
        queue.push(Entry(f"t{i}", arrival_s=i))
        admit_next(queue)
    queue.push(Entry("busy", arrival_s=2000))
    for i in range(10):
        queue.push(Entry("busy", arrival_s=2001 + i))
        admit_next(queue)
    queue.check()
    assert len(queue._tiers[0].accounts) == 1


def test_an_abort_leaves_nothing_behind():
    queue = queue_of(*(Entry(priority=i) for i in range(50)))
    for entry in list(queue):
        queue.remove(entry)
    queue.check()
    assert not queue._tiers
    assert len(queue) == 0


def test_a_forgotten_tenant_can_be_charged_but_not_refunded():
    queue = queue_of(Entry("b"))
    queue.charge("a", -50)
    queue.charge("a", 0, priority=4)
    queue.check()
    queue.charge("a", 100, weight=2.0)
    queue.charge("c", 60, priority=4)
    queue.check()
    queue.push(Entry("a", arrival_s=-1, weight=2.0))
    queue.push(Entry("b", arrival_s=1))
    assert "".join(e.tenant for e in queue.candidates(NOW)) == "bab"


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weights_that_cannot_share_are_refused(weight):
    queue = WaitingQueue()
    with pytest.raises(ValueError, match="tenant a: weight must be positive and finite, got"):
        queue.push(Entry(weight=weight))
    with pytest.raises(ValueError, match="cost_tokens must be at least 0, got -1"):
        queue.push(Entry(cost_tokens=-1))
    queue.check()
    assert len(queue) == 0


def test_queueing_twice_or_removing_what_is_not_there_is_a_bug():
    entry = Entry()
    queue = queue_of(entry)
    with pytest.raises(AssertionError, match="waiting already"):
        queue.push(entry)
    with pytest.raises(AssertionError, match="waiting already"):
        queue.push_front(entry)
    with pytest.raises(AssertionError, match="is not waiting"):
        queue.remove(replace(entry))
    with pytest.raises(AssertionError, match="is not waiting"):
        queue.admit(replace(entry), NOW)


class Backlog:
    """Tenants that always have entries waiting, of random cost; a seed makes every run the same."""

    def __init__(self, weights, seed, max_cost=2000, num_waiting=3):
        self.queue = WaitingQueue()
        self.rng = random.Random(seed)
        self.clock = count()
        self.max_cost = max_cost
        self.num_waiting = num_waiting
        self.served = Counter()
        self.weights = {}
        for tenant, weight in weights.items():
            self.join(tenant, weight)

    def join(self, tenant, weight):
        self.weights[tenant] = weight
        for _ in range(self.num_waiting):
            self.push(tenant)

    def push(self, tenant):
        cost = self.rng.randint(1, self.max_cost)
        self.queue.push(Entry(tenant, self.weights[tenant], arrival_s=next(self.clock), cost_tokens=cost))

    def serve(self, num_entries):
        """Tokens that each tenant got."""
        got = Counter(dict.fromkeys(self.weights, 0))
        for _ in range(num_entries):
            entry = admit_next(self.queue)
            got[entry.tenant] += entry.cost_tokens
            self.push(entry.tenant)
        return got

    def assert_shares(self, got, tolerance):
        total, weights = sum(got.values()), sum(self.weights.values())
        for tenant, weight in self.weights.items():
            share = got[tenant] / total
            assert share == pytest.approx(weight / weights, rel=tolerance), tenant


@pytest.mark.parametrize("weights", [(1, 1), (1, 2, 3), (1, 10), (0.5, 0.25, 4, 1, 1), (1,) * 12])
def test_backlogged_tenants_share_by_weight(weights):
    backlog = Backlog({f"t{i}": float(w) for i, w in enumerate(weights)}, seed=len(weights))
    backlog.assert_shares(backlog.serve(6000), tolerance=0.05)
    backlog.queue.check()


def test_no_tenant_starves_in_its_tier():
    """Between two of its admissions a tenant sees no more service than start-time fair queuing's bound."""
    weights = {"small": 0.2, "one": 1.0, "big": 5.0}
    backlog = Backlog(weights, seed=7)
    others = dict.fromkeys(weights, 0)
    for _ in range(5000):
        entry = admit_next(backlog.queue)
        backlog.push(entry.tenant)
        others[entry.tenant] = 0
        for tenant in weights.keys() - {entry.tenant}:
            others[tenant] += entry.cost_tokens
            rest = sum(w for t, w in weights.items() if t != tenant)
            most = rest * backlog.max_cost / weights[tenant] + 2 * len(weights) * backlog.max_cost
            assert others[tenant] <= most


def test_a_late_tenant_has_its_share_at_once_but_not_more():
    backlog = Backlog({"a": 1.0, "b": 2.0}, seed=3, max_cost=100)
    backlog.serve(5000)
    backlog.join("late", 1.0)
    # From the first entries on, to within a few of them; then exactly.
    got = backlog.serve(80)
    assert got["late"] == pytest.approx(sum(got.values()) / 4, abs=3 * backlog.max_cost)
    backlog.assert_shares(backlog.serve(5000), tolerance=0.05)


def test_shares_are_of_what_was_used_if_charges_are_corrected():
    """`cheap` is charged as much as `dear` but uses a tenth; corrected, it gets as many tokens, in more requests."""
    queue, used, clock = WaitingQueue(), Counter(), count()
    rates = {"cheap": 10, "dear": 100}
    for tenant in rates:
        queue.push(Entry(tenant, arrival_s=next(clock), cost_tokens=100))
    for _ in range(3000):
        entry = admit_next(queue)
        queue.push(Entry(entry.tenant, arrival_s=next(clock), cost_tokens=100))
        used[entry.tenant] += rates[entry.tenant]
        queue.charge(entry.tenant, rates[entry.tenant] - 100)
    assert used["cheap"] == pytest.approx(used["dear"], rel=0.05)


WaitingMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestWaiting = WaitingMachine.TestCase
