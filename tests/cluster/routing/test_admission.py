"""Requests that can't be placed at once wait, in order, within bounds, and learn what became of them."""

import pytest

from cluster.routing.admission import Admission
from cluster.routing.config import RoutingConfig
from cluster.routing.errors import DeadlineUnmet, NoMacAvailable, QueueFull, UnknownModel

# A Mac is full with a backlog of two seconds; four requests may wait.
CONFIG = RoutingConfig(
    lease_s=60.0, pressure_weight=0.0, stall_weight=0.0, decode_weight=0.0, max_backlog_s=2.0, max_waiting=4
)


class Desk:
    def __init__(self, fleet, prompt_of, *macs: str) -> None:
        self.fleet, self.prompt_of = fleet, prompt_of
        fleet.add(*macs)
        self.admission = Admission(fleet.router, CONFIG)
        self.num = 0

    def submit(self, seconds: float, name: str, **fields: object):
        """A cold prompt that takes so long; the Mac's name, or None if it waits."""
        self.num += 1
        prompt = self.prompt_of((self.num, int(1_000 * seconds)))
        decision = self.admission.submit(self.fleet.query(prompt, name, **fields), self.fleet.now_s)
        self.check()
        return None if decision is None else decision.mac

    def dispatch(self) -> dict[str, object]:
        outcomes = self.admission.dispatch(self.fleet.now_s)
        self.check()
        return {each.request_id: each.decision.mac if each.decision else each.error for each in outcomes}

    def finish(self, name: str) -> None:
        self.fleet.router.first_token(name)
        self.admission.withdraw(name)
        self.check()

    def check(self) -> None:
        self.admission.check()
        self.fleet.router.check()


@pytest.fixture
def desk(make_fleet, prompt_of):
    return lambda *macs: Desk(make_fleet(CONFIG), prompt_of, *macs)


def test_requests_go_at_once_while_a_mac_has_little_to_do(desk) -> None:
    one = desk("a", "b")
    assert {one.submit(3.0, "1"), one.submit(3.0, "2")} == {"a", "b"}
    assert one.submit(0.5, "3") is None
    assert one.dispatch() == {}
    assert one.admission.num_waiting() == {"tiny": 1}
    one.finish("1")
    assert set(one.dispatch()) == {"3"}
    assert one.admission.num_waiting() == {"tiny": 0}


def test_nobody_jumps_the_queue(desk) -> None:
    one = desk("a")
    one.submit(3.0, "1")
    assert one.submit(1.0, "2") is None
    one.finish("1")
    assert one.submit(0.1, "3") is None, "there is room, but another waits"
    assert list(one.dispatch()) == ["3", "2"], "both at once; the shorter one first"


def test_a_mac_worth_waiting_for_is_waited_for_there(desk, fleet, prompt_of) -> None:
    """The policy weighs the wait itself as long as any Mac has room."""
    one = desk("a", "b")
    one.fleet.store("a", prompt_of((50, 9_000)))
    assert one.submit(3.0, "1", exclude=["b"]) == "a"
    query = one.fleet.query(prompt_of((50, 9_000)), "2")
    decision = one.admission.submit(query, 0.0)
    assert decision is not None
    assert (decision.mac, decision.num_matched_tokens) == ("a", 8_992)


def test_tenants_take_turns_in_mac_seconds(desk) -> None:
    one = desk("a")
    one.submit(2.5, "0", tenant="x")
    for name, tenant in (("x1", "x"), ("x2", "x"), ("y1", "y"), ("y2", "y")):
        assert one.submit(2.5, name, tenant=tenant) is None
    order = []
    running = "0"
    for _ in range(4):
        one.finish(running)
        (running,) = one.dispatch()
        order.append(running)
    assert order == ["y1", "x1", "y2", "x2"]


def test_a_full_queue_says_when_to_come_back(desk) -> None:
    one = desk("a")
    one.submit(5.0, "0")
    for number in range(4):
        one.submit(2.0, f"w{number}")
    with pytest.raises(QueueFull, match="4 requests for 'tiny' are waiting") as refused:
        one.submit(1.0, "late")
    assert refused.value.retry_after_s == pytest.approx(4 * 2.0 + 5.0 - 2.0, rel=0.01)


