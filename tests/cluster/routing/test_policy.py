"""What a request would take on a Mac, and how each policy chooses among Macs."""

from collections.abc import Sequence

import pytest

from cluster.routing.config import POLICIES, RoutingConfig
from cluster.routing.policy import PredictedSeconds, View
from cluster.routing.predict import MacBounds, Prompt, Standing, base_s, beside_s, first_token_s, standing_of, terms_of
from cluster.routing.rivals import LeastLoaded, LinearBlockCost, PrefixAffinity, RoundRobin, WeightedScores
from cluster.routing.router import Router
from cluster.routing.speed import StepCosts

# A step costs 10 ms, a prefill token 1 ms and 1 us more for each token before it, a row 2 ms and 1 us a token.
COSTS = StepCosts(0.010, 0.001, 1e-6, 0.002, 1e-6)
BOUNDS = MacBounds(max_num_seqs=4, max_num_batched_tokens=500, max_chunk_tokens=250, token_capacity=10_000)
WEIGHTS = RoutingConfig(crowd_weight=0.0, stall_weight=0.5, decode_weight=1.0, pressure_weight=1.0)


FLAT = StepCosts(0.0, 0.001, 0.0, 0.0, 0.0)


def standing(config: RoutingConfig = WEIGHTS, costs: StepCosts = COSTS, **bookings: object) -> Standing:
    values: dict = {
        "prompts": (),
        "num_decoding": 0,
        "decode_context_tokens": 0,
        "hot_tokens": 0,
        "num_output_tokens": 100.0,
    }
    return standing_of(costs, BOUNDS, config, **(values | bookings))


def prompt(num_tokens: int) -> Prompt:
    """One that has just come, nothing of it cached."""
    return (num_tokens, num_tokens, num_tokens**2)


def view(
    standings: Sequence[Standing],
    held: Sequence[int],
    matched: Sequence[int] | None = None,
    num_tokens: int = 1_000,
    work: Sequence[float] = (),
    bookings: Sequence[int] = (),
    hint: int = -1,
    open_slots: Sequence[int] | None = None,
) -> View:
    num = len(standings)
    return View(
        open_slots=range(num) if open_slots is None else open_slots,
        standings=standings,
        num_held=held,
        num_matched=held if matched is None else matched,
        num_tokens=num_tokens,
        num_output=100.0,
        block_size=16,
        recent_work_s=work or [0.0] * num,
        last_booking=bookings or [0] * num,
        hint=hint,
    )


