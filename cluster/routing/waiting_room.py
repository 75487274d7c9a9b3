"""Requests that wait in the router because every Mac of their model has enough to do: whose turn it is.

Priorities are tiers: a higher one goes first, but a tier that waits and has had nothing dispatched for `PATIENCE_S` has
the next turn, so that a flood starves nobody. Within a tier, tenants share by start-time fair queuing (Goyal, Vin and
Cheng, 1996) in seconds of Mac time: each dispatch, also of a request that never had to wait, moves its tenant's virtual
time on by its seconds / weight, and the tenant with the lowest is next. One that comes (back) starts no lower than the
tier's virtual time: it has its share at once, and no more for the time it was away. That time goes on with the clock,
but not past anyone who waits, so that a debt is forgiven at one Mac second a second. Within a tenant, a request is as
if it had arrived later by as many seconds as it will take: small ones overtake a huge one, but only those that come
within them.

When the room is full, the longest queue of the lowest tier gives up its last request, or the newcomer goes away.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

from cluster.routing.decision import RouteQuery

# Accounts beyond those that wait, before the ones that have no debt are looked for.
_SPARE_ACCOUNTS = 64
# Seconds without a dispatch after which a tier that waits is given one.
PATIENCE_S = 60.0


@dataclass(slots=True)
class Waiting:
    """One request of `cost_s` predicted Mac time; from `until_s` on it is too late (None: never)."""

    query: RouteQuery
    cost_s: float
    arrived_s: float
    until_s: float | None
    serial: int

    def __lt__(self, other: "Waiting") -> bool:
        return self._key < other._key

    @property
    def _key(self) -> tuple[float, int]:
        return (self.arrived_s + self.cost_s, self.serial)


class _Account:
    """One tenant in one tier."""

    __slots__ = ("heap", "virtual_s", "weight")

    def __init__(self, virtual_s: float) -> None:
        self.virtual_s = virtual_s
        self.weight = 1.0
        self.heap: list[Waiting] = []


class _Tier:
    def __init__(self) -> None:
        self.accounts: dict[str, _Account] = {}
        self.virtual_s = 0.0
        self._now_s = 0.0
        self._last_dispatch_s = -inf

    def first(self) -> Waiting | None:
        """Whose turn it is in the tier. O(tenants)."""
        waiting = (each for each in self.accounts.values() if each.heap)
        account = min(waiting, key=lambda each: (each.virtual_s, each.heap[0]), default=None)
        return None if account is None else account.heap[0]

    def is_overdue(self, first: Waiting, now_s: float) -> bool:
        """Whether its first one is there, and none of the tier was dispatched, for `PATIENCE_S`."""
        return now_s - max(self._last_dispatch_s, first.arrived_s) >= PATIENCE_S

    def advance(self, now_s: float) -> None:
        """To be called before anything else."""
        waiting = [account.virtual_s for account in self.accounts.values() if account.heap]
        self.virtual_s = min([self.virtual_s + max(0.0, now_s - self._now_s), *waiting])
        self._now_s = now_s

    def account(self, query: RouteQuery) -> _Account:
        account = self.accounts.get(query.tenant)
        if account is None:
            self._tidy()
            account = self.accounts[query.tenant] = _Account(self.virtual_s)
        account.weight = query.tenant_weight
        return account

    def charge(self, account: _Account, seconds: float) -> None:
        self._last_dispatch_s = self._now_s
        account.virtual_s = max(account.virtual_s, self.virtual_s) + seconds / account.weight
        waiting = [each.virtual_s for each in self.accounts.values() if each.heap]
        if waiting:
            self.virtual_s = max(self.virtual_s, min(waiting))

    def _tidy(self) -> None:
        """Who has neither debt nor anything waiting would begin just so if it were forgotten."""
        if len(self.accounts) > _SPARE_ACCOUNTS:
            kept = {name: a for name, a in self.accounts.items() if a.heap or a.virtual_s > self.virtual_s}
            self.accounts = kept


class WaitingRoom:
    """Bounded. Times are those of the caller's clock."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._tiers: dict[int, _Tier] = {}
        self._entries: dict[str, Waiting] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Waiting]:
        return iter(self._entries.values())

    @property
    def cost_s(self) -> float:
        """Mac time of all that wait. O(requests)."""
        return sum(each.cost_s for each in self._entries.values())

    def push(self, query: RouteQuery, cost_s: float, now_s: float) -> Waiting | None:
        """Let a request wait that doesn't yet. Returns the one that has to go for it, which may be itself."""
        self._num_pushed += 1
        until_s = None if query.deadline_s is None else now_s + query.deadline_s
        entry = Waiting(query, cost_s, now_s, until_s, self._num_pushed)
        shed = None
        if len(self._entries) >= self._max_waiting:
            shed = self._last_of_the_longest(query)
            if shed is None:
                return entry
            self.remove(shed.query.request_id)
        tier = self._tier(query, now_s)
        account = tier.account(query)
        if not account.heap:
            account.virtual_s = max(account.virtual_s, tier.virtual_s)
        heappush(account.heap, entry)
        self._entries[query.request_id] = entry
        return shed

    def first(self, now_s: float) -> Waiting:
        """Whose turn it is, of those that wait: there must be some. O(tenants + priorities)."""
        by_priority = sorted(self._tiers.items(), reverse=True)
        turns = [(tier, first) for _, tier in by_priority if (first := tier.first()) is not None]
        return next((first for tier, first in turns if tier.is_overdue(first, now_s)), turns[0][1])

    def take(self, first: Waiting, now_s: float) -> None:
        """It is dispatched: take it out and charge its tenant."""
        tier = self._tier(first.query, now_s)
        account = tier.accounts[first.query.tenant]
        assert account.heap[0] is first, "only the first may be dispatched"
        heappop(account.heap)
        del self._entries[first.query.request_id]
        tier.charge(account, first.cost_s)

    def charge(self, query: RouteQuery, cost_s: float, now_s: float) -> None:
        """A request is dispatched that didn't wait."""
        tier = self._tier(query, now_s)
        tier.charge(tier.account(query), cost_s)

    def remove(self, request_id: str) -> Waiting | None:
        """It will not be dispatched, and nobody is charged; None if it doesn't wait. O(its tenant's requests)."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            heap = self._tiers[entry.query.priority].accounts[entry.query.tenant].heap
            heap.remove(entry)
            heapify(heap)
        return entry

    def expired(self, now_s: float) -> tuple[Waiting, ...]:
        """Take out those whose deadline has passed. O(requests)."""
        late = tuple(each for each in self._entries.values() if each.until_s is not None and each.until_s <= now_s)
        for entry in late:
            self.remove(entry.query.request_id)
        return late

    def seconds_ahead_of(self, query: RouteQuery) -> float:
        """Mac time of those that wait in its tier and above: all of it may be dispatched before a newcomer."""
        return sum(each.cost_s for each in self._entries.values() if each.query.priority >= query.priority)

    def check(self) -> None:
        """Raises AssertionError unless heaps and entries agree."""
        found = {}
        for priority, tier in self._tiers.items():
            for tenant, account in tier.accounts.items():
                for index, entry in enumerate(account.heap):
                    assert (entry.query.priority, entry.query.tenant) == (priority, tenant)
                    assert not index or not entry < account.heap[(index - 1) // 2], "no heap"
                    found[entry.query.request_id] = entry
                assert not account.heap or account.virtual_s >= tier.virtual_s, f"{tenant} has credit"
        assert found == self._entries
        assert len(found) <= self._max_waiting

    def _tier(self, query: RouteQuery, now_s: float) -> _Tier:
        tier = self._tiers.setdefault(query.priority, _Tier())
        tier.advance(now_s)
        return tier

    def _last_of_the_longest(self, newcomer: RouteQuery) -> Waiting | None:
        """Whom a newcomer may displace: someone of a lower tier, or of a tenant that has more than its share here."""
        priority = min((p for p, tier in self._tiers.items() if any(a.heap for a in tier.accounts.values())), default=0)
        if not self._entries or priority > newcomer.priority:
            return None
        tier = self._tiers[priority]
        longest = max(tier.accounts.values(), key=lambda each: len(each.heap) / each.weight)
        if priority == newcomer.priority:
            own = tier.accounts.get(newcomer.tenant)
            num_own = 1 + (len(own.heap) if own else 0)
            if len(longest.heap) / longest.weight <= num_own / newcomer.tenant_weight:
                return None
        return max(longest.heap)
