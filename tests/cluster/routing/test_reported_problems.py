"""Faults that users reported of other routers; each test names the behaviour that is right."""

from collections import Counter

from cluster.routing.index import Applied


def test_two_gateways_do_not_herd_onto_the_same_best_mac(fleet, prompt_of) -> None:
    """dynamo#589: choosing and booking are one step, so the second caller already sees the first one's work."""
    fleet.add("a", "b")
    of_gateway_1 = fleet.route(prompt_of((1, 500)))
    of_gateway_2 = fleet.route(prompt_of((2, 500)))
    assert {of_gateway_1.mac, of_gateway_2.mac} == {"a", "b"}
    waits = {each.mac: each.wait_s for each in of_gateway_2.candidates}
    assert waits == {of_gateway_1.mac: 0.5, of_gateway_2.mac: 0.0}


def test_paced_sessions_spread_though_nothing_is_in_flight(fleet, prompt_of) -> None:
    """Infera#103: with all loads zero at every decision, one Mac got 448 of 448."""
    fleet.add("a", "b", "c", "d")
    for _ in range(10):
        fleet.router.observe_prefill("c", 1_000, 0.985)
    chosen: Counter[str] = Counter()
    for number in range(40):
        prompt = prompt_of((number, 300))
        decision = fleet.route(prompt)
        fleet.finish(decision, prompt)
        chosen[decision.mac] += 1
    assert set(chosen.values()) == {10}


def test_a_burst_of_equal_scores_spreads(fleet, prompt_of) -> None:
    """llm-d-router#2515: each booking counts before the next decision."""
    fleet.add(*"abcdefgh")
    chosen = Counter(fleet.route(prompt_of((number, 300))).mac for number in range(64))
    assert set(chosen.values()) == {8}


def test_health_never_edits_load(fleet, prompt_of) -> None:
    """vllm router#197: a health check zeroed the load counters."""
    fleet.add("a", "b")
    for number in range(6):
        fleet.route(prompt_of((number, 100)))
    before = fleet.loads()
    fleet.router.lost("a")
    fleet.router.join(fleet.info("a"))
    fleet.router.load_snapshot("a", 1, 0, [])
    fleet.router.join(fleet.info("b"))
    fleet.router.drain("b")
    fleet.router.resume("b")
    fleet.router.check()
    assert fleet.loads() == before


def test_a_hundred_cancelled_requests_leave_no_load(fleet, prompt_of) -> None:
    """vllm router#200, #215: cancelled requests leaked load until one restarted node got everything."""
    fleet.add("a", "b")
    for number in range(100):
        decision = fleet.route(prompt_of((number, 200)))
        if number % 3 == 0:
            fleet.router.first_token(decision.request_id)
        fleet.router.release(decision.request_id)
    assert fleet.loads() == {"a": (0, 0, 0), "b": (0, 0, 0)}
    assert fleet.router.index_stats().num_expected == 0
    fleet.add("a", epoch=2)
    chosen = Counter(fleet.route(prompt_of((200 + number, 200))).mac for number in range(10))
    assert chosen == {"a": 5, "b": 5}


def test_a_flapping_mac_keeps_its_bookings_within_their_leases(fleet, prompt_of) -> None:
    """dynamo#13513: a discovery flap dropped live bookings and the worker looked idle."""
    fleet.add("a", "b")
    fleet.route(prompt_of((1, 3_000)), exclude=["b"])
    for _ in range(3):
        fleet.router.lost("a")
        fleet.router.check()
        assert fleet.router.join(fleet.info("a")) is Applied.RESYNC
        fleet.router.load_snapshot("a", 1, 5, [])
    assert fleet.loads()["a"] == (1, 3_000, 0)
    assert [fleet.route(prompt_of((2 + number, 500))).mac for number in range(4)] == ["b"] * 4
    fleet.router.expire(60.0)
    assert fleet.loads()["a"] == (0, 0, 0)


def test_bookings_belong_to_one_incarnation(fleet, prompt_of) -> None:
    """The other half of dynamo#13513: a restarted Mac runs none of the requests that its past self was given."""
    fleet.add("a")
    old = fleet.route(prompt_of((1, 3_000)))
    fleet.router.lost("a")
    fleet.add("a", epoch=2)
    assert fleet.loads() == {"a": (0, 0, 0)}
    new = fleet.route(prompt_of((2, 100)))
    fleet.router.release(old.request_id)
    fleet.router.check()
    assert fleet.loads() == {"a": (1, 100, 0)}
    fleet.router.release(new.request_id)


