"""Requests not yet admitted: whose turn it is among priorities, tenants and arrivals.

Priorities are tiers: a higher one goes first, but none waits for ever. The next of a tier that has something waiting
and has had no turn for `PATIENCE_S` is tried before all others, so a flood leaves each lower tier one admission in that
time. Within a tier, tenants share by start-time fair queuing (Goyal, Vin and Cheng, 1996): an admission moves its
tenant's virtual time on by cost_tokens / weight, and the tenant with the lowest is next. A tenant that comes (back)
starts no lower than the tier's virtual time, so it has its share at once, but no more for the time it was away. That
time is the start of the tier's last admission or, if lower, of the next one: admissions charged at far more than they
cost, and refunded later, would else leave it ahead of everyone and make newcomers wait for it.

A tenant has a virtual time of its own in every tier. With one for all of them, what it got in a higher tier would be
debt in a lower one, and a long wait in a lower one credit in a higher: without bound, as tiers can wait for ever.
"""

from collections.abc import Hashable, Iterator
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from typing import Generic, Protocol, TypeVar, cast


class QueueEntry(Protocol):
    """What the queue must know of a request. Compared by identity; only `cost_tokens` may change while it waits."""

    @property
    def tenant(self) -> str:
        """Whose share it comes out of."""

    @property
    def weight(self) -> float:
        """The tenant's share in proportion to others'; the last one pushed counts for all its entries in the tier."""

    @property
    def priority(self) -> int:
        """Higher goes first."""

    @property
    def arrival_s(self) -> float:
        """Earlier goes first within a tenant, and among tenants that are level."""

    @property
    def cost_tokens(self) -> int:
        """What serving it is expected to take: prompt not cached, and max_tokens."""


E = TypeVar("E", bound=QueueEntry)
T = TypeVar("T", bound=Hashable)
# Seconds without an admission after which a tier that waits is given one.
PATIENCE_S = 60.0
# Ends in a number that is unique to the item, so that comparing never goes on to the item itself.
_Key = tuple[float, ...]


class _KeyedHeap(Generic[T]):
    """A heap whose items can be filed anew and discarded, each in O(log n) amortized.

    Outdated records stay in the heap until they surface or outnumber the rest.
    """

    def __init__(self) -> None:
        self.records: dict[T, tuple[_Key, T]] = {}
        self._heap: list[tuple[_Key, T]] = []

    def put(self, item: T, key: _Key) -> None:
        record = self.records[item] = (key, item)
        heappush(self._heap, record)
        if len(self._heap) > 2 * len(self.records) + 8:
            self._heap = list(self.records.values())
            heapify(self._heap)

    def discard(self, item: T) -> None:
        self.records.pop(item, None)

    def first(self) -> tuple[_Key, T] | None:
        while self._heap:
            record = self._heap[0]
            if self.records.get(record[1]) is record:
                return record
            heappop(self._heap)
        return None

    def take_until(self, limit: float) -> Iterator[T]:
        """Remove and give the items whose keys begin at or below `limit`, lowest first."""
        while (record := self.first()) is not None and record[0][0] <= limit:
            del self.records[record[1]]
            yield record[1]

    def check(self) -> None:
        in_heap = set(map(id, self._heap))
        assert all(id(record) in in_heap for record in self.records.values()), "a record is not in the heap"


class _Node(Generic[E]):
    """One waiting entry, in its account's circular list."""

    __slots__ = ("account", "entry", "is_charged", "next", "prev", "serial")

    def __init__(self, account: "_Account[E]", entry: E, serial: int, is_charged: bool) -> None:
        self.account = account
        self.entry = entry
        self.serial = serial
        # Its tenant has paid for it: it was admitted before, and preempted.
        self.is_charged = is_charged
        self.prev = self.next = self


class _Account(Generic[E]):
    """One tenant in one tier."""

    __slots__ = ("sentinel", "serial", "tenant", "tier", "virtual_time", "weight")

    def __init__(self, tier: "_Tier[E]", tenant: str, serial: int) -> None:
        self.tier = tier
        self.tenant = tenant
        self.weight = 1.0
        self.serial = serial
        self.virtual_time = tier.virtual_time
        # Begins and ends the list; the one node without an entry, which nobody asks for.
        self.sentinel: _Node[E] = _Node(self, cast(E, None), 0, False)


