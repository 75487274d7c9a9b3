"""The scheduler, behaviour by behaviour; the names are the claims."""

from dataclasses import replace

import pytest

from cluster.scheduling.errors import DuplicateRequest, QueueFull
from cluster.scheduling.plan import StepResult
from cluster.scheduling.request import Finish
from cluster.scheduling.stats import SchedulerStats
from tests.cluster.scheduling.fake_worker import undisturbed
from tests.cluster.scheduling.rig import Rig, request_of, rows


class TestArrival:
    def test_an_idle_scheduler_plans_nothing(self):
        rig = Rig()
        assert rig.schedule() is None
        assert not rig.scheduler.has_work()

    def test_a_duplicate_id_is_refused_and_changes_nothing(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2)))
        with pytest.raises(DuplicateRequest, match="request a"):
            rig.scheduler.add(request_of("a", (3,)), 0.0)
        assert rig.scheduler.num_waiting == 1
        rig.drain()

    def test_an_id_may_return_after_its_request_ended(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2)))
        rig.drain()
        assert rig.scheduler.add(request_of("a", (1, 2)), 0.0) is None

    def test_a_full_queue_refuses_and_says_the_limit(self):
        rig = Rig(max_waiting=2)
        rig.add(request_of("a", (1,)))
        rig.add(request_of("b", (1,)))
        with pytest.raises(QueueFull, match="2 requests are waiting, max_waiting is 2"):
            rig.scheduler.add(request_of("c", (1,)), 0.0)
        rig.schedule()
        rig.add(request_of("c", (1,)))
        rig.drain()

    @pytest.mark.parametrize(("max_tokens", "generated"), [(0, ()), (2, (5, 6)), (2, (5, 6, 7))])
    def test_a_request_that_has_all_its_tokens_ends_at_once(self, max_tokens, generated):
        rig = Rig()
        update = rig.scheduler.add(request_of("a", (1, 2), max_tokens, generated=generated), 0.0)
        assert update is not None
        assert (update.finish, update.token_ids) == (Finish.LENGTH, ())
        assert not rig.scheduler.has_work()

    def test_a_request_continued_after_a_loss_goes_on_as_if_undisturbed(self):
        rig = Rig()
        whole = request_of("a", (1, 2, 3), 8)
        rig.add(request_of("a", (1, 2, 3), 8, generated=undisturbed(whole, 64)[:5]))
        rig.drain()
        assert len(rig.updates["a"]) == 3
        assert rig.tokens["a"] == undisturbed(whole, 64)


class TestOneRequest:
    def test_a_one_token_prompt_runs_as_one_row(self):
        rig = Rig()
        rig.add(request_of("a", (3,), 2))
        plan = rig.schedule()
        assert rows(plan) == [(0, 1, True)]
        assert plan.new_sequences[0].token_ids == (3,)
        rig.drain()

    def test_max_tokens_one_plans_no_row_after_the_prompt(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2, 3), 1))
        assert rows(rig.schedule()) == [(0, 3, True)]
        assert rig.schedule() is None
        (update,) = rig.apply()
        assert update.finish is Finish.LENGTH
        rig.drain()

    def test_a_decode_row_is_planned_before_its_token_is_known(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2, 3), 3))
        assert [rows(rig.schedule()), rows(rig.schedule())] == [[(0, 3, True)], [(3, 1, True)]]
        rig.apply()
        assert rows(rig.schedule()) == [(4, 1, True)]
        rig.apply()
        assert rig.schedule() is None
        assert rig.apply()[0].finish is Finish.LENGTH

    def test_a_third_plan_in_flight_is_a_bug_of_the_caller(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2, 3), 9))
        rig.schedule()
        rig.schedule()
        with pytest.raises(AssertionError, match="2 plans are in flight"):
            rig.scheduler.schedule(0.0)

    def test_it_ends_at_max_model_len(self):
        rig = Rig(max_model_len=6)
        rig.add(request_of("a", (1, 2, 3), 100))
        rig.drain()
        assert len(rig.tokens["a"]) == 3
        assert rig.finished["a"] is Finish.LENGTH

    def test_a_stop_token_ends_it_and_the_row_planned_ahead_is_skipped(self):
        rig = Rig()
        first = undisturbed(request_of("a", (1, 2, 3), 1), 64)[0]
        rig.add(request_of("a", (1, 2, 3), 9, stop=(first,)))
        rig.schedule()
        rig.schedule()
        assert rig.apply()[0].finish is Finish.STOP
        assert rig.kv.num_used_blocks == 0
        assert rig.results[0].skipped_seq_ids == (1,)
        assert rig.apply() == []
        assert rig.finished["a"] is Finish.STOP

    def test_a_row_without_a_token_ends_it_with_the_reason(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2, 3), 9))
        rig.add(request_of("b", (4, 5, 6), 3))
        rig.schedule()
        first, second = rig.results.popleft().sampled
        result = StepResult(1, sampled=(replace(first, token_id=0, failure="too complex"), second))
        failed, fine = rig.scheduler.apply(result)
        assert (failed.request_id, failed.token_ids, failed.finish) == ("a", (), Finish.ABORTED)
        assert failed.failure == "too complex"
        assert (fine.request_id, len(fine.token_ids), fine.failure) == ("b", 1, "")
        assert rig.scheduler.num_running == 1
        rig.scheduler.check()

    def test_its_queue_time_ends_with_the_first_plan_that_runs_it(self):
        rig = Rig()
        rig.now_s = 100.0
        rig.add(request_of("a", (1, 2, 3), 2))
        rig.now_s = 109.5
        rig.schedule()
        assert [u.queue_s for u in rig.apply()] == [9.5]
        rig.drain()

    def test_logprobs_travel_with_the_token(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2, 3), 3, logprobs=2))
        rig.drain()
        assert [u.logprobs[0].token_id for u in rig.updates["a"]] == rig.tokens["a"]

    def test_its_release_travels_with_the_next_plan(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2, 3), 1))
        rig.drain()
        rig.add(request_of("b", (1, 2, 3), 1))
        assert rig.schedule().released_seq_ids == (1,)
        assert list(rig.worker.sequences) == [2]
        rig.drain()


