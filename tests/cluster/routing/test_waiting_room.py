"""Whose turn it is among requests that wait in the router."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.kv.hashing import BlockHash
from cluster.routing.decision import RouteQuery
from cluster.routing.waiting_room import PATIENCE_S, WaitingRoom


def query(name: str, **fields: object) -> RouteQuery:
    return RouteQuery(name, "m", BlockHash(bytes(16)), (), 10, 10, **fields)  # type: ignore[arg-type]


def take(room: WaitingRoom, now_s: float = 0.0) -> str:
    entry = room.first(now_s)
    room.take(entry, now_s)
    room.check()
    return entry.query.request_id


def push(room: WaitingRoom, name: str, cost_s: float = 1.0, now_s: float = 0.0, **fields: object) -> str | None:
    shed = room.push(query(name, **fields), cost_s, now_s)
    room.check()
    return None if shed is None else shed.query.request_id


def test_first_come_first_served() -> None:
    room = WaitingRoom(10)
    for number in range(5):
        push(room, str(number), now_s=float(number))
    assert [take(room) for _ in range(5)] == list("01234")
    assert len(room) == 0


def test_higher_priorities_go_first() -> None:
    room = WaitingRoom(10)
    push(room, "low", priority=-1)
    push(room, "normal", now_s=1.0)
    push(room, "high", priority=2, now_s=2.0)
    assert [take(room) for _ in range(3)] == ["high", "normal", "low"]


def test_a_flood_of_a_higher_priority_leaves_each_lower_tier_a_turn_a_minute() -> None:
    room, taken = WaitingRoom(100), list[tuple[float, str]]()
    for number in range(3):
        push(room, f"low{number}", priority=-1)
        push(room, f"lower{number}", priority=-2)
    for second in range(200):
        push(room, f"high{second}", priority=1, now_s=float(second))
        taken.append((second, take(room, float(second))))
    lows = [(second, name) for second, name in taken if "low" in name]
    assert lows == [(60, "low0"), (61, "lower0"), (120, "low1"), (121, "lower1"), (180, "low2"), (181, "lower2")]
    # A debt is all that is left of these tiers.
    assert take(room, 300.0).startswith("high")


def test_tenants_share_mac_time_by_weight_not_by_requests() -> None:
    """Tenant a's requests take three seconds each, b's one, and c has double weight."""
    room, seconds = WaitingRoom(1_000), Counter[str]()
    for number in range(200):
        for tenant, cost_s, weight in (("a", 3.0, 1.0), ("b", 1.0, 1.0), ("c", 1.0, 2.0)):
            push(room, f"{tenant}{number}", cost_s, tenant=tenant, tenant_weight=weight)
    for _ in range(150):
        entry = room.first(0.0)
        room.take(entry, 0.0)
        seconds[entry.query.tenant] += entry.cost_s
    assert seconds["a"] == pytest.approx(seconds["b"], abs=3.0)
    assert seconds["c"] == pytest.approx(2 * seconds["b"], abs=3.0)


def test_what_never_had_to_wait_counts_too() -> None:
    room = WaitingRoom(10)
    for _ in range(5):
        room.charge(query("x", tenant="greedy"), 2.0, 0.0)
    push(room, "g1", tenant="greedy")
    push(room, "m1", tenant="modest", now_s=1.0)
    push(room, "m2", tenant="modest", now_s=2.0)
    assert [take(room) for _ in range(3)] == ["m1", "m2", "g1"]


def test_being_away_gives_no_credit() -> None:
    room = WaitingRoom(100)
    for number in range(20):
        push(room, f"a{number}", tenant="a")
    for _ in range(10):
        take(room)
    for number in range(20):
        push(room, f"b{number}", tenant="b", now_s=5.0)
    turns = Counter(take(room)[0] for _ in range(10))
    assert turns == {"a": 5, "b": 5}


def test_small_prompts_overtake_a_huge_one_and_do_not_starve_it() -> None:
    room = WaitingRoom(100)
    push(room, "huge", cost_s=30.0)
    for number in range(40):
        push(room, f"{number}", cost_s=1.0, now_s=float(number + 1))
    order = [take(room) for _ in range(41)]
    assert order.index("huge") == 28, "those that came within its 30 seconds, less their own"


def test_a_full_room_sheds_the_longest_queue_of_the_lowest_tier() -> None:
    room = WaitingRoom(4)
    for number in range(3):
        assert push(room, f"flood{number}", tenant="flood", now_s=float(number)) is None
    assert push(room, "other", tenant="other") is None
    assert push(room, "flood3", tenant="flood", now_s=3.0) == "flood3", "who floods is refused"
    assert push(room, "third", tenant="third") == "flood2"
    assert push(room, "urgent", tenant="flood", priority=1) == "flood1"
    assert push(room, "vain", tenant="other", priority=-1) == "vain"
    assert push(room, "another", tenant="other") == "another", "all have one: the newcomer would have two"
    assert len(room) == 4


def test_a_room_without_places_takes_nobody() -> None:
    assert push(WaitingRoom(0), "a") == "a"


def test_deadlines_pass() -> None:
    room = WaitingRoom(10)
    push(room, "patient")
    push(room, "hasty", deadline_s=2.0, now_s=1.0)
    assert room.expired(2.9) == ()
    assert [each.query.request_id for each in room.expired(3.0)] == ["hasty"]
    assert room.remove("hasty") is None
    assert [each.query.request_id for each in room] == ["patient"]


def test_only_its_tier_and_those_above_are_ahead_of_a_newcomer() -> None:
    room = WaitingRoom(10)
    for priority in (-1, 0, 1):
        push(room, str(priority), cost_s=2.0 + priority, priority=priority)
    assert room.seconds_ahead_of(query("x")) == 5.0
    assert room.cost_s == 6.0


def test_tenants_without_debt_are_forgotten() -> None:
    room = WaitingRoom(10)
    for number in range(500):
        push(room, "r", tenant=f"t{number}", cost_s=0.1, now_s=number / 10)
        take(room, number / 10)
    assert len(room._tiers[0].accounts) <= 66


def test_a_debt_is_forgiven_with_time() -> None:
    room = WaitingRoom(10)
    room.charge(query("x", tenant="a"), 5.0, 0.0)
    for name, now_s in (("a1", 6.0), ("b1", 6.5)):
        push(room, name, tenant=name[0], now_s=now_s)
    assert [take(room, 7.0) for _ in range(2)] == ["a1", "b1"]


class RoomMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.room = WaitingRoom(5)
        self.now_s = 0.0
        self.waiting: dict[str, RouteQuery] = {}
        self.dispatched_s: dict[int, float] = {}
        self.num = 0

    @rule(
        tenant=st.sampled_from("abc"),
        weight=st.sampled_from([0.5, 1.0, 4.0]),
        priority=st.integers(0, 1),
        cost_s=st.sampled_from([0.0, 1.0, 9.0]),
        deadline_s=st.sampled_from([None, 3.0]),
    )
    def push(self, tenant: str, weight: float, priority: int, cost_s: float, deadline_s: float | None) -> None:
        self.num += 1
        new = query(f"r{self.num}", tenant=tenant, tenant_weight=weight, priority=priority, deadline_s=deadline_s)
        shed = self.room.push(new, cost_s, self.now_s)
        self.waiting[new.request_id] = new
        assert (shed is not None) == (len(self.waiting) > 5)
        if shed is not None:
            assert shed.query.priority <= priority
            del self.waiting[shed.query.request_id]

    @precondition(lambda self: self.waiting)
    @rule()
    def take(self) -> None:
        entry = self.room.first(self.now_s)
        highest = max(each.priority for each in self.waiting.values())
        # The other way round than the room: all tiers that are out of patience, and the highest.
        tiers = {each.priority for each in self.waiting.values() if self.out_of_patience(each.priority)} | {highest}
        ahead = max(tiers, key=lambda tier: (self.out_of_patience(tier), tier))
        assert entry.query.priority == ahead
        self.room.take(entry, self.now_s)
        self.dispatched_s[ahead] = self.now_s
        del self.waiting[entry.query.request_id]

    def out_of_patience(self, priority: int) -> bool:
        first = min(
            (each for each in self.room if each.query.priority == priority),
            key=lambda each: (self.room._tiers[priority].accounts[each.query.tenant].virtual_s, each),
        )
        since = [first.arrived_s, *(at for tier, at in self.dispatched_s.items() if tier == priority)]
        return all(self.now_s - at >= PATIENCE_S for at in since)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*self.waiting, "unknown"]))
        assert (self.room.remove(name) is not None) == (name in self.waiting)
        self.waiting.pop(name, None)

    @rule(tenant=st.sampled_from("abc"), cost_s=st.sampled_from([0.5, 5.0]))
    def charge(self, tenant: str, cost_s: float) -> None:
        self.room.charge(query("x", tenant=tenant), cost_s, self.now_s)
        self.dispatched_s[0] = self.now_s

    @rule(seconds=st.sampled_from([0.5, 2.0, PATIENCE_S]))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for late in self.room.expired(self.now_s):
            assert late.query.deadline_s is not None
            del self.waiting[late.query.request_id]

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "room"):
            self.room.check()
            assert {each.query.request_id for each in self.room} == set(self.waiting)


TestRoomMachine = RoomMachine.TestCase
TestRoomMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
