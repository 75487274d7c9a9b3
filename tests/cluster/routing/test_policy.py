"""What a request would take on a Mac, and how each policy chooses among Macs."""

from collections.abc import Sequence

import pytest

from cluster.routing.config import POLICIES, RoutingConfig
from cluster.routing.policy import PredictedSeconds, View
from cluster.routing.predict import MacBounds, Standing, base_s, beside_s, first_token_s, standing_of, terms_of
from cluster.routing.rivals import LeastLoaded, LinearBlockCost, PrefixAffinity, RoundRobin, WeightedScores
from cluster.routing.router import Router
from cluster.routing.speed import StepCosts

# A step costs 10 ms, a prefill token 1 ms and 1 us more for each token before it, a row 2 ms and 1 us a token.
COSTS = StepCosts(0.010, 0.001, 1e-6, 0.002, 1e-6)
BOUNDS = MacBounds(max_num_seqs=4, max_num_batched_tokens=500, max_chunk_tokens=250, token_capacity=10_000)
WEIGHTS = RoutingConfig(work_weight=0.0, crowd_weight=0.0, stall_weight=0.5, decode_weight=1.0, pressure_weight=1.0)


def standing(config: RoutingConfig = WEIGHTS, costs: StepCosts = COSTS, **bookings: float) -> Standing:
    values: dict = {
        "num_prefilling": 0,
        "num_prefill_tokens": 0,
        "prefill_work": 0,
        "num_decoding": 0,
        "decode_context_tokens": 0,
        "hot_tokens": 0,
        "num_output_tokens": 100.0,
    }
    return standing_of(costs, BOUNDS, config, **(values | bookings))


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
        # 600 tokens at 1 ms, in steps of 250, behind 700 tokens on average.
        assert terms.prefill_s == pytest.approx(600 * (0.001 + 0.010 / 250 + 700e-6))
        assert terms.decode_s == pytest.approx(100 * (0.010 + 0.002 + 1_000e-6))
        assert terms.first_token_s == terms.prefill_s
        assert terms.total_s == pytest.approx(terms.prefill_s + terms.decode_s)

    def test_booked_prefill_is_waited_for_with_its_context(self) -> None:
        """1,000 tokens after 3,000: twice their mean context is 7,000."""
        busy = standing(num_prefilling=1, num_prefill_tokens=1_000, prefill_work=1_000 * 7_000)
        assert busy.wait_s == pytest.approx(1_000 * (0.001 + 0.010 / 500) + 1e-6 * 1_000 * 3_500)

    def test_rows_that_decode_slow_prefill_and_are_held_up(self) -> None:
        terms = terms_of(standing(num_decoding=2, decode_context_tokens=4_000), 0, 0, 500, 0.0)
        rows_s = 0.010 + 2 * 0.002 + 4_000e-6
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

    def test_a_short_prompt_runs_beside_a_long_one(self) -> None:
        """Two abreast, 900 tokens booked, 700 of them one prompt's: the others go first, then both at half speed."""
        flat = StepCosts(0.0, 0.001, 0.0, 0.0, 0.0)
        work = 700 * 700 + 200 * 200
        busy = standing(
            costs=flat, num_prefilling=2, num_prefill_tokens=900, prefill_work=work, longest=(700, 700 * 700)
        )
        assert (busy.wait_s, busy.start_s, busy.beside_s) == pytest.approx((0.9, 0.4, 0.5))
        short = terms_of(busy, 0, 0, 100, 0.0)
        assert short.wait_s == pytest.approx(0.4 + 0.1)
        assert short.stall_s == pytest.approx(0.1), "the long one is held up as long"
        long = terms_of(busy, 0, 0, 1_000, 0.0)
        assert long.first_token_s == pytest.approx(0.9 + 1.0), "in the end it waits for all"

    def test_an_even_queue_is_waited_for(self) -> None:
        flat = StepCosts(0.0, 0.001, 0.0, 0.0, 0.0)
        for longest in ((0, 0), (300, 300 * 300)):
            work = 3 * 300 * 300
            even = standing(costs=flat, num_prefilling=3, num_prefill_tokens=900, prefill_work=work, longest=longest)
            assert (even.start_s, even.beside_s) == (even.wait_s, 0.0)

    def test_prompts_that_are_left_slow_its_decoding(self) -> None:
        """Those of the queue that are prefilled after its own first token: each of their steps is one of its tokens."""
        flat = StepCosts(0.0, 0.001, 0.0, 0.0, 0.0)
        busy = standing(
            costs=flat, num_prefilling=1, num_prefill_tokens=2_000, prefill_work=2_000**2, longest=(2_000, 2_000**2)
        )
        terms = terms_of(busy, 0, 0, 500, 100.0)
        # It begins after a step and a half of 250 ms and takes half of those that follow: 1.125 s are left then.
        assert terms.first_token_s == pytest.approx(1.375)
        assert terms.decode_s == pytest.approx(1.125)
        assert terms_of(busy, 0, 0, 500, 2.0).decode_s == pytest.approx(2 * 0.25)

    def test_steps_that_are_planned_come_first(self) -> None:
        """The one that runs, half done on average, and the one behind it: of one row, or of a chunk."""
        flat = StepCosts(0.0, 0.001, 0.0, 0.1, 0.0)
        assert standing(costs=flat).start_s == 0.0
        assert standing(costs=flat, num_decoding=2).start_s == pytest.approx(1.5 * 0.2)
        long = standing(
            costs=flat, num_prefilling=1, num_prefill_tokens=900, prefill_work=900**2, longest=(900, 900**2)
        )
        assert long.start_s == pytest.approx(1.5 * 0.25)
        short = standing(costs=flat, num_prefilling=1, num_prefill_tokens=50, prefill_work=50**2, longest=(50, 50**2))
        assert short.start_s == pytest.approx(0.05), "no longer than there is anything"

    def test_a_prompt_alone_carries_the_rows_by_itself(self) -> None:
        """Steps of 250 tokens beside rows of 250 ms: alone a token takes 2 ms, two abreast 1.5."""
        costs = StepCosts(0.0, 0.001, 0.0, 0.25, 0.0)
        rows = {"num_decoding": 1}
        even = standing(
            costs=costs, num_prefilling=2, num_prefill_tokens=1_000, prefill_work=0, longest=(500, 0), **rows
        )
        assert (even.wait_s, even.start_s) == pytest.approx((1_000 * 0.0015, 1_000 * 0.0015))
        one = standing(
            costs=costs, num_prefilling=1, num_prefill_tokens=1_000, prefill_work=0, longest=(1_000, 0), **rows
        )
        assert (one.wait_s, one.beside_s) == pytest.approx((1_000 * 0.002, 1.0))
        terms = terms_of(one, 0, 0, 500, 0.0)
        assert terms.prefill_s == pytest.approx(500 * 0.002)
        assert first_token_s(one, 0, 500) == pytest.approx(terms.first_token_s)
        assert first_token_s(standing(), 0, 500) == pytest.approx(terms_of(standing(), 0, 0, 500, 0.0).first_token_s)
        assert terms.wait_s == pytest.approx(one.start_s + 500 * 0.001), "the other's tokens, but not its rows again"

    def test_what_is_busy_costs_those_who_come_later(self) -> None:
        config = RoutingConfig(work_weight=0.1, crowd_weight=0.5, pressure_weight=0.0)
        idle, busy, full = (standing(config, recent_work_s=work_s).pressure for work_s in (0.0, 43.3, 10_000.0))
        assert idle == pytest.approx(0.1)
        assert busy == pytest.approx(0.1 + 0.5 * 1.0)
        assert full == pytest.approx(0.1 + 0.5 * 0.85 / 0.15)

    def test_rows_that_end_before_a_long_prompt_are_held_up_no_longer(self) -> None:
        """50 tokens are left to each of two rows, so 50 steps of 250 tokens."""
        flat = StepCosts(0.0, 0.001, 0.0, 0.0, 0.0)
        mac = standing(costs=flat, num_decoding=2)
        assert terms_of(mac, 0, 0, 12_500, 0.0).stall_s == pytest.approx(12.5)
        assert terms_of(mac, 0, 0, 50_000, 0.0).stall_s == pytest.approx(12.5)

    def test_a_prompt_that_is_all_there_costs_nothing(self) -> None:
        terms = terms_of(standing(num_decoding=2), 100, 100, 100, 0.0)
        assert (terms.prefill_s, terms.stall_s, terms.pressure_s) == (0.0, 0.0, 0.0)

    def test_what_a_sibling_computes_is_not_waited_for(self) -> None:
        """900 of the 950 booked tokens are the request's own prefix: anywhere else it would compute them itself."""
        flat = StepCosts(0.0, 0.001, 0.0, 0.0, 0.0)
        busy = standing(costs=flat, num_prefilling=1, num_prefill_tokens=950, prefill_work=950 * 950)
        terms = terms_of(busy, 0, 900, 1_000, 0.0)
        assert (terms.wait_s, terms.shared_s) == (pytest.approx(0.95), pytest.approx(0.9))
        assert terms.total_s == pytest.approx(0.05 + 0.1)
        assert terms_of(standing(costs=flat), 0, 900, 1_000, 0.0).shared_s == 0.0, "never more than the wait"