class TestShares:
    def first_after_abort(self, num_steps):
        """Of two tenants with two prompts each, who goes next when the first prompt is aborted after so many steps."""
        rig = Rig(num_blocks=40, max_num_seqs=1, max_plans_in_flight=1)
        for number, (tenant, length) in enumerate([("a", 60), ("b", 20), ("a", 20), ("b", 20)]):
            rig.add(
                replace(request_of(f"{tenant}{number}", range(100 * number, 100 * number + length), 2), tenant=tenant)
            )
        for _ in range(num_steps):
            rig.step()
        rig.abort("a0")
        while not rig.finished.keys() - {"a0"}:
            rig.step()
        rig.drain()
        return [name for name in rig.finished if name != "a0"]

    def test_an_aborted_request_is_charged_what_was_run_of_it(self):
        """16 tokens of 62 leave its tenant behind one that had 22, once that one has had them."""
        assert self.first_after_abort(2) == ["b1", "a2", "b3"]
        assert self.first_after_abort(6) == ["b1", "b3", "a2"]

    def test_a_preempted_request_is_charged_what_was_run_before(self):
        rig = Rig(num_blocks=40, max_plans_in_flight=1)
        rig.add(request_of("a", tuple(range(30)), 2))
        for _ in range(3):
            rig.step()
        rig.lose_worker()
        refunds = []
        charge = rig.scheduler._roster.waiting.charge
        rig.scheduler._roster.waiting.charge = lambda *a, **k: refunds.append(a) or charge(*a, **k)
        rig.abort("a")
        assert refunds == [("", 24 - 32)]


