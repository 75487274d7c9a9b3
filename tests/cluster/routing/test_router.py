"""The router as one object: membership, routing, leases, explanations."""

from dataclasses import replace

import pytest

from cluster.kv.hashing import root_hash
from cluster.routing.errors import IncompatibleMac, NoMacAvailable, UnknownMac, UnknownModel, UnknownRequest
from cluster.routing.index import Applied
from cluster.routing.mac import MacState
from cluster.routing.router import NUM_DECISIONS_KEPT

OTHER_ROOT = root_hash(model="other", tokenizer="t", kv_format="f16", block_size=16)


def states(fleet) -> dict[str, MacState]:
    return {each.info.name: each.state for each in fleet.router.fleet()}


class TestMembership:
    def test_a_mac_starts_and_is_ready_with_its_first_snapshot(self, fleet, prompt_of) -> None:
        assert fleet.router.join(fleet.info("a")) is Applied.RESYNC
        assert states(fleet) == {"a": MacState.STARTING}
        with pytest.raises(NoMacAvailable, match="a: starting"):
            fleet.route(prompt_of((1, 40)))
        fleet.router.load_snapshot("a", 1, 0, [])
        assert states(fleet) == {"a": MacState.READY}
        assert fleet.router.join(fleet.info("a")) is Applied.OK, "joining twice changes nothing"
        assert fleet.route(prompt_of((1, 40))).mac == "a"

    def test_a_snapshot_for_a_mac_that_has_not_joined_is_refused(self, fleet) -> None:
        assert fleet.router.load_snapshot("a", 1, 0, []) is Applied.RESYNC

    def test_knows_the_present_incarnation_while_it_can_be_reached(self, fleet) -> None:
        fleet.add("a", epoch=2)
        assert fleet.router.knows("a", 2)
        assert not fleet.router.knows("a", 1)
        assert not fleet.router.knows("b", 2)
        fleet.router.lost("a")
        assert not fleet.router.knows("a", 2)

    def test_leaving_forgets_the_mac_and_its_bookings(self, fleet, prompt_of, hashes_of) -> None:
        fleet.add("a", holds=hashes_of(prompt_of((1, 40))))
        fleet.route(prompt_of((1, 40)))
        fleet.router.leave("a", 1)
        fleet.router.leave("a", 1)
        fleet.router.check()
        assert fleet.router.fleet() == ()
        assert fleet.router.index_stats().num_keys == 0

    def test_leaving_late_does_not_hurt_the_next_incarnation(self, fleet) -> None:
        fleet.add("a")
        fleet.add("a", epoch=2)
        fleet.router.leave("a", 1)
        assert states(fleet) == {"a": MacState.READY}

    def test_a_new_epoch_replaces_the_old_incarnation(self, fleet, prompt_of, hashes_of) -> None:
        prompt = prompt_of((1, 320))
        fleet.add("a", holds=hashes_of(prompt))
        fleet.route(prompt)
        assert fleet.router.join(fleet.info("a", epoch=2)) is Applied.RESYNC
        fleet.router.check()
        assert fleet.loads() == {"a": (0, 0, 0)}
        assert states(fleet) == {"a": MacState.STARTING}
        fleet.router.load_snapshot("a", 2, 0, [])
        decision = fleet.route(prompt)
        assert (decision.epoch, decision.num_matched_tokens) == (2, 0)

    def test_a_lost_mac_takes_nothing_and_its_blocks_are_forgotten(self, fleet, prompt_of, hashes_of) -> None:
        fleet.add("a", "b", holds=hashes_of(prompt_of((1, 320))))
        fleet.router.lost("a")
        fleet.router.lost("unknown")
        fleet.router.check()
        assert {fleet.route(prompt_of((1, 320))).mac for _ in range(8)} == {"b"}
        assert [each.mac for each in fleet.router.index_stats().macs] == ["b"]
        assert fleet.router.apply_events("a", 1, 0, [], []) is Applied.RESYNC

    def test_a_drained_mac_takes_nothing_new_until_resumed(self, fleet, prompt_of, hashes_of) -> None:
        prompt = prompt_of((1, 320))
        fleet.add("a", holds=hashes_of(prompt))
        fleet.add("b")
        running = fleet.route(prompt)
        fleet.router.drain("a")
        assert [fleet.route(prompt).mac for _ in range(5)] == ["b"] * 5
        assert fleet.loads()["a"] == (1, 16, 0), "what runs there goes on"
        fleet.router.first_token(running.request_id)
        fleet.router.resume("a")
        assert fleet.route(prompt).mac == "a"

    def test_a_drain_outlives_a_restart_and_a_flap(self, fleet) -> None:
        fleet.add("a")
        fleet.router.drain("a")
        fleet.add("a", epoch=2)
        assert states(fleet) == {"a": MacState.DRAINING}
        fleet.router.lost("a")
        assert states(fleet) == {"a": MacState.LOST}
        fleet.router.join(fleet.info("a", epoch=2))
        assert states(fleet) == {"a": MacState.DRAINING}

    def test_draining_an_unknown_mac_names_the_known_ones(self, fleet) -> None:
        fleet.add("a", "b")
        with pytest.raises(UnknownMac, match=r"no Mac is named 'c'; known: a, b"):
            fleet.router.drain("c")
        with pytest.raises(UnknownMac, match="'c'"):
            fleet.router.resume("c")