def test_a_shed_request_is_told(desk) -> None:
    one = desk("a")
    one.submit(5.0, "0")
    for number in range(4):
        one.submit(2.0, f"w{number}", tenant="flood")
    assert one.submit(1.0, "urgent", priority=1) is None
    outcomes = one.dispatch()
    assert isinstance(outcomes["w3"], QueueFull)


def test_only_deadlines_that_can_be_met_are_admitted(desk) -> None:
    one = desk("a", "b")
    with pytest.raises(DeadlineUnmet, match=r"would take 3.0 s, its deadline is 2.0 s") as refused:
        one.submit(3.0, "vain", deadline_s=2.0)
    assert refused.value.retry_after_s == 1.0
    busy = one.submit(1.5, "0")
    assert one.submit(1.0, "1", deadline_s=1.2) not in (busy, None), "where it can be met"
    explained = one.fleet.router.what_if(one.fleet.query(one.prompt_of((99, 2_000)), deadline_s=2.7), 0.0)
    assert {each.mac: each.excluded for each in explained.candidates} == {
        busy: "its first token would take 3.5 s, the deadline is 2.7 s",
        "ab".replace(busy, ""): "",
    }
    one.submit(3.0, "2")
    one.submit(3.0, "3")
    with pytest.raises(DeadlineUnmet):
        one.submit(0.1, "4", deadline_s=2.0)
    assert one.submit(0.1, "5", deadline_s=20.0) is None
    assert one.submit(4.0, "6", deadline_s=30.0) is None
    with pytest.raises(DeadlineUnmet):
        one.submit(0.1, "7", deadline_s=4.0)


def test_a_mac_of_unknown_speed_is_believed_to_be_in_time(desk) -> None:
    """Else it might never be asked, and never learnt."""
    one = desk("a")
    one.fleet.router.macs.join(one.fleet.info("new"))
    assert one.submit(3.0, "1", deadline_s=2.0) == "new"


def test_a_deadline_passes_while_waiting(desk) -> None:
    one = desk("a")
    one.submit(3.0, "0")
    assert one.submit(0.1, "1", deadline_s=4.0) is None
    one.fleet.now_s = 3.95
    one.finish("0")
    assert isinstance(one.dispatch()["1"], DeadlineUnmet), "50 ms are left, it takes 100"
    one.submit(3.0, "2")
    assert one.submit(0.1, "3", deadline_s=4.0) is None
    one.fleet.now_s = 8.0
    late = one.dispatch()["3"]
    assert isinstance(late, DeadlineUnmet)
    assert "would take 4.0 s" in str(late) or "would take 4.1 s" in str(late)


def test_a_request_that_ends_while_it_waits_is_gone(desk) -> None:
    one = desk("a")
    one.submit(3.0, "0")
    one.submit(1.0, "1")
    one.admission.withdraw("1")
    one.finish("0")
    assert one.dispatch() == {}
    assert one.fleet.loads() == {"a": (0, 0, 0)}


def test_submitting_again_takes_the_place_of_the_first(desk) -> None:
    one = desk("a")
    one.submit(3.0, "0")
    one.submit(1.0, "1")
    one.submit(1.0, "1")
    assert one.admission.num_waiting() == {"tiny": 1}
    assert one.submit(3.0, "0") == "a" or one.admission.num_waiting() == {"tiny": 2}


def test_waiting_in_vain_ends_with_the_reason(desk) -> None:
    one = desk("a")
    one.submit(3.0, "0")
    one.submit(1.0, "1")
    one.fleet.router.macs.drain("a")
    assert isinstance(one.dispatch()["1"], NoMacAvailable)
    one.fleet.router.macs.resume("a")
    one.submit(1.0, "2")
    one.fleet.router.macs.leave("a", 1)
    assert isinstance(one.dispatch()["2"], UnknownModel)
    assert one.admission.num_waiting() == {}
    with pytest.raises(UnknownModel):
        one.submit(1.0, "3")