class TestBatching:
    def test_a_long_prompt_never_stalls_a_decode(self):
        rig = Rig(num_blocks=40)
        rig.add(request_of("short", (1, 2), 12))
        rig.schedule()
        rig.add(request_of("long", tuple(range(30)), 2))
        for start in (0, 8, 16):
            rig.apply()
            assert rows(rig.schedule())[1] == (start, 8, False)
            assert len(rig.results[0].sampled) == 1
        rig.drain()

    def test_decodes_come_first_and_prefill_takes_what_is_left(self):
        rig = Rig(num_blocks=40, max_num_batched_tokens=9, max_chunk_tokens=9)
        rig.add(request_of("a", (1, 2), 9))
        rig.schedule()
        rig.add(request_of("b", tuple(range(20)), 2))
        assert rows(rig.schedule()) == [(2, 1, True), (0, 8, False)]
        rig.drain()

    def test_prompts_that_end_fill_the_budget_and_others_make_up_for_one_chunk(self):
        rig = Rig(num_blocks=40, max_num_batched_tokens=12, max_chunk_tokens=8)
        rig.add(request_of("a", tuple(range(10)), 2))
        rig.add(request_of("b", tuple(range(20, 30)), 2))
        rig.add(request_of("c", tuple(range(40, 50)), 2))
        assert rows(rig.schedule()) == [(0, 8, False)]
        assert rows(rig.schedule()) == [(8, 2, True), (0, 6, False)]
        rig.add(request_of("d", (1, 2), 1))
        rig.add(request_of("e", (3, 4), 1))
        rig.apply()
        assert rows(rig.schedule()) == [(10, 1, True), (6, 4, True), (0, 4, False), (0, 2, True)]
        rig.drain()

    def test_a_short_prompt_overtakes_long_ones(self):
        rig = Rig(num_blocks=60, max_num_batched_tokens=12, max_chunk_tokens=8)
        for name, first in (("a", 0), ("b", 60)):
            rig.add(request_of(name, tuple(range(first, first + 30)), 1))
        assert rows(rig.schedule()) == [(0, 8, False)]
        rig.add(request_of("c", tuple(range(100, 110)), 1))
        assert rows(rig.schedule()) == [(0, 8, False)]
        rig.apply()
        assert rows(rig.schedule()) == [(8, 2, True), (8, 6, False)]
        rig.drain()
        assert list(rig.finished) == ["c", "a", "b"]

    def test_a_long_prompt_is_overtaken_for_no_more_than_its_own_length(self):
        rig = Rig(num_blocks=60, max_num_batched_tokens=8, max_chunk_tokens=8)
        rig.add(request_of("long", tuple(range(40)), 1))
        rig.schedule()
        for number in range(12):
            rig.add(request_of(f"short-{number}", tuple(range(100 * number, 100 * number + 8)), 1))
            rig.apply()
            rig.schedule()
        rig.drain()
        finished = list(rig.finished)
        assert finished.index("long") == 3, "the fourth short one would end after 40 tokens"

    def test_a_short_prompt_does_not_pass_those_of_tenants_that_are_next(self):
        for tenant, expected in (("x", [(8, 8, False)]), ("y", [(0, 4, True), (8, 4, False)])):
            rig = Rig(num_blocks=60, max_num_batched_tokens=8, max_chunk_tokens=8)
            rig.add(replace(request_of("running", tuple(range(40)), 1), tenant="x"))
            rig.schedule()
            rig.add(replace(request_of("long", tuple(range(100, 160)), 1), tenant="y"))
            rig.add(replace(request_of("short", (1, 2, 3, 4), 1), tenant=tenant))
            assert rows(rig.schedule()) == expected
            rig.drain()

    def test_priority_goes_before_length(self):
        rig = Rig(num_blocks=60, max_num_batched_tokens=8, max_chunk_tokens=8)
        rig.add(replace(request_of("urgent", tuple(range(30)), 1), priority=1))
        rig.schedule()
        rig.add(request_of("short", (1, 2, 3), 1))
        assert rows(rig.schedule()) == [(8, 8, False)]
        rig.drain()
        assert list(rig.finished) == ["urgent", "short"]

    def test_no_more_sequences_run_than_allowed(self):
        rig = Rig(max_num_seqs=2)
        for name in "abc":
            rig.add(request_of(name, (1, 2), 3))
        rig.schedule()
        assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (2, 1)
        rig.drain()

    def test_the_first_in_line_is_not_overtaken_by_one_that_would_fit(self):
        rig = Rig(num_blocks=6)
        rig.add(request_of("a", tuple(range(8)), 9))
        rig.schedule()
        rig.add(request_of("big", tuple(range(20, 36)), 2))
        rig.add(request_of("small", (1,), 1))
        assert rig.schedule().new_sequences == ()
        rig.drain()

    def test_admission_leaves_room_for_prompts_that_are_half_way(self):
        """Blocks that an admitted prompt has yet to take are not promised to another."""
        rig = Rig(num_blocks=9, max_num_batched_tokens=8, max_chunk_tokens=4)
        rig.add(request_of("a", tuple(range(24)), 2))
        rig.add(request_of("b", tuple(range(30, 46)), 2))
        assert len(rig.schedule().new_sequences) == 1
        rig.drain()
        assert rig.scheduler.stats().num_preemptions == 0