class TestTerms:
    def test_an_idle_mac_costs_its_prefill_and_its_answer(self) -> None:
        terms = terms_of(standing(), 400, 400, 1_000, 100.0)
        assert (terms.wait_s, terms.shared_s, terms.stall_s, terms.pressure_s) == (0.0, 0.0, 0.0, 0.0)
        # 600 tokens at 1 ms, behind 700 tokens on average; weights are read meanwhile.
        assert terms.prefill_s == pytest.approx(600 * (0.001 + 700e-6))
        assert terms.decode_s == pytest.approx(100 * (0.010 + 0.002 + 1_000e-6))
        assert terms.first_token_s == terms.prefill_s
        assert terms.total_s == pytest.approx(terms.prefill_s + terms.decode_s)

    def test_booked_prefill_is_waited_for_with_its_context(self) -> None:
        """1,000 tokens after 3,000: twice their mean context is 7,000."""
        busy = standing(prompts=[(1_000, 1_000, 1_000 * 7_000)])
        assert busy.wait_s == pytest.approx(1_000 * 0.001 + 1e-6 * 1_000 * 3_500)

    def test_a_chunk_takes_as_long_as_the_weights_at_least(self) -> None:
        slow = standing(costs=StepCosts(1.0, 0.001, 0.0, 0.0, 0.0))
        assert terms_of(slow, 0, 0, 500, 0.0).prefill_s == pytest.approx(500 * 1.0 / 250)

    def test_rows_that_decode_slow_prefill_and_are_held_up(self) -> None:
        terms = terms_of(standing(num_decoding=2, decode_context_tokens=4_000), 0, 0, 500, 0.0)
        rows_s = 2 * 0.002 + 4_000e-6
        assert terms.prefill_s == pytest.approx(500 * (0.001 + rows_s / 250 + 250e-6))
        assert terms.stall_s == pytest.approx(0.5 * 2 * terms.prefill_s)

    def test_a_row_costs_itself_and_the_others(self) -> None:
        alone = terms_of(standing(), 0, 0, 1_000, 100.0).decode_s
        third = terms_of(standing(num_decoding=2, decode_context_tokens=4_000), 0, 0, 1_000, 100.0).decode_s
        own_s = 0.010 + 3 * 0.002 + 5_000e-6
        others_s = 2 * (0.002 + 1_000e-6)
        assert third == pytest.approx(100 * (own_s + others_s))
        assert alone < third

    def test_without_a_free_row_one_has_to_be_waited_for(self) -> None:
        assert standing(num_decoding=3).wait_s == 0.0
        assert standing(num_decoding=4).wait_s == pytest.approx(1 * 100 * (0.010 + 5 * 0.002) / 4)

    def test_pressure_is_the_hot_share_of_what_it_brings(self) -> None:
        for hot_tokens, share in ((2_500, 0.25), (30_000, 1.0)):
            terms = terms_of(standing(hot_tokens=hot_tokens), 0, 0, 500, 0.0)
            assert terms.pressure_s == pytest.approx(share * terms.prefill_s)

    def test_a_prompt_waits_for_shorter_ones_and_overtakes_longer_ones(self) -> None:
        """Two steps of a chunk come first in any case."""
        busy = standing(costs=FLAT, prompts=[prompt(200), prompt(700), prompt(5_000)])
        assert (busy.wait_s, busy.start_s) == pytest.approx((5.9, 0.5))
        for num_tokens, wait_s, num_overtaken in (
            (100, 0.5, 3),
            (200, 0.5, 2),
            (699, 0.5, 2),
            (700, 0.9, 1),
            (6_000, 5.9, 0),
        ):
            terms = terms_of(busy, 0, 0, num_tokens, 0.0)
            own_s = num_tokens / 1_000
            assert terms.wait_s == pytest.approx(wait_s)
            assert terms.stall_s == pytest.approx(num_overtaken * own_s), "each of them is held up as long"
            assert first_token_s(busy, 0, num_tokens) == pytest.approx(terms.first_token_s)

    def test_who_has_waited_goes_before_a_newcomer_of_its_length(self) -> None:
        """It has 900 tokens left, and there were 400 others since it came."""
        waited = standing(costs=FLAT, prompts=[(500, 900, 900**2)])
        assert terms_of(waited, 0, 0, 600, 0.0).wait_s == pytest.approx(0.9)
        assert terms_of(waited, 0, 0, 400, 0.0).wait_s == pytest.approx(0.5)

    def test_prompts_that_are_left_slow_its_decoding(self) -> None:
        """Those that are prefilled after its own first token: each of their steps is one of its tokens."""
        busy = standing(costs=FLAT, prompts=[prompt(2_000)])
        terms = terms_of(busy, 0, 0, 500, 100.0)
        # It begins after two steps of 250 ms; 1.5 s are left then.
        assert terms.first_token_s == pytest.approx(1.0)
        assert terms.decode_s == pytest.approx(1.5)
        assert terms_of(busy, 0, 0, 500, 2.0).decode_s == pytest.approx(2 * 0.25)

    def test_steps_that_are_planned_come_first(self) -> None:
        """The one that runs, half done on average, the one behind it, and where prompts fill it half of its own."""
        costs = StepCosts(0.0, 0.001, 0.0, 0.1, 0.0)
        assert standing(costs=costs).start_s == 0.0
        assert standing(costs=costs, num_decoding=2).start_s == pytest.approx(1.5 * 0.2)
        assert standing(costs=costs, prompts=[prompt(900)]).start_s == pytest.approx(2 * 0.25)
        assert standing(costs=costs, prompts=[prompt(50)]).start_s == pytest.approx(0.05), "no longer than there is any"

    def test_each_chunk_carries_the_rows_that_decode(self) -> None:
        """Steps of 250 tokens beside a row of 250 ms: a token takes 2 ms."""
        mac = standing(costs=StepCosts(0.0, 0.001, 0.0, 0.25, 0.0), prompts=[prompt(1_000)], num_decoding=1)
        assert mac.wait_s == pytest.approx(1_000 * 0.002)
        assert terms_of(mac, 0, 0, 500, 0.0).prefill_s == pytest.approx(500 * 0.002)

    def test_what_is_busy_costs_those_who_come_later(self) -> None:
        config = RoutingConfig(crowd_weight=0.5, pressure_weight=0.0)
        idle, busy, full = (standing(config, recent_work_s=work_s).pressure for work_s in (0.0, 43.3, 10_000.0))
        assert idle == 0.0
        assert busy == pytest.approx(0.5 * 1.0)
        assert full == pytest.approx(0.5 * 0.85 / 0.15)

    def test_rows_that_end_before_a_long_prompt_are_held_up_no_longer(self) -> None:
        """50 tokens are left to each of two rows, so 50 steps of 250 tokens."""
        mac = standing(costs=FLAT, num_decoding=2)
        assert terms_of(mac, 0, 0, 12_500, 0.0).stall_s == pytest.approx(12.5)
        assert terms_of(mac, 0, 0, 50_000, 0.0).stall_s == pytest.approx(12.5)

    def test_a_prompt_that_is_all_there_costs_nothing(self) -> None:
        terms = terms_of(standing(num_decoding=2), 100, 100, 100, 0.0)
        assert (terms.prefill_s, terms.stall_s, terms.pressure_s) == (0.0, 0.0, 0.0)

    def test_what_a_sibling_computes_is_not_waited_for(self) -> None:
        """900 of the 950 booked tokens are the request's own prefix: anywhere else it would compute them itself."""
        busy = standing(costs=FLAT, prompts=[prompt(950)])
        terms = terms_of(busy, 0, 900, 1_000, 0.0)
        assert (terms.wait_s, terms.shared_s) == (pytest.approx(0.95), pytest.approx(0.9))
        assert terms.total_s == pytest.approx(0.05 + 0.1)
        assert terms_of(standing(costs=FLAT), 0, 900, 1_000, 0.0).shared_s == 0.0, "never more than the wait"