class TestPredictedSeconds:
    def test_chooses_what_the_terms_say(self) -> None:
        """The fast way through the lists and the explained terms are one formula."""
        macs = [
            standing(num_decoding=3, decode_context_tokens=9_000, hot_tokens=9_000),
            standing(num_prefilling=1, num_prefill_tokens=300, prefill_work=300 * 300),
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
        flat = StepCosts(0.0, 0.001, 0.0, 0.0, 0.0)
        for num_ahead, chosen in ((700, 0), (900, 1)):
            warm = standing(costs=flat, num_prefilling=1, num_prefill_tokens=num_ahead, prefill_work=num_ahead**2)
            assert PredictedSeconds().choose(view([warm, standing(costs=flat)], [800, 0])) == chosen

    def test_equals_go_by_hint_then_cached_then_recent_work_then_turns(self) -> None:
        macs = [standing()] * 3
        choose = PredictedSeconds().choose
        assert choose(view(macs, [0, 0, 0], bookings=[3, 1, 2])) == 1
        assert choose(view(macs, [0, 0, 0], bookings=[3, 1, 2], work=[0.0, 9.0, 0.2])) == 2
        assert choose(view(macs, [16, 0, 0], bookings=[3, 1, 2], work=[5.0, 9.0, 0.2])) == 0
        assert choose(view(macs, [16, 0, 0], bookings=[3, 1, 2], work=[5.0, 9.0, 0.2], hint=1)) == 1

    def test_siblings_are_worked_out_though_the_queue_alone_would_rule_them_out(self) -> None:
        """A Mac with two seconds of a shared prompt booked, against an idle one where all would be computed again."""
        flat = StepCosts(0.0, 0.001, 0.0, 0.0, 0.0)
        warm = standing(costs=flat, num_prefilling=1, num_prefill_tokens=2_000, prefill_work=2_000**2)
        choose = PredictedSeconds().choose
        assert choose(view([standing(costs=flat), warm], [0, 0], [0, 1_900], num_tokens=2_000)) == 1
        assert choose(view([standing(costs=flat), warm], [0, 0], [0, 0], num_tokens=2_000)) == 0

    def test_the_terms_add_up_to_what_is_compared(self) -> None:
        busy = standing(
            num_prefilling=2,
            num_prefill_tokens=900,
            prefill_work=900 * 1_900,
            num_decoding=2,
            decode_context_tokens=5_000,
            longest=(700, 700 * 1_900),
            hot_tokens=4_000,
            recent_work_s=20.0,
        )
        for held, matched, num_tokens in ((0, 0, 500), (0, 480, 500), (64, 64, 3_000), (499, 499, 500), (0, 16, 9_000)):
            total = base_s([busy], [0], [matched], num_tokens, 80.0)[0]
            total += beside_s(busy, held, matched, num_tokens, 80.0)
            assert terms_of(busy, held, matched, num_tokens, 80.0).total_s == pytest.approx(total)

    def test_closed_macs_are_never_chosen(self) -> None:
        assert PredictedSeconds().choose(view([standing()] * 3, [900, 0, 900], open_slots=[1])) == 1
        busy = standing(num_prefilling=1, num_prefill_tokens=99_999, prefill_work=99_999**2)
        assert PredictedSeconds().choose(view([standing(), busy, standing()], [0, 0, 900], open_slots=[0, 1])) == 0


class TestRivals:
    def test_round_robin_takes_turns(self) -> None:
        assert RoundRobin().choose(view([standing()] * 3, [0, 0, 0], bookings=[5, 4, 6])) == 1

    def test_least_loaded_counts_requests(self) -> None:
        macs = [standing(num_decoding=2), standing(num_prefilling=1), standing(num_decoding=1)]
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
        assert choose(view([standing(num_prefilling=1, num_prefill_tokens=500), standing()], [999, 0])) == 1
        assert choose(view([standing()] * 2, [0, 0], bookings=[2, 1])) == 1

    def test_weighted_scores_add_prefix_queue_and_memory(self) -> None:
        choose = WeightedScores().choose
        queued = standing(num_prefilling=2)
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
