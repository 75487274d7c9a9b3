"""Faults that users reported of other routers, each with the behaviour that is right.

`ROWS` says for each of the 31 reports where it is tested, or why it can't befall this router: a test here, one in
another file, or a sentence.
"""

import ast
from collections import Counter
from pathlib import Path

import pytest

from cluster.kv.events import BlocksRemoved, BlocksStored, xor_of
from cluster.kv.layout import KVGroup
from cluster.kv.spec import RecurrentStateSpec, SlidingWindowSpec, StateTensor
from cluster.routing.errors import IncompatibleMac
from cluster.routing.index import Applied

REPOSITORY = Path(__file__).resolve().parents[3]
MACHINE = "tests/cluster/routing/test_router_machine.py::TestRouterMachine"
ROWS = {
    1: "test_a_hot_prefix_is_replicated_when_queueing_costs_more_than_prefilling_again",
    2: "test_two_gateways_do_not_herd_onto_the_same_best_mac",
    3: "test_paced_sessions_spread_though_nothing_is_in_flight",
    4: "test_a_burst_of_equal_scores_spreads",
    5: "tests/cluster/routing/test_load.py::test_a_release_takes_back_all_once",
    6: "test_health_never_edits_load",
    7: "test_a_hundred_cancelled_requests_leave_no_load",
    8: "test_a_macs_own_count_never_overwrites_what_is_booked",
    9: "test_a_flapping_mac_keeps_its_bookings_within_their_leases",
    10: "test_a_shared_system_prompt_does_not_pin_everyone_to_one_mac",
    11: "test_a_restarted_router_rebuilds_from_what_macs_hold",
    12: "test_a_gap_in_the_events_is_seen_and_healed",
    13: "tests/e2e/test_crash.py::test_a_killed_router_learns_the_fleet_anew",
    14: "test_an_unknown_block_does_not_stop_the_rest_of_a_removal",
    15: "test_duplicate_stores_are_one_presence_for_each_mac_and_group",
    16: "tests/cluster/kv/test_manager.py::test_the_last_evicted_copy_is_the_only_removal",
    17: "test_an_evicted_state_alone_is_an_event_and_ends_the_credit",
    18: "test_tells_how_far_back_the_newest_reusable_state_is",
    19: "test_groups_of_another_cut_are_refused_in_the_handshake",
    20: "test_memory_follows_the_live_blocks_under_churn",
    21: "test_a_model_that_leaves_leaves_nothing",
    22: "there is no guess tree: only blocks that a Mac has announced, and chains of live bookings, are known",
    23: "tests/e2e/test_routing.py::test_every_next_turn_goes_where_its_prefix_is_cached",
    24: "test_another_hash_seed_is_refused_in_the_handshake",
    25: "test_two_models_share_no_state",
    26: "tests/e2e/test_crash.py::test_a_killed_mac_costs_no_token_and_it_comes_back",
    27: "tests/e2e/test_routing.py::test_a_drained_mac_gets_nothing_new_until_it_is_resumed",
    28: "guided decoding is the worker's; the router moves tokens' addresses, never grammar states",
    29: "tests/e2e/test_crash.py::test_new_requests_wait_for_macs_that_come_back",
    30: "test_an_exact_hit_runs_one_token_and_no_more",
    31: "test_only_events_and_digests_write_the_index",
}