class TestPredictedSeconds:
    def test_chooses_what_the_terms_say(self) -> None:
        """The fast way through the lists and the explained terms are one formula."""
        macs = [
            standing(num_decoding=3, decode_context_tokens=9_000, hot_tokens=9_000),
            standing(prompts=[prompt(300)]),
            standing(costs=StepCosts(0.05, 0.003, 2e-6, 0.004, 2e-6)),
            standing(num_decoding=9),
        ]
        for num_tokens in (50, 1_000, 9_000):
            for held in ([0, 0, 0, 0], [num_tokens - 1, 0, 0, 0], [0, 16, 32, 48], [0, 0, num_tokens // 2, 0]):
                chosen = PredictedSeconds().choose(view(macs, held, num_tokens=num_tokens))
                totals = [
                    terms_of(mac, depth, depth, num_tokens, 100.0).total_s
                    for mac, depth in zip(macs, held, strict=True)
                ]
                assert totals[chosen] <= max(min(totals) * 1.05, min(totals) + 0.02)

    def test_a_warm_mac_wins_while_its_queue_is_short(self) -> None:
        for num_ahead, chosen in ((700, 0), (900, 1)):
            warm = standing(costs=FLAT, prompts=[prompt(100)] * (num_ahead // 100))
            assert PredictedSeconds().choose(view([warm, standing(costs=FLAT)], [800, 0])) == chosen

    def test_equals_go_by_hint_then_cached_then_recent_work_then_turns(self) -> None:
        macs = [standing()] * 3
        choose = PredictedSeconds().choose
        assert choose(view(macs, [0, 0, 0], bookings=[3, 1, 2])) == 1
        assert choose(view(macs, [0, 0, 0], bookings=[3, 1, 2], work=[0.0, 9.0, 0.2])) == 2
        assert choose(view(macs, [16, 0, 0], bookings=[3, 1, 2], work=[5.0, 9.0, 0.2])) == 0
        assert choose(view(macs, [16, 0, 0], bookings=[3, 1, 2], work=[5.0, 9.0, 0.2], hint=1)) == 1

    def test_siblings_are_worked_out_though_the_queue_alone_would_rule_them_out(self) -> None:
        """A Mac with two seconds of a shared prompt booked, against an idle one where all would be computed again."""
        warm = standing(costs=FLAT, prompts=[prompt(2_000)])
        choose = PredictedSeconds().choose
        assert choose(view([standing(costs=FLAT), warm], [0, 0], [0, 1_900], num_tokens=2_000)) == 1
        assert choose(view([standing(costs=FLAT), warm], [0, 0], [0, 0], num_tokens=2_000)) == 0

    def test_the_terms_add_up_to_what_is_compared(self) -> None:
        busy = standing(
            prompts=[(200, 200, 200 * 1_900), (900, 700, 700 * 1_900)],
            num_decoding=2,
            decode_context_tokens=5_000,
            hot_tokens=4_000,
            recent_work_s=20.0,
        )
        for held, matched, num_tokens in ((0, 0, 500), (0, 480, 500), (64, 64, 3_000), (499, 499, 500), (0, 16, 9_000)):
            ((total, _, turn_s),) = base_s([busy], [0], [held], [matched], num_tokens, 80.0)
            total += beside_s(busy, turn_s, held, matched, 80.0)
            assert terms_of(busy, held, matched, num_tokens, 80.0).total_s == pytest.approx(total)

    def test_closed_macs_are_never_chosen(self) -> None:
        assert PredictedSeconds().choose(view([standing()] * 3, [900, 0, 900], open_slots=[1])) == 1
        busy = standing(prompts=[prompt(500)] * 200)
        assert PredictedSeconds().choose(view([standing(), busy, standing()], [0, 0, 900], open_slots=[0, 1])) == 0


class TestRivals:
    def test_round_robin_takes_turns(self) -> None:
        assert RoundRobin().choose(view([standing()] * 3, [0, 0, 0], bookings=[5, 4, 6])) == 1

    def test_least_loaded_counts_requests(self) -> None:
        macs = [standing(num_decoding=2), standing(prompts=[prompt(10)]), standing(num_decoding=1)]
        assert LeastLoaded().choose(view(macs, [900, 0, 0], bookings=[1, 3, 2])) == 2

    def test_prefix_affinity_needs_a_long_match_and_even_loads(self) -> None:
        choose = PrefixAffinity().choose
        macs = [standing(num_decoding=3), standing()]
        assert choose(view(macs, [301, 0])) == 0
        assert choose(view(macs, [300, 0])) == 1
        assert choose(view([standing(num_decoding=65), standing()], [900, 0])) == 1
        assert choose(view([standing(num_decoding=200), standing(num_decoding=135)], [900, 0])) == 0
        assert choose(view(macs, [900, 900])) == 1, "among equal matches the fewest requests"

    def test_linear_block_cost_charges_decoding_like_prefill(self) -> None:
        choose = LinearBlockCost().choose
        warm = standing(num_decoding=1, decode_context_tokens=900)
        assert choose(view([warm, standing()], [901, 0])) == 0
        assert choose(view([warm, standing()], [899, 0])) == 1
        assert choose(view([standing(prompts=[prompt(500)]), standing()], [999, 0])) == 1
        assert choose(view([standing()] * 2, [0, 0], bookings=[2, 1])) == 1

    def test_weighted_scores_add_prefix_queue_and_memory(self) -> None:
        choose = WeightedScores().choose
        queued = standing(prompts=[prompt(10)] * 2)
        assert choose(view([queued, standing()], [600, 0])) == 1
        assert choose(view([queued, standing()], [700, 0])) == 0
        full = standing(num_decoding=1, decode_context_tokens=10_000)
        assert choose(view([full, standing()], [600, 0])) == 1
        assert choose(view([full, standing()], [700, 0])) == 0
        assert choose(view([standing()] * 2, [0, 0], bookings=[2, 1])) == 1

    @pytest.mark.parametrize("policy", POLICIES)
    def test_each_is_there_by_its_name(self, policy: str, make_fleet, prompt_of) -> None:
        fleet = make_fleet(RoutingConfig(policy=policy))
        fleet.add("a", "b")
        assert {fleet.route(prompt_of((number, 50))).mac for number in range(6)} == {"a", "b"}
        assert isinstance(fleet.router, Router)