def test_a_shared_system_prompt_does_not_pin_everyone_to_one_mac(fleet, prompt_of, hashes_of) -> None:
    """production-stack#957, #1035: what counts is the seconds saved, not that something matched."""
    system = prompt_of((99, 160))
    fleet.add("a", holds=hashes_of(system))
    fleet.add("b", "c", "d")
    chosen = Counter(fleet.route(system + prompt_of((number, 1_000))).mac for number in range(40))
    assert set(chosen) == {"a", "b", "c", "d"}
    assert max(chosen.values()) <= 13


def test_a_hot_prefix_is_replicated_when_queueing_costs_more_than_prefilling_again(fleet, prompt_of, hashes_of) -> None:
    """dynamo#737: eight workers, one shared prompt, all requests on one of them."""
    hot = prompt_of((99, 800))
    fleet.add("a", holds=hashes_of(hot))
    fleet.add("b", "c")
    decisions = [fleet.route(hot + prompt_of((number, 200))) for number in range(30)]
    assert [each.mac for each in decisions[:4]] == ["a"] * 4
    assert {each.mac for each in decisions} == {"a", "b", "c"}
    assert sum(each.num_matched_tokens == 0 for each in decisions) == 2, "computed once more on each of the others"


def test_a_gap_in_the_events_is_seen_and_healed(fleet, prompt_of, hashes_of) -> None:
    """llm-d-router#1737: the sequence number was read and never checked."""
    prompt = prompt_of((1, 160))
    fleet.add("a")
    blocks = [(0, each) for each in hashes_of(prompt)]
    assert fleet.router.apply_events("a", 1, 0, blocks[:3], []) is Applied.OK
    assert fleet.router.apply_events("a", 1, 2, [], blocks[:1]) is Applied.RESYNC
    assert fleet.router.apply_events("a", 1, 3, blocks[5:6], []) is Applied.RESYNC
    assert fleet.router.load_snapshot("a", 1, 4, blocks[:8]) is Applied.OK
    assert fleet.route(prompt).num_matched_tokens == 128
    assert fleet.router.index_stats().macs[0].num_gaps == 1


def test_a_restarted_router_rebuilds_from_snapshots(make_fleet, prompt_of, hashes_of) -> None:
    """dynamo#1056, llm-d-kv-cache#372: a router that came later dropped the children of blocks it hadn't seen."""
    prompt = prompt_of((1, 160))
    blocks = [(0, each) for each in hashes_of(prompt)]
    fleet = make_fleet()
    fleet.router.join(fleet.info("a"))
    assert fleet.router.apply_events("a", 1, 42, blocks[7:8], []) is Applied.RESYNC
    fleet.router.load_snapshot("a", 1, 43, blocks[:8])
    assert fleet.router.apply_events("a", 1, 43, blocks[8:], []) is Applied.OK
    assert fleet.route(prompt).num_matched_tokens == 144


def test_an_unknown_block_does_not_stop_the_rest_of_a_removal(fleet, prompt_of, hashes_of) -> None:
    """dynamo#14652: the batch was aborted at the first block that the index did not know."""
    prompt = prompt_of((1, 160))
    fleet.add("a", holds=hashes_of(prompt))
    fleet.remove("a", [*hashes_of(prompt_of((2, 32))), *hashes_of(prompt)])
    fleet.router.check()
    assert fleet.route(prompt).num_matched_tokens == 0
    stats = fleet.router.index_stats()
    assert stats.num_keys == 0
    assert stats.macs[0].num_no_effect_events == 2


def test_duplicate_stores_are_one_presence_for_each_mac_and_group(fleet, prompt_of, hashes_of) -> None:
    """dynamo#8012, llm-d-kv-cache#680: a removal must end this Mac's block in this group, no other and not half."""
    prompt = prompt_of((1, 33))
    hashes = hashes_of(prompt)
    fleet.add("a", "b", holds=hashes)
    fleet.store("a", hashes)
    assert fleet.router.apply_events("b", 1, 0, [(1, each) for each in hashes], []) is Applied.OK
    assert fleet.router.apply_events("b", 1, 1, [], [(1, each) for each in hashes]) is Applied.OK
    fleet.remove("a", hashes)
    fleet.router.check()
    matched = {each.mac: each.num_matched_tokens for each in fleet.route(prompt).candidates}
    assert matched == {"a": 0, "b": 32}
