"""The router as one object: membership, routing, leases, explanations."""

from dataclasses import replace

import pytest

from cluster.kv.events import xor_of
from cluster.kv.hashing import root_hash
from cluster.kv.layout import KVGroup
from cluster.kv.spec import SlidingWindowSpec
from cluster.routing.config import RoutingConfig
from cluster.routing.decision import GroupDepth
from cluster.routing.digests import bucket_digests, in_buckets
from cluster.routing.errors import IncompatibleMac, NoMacAvailable, UnknownMac, UnknownModel, UnknownRequest
from cluster.routing.index import Applied
from cluster.routing.mac import MacState
from cluster.routing.router import NUM_DECISIONS_KEPT, Router
from cluster.routing.speed import StepCosts, StepSample

OTHER_ROOT = root_hash(model="other", tokenizer="t", kv_format="f16", block_size=16)


def states(fleet) -> dict[str, MacState]:
    return {each.info.name: each.state for each in fleet.router.fleet()}


class TestMembership:
    def test_a_mac_takes_requests_by_load_until_its_content_is_known(self, fleet, prompt_of) -> None:
        assert fleet.router.macs.join(fleet.info("a")) is Applied.RESYNC
        assert states(fleet) == {"a": MacState.STARTING}
        assert fleet.route(prompt_of((1, 40))).num_matched_tokens == 0
        fleet.router.macs.load_snapshot("a", 1, 0, [b""])
        assert states(fleet) == {"a": MacState.READY}
        assert fleet.router.macs.join(fleet.info("a")) is Applied.OK, "joining twice changes nothing"
        assert fleet.route(prompt_of((1, 40))).mac == "a"

    def test_a_snapshot_for_a_mac_that_has_not_joined_is_refused(self, fleet) -> None:
        assert fleet.router.macs.load_snapshot("a", 1, 0, [b""]) is Applied.RESYNC

    def test_knows_the_present_incarnation_while_it_can_be_reached(self, fleet) -> None:
        fleet.add("a", epoch=2)
        assert fleet.router.macs.knows("a", 2)
        assert not fleet.router.macs.knows("a", 1)
        assert not fleet.router.macs.knows("b", 2)
        fleet.router.macs.lost("a")
        assert not fleet.router.macs.knows("a", 2)

    def test_leaving_forgets_the_mac_and_its_bookings(self, fleet, prompt_of, hashes_of) -> None:
        fleet.add("a", holds=hashes_of(prompt_of((1, 40))))
        fleet.route(prompt_of((1, 40)))
        fleet.router.macs.leave("a", 1)
        fleet.router.macs.leave("a", 1)
        fleet.router.check()
        assert fleet.router.fleet() == ()
        assert fleet.router.index_stats().num_keys == 0

    def test_leaving_late_does_not_hurt_the_next_incarnation(self, fleet) -> None:
        fleet.add("a")
        fleet.add("a", epoch=2)
        fleet.router.macs.leave("a", 1)
        assert states(fleet) == {"a": MacState.READY}

    def test_a_new_epoch_replaces_the_old_incarnation(self, fleet, prompt_of, hashes_of) -> None:
        prompt = prompt_of((1, 320))
        fleet.add("a", holds=hashes_of(prompt))
        fleet.route(prompt)
        assert fleet.router.macs.join(fleet.info("a", epoch=2)) is Applied.RESYNC
        fleet.router.check()
        assert fleet.loads() == {"a": (0, 0, 0)}
        assert states(fleet) == {"a": MacState.STARTING}
        fleet.router.macs.load_snapshot("a", 2, 0, [b""])
        decision = fleet.route(prompt)
        assert (decision.epoch, decision.num_matched_tokens) == (2, 0)

    def test_a_lost_mac_takes_nothing_and_its_blocks_are_forgotten_after_a_minute(self, fleet, prompt_of, hashes_of):
        fleet.add("a", "b", holds=hashes_of(prompt_of((1, 320))))
        fleet.router.macs.lost("a")
        fleet.router.macs.lost("unknown")
        fleet.router.check()
        assert {fleet.route(prompt_of((1, 320))).mac for _ in range(8)} == {"b"}
        assert fleet.router.macs.apply_events("a", 1, 0, []) is Applied.RESYNC
        fleet.router.expire(5.0)
        fleet.router.expire(64.0)
        assert [sum(each.content.num_blocks_by_group) for each in fleet.router.index_stats().macs] == [20, 20]
        fleet.router.expire(65.0)
        fleet.router.expire(200.0)
        fleet.router.check()
        assert [sum(each.content.num_blocks_by_group) for each in fleet.router.index_stats().macs] == [0, 20]

    def test_a_mac_that_flaps_need_not_send_its_blocks_again(self, fleet, prompt_of, hashes_of) -> None:
        prompt = prompt_of((1, 320))
        fleet.add("a", holds=hashes_of(prompt))
        fleet.router.macs.lost("a")
        fleet.router.expire(1.0)
        assert fleet.router.macs.join(fleet.info("a")) is Applied.RESYNC
        assert states(fleet) == {"a": MacState.READY}
        assert fleet.router.macs.check_digests("a", 1, 7, [xor_of(b"".join(hashes_of(prompt)))]) == ()
        fleet.router.expire(100.0)
        assert fleet.route(prompt).num_matched_tokens == 319

    def test_a_drained_mac_takes_nothing_new_until_resumed(self, fleet, prompt_of, hashes_of) -> None:
        prompt = prompt_of((1, 320))
        fleet.add("a", holds=hashes_of(prompt))
        fleet.add("b")
        running = fleet.route(prompt)
        fleet.router.macs.drain("a")
        assert [fleet.route(prompt).mac for _ in range(5)] == ["b"] * 5
        assert fleet.loads()["a"] == (1, 1, 0), "what runs there goes on"
        fleet.router.first_token(running.request_id)
        fleet.router.macs.resume("a")
        assert fleet.route(prompt).mac == "a"

    def test_a_drain_outlives_a_restart_and_a_flap(self, fleet) -> None:
        fleet.add("a")
        fleet.router.macs.drain("a")
        fleet.add("a", epoch=2)
        assert states(fleet) == {"a": MacState.DRAINING}
        fleet.router.macs.lost("a")
        assert states(fleet) == {"a": MacState.LOST}
        fleet.router.macs.join(fleet.info("a", epoch=2))
        assert states(fleet) == {"a": MacState.DRAINING}

    def test_draining_an_unknown_mac_names_the_known_ones(self, fleet) -> None:
        fleet.add("a", "b")
        with pytest.raises(UnknownMac, match=r"no Mac is named 'c'; known: a, b"):
            fleet.router.macs.drain("c")
        with pytest.raises(UnknownMac, match="'c'"):
            fleet.router.macs.resume("c")


