"""A waiting queue written the slow way, and a machine that works it beside the fast one in any order."""

from dataclasses import dataclass, replace
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.scheduling.waiting import PATIENCE_S, WaitingQueue


@dataclass(frozen=True)
class Entry:
    """Equal to any other of the same fields: the queue must go by identity."""

    tenant: str = "a"
    weight: float = 1.0
    priority: int = 0
    arrival_s: float = 0.0
    cost_tokens: int = 100


def same(found, expected):
    """Equal by identity, in order."""
    return [id(e) for e in found] == [id(e) for e in expected]


class NaiveQueue:
    """The same rules over plain lists: everything is looked for anew each time."""

    def __init__(self):
        self.waiting = []  # (entry, serial, is_charged)
        self.accounts = {}  # (priority, tenant): [virtual time, weight]
        self.last_start = {}
        self.serials = count()
        self.admitted_s = {}

    def tiers(self):
        return {priority for priority, _ in self.accounts}

    def of(self, priority, tenant):
        """Its waiting items in order."""
        items = [w for w in self.waiting if (w[0].priority, w[0].tenant) == (priority, tenant)]
        preempted = [w for w in items if w[2]]
        return preempted[::-1] + sorted((w for w in items if not w[2]), key=lambda w: (w[0].arrival_s, w[1]))

    def virtual_time(self, priority):
        times = [self.last_start.get(priority, 0.0)]
        times += [a[0] for (p, t), a in self.accounts.items() if p == priority and self.of(p, t)]
        return min(times)

    def account(self, priority, tenant, weight):
        account = self.accounts.setdefault((priority, tenant), [self.virtual_time(priority), weight])
        account[1] = weight
        return account

    def forget(self):
        for priority, tenant in list(self.accounts):
            idle = not self.of(priority, tenant)
            if idle and self.accounts[priority, tenant][0] <= self.virtual_time(priority):
                del self.accounts[priority, tenant]
        self.last_start = {p: start for p, start in self.last_start.items() if p in self.tiers()}

    def push(self, entry, is_charged=False):
        self.account(entry.priority, entry.tenant, entry.weight)
        self.waiting.append((entry, next(self.serials), is_charged))
        self.forget()

    def take_out(self, entry):
        (item,) = [w for w in self.waiting if w[0] is entry]
        self.waiting.remove(item)
        return item

    def remove(self, entry):
        self.take_out(entry)
        self.forget()

    def admit(self, entry, now_s):
        self.admitted_s[entry.priority] = now_s
        is_charged = self.take_out(entry)[2]
        if not is_charged:
            account = self.accounts[entry.priority, entry.tenant]
            self.last_start[entry.priority] = account[0]
            account[0] += entry.cost_tokens / account[1]
        self.forget()

    def charge(self, tenant, num_tokens, priority, weight):
        if (priority, tenant) not in self.accounts:
            if num_tokens <= 0:
                return
            self.account(priority, tenant, weight)
        account = self.accounts[priority, tenant]
        account[0] += num_tokens / account[1]
        self.forget()

    def candidates(self, now_s):
        by_tier = [self.of_tier(priority) for priority in sorted(self.tiers(), reverse=True)]
        overdue = [entries[0] for entries in by_tier if entries and self.is_overdue(entries[0], now_s)]
        rest = [entry for entries in by_tier for entry in entries if all(entry is not each for each in overdue)]
        return overdue + rest

    def is_overdue(self, first, now_s):
        since = [first.arrival_s, *(at for p, at in self.admitted_s.items() if p == first.priority)]
        return all(now_s - at >= PATIENCE_S for at in since)

    def of_tier(self, priority):
        entries = []
        times = {t: a[0] for (p, t), a in self.accounts.items() if p == priority}
        items = {t: self.of(priority, t) for t in times}
        while any(items.values()):
            tenant = min(
                (t for t in items if items[t]), key=lambda t: (times[t], items[t][0][0].arrival_s, items[t][0][1])
            )
            entry, _, is_charged = items[tenant].pop(0)
            times[tenant] += 0 if is_charged else entry.cost_tokens / self.accounts[priority, tenant][1]
            entries.append(entry)
        return entries


class WaitingMachine(RuleBasedStateMachine):
    """Any order of operations; the queue and its twin agree on all that can be seen."""

    def __init__(self):
        super().__init__()
        self.queue = WaitingQueue()
        self.naive = NaiveQueue()
        self.admitted = []
        self.now_s = 9.0

    @rule(seconds=st.sampled_from([1.0, 30.0, PATIENCE_S]))
    def wait(self, seconds):
        self.now_s += seconds

    @rule(
        entry=st.builds(
            Entry,
            tenant=st.sampled_from("abc"),
            weight=st.sampled_from([0.5, 1.0, 3.0]),
            priority=st.integers(0, 1),
            arrival_s=st.integers(-9, 0).map(float),
            cost_tokens=st.integers(0, 9),
        )
    )
    def push(self, entry):
        entry = replace(entry, arrival_s=self.now_s + entry.arrival_s)
        self.queue.push(entry)
        self.naive.push(entry)

    @precondition(lambda self: len(self.queue))
    @rule(data=st.data())
    def admit(self, data):
        """The first one fits, or only a later one does."""
        for entry in self.queue.candidates(self.now_s):
            if data.draw(st.booleans()):
                was_overdue = self.queue.admit(entry, self.now_s)
                first = self.naive.of_tier(entry.priority)[0]
                assert was_overdue == self.naive.is_overdue(first, self.now_s)
                self.naive.admit(entry, self.now_s)
                self.admitted.append(entry)

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def preempt(self, data):
        entry = self.admitted.pop(data.draw(st.integers(0, len(self.admitted) - 1)))
        self.queue.push_front(entry)
        self.naive.push(entry, is_charged=True)

    @precondition(lambda self: len(self.queue))
    @rule(data=st.data())
    def abort(self, data):
        entry = data.draw(st.sampled_from(list(self.queue)))
        self.queue.remove(entry)
        self.naive.remove(entry)

    @rule(
        tenant=st.sampled_from("abcd"),
        num_tokens=st.integers(-20, 20),
        priority=st.integers(0, 2),
        weight=st.sampled_from([1.0, 2.0]),
    )
    def charge(self, tenant, num_tokens, priority, weight):
        self.queue.charge(tenant, num_tokens, priority=priority, weight=weight)
        self.naive.charge(tenant, num_tokens, priority, weight)

    @invariant()
    def twins_agree(self):
        self.queue.check()
        assert same(self.queue.candidates(self.now_s), self.naive.candidates(self.now_s))
        assert same(self.queue, [w[0] for w in self.naive.waiting])
        assert len(self.queue) == len(self.naive.waiting)
        times = {(p, t): a.virtual_time for p, tier in self.queue._tiers.items() for t, a in tier.accounts.items()}
        assert times == {key: account[0] for key, account in self.naive.accounts.items()}