def test_every_row_names_a_test_that_exists_or_a_reason() -> None:
    assert list(ROWS) == list(range(1, 32))
    for number, where in ROWS.items():
        if " " in where:
            continue
        path, _, name = where.rpartition("::")
        tree = ast.parse((REPOSITORY / path).read_text() if path else Path(__file__).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in names, f"row {number}: {where} does not exist"


def test_two_gateways_do_not_herd_onto_the_same_best_mac(fleet, prompt_of) -> None:
    """dynamo#589: choosing and booking are one step, so the second caller already sees the first one's work."""
    fleet.add("a", "b")
    of_gateway_1 = fleet.route(prompt_of((1, 500)))
    of_gateway_2 = fleet.route(prompt_of((2, 500)))
    assert {of_gateway_1.mac, of_gateway_2.mac} == {"a", "b"}
    waits = {mac: each.terms.wait_s for mac, each in fleet.candidates(of_gateway_2).items()}
    assert waits == {of_gateway_1.mac: 0.5, of_gateway_2.mac: 0.0}


def test_paced_sessions_spread_though_nothing_is_in_flight(fleet, prompt_of) -> None:
    """Infera#103: with all loads zero at every decision, one Mac got 448 of 448."""
    fleet.add("a", "b", "d")
    fleet.add("c", speed=1_015.0)
    chosen: Counter[str] = Counter()
    for number in range(40):
        prompt = prompt_of((number, 300))
        decision = fleet.route(prompt)
        fleet.finish(decision, prompt)
        fleet.now_s += 1.0
        chosen[decision.mac] += 1
    assert all(count in (9, 10, 11) for count in chosen.values())


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
    fleet.router.macs.lost("a")
    fleet.router.macs.join(fleet.info("a"))
    fleet.router.macs.check_digests("a", 1, 0, [0])
    fleet.router.macs.join(fleet.info("b"))
    fleet.router.macs.drain("b")
    fleet.router.macs.resume("b")
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
    assert fleet.route(prompt_of((5, 200))).num_matched_tokens == 0, "nothing is expected of them"
    fleet.add("a", epoch=2)
    fleet.add("b", epoch=2)
    chosen = Counter(fleet.route(prompt_of((200 + number, 200))).mac for number in range(10))
    assert chosen == {"a": 5, "b": 5}


def test_a_macs_own_count_never_overwrites_what_is_booked(fleet, prompt_of) -> None:
    """dynamo#7753: two publishers wrote one load value, and shedding never fired.

    Bookings have one owner; a Mac's count only adds requests that aren't booked here.
    """
    fleet.add("a")
    fleet.route(prompt_of((1, 500)))
    fleet.router.macs.observe_load("a", 1, 0)
    assert fleet.loads() == {"a": (1, 500, 0)}
    explained = fleet.router.what_if(fleet.query(prompt_of((2, 500))), 0.0)
    assert explained.candidates[0].terms.wait_s == 0.5


def test_a_flapping_mac_keeps_its_bookings_within_their_leases(fleet, prompt_of) -> None:
    """dynamo#13513: a discovery flap dropped live bookings and the worker looked idle."""
    fleet.add("a", "b")
    fleet.route(prompt_of((1, 3_000)), exclude=["b"])
    for _ in range(3):
        fleet.router.macs.lost("a")
        fleet.router.check()
        assert fleet.router.macs.join(fleet.info("a")) is Applied.RESYNC
        fleet.router.macs.check_digests("a", 1, 5, [0])
    assert fleet.loads()["a"] == (1, 3_000, 0)
    assert [fleet.route(prompt_of((2 + number, 500))).mac for number in range(4)] == ["b"] * 4
    fleet.router.expire(60.0)
    assert fleet.loads()["a"] == (0, 0, 0)


def test_bookings_belong_to_one_incarnation(fleet, prompt_of) -> None:
    """The other half of dynamo#13513: a restarted Mac runs none of the requests that its past self was given."""
    fleet.add("a")
    old = fleet.route(prompt_of((1, 3_000)))
    fleet.router.macs.lost("a")
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
    hashes = hashes_of(prompt)
    fleet.add("a")
    apply = fleet.router.macs.apply_events
    assert apply("a", 1, 0, [BlocksStored(0, b"".join(hashes[:3]), None, 0)]) is Applied.OK
    assert apply("a", 1, 2, [BlocksRemoved(0, hashes[2])]) is Applied.RESYNC
    assert apply("a", 1, 3, [BlocksStored(0, hashes[3], hashes[2], 3)]) is Applied.RESYNC
    assert fleet.router.macs.check_digests("a", 1, 4, [xor_of(b"".join(hashes[:8]))]) == (0,)
    assert fleet.router.macs.load_snapshot("a", 1, 4, [b"".join(hashes[:8])]) is Applied.OK
    assert fleet.route(prompt).num_matched_tokens == 128
    assert fleet.router.index_stats().macs[0].content.num_gaps == 1


def test_a_restarted_router_rebuilds_from_what_macs_hold(make_fleet, prompt_of, hashes_of) -> None:
    """dynamo#1056, llm-d-kv-cache#372: a router that came later dropped the children of blocks it hadn't seen."""
    prompt = prompt_of((1, 161))
    hashes = hashes_of(prompt)
    fleet = make_fleet()
    child = BlocksStored(0, hashes[8], hashes[7], 8)
    assert fleet.router.macs.apply_events("a", 1, 42, [child]) is Applied.RESYNC
    assert not fleet.router.macs.knows("a", 1)
    assert fleet.router.macs.join(fleet.info("a")) is Applied.RESYNC
    assert fleet.router.macs.apply_events("a", 1, 42, [child]) is Applied.RESYNC
    assert fleet.route(prompt, "x").mac == "a", "by load alone meanwhile"
    fleet.router.release("x")
    fleet.router.macs.load_snapshot("a", 1, 42, [b"".join(hashes[:8])])
    assert fleet.router.macs.apply_events("a", 1, 42, [child]) is Applied.OK
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
    assert stats.macs[0].content.num_no_effect == 2


def with_groups(fleet, *specs, names=("a",)) -> tuple[KVGroup, ...]:
    groups = (*fleet.info("a").groups, *(KVGroup(i, 0, spec, (i,), 64) for i, spec in enumerate(specs, 1)))
    for name in names:
        fleet.router.macs.join(fleet.info(name, groups=groups))
        fleet.router.macs.check_digests(name, 1, 0, [0] * len(groups))
        fleet.learn(name, 1_000.0)
    return groups


WINDOW = SlidingWindowSpec(1, 8, 32)
STATE = RecurrentStateSpec("mamba", (StateTensor((8,), 2),))


def test_duplicate_stores_are_one_presence_for_each_mac_and_group(fleet, prompt_of, hashes_of) -> None:
    """dynamo#8012, llm-d-kv-cache#680: a removal must end this Mac's block in this group, no other and not half."""
    prompt = prompt_of((1, 33))
    joined = b"".join(hashes_of(prompt))
    with_groups(fleet, WINDOW, names=("a", "b"))
    stored = [BlocksStored(group, joined, None, 0) for group in (0, 1)]
    for name in ("a", "b"):
        assert fleet.router.macs.apply_events(name, 1, 0, [*stored, stored[0]]) is Applied.OK
    fleet.router.macs.apply_events("a", 1, 1, [BlocksRemoved(0, joined)])
    fleet.router.check()
    held = {mac: each.num_held_tokens for mac, each in fleet.candidates(fleet.route(prompt)).items()}
    assert held == {"a": 0, "b": 32}
    blocks = {each.mac: each.content.num_blocks_by_group for each in fleet.router.index_stats().macs}
    assert blocks == {"a": (0, 2), "b": (2, 2)}


def test_an_evicted_state_alone_is_an_event_and_ends_the_credit(fleet, prompt_of, hashes_of) -> None:
    """sglang#23678: an eviction of Mamba states alone was silent; Dynamo 1.6.1 credits the full prefix still."""
    prompt = prompt_of((1, 161))
    hashes = hashes_of(prompt)
    with_groups(fleet, STATE, names=("a", "b"))
    for name in ("a", "b"):
        stored = [BlocksStored(0, b"".join(hashes), None, 0), BlocksStored(1, hashes[9], hashes[8], 9)]
        fleet.router.macs.apply_events(name, 1, 0, stored)
    fleet.router.macs.apply_events("a", 1, 1, [BlocksRemoved(1, hashes[9])])
    decision = fleet.route(prompt)
    held = {mac: each.num_held_tokens for mac, each in fleet.candidates(decision).items()}
    assert held == {"a": 0, "b": 160}
    assert decision.mac == "b"


def test_a_state_to_come_is_credited_only_where_no_sibling_has_passed(fleet, prompt_of, hashes_of) -> None:
    """A recurrent model keeps a state where prompts part only if the first has not run past it."""
    first, second = prompt_of((1, 3_200), (2, 1_600)), prompt_of((1, 3_200), (3, 1_600))
    with_groups(fleet, STATE)
    fleet.route(first)
    assert fleet.route(second, "early").num_matched_tokens == 3_200
    fleet.router.release("early")
    joined = b"".join(hashes_of(first)[:180])
    fleet.router.macs.apply_events("a", 1, 0, [BlocksStored(0, joined, None, 0)])
    assert fleet.route(second, "late").num_matched_tokens == 0, "320 tokens are left to there, two steps of 512 planned"
    # Elsewhere the content was known, but not its state: there the first of them stops anyway.
    fleet.router.release("late")
    third, joined = prompt_of((5, 4_800)), hashes_of(prompt_of((5, 3_200)))
    stored = [BlocksStored(0, b"".join(joined), None, 0), BlocksStored(1, joined[189], joined[188], 189)]
    fleet.router.macs.apply_events("a", 1, 1, stored)
    assert fleet.route(third, "third").num_matched_tokens == 190 * 16
    assert fleet.route(prompt_of((5, 3_300)), "fourth").num_matched_tokens == 200 * 16
    assert fleet.route(prompt_of((5, 4_800), (6, 800)), "fifth").num_matched_tokens == 4_800, "far from passed"


def test_tells_how_far_back_the_newest_reusable_state_is(fleet, prompt_of, hashes_of) -> None:
    """dynamo#8667, #12169: hybrid groups could not be routed by."""
    prompt = prompt_of((1, 161))
    hashes = hashes_of(prompt)
    with_groups(fleet, STATE)
    stored = [BlocksStored(0, b"".join(hashes), None, 0), BlocksStored(1, hashes[3], hashes[2], 3)]
    fleet.router.macs.apply_events("a", 1, 0, stored)
    (candidate,) = fleet.router.what_if(fleet.query(prompt), 0.0).candidates
    assert candidate.num_held_tokens == 64
    assert [(each.kind, each.num_tokens) for each in candidate.groups] == [
        ("FullAttention", 160),
        ("RecurrentState", 64),
    ]


def test_groups_of_another_cut_are_refused_in_the_handshake(fleet) -> None:
    """dynamo#9376: events of hybrid groups came with another block size than the router believed."""
    with_groups(fleet, WINDOW)
    with pytest.raises(IncompatibleMac, match="KV layers in other groups"):
        fleet.router.macs.join(fleet.info("b"))
    with pytest.raises(IncompatibleMac, match="another block size: 32 tokens here, 16 on a"):
        fleet.router.macs.join(fleet.info("b", block_size=32))


def test_memory_follows_the_live_blocks_under_churn(fleet, prompt_of, hashes_of) -> None:
    """dynamo#4429, #10774, #11678, #11785: index memory grew for ever. The soak is in tests/bench/bench_router.py."""
    fleet.add("a", "b")
    for number in range(50):
        prompt = prompt_of((number, 1_600))
        for name in ("a", "b"):
            fleet.store(name, prompt)
            if number >= 2:
                fleet.remove(name, hashes_of(prompt_of((number - 2, 1_600))))
    fleet.router.check()
    assert fleet.router.index_stats().num_keys == 200
    holdings = [
        each for content in fleet.router.macs._fleets["tiny"].index._contents.values() for each in content.holdings
    ]
    assert all(len(each._log) // 16 <= 200 * 5 // 4 + 1_024 for each in holdings)
    for name in ("a", "b"):
        fleet.router.macs.leave(name, 1)
    assert fleet.router.macs._fleets == {}


def test_a_model_that_leaves_leaves_nothing(fleet, prompt_of, hashes_of) -> None:
    """dynamo#10729: models that came and went left threads and 88 GiB behind."""
    for number in range(20):
        model = f"model-{number}"
        fleet.add("a", epoch=number, model=model, holds=hashes_of(prompt_of((1, 160))))
        fleet.route(prompt_of((1, 160)), model=model, session="s")
        fleet.router.macs.leave("a", number)
    router = fleet.router
    assert (router.macs._fleets, router.macs._model_of_mac, router._model_of_request) == ({}, {}, {})


def test_another_hash_seed_is_refused_in_the_handshake(fleet, hashes_of, prompt_of) -> None:
    """vllm#51875, LMCache#2511, #1403: a hash seed of its own in every process gave no hits, silently.

    Hashes here depend on nothing of the process, and their root names model, tokenizer, format and block size.
    """
    fleet.add("a")
    with pytest.raises(IncompatibleMac, match="another root hash"):
        fleet.router.macs.join(fleet.info("b", root_hash=hashes_of(prompt_of((1, 16)))[0]))
    code = (REPOSITORY / "cluster/kv/hashing.py").read_text()
    assert "hash(" not in code.replace("root_hash(", "").replace("_hash(", "")


def test_two_models_share_no_state(fleet, prompt_of, hashes_of) -> None:
    """ray#58835: one tree served two deployments, and one's tenants were unknown to the other."""
    prompt = prompt_of((1, 161))
    fleet.add("a", holds=hashes_of(prompt))
    fleet.add("b", model="other")
    assert fleet.route(prompt).mac == "a"
    decision = fleet.route(prompt, model="other")
    assert (decision.mac, decision.num_matched_tokens) == ("b", 0)
    assert set(fleet.candidates(decision)) == {"b"}
    fleet.router.macs.leave("a", 1)
    assert fleet.route(prompt, model="other").mac == "b"


@pytest.mark.parametrize("specs", [(), (WINDOW,)], ids=["full", "window"])
def test_an_exact_hit_runs_one_token_and_no_more(fleet, prompt_of, hashes_of, specs) -> None:
    """Rapid-MLX#1124: an exact hit on a rotated window counted its last token twice; tokens are in tests/worker."""
    prompt = prompt_of((1, 160))
    with_groups(fleet, *specs)
    joined = b"".join(hashes_of(prompt))
    fleet.router.macs.apply_events("a", 1, 0, [BlocksStored(group, joined, None, 0) for group in range(1 + len(specs))])
    decision = fleet.route(prompt)
    assert decision.num_matched_tokens == 159
    assert fleet.loads() == {"a": (1, 1, 0)}


def test_only_events_and_digests_write_the_index(fleet, prompt_of, hashes_of) -> None:
    """smg#2438: a fallback branch of the policy wrote the tree too."""
    prompt = prompt_of((1, 161))
    fleet.add("a", "b")
    fleet.store("a", prompt)
    before = fleet.router.index_stats()
    for number in range(5):
        decision = fleet.route(prompt_of((1, 161), (number, 100)), session="s")
        fleet.router.first_token(decision.request_id, 0)
        fleet.router.what_if(fleet.query(prompt), 1.0)
    fleet.router.expire(1.0)
    assert fleet.router.index_stats() == before