class TestCompatibility:
    def test_a_root_hash_unlike_the_others_is_refused(self, fleet) -> None:
        fleet.add("a")
        with pytest.raises(IncompatibleMac, match=rf"b can't join: .*{OTHER_ROOT.hex()} here, .* on a"):
            fleet.router.macs.join(fleet.info("b", root_hash=OTHER_ROOT))
        assert list(states(fleet)) == ["a"]

    def test_a_block_size_unlike_the_others_is_refused(self, fleet) -> None:
        fleet.add("a")
        with pytest.raises(IncompatibleMac, match="32 tokens here, 16 on a"):
            fleet.router.macs.join(fleet.info("b", block_size=32))

    def test_other_models_and_lost_macs_do_not_matter(self, fleet) -> None:
        fleet.add("a")
        fleet.add("b", model="other", root_hash=OTHER_ROOT, block_size=32)
        fleet.router.macs.lost("a")
        fleet.add("c", root_hash=OTHER_ROOT)
        fleet.router.check()
        assert set(states(fleet)) == {"b", "c"}

    def test_a_refused_restart_ends_the_old_incarnation(self, fleet, prompt_of) -> None:
        fleet.add("a", "b")
        fleet.route(prompt_of((1, 40)))
        with pytest.raises(IncompatibleMac):
            fleet.router.macs.join(fleet.info("a", epoch=2, root_hash=OTHER_ROOT))
        fleet.router.check()
        assert states(fleet)["a"] is MacState.LOST

    def test_a_mac_alone_may_change_its_model(self, fleet) -> None:
        fleet.add("a")
        fleet.learn("a", 1_500.0)
        fleet.router.macs.join(fleet.info("a", epoch=2))
        speeds = [each.prefill_tokens_per_s for each in fleet.router.fleet()]
        assert speeds == [pytest.approx(1_500.0)], "same Mac, same model: same speed"
        fleet.router.macs.drain("a")
        fleet.router.macs.join(fleet.info("a", epoch=3, model="other", root_hash=OTHER_ROOT))
        fleet.router.check()
        assert states(fleet) == {"a": MacState.DRAINING}
        assert fleet.router.fleet()[0].prefill_tokens_per_s == pytest.approx(500.0, rel=0.02)
        assert fleet.router.models() == {"other": {"a": MacState.DRAINING}}

    def test_a_model_that_comes_back_in_another_format_begins_anew(self, fleet, prompt_of, hashes_of) -> None:
        fleet.add("a", "b", holds=hashes_of(prompt_of((1, 320))))
        fleet.route(prompt_of((1, 320)))
        fleet.router.macs.lost("a")
        fleet.learn("b", 1_500.0)
        fleet.router.macs.drain("b")
        fleet.router.macs.join(fleet.info("b", epoch=2, root_hash=OTHER_ROOT))
        fleet.router.check()
        assert states(fleet) == {"b": MacState.DRAINING}
        assert fleet.router.fleet()[0].prefill_tokens_per_s == pytest.approx(1_500.0)
        assert fleet.router.index_stats().num_keys == 0

    def test_kv_groups_unlike_the_others_are_refused(self, fleet) -> None:
        """Or a block of one Mac would be taken for another kind on the next."""
        fleet.add("a")
        window = KVGroup(1, 0, SlidingWindowSpec(1, 8, 64), (1,), 4096)
        with pytest.raises(IncompatibleMac, match=r"FullAttention \+ SlidingWindow here, FullAttention on a"):
            fleet.router.macs.join(fleet.info("b", groups=(*fleet.info("b").groups, window)))

    def test_pools_may_differ(self, fleet) -> None:
        """They follow each Mac's memory; what a block means doesn't."""
        fleet.add("a")
        other = tuple(replace(group, pool_id=1, page_bytes=8192) for group in fleet.info("b").groups)
        fleet.add("b", groups=other)
        assert set(states(fleet)) == {"a", "b"}