class _Tier(Generic[E]):
    """All accounts of one priority, filed by virtual time: with something waiting, or idle."""

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.accounts: dict[str, _Account[E]] = {}
        self.backlogged: _KeyedHeap[_Account[E]] = _KeyedHeap()
        self.idle: _KeyedHeap[_Account[E]] = _KeyedHeap()
        self.last_start = 0.0

    def first(self) -> E | None:
        """The one whose turn it is."""
        record = self.backlogged.first()
        return None if record is None else record[1].sentinel.next.entry

    @property
    def virtual_time(self) -> float:
        lowest = self.backlogged.first()
        return self.last_start if lowest is None else min(self.last_start, lowest[0][0])

    def file(self, account: _Account[E]) -> None:
        """To be called after every change of an account. Forgets the idle ones that are not ahead of the tier."""
        key = _key_of(account.virtual_time, account.sentinel.next)
        if key is None:
            self.backlogged.discard(account)
            self.idle.put(account, (account.virtual_time, account.serial))
        else:
            self.idle.discard(account)
            self.backlogged.put(account, key)
        for behind in self.idle.take_until(self.virtual_time):
            del self.accounts[behind.tenant]

    def candidates(self) -> Iterator[E]:
        """In the order in which they would be admitted if none were passed over: each starts when those before end."""
        starts = [(key, account.sentinel.next) for key, account in self.backlogged.records.values()]
        heapify(starts)
        while starts:
            key, node = heappop(starts)
            end = key[0] + _charge_of(node)
            yield node.entry
            # An entry admitted meanwhile still knows what came after it.
            following = node.next
            next_key = _key_of(end, following)
            if next_key is not None:
                heappush(starts, (next_key, following))


def _key_of(virtual_time: float, node: _Node[E]) -> _Key | None:
    """Tenants on a par go by arrival; None for the end of a list."""
    return None if node is node.account.sentinel else (virtual_time, node.entry.arrival_s, node.serial)


def _charge_of(node: _Node[E]) -> float:
    return 0.0 if node.is_charged else node.entry.cost_tokens / node.account.weight


