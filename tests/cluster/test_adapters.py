"""The fleet's list of adapters: names, versions, what a router that begins anew believes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.adapters import AdapterList, AdapterReport, AdapterSpec, AdapterState, AdapterStatus, FleetAdapters
from cluster.errors import InvalidRequest, NotFound


def spec(name="pirate", digest="d1", model="m") -> AdapterSpec:
    return AdapterSpec(name, model, f"/adapters/{name}", digest, 100, 5)


def status(digest="d1", state=AdapterState.READY) -> AdapterStatus:
    return AdapterStatus("pirate", digest, state)


def test_each_change_makes_a_newer_list_also_when_the_clock_jumps_back():
    fleet = FleetAdapters()
    fleet.add(spec(), 1000)
    assert fleet.wanted == AdapterList(1000, (spec(),))
    fleet.add(spec("poet", "d2"), 10)
    assert fleet.wanted.version == 1001
    fleet.remove("pirate", 5000)
    assert fleet.wanted == AdapterList(5000, (spec("poet", "d2"),))


def test_the_same_again_is_a_new_list_for_those_that_failed():
    fleet = FleetAdapters()
    fleet.add(spec(), 1)
    fleet.add(spec(), 2)
    assert fleet.wanted == AdapterList(2, (spec(),))


@pytest.mark.parametrize("other", [spec(digest="d2"), spec(model="n")])
def test_a_name_means_one_thing(other):
    fleet = FleetAdapters()
    fleet.add(spec(), 1)
    with pytest.raises(InvalidRequest, match="'pirate' is taken by an adapter of m with other content"):
        fleet.add(other, 2)
    assert fleet.wanted == AdapterList(1, (spec(),))


def test_what_is_not_there_cannot_be_removed():
    fleet = FleetAdapters()
    with pytest.raises(NotFound, match="no adapter is named 'x'; loaded: none"):
        fleet.remove("x", 1)
    fleet.add(spec(), 1)
    with pytest.raises(NotFound, match="loaded: pirate"):
        fleet.remove("x", 2)


def test_the_newest_list_that_macs_bring_counts():
    fleet = FleetAdapters()
    for version in (5, 9, 7):
        fleet.adopt(AdapterList(version, (spec(f"v{version}"),)))
    assert fleet.wanted == AdapterList(9, (spec("v9"),))
    assert fleet.report("a", AdapterReport(7))
    assert not fleet.report("a", AdapterReport(9))


def test_what_macs_say_is_remembered_until_they_leave():
    fleet = FleetAdapters()
    fleet.report("a", AdapterReport(1, (status(),)))
    loading = AdapterReport(1, (status(state=AdapterState.LOADING), status("d2")))
    assert loading.ready == {"d2"}
    fleet.report("b", loading)
    assert fleet.view().by_mac["a"] == (status(),)
    assert fleet.view().versions == {"a": 1, "b": 1}
    fleet.forget("a")
    assert set(fleet.view().by_mac) == {"b"}


def test_what_is_wanted_and_has_not_failed_may_be_ready_soon():
    fleet = FleetAdapters()
    # Nobody has told what is wanted.
    assert fleet.may_be_ready_soon("d1", ["a"])
    assert not fleet.may_be_ready_soon("d1", [])
    fleet.add(spec(), 1)
    assert not fleet.may_be_ready_soon("d2", ["a"])
    assert fleet.may_be_ready_soon("d1", ["a"])
    assert not fleet.may_be_ready_soon("d1", [])
    fleet.report("a", AdapterReport(1, (status(state=AdapterState.FAILED), status("d2"))))
    fleet.report("b", AdapterReport(1, (status(),)))
    assert not fleet.may_be_ready_soon("d1", ["a", "b"])
    fleet.report("b", AdapterReport(1, (status(state=AdapterState.LOADING),)))
    assert fleet.may_be_ready_soon("d1", ["a", "b"])


class FleetMachine(RuleBasedStateMachine):
    """Macs that follow, lag, leave and come back; a router that forgets everything."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = FleetAdapters()
        self.macs: dict[str, AdapterList] = {}
        self.now_ns = 0
        self.truth = AdapterList()

    @rule(name=st.sampled_from("pq"), adds=st.booleans(), step=st.integers(-3, 3))
    def change(self, name, adds, step):
        self.now_ns += step
        try:
            if adds:
                self.fleet.add(spec(name), self.now_ns)
            else:
                self.fleet.remove(name, self.now_ns)
        except NotFound:
            assert name not in {each.name for each in self.truth.specs}
            return
        assert self.fleet.wanted.version > self.truth.version
        self.truth = self.fleet.wanted

    @rule(mac=st.sampled_from("abc"))
    def follow(self, mac):
        """As a Mac does at each report."""
        mine = self.macs.get(mac, AdapterList())
        if self.fleet.report(mac, AdapterReport(mine.version)):
            self.macs[mac] = self.fleet.wanted

    @rule()
    def restart_router(self):
        """Every Mac joins again; the list lives on if any Mac has it."""
        self.fleet = FleetAdapters()
        for mine in self.macs.values():
            self.fleet.adopt(mine)
        self.truth = max([AdapterList(), *self.macs.values()], key=lambda each: each.version)

    @rule(mac=st.sampled_from("abc"))
    def leave(self, mac):
        self.macs.pop(mac, None)
        self.fleet.forget(mac)

    @invariant()
    def the_list_is_the_newest(self):
        assert self.fleet.wanted == self.truth
        names = [each.name for each in self.truth.specs]
        assert len(names) == len(set(names))


FleetMachine.TestCase.settings = settings(max_examples=100, deadline=None)
TestFleet = FleetMachine.TestCase