class TestRouting:
    def test_a_decision_says_where_to_go(self, fleet, prompt_of, hashes_of) -> None:
        prompt = prompt_of((1, 100))
        fleet.add("a", holds=hashes_of(prompt))
        fleet.now_s = 7.5
        decision = fleet.route(prompt, "r")
        assert (decision.request_id, decision.mac, decision.epoch) == ("r", "a", 1)
        assert (decision.address, decision.decided_at_s) == ("a.local:7000", 7.5)
        assert (decision.num_tokens, decision.num_matched_tokens) == (100, 96)
        assert fleet.loads() == {"a": (1, 4, 0)}

    def test_one_token_always_runs(self, fleet, prompt_of, hashes_of) -> None:
        """A prompt of whole blocks that are all cached, or will be, still computes its last token, or block."""
        prompt = prompt_of((1, 64))
        fleet.add("a", "b", holds=hashes_of(prompt))
        fleet.remove("b", hashes_of(prompt))
        assert fleet.route(prompt, exclude=["b"]).num_matched_tokens == 63
        assert fleet.route(prompt, exclude=["a"]).num_matched_tokens == 0
        assert fleet.route(prompt, exclude=["a"]).num_matched_tokens == 48

    def test_a_conversation_goes_back_to_its_mac_though_another_is_idle(self, fleet, prompt_of) -> None:
        fleet.add("a", "b")
        turn_1 = prompt_of((1, 1_600))
        first = fleet.route(turn_1)
        fleet.finish(first, turn_1)
        fleet.route(prompt_of((2, 800)), exclude=[name for name in ("a", "b") if name != first.mac])
        second = fleet.route(prompt_of((1, 1_600), (3, 100)))
        assert second.mac == first.mac
        assert second.num_matched_tokens == 1_600

    def test_a_conversation_leaves_its_mac_when_the_queue_there_is_long(self, fleet, prompt_of) -> None:
        fleet.add("a", "b")
        turn_1 = prompt_of((1, 1_600))
        first = fleet.route(turn_1)
        fleet.finish(first, turn_1)
        for number in range(24):
            fleet.route(prompt_of((10 + number, 100)), exclude=[name for name in ("a", "b") if name != first.mac])
        second = fleet.route(prompt_of((1, 1_600), (3, 100)))
        assert second.mac != first.mac
        reason = fleet.router.explain(second.request_id).reason
        assert f"{first.mac} holds 1600 but its queue costs more" in reason

    def test_cold_requests_spread(self, fleet, prompt_of) -> None:
        fleet.add("a", "b", "c", "d")
        chosen = [fleet.route(prompt_of((number, 500))).mac for number in range(12)]
        assert all(sorted(chosen[i : i + 4]) == ["a", "b", "c", "d"] for i in (0, 4, 8))

    @pytest.mark.parametrize("num_unique_tokens", [16, 160])
    def test_a_burst_of_siblings_stays_together_until_queueing_costs_more(
        self, fleet, prompt_of, num_unique_tokens: int
    ) -> None:
        """1,024 shared tokens: a Mac takes siblings until their own tokens queue up to one prefill of the prefix."""
        fleet.add(*"abcdefgh")
        prompts = [prompt_of((1, 1_024), (2 + number, num_unique_tokens)) for number in range(16)]
        bursts = [fleet.route(each) for each in prompts], [fleet.route(each) for each in prompts]
        macs = {each.mac for each in bursts[0]}
        num_together = 1_024 // num_unique_tokens
        assert len(macs) == -(-16 // (num_together + 1))
        assert {each.mac for each in bursts[1]} >= macs, "the second burst finds the first one's Macs"
        assert all(each.num_matched_tokens >= 1_024 for each in bursts[1] if each.mac in macs)

    def test_an_identical_burst_prefills_once(self, fleet, prompt_of, hashes_of) -> None:
        prompt = prompt_of((1, 1_000))
        fleet.add("a", "b")
        decisions = [fleet.route(prompt) for _ in range(10)]
        assert len({each.mac for each in decisions}) == 1
        assert [each.num_matched_tokens for each in decisions] == [0] + [992] * 9
        fleet.store(decisions[0].mac, prompt)
        fleet.router.check()
        assert fleet.loads()[decisions[0].mac] == (10, 10 * 8, 0), "each still has the tokens after its last full block"
        assert fleet.route(prompt).mac == decisions[0].mac

    def test_a_prompt_under_way_counts_beside_what_the_mac_and_others_hold(self, fleet, prompt_of, hashes_of) -> None:
        """One Mac holds all but the last block, the other a little and is computing the rest."""
        prompt = prompt_of((1, 321))
        fleet.add("a", holds=hashes_of(prompt)[:19])
        fleet.add("b", holds=hashes_of(prompt)[:2])
        fleet.router.macs.drain("a")
        assert fleet.route(prompt).mac == "b"
        fleet.router.macs.resume("a")
        found = fleet.candidates(fleet.route(prompt))
        assert {name: each.num_matched_tokens for name, each in found.items()} == {"a": 304, "b": 320}

    def test_expected_blocks_end_with_the_request(self, fleet, prompt_of) -> None:
        prompt = prompt_of((1, 320))
        fleet.add("a")
        fleet.router.release(fleet.route(prompt).request_id)
        assert fleet.route(prompt).num_matched_tokens == 0

    def test_routing_again_moves_the_booking(self, fleet, prompt_of) -> None:
        fleet.add("a", "b")
        first = fleet.route(prompt_of((1, 100)), "r")
        second = fleet.route(prompt_of((1, 100)), "r", exclude=[first.mac])
        assert second.mac != first.mac
        assert second.num_matched_tokens == 0
        assert fleet.loads() == {first.mac: (0, 0, 0), second.mac: (1, 100, 0)}

    def test_a_request_that_finds_no_mac_keeps_no_booking(self, fleet, prompt_of) -> None:
        fleet.add("a")
        fleet.route(prompt_of((1, 100)), "r")
        with pytest.raises(NoMacAvailable):
            fleet.route(prompt_of((1, 100)), "r", exclude=["a"])
        assert fleet.loads() == {"a": (0, 0, 0)}

    def test_the_first_token_ends_the_wait_of_others(self, fleet, prompt_of) -> None:
        fleet.add("a")
        running = fleet.route(prompt_of((1, 1_000)))
        waits = fleet.candidates(fleet.route(prompt_of((2, 100)), "x"))
        assert waits["a"].terms.wait_s == 1.0
        assert waits["a"].terms.first_token_s == 1.1
        fleet.router.first_token(running.request_id)
        fleet.router.release("x")
        assert fleet.candidates(fleet.route(prompt_of((3, 100))))["a"].terms.wait_s == 0.0
        assert fleet.loads() == {"a": (2, 100, 1)}

    def test_announced_blocks_shorten_the_wait_of_others(self, fleet, prompt_of, hashes_of) -> None:
        """A long prompt is announced step by step; what is done need not be waited for."""
        prompt = prompt_of((1, 1_600))
        fleet.add("a")
        fleet.route(prompt)
        fleet.store("a", prompt, 0, 75)
        assert fleet.candidates(fleet.route(prompt_of((2, 100))))["a"].terms.wait_s == 0.4

    def test_learnt_speeds_decide(self, fleet, prompt_of, prefill_sample) -> None:
        fleet.add("slow", "fast")
        for _ in range(10):
            fleet.router.macs.observe_steps("slow", [prefill_sample(512, 1.024)])
            fleet.router.macs.observe_steps("fast", [prefill_sample(512, 0.128)])
            fleet.router.macs.observe_steps("unknown", [prefill_sample(512, 0.128)])
        fleet.router.check()
        speeds = {each.info.name: each.prefill_tokens_per_s for each in fleet.router.fleet()}
        assert speeds == {"slow": pytest.approx(500.0, rel=0.1), "fast": pytest.approx(4_000.0, rel=0.1)}
        fleet.router.macs.join(fleet.info("new"))
        new = next(each for each in fleet.router.fleet() if each.info.name == "new")
        assert 500.0 < new.prefill_tokens_per_s < 4_000.0, "taken for an average one"
        fleet.router.macs.leave("new", 1)
        assert [fleet.route(prompt_of((number, 500))).mac for number in range(4)] == ["fast"] * 4


class TestRefusals:
    def test_an_unknown_model_names_those_served(self, fleet, prompt_of) -> None:
        fleet.add("a")
        with pytest.raises(UnknownModel, match="model 'gpt' is not served; served: tiny") as refused:
            fleet.route(prompt_of((1, 10)), model="gpt")
        assert refused.value.served == ("tiny",)

    def test_no_mac_says_why_for_each(self, fleet, prompt_of) -> None:
        fleet.add("drained", "gone", "named", "small")
        fleet.router.macs.drain("drained")
        fleet.router.macs.lost("gone")
        fleet.router.macs.join(fleet.info("small", max_model_len=50))
        with pytest.raises(NoMacAvailable) as refused:
            fleet.route(prompt_of((1, 50)), exclude=["named"])
        assert refused.value.reasons == {
            "drained": "draining",
            "gone": "lost",
            "named": "excluded by the request",
            "small": "a prompt of 50 tokens leaves no room in its context of 50",
        }
        assert not refused.value.is_permanent
        assert "gone: lost" in str(refused.value)

    def test_a_prompt_too_long_for_every_mac_is_refused_for_good(self, fleet, prompt_of) -> None:
        fleet.add("a", "b", max_model_len=50)
        fleet.router.macs.lost("b")
        with pytest.raises(NoMacAvailable) as refused:
            fleet.route(prompt_of((1, 50)))
        assert refused.value.is_permanent
        assert fleet.route(prompt_of((1, 49))).mac == "a"

    def test_a_mac_that_lacks_the_adapter_is_not_asked(self, fleet, prompt_of) -> None:
        fleet.add("a", "b")
        fleet.router.macs.observe_adapters("a", 1, frozenset({"c"}))
        fleet.router.macs.observe_adapters("b", 1, frozenset({"c", "d"}))
        fleet.router.macs.observe_adapters("b", 2, frozenset())  # of an incarnation that is not there
        decision = fleet.route(prompt_of((1, 50)), adapter="d")
        assert decision.mac == "b"
        assert fleet.candidates(decision)["a"].excluded == "has not loaded the adapter"

    def test_a_mac_that_begins_anew_has_no_adapter_until_it_says_so(self, fleet, prompt_of) -> None:
        fleet.add("a")
        fleet.router.macs.observe_adapters("a", 1, frozenset({"d"}))
        fleet.add("a", epoch=2)
        with pytest.raises(NoMacAvailable, match="has not loaded the adapter"):
            fleet.route(prompt_of((1, 50)), adapter="d")
        fleet.router.macs.observe_adapters("a", 2, frozenset({"d"}))
        assert fleet.route(prompt_of((1, 50)), adapter="d").mac == "a"

    def test_a_prompt_that_is_only_read_may_fill_the_context(self, fleet, prompt_of) -> None:
        fleet.add("a", max_model_len=50)
        assert fleet.route(prompt_of((1, 50)), max_tokens=0).mac == "a"
        with pytest.raises(NoMacAvailable) as refused:
            fleet.route(prompt_of((1, 51)), max_tokens=0)
        assert refused.value.is_permanent

    def test_a_long_prompt_goes_where_it_fits(self, fleet, prompt_of) -> None:
        fleet.add("small", max_model_len=50)
        fleet.add("large")
        assert [fleet.route(prompt_of((number, 60))).mac for number in range(3)] == ["large"] * 3

    def test_a_mac_with_another_root_hash_is_not_asked(self, fleet, prompt_of) -> None:
        fleet.add("a")
        with pytest.raises(NoMacAvailable, match=f"the request's {OTHER_ROOT.hex()}"):
            fleet.route(prompt_of((1, 10)), root_hash=OTHER_ROOT)


class TestLeases:
    def test_a_request_nobody_releases_ends_with_its_lease(self, fleet, prompt_of) -> None:
        fleet.add("a")
        fleet.route(prompt_of((1, 100)), "r")
        assert fleet.router.expire(59.9) == ()
        assert fleet.router.expire(60.0) == ("r",)
        fleet.router.check()
        assert fleet.loads() == {"a": (0, 0, 0)}
        assert fleet.route(prompt_of((1, 100))).num_matched_tokens == 0, "nothing is expected of it any more"

    def test_calls_for_a_request_that_is_over_do_nothing(self, fleet, prompt_of) -> None:
        fleet.add("a")
        fleet.route(prompt_of((1, 100)), "r")
        for _ in range(2):
            fleet.router.release("r")
            fleet.router.first_token("r")
        fleet.router.check()
        assert fleet.loads() == {"a": (0, 0, 0)}


class TestExplain:
    def test_tells_each_macs_numbers_of_a_past_request(self, fleet, prompt_of, hashes_of) -> None:
        """As they were then, whatever has happened since."""
        prompt = prompt_of((1, 100))
        fleet.add("a", "b")
        fleet.store("b", prompt, 0, 3)
        decision = fleet.route(prompt, "r")
        fleet.router.release("r")
        fleet.remove("b", hashes_of(prompt))
        fleet.add("a", epoch=2, speed=10.0)
        explained = fleet.router.explain("r")
        assert explained.decision is decision
        assert (explained.request_id, explained.num_tokens, explained.policy) == ("r", 100, "predicted_seconds")
        a, b = explained.candidates
        assert (a.mac, a.num_held_tokens, a.terms.prefill_s) == ("a", 0, pytest.approx(0.1))
        assert (b.mac, b.num_held_tokens, b.terms.prefill_s) == ("b", 48, pytest.approx(0.052))
        assert b.groups == (GroupDepth(0, "FullAttention", 48),)
        assert explained.reason == ("b holds 48 of 100 prompt tokens, more than any other: 0.052 s there, 0.100 s on a")

    def test_tells_how_far_each_group_goes(self, fleet, prompt_of, hashes_of) -> None:
        """Full attention is there, a window's blocks are not: nothing can be resumed, and explain says whose fault."""
        prompt = prompt_of((1, 100))
        groups = (*fleet.info("a").groups, KVGroup(1, 0, SlidingWindowSpec(1, 8, 40), (1,), 4096))
        fleet.router.macs.join(fleet.info("a", groups=groups))
        hashes = hashes_of(prompt)
        fleet.router.macs.load_snapshot("a", 1, 0, [b"".join(hashes), b"".join(hashes[:2])])
        fleet.route(prompt, "r")
        (candidate,) = fleet.router.explain("r").candidates
        assert candidate.num_held_tokens == 32
        assert candidate.groups == (GroupDepth(0, "FullAttention", 96), GroupDepth(1, "SlidingWindow", 32))

    def test_keeps_the_last_thousand(self, fleet, prompt_of) -> None:
        fleet.add("a")
        query = fleet.query(prompt_of((1, 10)))
        for number in range(NUM_DECISIONS_KEPT):
            fleet.router.route(replace(query, request_id=f"q{number}"), 0.0)
        fleet.router.route(replace(query, request_id="q0"), 1.0)
        fleet.router.route(replace(query, request_id="new"), 1.0)
        fleet.router.check()
        decision = fleet.router.explain("q0").decision
        assert decision is not None
        assert decision.decided_at_s == 1.0, "routed again: the latest decision, kept longest"
        with pytest.raises(UnknownRequest, match="'q1' is not among the last 1000"):
            fleet.router.explain("q1")

    def test_what_if_changes_nothing(self, fleet, prompt_of) -> None:
        fleet.add("a", "b")
        query = fleet.query(prompt_of((1, 100)), "hypothetical", session="s")
        supposed = fleet.router.what_if(query, 1.0)
        fleet.router.check()
        assert fleet.loads() == {"a": (0, 0, 0), "b": (0, 0, 0)}
        with pytest.raises(UnknownRequest):
            fleet.router.explain("hypothetical")
        assert fleet.router.route(query, 1.0) == supposed.decision

    def test_what_if_says_so_when_every_mac_is_excluded(self, fleet, prompt_of) -> None:
        fleet.add("a")
        fleet.router.macs.drain("a")
        explained = fleet.router.what_if(fleet.query(prompt_of((1, 100))), 1.0)
        assert explained.decision is None
        assert explained.reason == "every Mac is excluded"
        assert [each.excluded for each in explained.candidates] == ["draining"]

    @pytest.mark.parametrize(
        ("macs", "reason"),
        [
            ({"a": 1_000.0}, "a holds 0 of 100 prompt tokens and is the only Mac that can take the request"),
            ({"a": 1_000.0, "b": 1_000.0}, "as much as the best of the others, and has had less work of late"),
            ({"a": 1_000.0, "b": 100.0}, "as much as the best of the others, and is less busy or faster"),
        ],
    )
    def test_gives_a_reason(self, fleet, prompt_of, macs: dict[str, float], reason: str) -> None:
        for name, speed in macs.items():
            fleet.add(name, speed=speed)
        assert reason in fleet.router.explain(fleet.route(prompt_of((1, 100))).request_id).reason

    def test_names_another_policy(self, make_fleet, prompt_of) -> None:
        fleet = make_fleet(RoutingConfig(policy="round_robin"))
        fleet.add("a", "b")
        explained = fleet.router.explain(fleet.route(prompt_of((1, 100))).request_id)
        assert explained.policy == "round_robin"
        assert "chosen by round_robin" in explained.reason


class TestDigests:
    def test_a_difference_is_loaded_by_buckets(self, fleet, prompt_of, hashes_of) -> None:
        """Digest of each group, then of 256 buckets, then what differs: the rest is not sent."""
        prompt, more = prompt_of((1, 1_600)), prompt_of((2, 160))
        fleet.add("a", holds=hashes_of(prompt))
        held = [*hashes_of(prompt), *hashes_of(more)]
        digests = [xor_of(b"".join(held))]
        assert fleet.router.macs.check_digests("a", 1, 5, digests) == (0,)
        wanted = fleet.router.macs.differing_buckets("a", 1, {0: bucket_digests(held)})
        assert wanted is not None
        assert set(wanted[0]) == {each[0] for each in hashes_of(more)}
        sent = in_buckets(held, wanted[0])
        assert len(sent) < 16 * 30
        assert fleet.router.macs.load_difference("a", 1, 5, {0: (wanted[0], sent)}, digests) is Applied.OK
        fleet.router.check()
        assert fleet.route(more).num_matched_tokens == 159

    def test_a_difference_that_does_not_add_up_is_asked_for_again(self, fleet, prompt_of, hashes_of) -> None:
        fleet.add("a")
        digests = [xor_of(b"".join(hashes_of(prompt_of((1, 160)))))]
        assert fleet.router.macs.load_difference("a", 1, 5, {0: ((), b"")}, digests) is Applied.RESYNC
        assert fleet.router.macs.apply_events("a", 1, 5, []) is Applied.RESYNC

    def test_an_unknown_incarnation_is_told_to_join(self, fleet) -> None:
        fleet.add("a", epoch=2)
        for name, epoch in (("a", 1), ("b", 2)):
            assert fleet.router.macs.check_digests(name, epoch, 0, [0]) is None
            assert fleet.router.macs.differing_buckets(name, epoch, {}) is None
            assert fleet.router.macs.load_difference(name, epoch, 0, {}, [0]) is Applied.RESYNC
            assert fleet.router.macs.load_snapshot(name, epoch, 0, [b""]) is Applied.RESYNC
            assert fleet.router.macs.apply_events(name, epoch, 0, []) is Applied.RESYNC

    def test_another_number_of_groups_is_named(self, fleet) -> None:
        fleet.add("a")
        with pytest.raises(ValueError, match="a: 2 digests for 1 groups"):
            fleet.router.macs.check_digests("a", 1, 0, [0, 0])
        with pytest.raises(ValueError, match="a: a snapshot of 2 groups, the model has 1"):
            fleet.router.macs.load_snapshot("a", 1, 0, [b"", b""])


class TestOperators:
    def test_a_cordon_is_about_the_host_and_stays(self, fleet, prompt_of) -> None:
        fleet.add("a", "b")
        fleet.router.macs.cordon("a", "new memory")
        assert states(fleet)["a"] is MacState.CORDONED
        assert {fleet.route(prompt_of((number, 50))).mac for number in range(5)} == {"b"}
        fleet.router.macs.leave("a", 1)
        fleet.add("a", epoch=2)
        assert states(fleet)["a"] is MacState.CORDONED
        fleet.router.macs.drain("b")
        with pytest.raises(NoMacAvailable) as refused:
            fleet.route(prompt_of((1, 50)))
        assert refused.value.reasons == {"a": "cordoned: new memory", "b": "draining"}
        fleet.router.macs.resume("a")
        assert states(fleet)["a"] is MacState.READY
        assert fleet.router.fleet()[1].note == ""
        fleet.router.check()

    def test_models_say_which_macs_serve_them(self, fleet) -> None:
        fleet.add("a", "b")
        fleet.add("c", model="other", root_hash=OTHER_ROOT, block_size=32)
        fleet.router.macs.lost("b")
        assert fleet.router.models() == {
            "tiny": {"a": MacState.READY, "b": MacState.LOST},
            "other": {"c": MacState.READY},
        }

    def test_a_mac_that_changes_its_model_moves(self, fleet) -> None:
        fleet.add("a", "b")
        fleet.router.macs.join(fleet.info("a", epoch=2, model="other", root_hash=OTHER_ROOT))
        fleet.router.check()
        assert {model: list(macs) for model, macs in fleet.router.models().items()} == {"tiny": ["b"], "other": ["a"]}


class TestLearning:
    def test_a_mac_starts_from_what_the_others_are_and_then_learns(self, fleet, prefill_sample) -> None:
        fleet.router.macs.join(fleet.info("a"))
        fleet.router.macs.observe_steps("a", [])
        assert fleet.router.fleet()[0].prefill_tokens_per_s == pytest.approx(500.0, rel=0.02)
        fleet.router.macs.observe_steps("a", [prefill_sample(512, 0.1)] * 5)
        fleet.router.macs.join(fleet.info("b"))
        speeds = {each.info.name: each.prefill_tokens_per_s for each in fleet.router.fleet()}
        assert speeds["b"] == pytest.approx(speeds["a"]) == pytest.approx(5_120, rel=0.01)
        fleet.router.macs.observe_steps("b", [prefill_sample(512, 0.2)])
        assert fleet.router.fleet()[1].prefill_tokens_per_s == pytest.approx(2_560, rel=0.01)

    def test_of_a_report_s_steps_that_only_decode_one_is_learnt_from(self, fleet, prefill_sample) -> None:
        """They are all alike, and many; a prefill among them must not be drowned."""
        fleet.router.macs.join(fleet.info("a"))
        decode = StepSample(0, 0.0, 4, 4_000, 0.05)
        fleet.router.macs.observe_steps("a", [decode, decode, prefill_sample(512, 0.1), decode, decode])
        assert fleet.router.macs._fleets["tiny"].members["a"].speed.num_observed == 2

    def test_answers_tell_how_long_answers_are(self, fleet, prompt_of) -> None:
        fleet.add("a")
        for number in range(300):
            fleet.router.release(fleet.route(prompt_of((number, 20))).request_id, 1_000)
        assert fleet.router.macs._fleets["tiny"].num_output_tokens == pytest.approx(1_000, rel=0.02)

    def test_predicted_and_actual_hits_are_compared(self, fleet, prompt_of, hashes_of) -> None:
        prompt = prompt_of((1, 320))
        fleet.add("a", holds=hashes_of(prompt))
        alarms = []
        for number in range(10):
            request_id = fleet.route(prompt, f"r{number}").request_id
            alarms.append(fleet.router.first_token(request_id, 319 if number < 5 else 0))
            assert fleet.router.first_token(request_id, 0) is False, "once a request"
            fleet.router.release(request_id)
        drift = fleet.router.fleet()[0].drift
        assert (drift.num_requests, drift.num_predicted_tokens) == (10, 3_190)
        assert (drift.num_actual_tokens, drift.num_error_tokens) == (5 * 319, 5 * 319)
        assert drift.is_alarming
        assert alarms.count(True) == 1

    def test_speeds_that_a_mac_gets_wrong_heal_within_a_few_requests(self, fleet, prompt_of) -> None:
        """It says that it prefills 1,000 tokens a second; first tokens come twice as soon."""
        fleet.add("a")
        for number in range(3):
            decision = fleet.route(prompt_of((number, 2_000)))
            fleet.now_s += 1.0
            fleet.router.first_token(decision.request_id, 0, fleet.now_s)
            fleet.router.release(decision.request_id)
        assert fleet.router.fleet()[0].prefill_tokens_per_s == pytest.approx(2_000.0)
        decision = fleet.route(prompt_of((9, 2_000)))
        assert fleet.candidates(decision)["a"].terms.prefill_s == pytest.approx(1.0)

    def test_first_tokens_that_others_disturbed_tell_nothing_of_a_speed(self, fleet, prompt_of) -> None:
        prompt = prompt_of((100, 3_200))
        fleet.add("a")
        for number in range(12):
            first = fleet.route(prompt_of((number, 2_000)))
            fleet.route(prompt_of((number, 1_000), (50 + number, 1_000)), "behind it")
            fleet.now_s += 4.0
            fleet.router.first_token(first.request_id, 0, fleet.now_s)
            # Not what was predicted was cached, for whatever reason.
            fleet.router.first_token("behind it", 16, fleet.now_s)
            fleet.router.release(first.request_id)
            fleet.router.release("behind it")
        assert fleet.router.fleet()[0].prefill_tokens_per_s == pytest.approx(1_000.0)
        for number in range(12):
            first = fleet.route(prompt, f"f{number}")
            sibling = fleet.route([*prompt, number], f"s{number}")
            assert sibling.num_matched_tokens > 0
            fleet.router.release(first.request_id)
            fleet.router.first_token(sibling.request_id, sibling.num_matched_tokens, fleet.now_s + 30.0)
            fleet.router.release(sibling.request_id)
        assert fleet.router.fleet()[0].prefill_tokens_per_s == pytest.approx(1_000.0), "it waited for its sibling"

    def test_what_one_mac_has_learnt_of_long_prompts_holds_for_the_others(self, fleet) -> None:
        """Two Macs measured themselves with a short prompt; then one had long ones."""
        costs = StepCosts(0.01, 0.0005, 0.0005 / 100_000, 0.001, 1e-7)

        def report(name: str, *shapes: tuple[int, float]) -> None:
            seconds = [costs.step_s + num * (costs.token_s + costs.context_s * context) for num, context in shapes]
            samples = [StepSample(*shape, 0, 0, each) for shape, each in zip(shapes, seconds, strict=True)]
            fleet.router.macs.observe_steps(name, samples)

        for name in ("a", "b"):
            fleet.router.macs.join(fleet.info(name))
            report(name, *[(256, 128.0)] * 8)
        report("a", *[(256, context * 1_000.0) for context in range(60)])
        member = fleet.router.macs._fleets["tiny"].members["b"]
        assert member.costs.context_s > 2 * costs.context_s, "as was assumed of all Macs"
        fleet.router.expire(1.0)
        assert member.costs.context_s == pytest.approx(costs.context_s, rel=0.25)

    def test_a_mac_whose_content_is_not_known_is_not_compared(self, fleet, prompt_of) -> None:
        """A restarted router would else raise an alarm for what it can't know."""
        fleet.router.macs.join(fleet.info("a"))
        for number in range(10):
            request_id = fleet.route(prompt_of((number, 320))).request_id
            assert fleet.router.first_token(request_id, 304) is False
        assert fleet.router.fleet()[0].drift.num_requests == 0

    def test_of_a_mac_without_a_prefix_cache_nothing_is_expected(self, fleet, prompt_of) -> None:
        fleet.add("a", is_caching=False)
        assert [fleet.route(prompt_of((1, 320))).num_matched_tokens for _ in range(3)] == [0, 0, 0]
        assert fleet.router.fleet()[0].hot_tokens == 0

    def test_requests_that_a_restarted_router_does_not_know_still_load_their_mac(self, fleet, prompt_of) -> None:
        config = RoutingConfig(decode_weight=1.0)
        fleet.router = Router(config)
        fleet.add("a", "b")
        fleet.router.macs.observe_load("a", 1, 3)
        fleet.router.macs.observe_load("a", 9, 8)
        fleet.router.macs.observe_load("c", 1, 8)
        requests = {each.mac: each for each in fleet.router.what_if(fleet.query(prompt_of((1, 50))), 0.0).candidates}
        assert set(requests) == {"a", "b"}
        assert fleet.router.macs._fleets["tiny"].members["a"].num_foreign == 3
        fleet.route(prompt_of((1, 50)), exclude=["b"])
        fleet.router.macs.observe_load("a", 1, 1)
        assert fleet.router.macs._fleets["tiny"].members["a"].num_foreign == 0

    def test_sessions_are_a_hint_among_equals(self, fleet, prompt_of) -> None:
        fleet.add("a", "b", "c")
        first = fleet.route(prompt_of((1, 10)), session="s")
        fleet.finish(first, prompt_of((1, 10)))
        for number in range(3):
            again = fleet.route(prompt_of((2 + number, 10)), session="s")
            assert again.mac == first.mac
            fleet.finish(again, prompt_of((2 + number, 10)))
        fleet.route(prompt_of((9, 1_000)), exclude=[each for each in "abc" if each != first.mac])
        assert fleet.route(prompt_of((7, 10)), session="s").mac != first.mac, "never a pin"

    def test_a_session_of_a_mac_that_left_is_forgotten(self, fleet, prompt_of) -> None:
        fleet.add("a", "b")
        first = fleet.route(prompt_of((1, 10)), session="s")
        fleet.router.macs.leave(first.mac, 1)
        fleet.add("c", "d")
        fleet.router.check()
        assert fleet.route(prompt_of((2, 10)), session="s").mac != first.mac

    def test_the_oldest_sessions_are_forgotten(self, fleet, prompt_of, monkeypatch) -> None:
        monkeypatch.setattr("cluster.routing.history.MAX_SESSIONS", 2)
        fleet.add("a")
        for number in range(4):
            fleet.route(prompt_of((number, 10)), session=f"s{number}")
        assert list(fleet.router.macs._fleets["tiny"].history._sessions) == ["s2", "s3"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_tokens": 0}, "num_tokens must be at least 1, got 0"),
        ({"tenant_weight": 0.0}, "weight must be positive and finite, got 0.0"),
        ({"tenant_weight": float("inf")}, "weight must be positive and finite"),
    ],
)
def test_a_query_that_can_not_be_is_refused(fleet, prompt_of, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fleet.query(prompt_of((1, 10)), **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "guess"}, "policy must be one of predicted_seconds, .*, got 'guess'"),
        ({"lease_s": 0.0}, "lease_s must be positive, got 0.0"),
        ({"default_prefill_tokens_per_s": float("nan")}, "default_prefill_tokens_per_s must be positive"),
        ({"stall_weight": -1.0}, "stall_weight must not be negative, got -1.0"),
    ],
)
def test_settings_name_what_is_wrong(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutingConfig(**fields)


def test_macs_that_store_keys_in_other_bits_are_refused(fleet) -> None:
    """A block of one would be read by the other as what it isn't: the way of storing is a part of every hash."""
    roots = [
        root_hash(model="m", tokenizer="t", kv_format=kv_format, block_size=16)
        for kv_format in (
            "bfloat16",
            "bfloat16 in 8 bits by 64",
            "bfloat16 in 4 bits by 64",
            "bfloat16 in 8 bits by 32",
        )
    ]
    assert len(set(roots)) == 4
    fleet.router.macs.join(fleet.info("a", root_hash=roots[0]))
    for root in roots[1:]:
        with pytest.raises(IncompatibleMac, match="weights, tokenizer or KV format differ"):
            fleet.router.macs.join(fleet.info("b", root_hash=root))
    # Once the others are gone, a fleet may store otherwise.
    fleet.router.macs.leave("a", 1)
    fleet.router.macs.join(fleet.info("b", root_hash=roots[1]))