class TestCompatibility:
    def test_a_root_hash_unlike_the_others_is_refused(self, fleet) -> None:
        fleet.add("a")
        with pytest.raises(IncompatibleMac, match=rf"b can't join: .*{OTHER_ROOT.hex()} here, .* on a"):
            fleet.router.join(fleet.info("b", root_hash=OTHER_ROOT))
        assert list(states(fleet)) == ["a"]

    def test_a_block_size_unlike_the_others_is_refused(self, fleet) -> None:
        fleet.add("a")
        with pytest.raises(IncompatibleMac, match="32 tokens here, 16 on a"):
            fleet.router.join(fleet.info("b", block_size=32))

    def test_other_models_and_lost_macs_do_not_matter(self, fleet) -> None:
        fleet.add("a")
        fleet.add("b", model="other", root_hash=OTHER_ROOT, block_size=32)
        fleet.router.lost("a")
        fleet.add("c", root_hash=OTHER_ROOT)
        fleet.router.check()

    def test_a_refused_restart_ends_the_old_incarnation(self, fleet, prompt_of) -> None:
        fleet.add("a", "b")
        fleet.route(prompt_of((1, 40)))
        with pytest.raises(IncompatibleMac):
            fleet.router.join(fleet.info("a", epoch=2, root_hash=OTHER_ROOT))
        fleet.router.check()
        assert states(fleet)["a"] is MacState.LOST

    def test_a_mac_alone_may_change_its_model(self, fleet) -> None:
        fleet.add("a")
        fleet.router.observe_prefill("a", 1_500, 1.0)
        fleet.add("a", epoch=2)
        assert fleet.router.fleet()[0].prefill_tokens_per_s == 1_500.0, "same Mac, same model: same speed"
        fleet.add("a", epoch=3, model="other", root_hash=OTHER_ROOT)
        assert fleet.router.fleet()[0].prefill_tokens_per_s == 1_000.0


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
        """A prompt of whole blocks that are all cached still computes its last block."""
        prompt = prompt_of((1, 64))
        fleet.add("a", holds=hashes_of(prompt))
        assert fleet.route(prompt).num_matched_tokens == 48

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
        fleet.route(prompt_of((2, 2_400)), exclude=[name for name in ("a", "b") if name != first.mac])
        second = fleet.route(prompt_of((1, 1_600), (3, 100)))
        assert second.mac != first.mac
        assert f"{first.mac} holds 1600 but its queue costs 2.400 s" in second.reason

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
        fleet.store(decisions[0].mac, hashes_of(prompt))
        assert fleet.router.index_stats().num_expected == 0
        assert fleet.loads()[decisions[0].mac] == (10, 10 * 8, 0), "each still has the tokens after its last full block"
        assert fleet.route(prompt).mac == decisions[0].mac

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
        assert fleet.route(prompt_of((2, 100)), "x").candidates[0].wait_s == 1.0
        fleet.router.first_token(running.request_id)
        fleet.router.release("x")
        assert fleet.route(prompt_of((3, 100))).candidates[0].wait_s == 0.0
        assert fleet.loads() == {"a": (2, 100, 1)}

    def test_announced_blocks_shorten_the_wait_of_others(self, fleet, prompt_of, hashes_of) -> None:
        """A long prompt is announced step by step; what is done need not be waited for."""
        prompt = prompt_of((1, 1_600))
        fleet.add("a")
        fleet.route(prompt)
        fleet.store("a", hashes_of(prompt)[:75])
        assert fleet.route(prompt_of((2, 100))).candidates[0].wait_s == 0.4

    def test_learnt_speeds_decide(self, fleet, prompt_of) -> None:
        fleet.add("slow", "fast")
        for _ in range(10):
            fleet.router.observe_prefill("slow", 512, 1.024)
            fleet.router.observe_prefill("fast", 512, 0.128)
            fleet.router.observe_prefill("unknown", 512, 0.128)
        fleet.router.check()
        speeds = {each.info.name: each.prefill_tokens_per_s for each in fleet.router.fleet()}
        assert speeds == {"slow": pytest.approx(500.0, rel=0.1), "fast": pytest.approx(4_000.0, rel=0.1)}
        assert [fleet.route(prompt_of((number, 500))).mac for number in range(4)] == ["fast"] * 4