class TestPrefixCache:
    def test_a_repeated_prompt_starts_where_the_cache_ends(self):
        rig = Rig()
        rig.add(request_of("a", tuple(range(10)), 2))
        rig.drain()
        rig.add(request_of("b", tuple(range(10)), 2))
        plan = rig.schedule()
        assert rows(plan) == [(8, 2, True)]
        assert len(plan.new_sequences[0].block_tables[0]) == 2
        rig.drain()
        assert [u.num_cached_tokens for u in rig.updates["b"]] == [8, 8]
        assert rig.scheduler.stats() == SchedulerStats(0, 0, 0, 0, num_queried_tokens=20, num_cached_tokens=8)

    def test_one_token_of_a_fully_cached_prompt_still_runs(self):
        """A prompt of exactly its cached blocks hits all but its last token, whose block it writes in a copy."""
        rig = Rig()
        rig.add(request_of("a", (1, 2, 3, 4), 1))
        rig.drain()
        rig.add(request_of("b", (1, 2, 3, 4), 1))
        plan = rig.schedule()
        assert rows(plan) == [(3, 1, True)]
        assert [(c.source, c.target) for c in plan.copies] == [(1, 2)]
        rig.drain()
        rig.add(request_of("c", (1, 2, 3, 4, 5), 1))
        assert rows(rig.schedule()) == [(4, 1, True)]
        rig.drain()

    def test_of_two_identical_requests_in_one_step_the_second_waits_for_the_first(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2, 3, 4, 5), 3))
        rig.add(request_of("b", (1, 2, 3, 4, 5), 3))
        assert rows(rig.schedule()) == [(0, 5, True)]
        rig.apply()
        assert rows(rig.schedule()) == [(5, 1, True), (4, 1, True)]
        rig.drain()
        assert rig.worker.num_run_tokens == 5 + 1 + 2 * 2

    def test_who_waits_for_a_sibling_is_overtaken(self):
        rig = Rig()
        rig.add(request_of("a", tuple(range(20)), 1))
        rig.add(request_of("b", tuple(range(20)), 1))
        rig.add(request_of("c", (9, 9, 9), 1))
        assert rows(rig.schedule()) == [(0, 8, False), (0, 3, True)]
        rig.drain()
        assert rig.worker.num_run_tokens == 20 + 4 + 3

    def test_a_sibling_does_not_wait_for_one_that_has_gone(self):
        rig = Rig()
        rig.add(request_of("a", tuple(range(20)), 1))
        rig.add(request_of("b", tuple(range(20)), 1))
        rig.schedule()
        rig.abort("a")
        assert rows(rig.schedule()) == [(0, 8, False)]
        rig.drain()

    def test_a_copy_of_known_content_is_given_back(self):
        """Two answers turn out to continue alike; the second goes over to the first's block."""
        rig = Rig()
        rig.add(request_of("a", (1, 2), 9))
        rig.add(request_of("b", (1, 2), 9))
        edits = []
        while rig.scheduler.has_work():
            plan = rig.schedule()
            edits += plan.edits
            rig.apply()
        assert [(e.index, e.block_id) for e in edits] == [(0, 1), (1, 2)]
        rig.verify()

    def test_a_blocked_request_is_not_looked_up_again(self, monkeypatch):
        rig = Rig(num_blocks=4)
        rig.add(request_of("a", (1, 2, 3), 10))
        rig.add(request_of("b", tuple(range(10)), 2))
        lookups = []
        found = rig.kv.get_computed_blocks
        monkeypatch.setattr(rig.kv, "get_computed_blocks", lambda *a: lookups.append(a) or found(*a))
        for _ in range(6):
            rig.step()
        assert len(lookups) == 2, "one each"
        rig.drain()

    def test_a_cached_prompt_that_leaves_no_room_for_itself_is_computed_again(self):
        """Its last block would be copied before it is written, and there is no third block."""
        rig = Rig(num_blocks=2)
        for name in "ab":
            rig.add(request_of(name, tuple(range(8)), 1))
            rig.drain()
        assert rig.finished == {"a": Finish.LENGTH, "b": Finish.LENGTH}
        assert rig.worker.num_run_tokens == 16

    def test_generated_blocks_are_found_by_the_next_turn(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2, 3), 6))
        rig.drain()
        rig.add(request_of("b", (1, 2, 3, *rig.tokens["a"], 9), 1))
        assert rows(rig.schedule()) == [(8, 2, True)]
        rig.drain()

    def test_without_prefix_caching_everything_is_computed(self):
        rig = Rig(caching=False)
        for name in "ab":
            rig.add(request_of(name, tuple(range(10)), 2))
            rig.drain()
        assert rig.scheduler.stats().num_cached_tokens == 0


def test_an_adapter_is_in_use_as_long_as_a_request_with_it_lives():
    rig = Rig()
    rig.add(replace(request_of("r", (1, 2, 3), 2), adapter="d"))
    assert rig.scheduler.uses_adapter("d")
    assert not rig.scheduler.uses_adapter("other")
    assert rig.scheduler.adapter_of("r") == "d"
    assert rig.scheduler.adapter_of("unknown") == ""
    assert rig.schedule().new_sequences[0].adapter == "d"
    rig.abort("r")
    assert not rig.scheduler.uses_adapter("d")