class WaitingQueue(Generic[E]):
    """Entries that wait, and what each tenant has had lately.

    With one tenant and one priority: first come, first served. Memory is that of the entries and of the tenants ahead
    of their tier's virtual time. Nothing but the entry at hand may be removed between two steps of an iterator.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, _Node[E]] = {}
        self._tiers: dict[int, _Tier[E]] = {}
        # By priority; outlives the tier, which goes when nothing waits.
        self._last_admission_s: dict[int, float] = {}
        self._serials = count(1)

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[E]:
        return (node.entry for node in self._nodes.values())

    def push(self, entry: E) -> None:
        """Queue a new entry behind its tenant's earlier arrivals.

        O(log n), and O(1) more for each that arrived later but was pushed before. Raises ValueError for a weight or a
        cost that cannot be charged.
        """
        node = self._new_node(entry, is_charged=False)
        sentinel = node.account.sentinel
        before = sentinel.prev
        while before is not sentinel and not before.is_charged and before.entry.arrival_s > entry.arrival_s:
            before = before.prev
        self._insert(node, before)

    def push_front(self, entry: E) -> None:
        """Queue a preempted entry before all of its tenant. O(log n).

        It was paid for when it was first admitted. Raises as `push` does.
        """
        node = self._new_node(entry, is_charged=True)
        self._insert(node, node.account.sentinel)

    def candidates(self, now_s: float) -> Iterator[E]:
        """Waiting entries in the order in which to try them; none is removed.

        The one just given may be admitted or removed before going on. Beginning a tier costs O(its tenants that wait),
        each step O(log of them).
        """
        tiers = [self._tiers[priority] for priority in sorted(self._tiers, reverse=True)]
        overdue = [entry for tier in tiers if (entry := self._overdue(tier, now_s)) is not None]
        yield from overdue
        tried = set(map(id, overdue))
        for tier in tiers:
            yield from (entry for entry in tier.candidates() if id(entry) not in tried)

    def admit(self, entry: E, now_s: float) -> bool:
        """Remove an entry and charge its tenant what it is expected to cost; O(log n).

        Returns whether its tier had been without a turn for `PATIENCE_S`.
        """
        account = self._node_of(entry).account
        was_overdue = self._overdue(account.tier, now_s) is not None
        self._last_admission_s[entry.priority] = now_s
        node = self._take_out(entry)
        if not node.is_charged:
            account.tier.last_start = account.virtual_time
            account.virtual_time += _charge_of(node)
        self._file(account)
        return was_overdue

    def charge(self, tenant: str, num_tokens: int, *, priority: int = 0, weight: float = 1.0) -> None:
        """Correct what the tenant was charged in the tier, by less than 0 if it used less. O(log n).

        `weight` is for a tenant that has been forgotten since; such a one has no use for a refund.
        """
        tier = self._tiers.get(priority)
        account = None if tier is None else tier.accounts.get(tenant)
        if account is None:
            if num_tokens <= 0:
                return
            account = self._account(tenant, priority, weight)
        account.virtual_time += num_tokens / account.weight
        self._file(account)

    def remove(self, entry: E) -> None:
        """Remove an entry that will not be served; nobody is charged. O(log n)."""
        self._file(self._take_out(entry).account)

    def check(self) -> None:
        """Assert that lists, files and clocks agree. O(n)."""
        found: set[int] = set()
        for priority, tier in self._tiers.items():
            assert tier.priority == priority, f"tier {priority} calls itself {tier.priority}"
            assert tier.accounts, f"tier {priority} is empty"
            tier.backlogged.check()
            tier.idle.check()
            for tenant, account in tier.accounts.items():
                assert (account.tier, account.tenant) == (tier, tenant), f"{tenant} is filed as another"
                nodes = list(_nodes_of(account))
                found.update(id(node.entry) for node in nodes)
                file, other = (tier.backlogged, tier.idle) if nodes else (tier.idle, tier.backlogged)
                assert account in file.records, f"{tenant} is not where its {len(nodes)} entries belong"
                assert account not in other.records, f"{tenant} is both backlogged and idle"
                assert file.records[account][0][0] == account.virtual_time, f"{tenant} is filed under an old time"
                assert nodes or account.virtual_time > tier.virtual_time, f"{tenant} should be forgotten"
        assert found == set(self._nodes), "lists and map hold other entries"

    def _overdue(self, tier: _Tier[E], now_s: float) -> E | None:
        """The tier's next entry, if it is there, and none of the tier was admitted, for `PATIENCE_S`."""
        first = tier.first()
        if first is None:
            return None
        since_s = max(first.arrival_s, self._last_admission_s.get(tier.priority, -inf))
        return first if now_s - since_s >= PATIENCE_S else None

    def _new_node(self, entry: E, *, is_charged: bool) -> _Node[E]:
        assert id(entry) not in self._nodes, f"{entry} is waiting already"
        if entry.cost_tokens < 0:
            raise ValueError(f"tenant {entry.tenant}: cost_tokens must be at least 0, got {entry.cost_tokens}")
        account = self._account(entry.tenant, entry.priority, entry.weight)
        return _Node(account, entry, next(self._serials), is_charged)

    def _account(self, tenant: str, priority: int, weight: float) -> _Account[E]:
        """The tenant's account, from now on of this weight. A new one is to be filed by the caller."""
        if not 0 < weight < inf:
            raise ValueError(f"tenant {tenant}: weight must be positive and finite, got {weight}")
        tier = self._tiers.get(priority)
        if tier is None:
            tier = self._tiers[priority] = _Tier(priority)
        account = tier.accounts.get(tenant)
        if account is None:
            account = tier.accounts[tenant] = _Account(tier, tenant, next(self._serials))
        account.weight = weight
        return account

    def _insert(self, node: _Node[E], before: _Node[E]) -> None:
        node.prev, node.next = before, before.next
        before.next.prev = before.next = node
        self._nodes[id(node.entry)] = node
        # Idle accounts that fell behind were forgotten, so whoever is not new here has no credit either.
        self._file(node.account)

    def _take_out(self, entry: E) -> _Node[E]:
        """Unlink an entry; its own links stay for iterators. The caller files the account."""
        node = self._node_of(entry)
        del self._nodes[id(entry)]
        node.prev.next, node.next.prev = node.next, node.prev
        return node

    def _node_of(self, entry: E) -> _Node[E]:
        node = self._nodes.get(id(entry))
        assert node is not None, f"{entry} is not waiting"
        return node

    def _file(self, account: _Account[E]) -> None:
        tier = account.tier
        tier.file(account)
        if not tier.accounts:
            del self._tiers[tier.priority]


def _nodes_of(account: _Account[E]) -> Iterator[_Node[E]]:
    node = account.sentinel.next
    while node is not account.sentinel:
        assert node.prev.next is node, "the links of a list part"
        yield node
        node = node.next