class TestRefusals:
    def test_an_unknown_model_names_those_served(self, fleet, prompt_of) -> None:
        fleet.add("a")
        with pytest.raises(UnknownModel, match="model 'gpt' is not served; served: tiny") as refused:
            fleet.route(prompt_of((1, 10)), model="gpt")
        assert refused.value.served == ("tiny",)

    def test_no_mac_says_why_for_each(self, fleet, prompt_of) -> None:
        fleet.add("drained", "gone", "named", "small")
        fleet.router.drain("drained")
        fleet.router.lost("gone")
        fleet.router.join(fleet.info("small", max_model_len=50))
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
        fleet.router.lost("b")
        with pytest.raises(NoMacAvailable) as refused:
            fleet.route(prompt_of((1, 50)))
        assert refused.value.is_permanent
        assert fleet.route(prompt_of((1, 49))).mac == "a"

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
        assert fleet.router.index_stats().num_expected == 0

    def test_calls_for_a_request_that_is_over_do_nothing(self, fleet, prompt_of) -> None:
        fleet.add("a")
        fleet.route(prompt_of((1, 100)), "r")
        for _ in range(2):
            fleet.router.release("r")
            fleet.router.first_token("r")
        fleet.router.check()
        assert fleet.loads() == {"a": (0, 0, 0)}


class TestExplain:
    def test_tells_each_macs_numbers_of_a_past_request(self, fleet, prompt_of) -> None:
        fleet.add("a", "b")
        decision = fleet.route(prompt_of((1, 100)), "r")
        fleet.router.release("r")
        assert fleet.router.explain("r") is decision
        assert [each.mac for each in decision.candidates] == ["a", "b"]

    def test_keeps_the_last_thousand(self, fleet, prompt_of) -> None:
        fleet.add("a")
        query = fleet.query(prompt_of((1, 10)))
        for number in range(NUM_DECISIONS_KEPT):
            fleet.router.route(replace(query, request_id=f"q{number}"), 0.0)
        fleet.router.route(replace(query, request_id="q0"), 1.0)
        fleet.router.route(replace(query, request_id="new"), 1.0)
        fleet.router.check()
        assert fleet.router.explain("q0").decided_at_s == 1.0, "routed again: the latest decision, kept longest"
        with pytest.raises(UnknownRequest, match="'q1' is not among the last 1000"):
            fleet.router.explain("q1")

    def test_what_if_changes_nothing(self, fleet, prompt_of) -> None:
        fleet.add("a", "b")
        query = fleet.query(prompt_of((1, 100)), "hypothetical")
        supposed = fleet.router.what_if(query, 1.0)
        fleet.router.check()
        assert fleet.loads() == {"a": (0, 0, 0), "b": (0, 0, 0)}
        with pytest.raises(UnknownRequest):
            fleet.router.explain("hypothetical")
        assert fleet.router.route(query, 1.0) == supposed
