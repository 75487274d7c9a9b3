"""The scheduler, behaviour by behaviour; the names are the claims."""

from dataclasses import replace

import pytest

from cluster.kv.hashing import BlockHash
from cluster.scheduling.errors import DuplicateRequest, ProtocolError, QueueFull
from cluster.scheduling.plan import FilledBlock, Sampled, StepResult
from cluster.scheduling.request import Finish
from cluster.scheduling.scheduler import SchedulerStats
from tests.cluster.scheduling.fake_worker import undisturbed
from tests.cluster.scheduling.rig import Rig, request_of


def rows(plan):
    """(start, num_tokens, samples) of each slice."""
    return [(s.start, s.num_tokens, s.samples) for s in plan.slices]


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

    def test_chunks_share_the_budget_in_order_of_arrival(self):
        rig = Rig(num_blocks=40, max_num_batched_tokens=12, max_chunk_tokens=8)
        rig.add(request_of("a", tuple(range(10)), 2))
        rig.add(request_of("b", tuple(range(20, 30)), 2))
        rig.add(request_of("c", tuple(range(40, 50)), 2))
        assert rows(rig.schedule()) == [(0, 8, False), (0, 4, False)]
        assert rows(rig.schedule()) == [(8, 2, True), (4, 6, True), (0, 4, False)]
        rig.drain()

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
        """A prompt of exactly its cached blocks hits all but the last block."""
        rig = Rig()
        rig.add(request_of("a", (1, 2, 3, 4), 1))
        rig.drain()
        rig.add(request_of("b", (1, 2, 3, 4), 1))
        assert rows(rig.schedule()) == [(0, 4, True)]
        rig.drain()
        rig.add(request_of("c", (1, 2, 3, 4, 5), 1))
        assert rows(rig.schedule()) == [(4, 1, True)]
        rig.drain()

    def test_two_identical_requests_in_one_step_both_compute_and_one_is_kept(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2, 3, 4, 5), 3))
        rig.add(request_of("b", (1, 2, 3, 4, 5), 3))
        assert rows(rig.schedule()) == [(0, 5, True), (0, 5, True)]
        rig.apply()
        assert rig.kv.num_cached_blocks == 1
        rig.drain()

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


class TestAbort:
    def test_an_unknown_request_was_not_live(self):
        assert Rig().scheduler.abort("nobody") is False

    def test_while_waiting(self):
        rig = Rig()
        rig.add(request_of("a", (1,)))
        assert rig.abort("a") is True
        assert rig.schedule() is None

    def test_twice(self):
        rig = Rig()
        rig.add(request_of("a", (1,)))
        rig.schedule()
        assert [rig.abort("a"), rig.abort("a")] == [True, False]
        assert rig.apply() == []

    def test_mid_prefill_gives_all_blocks_back_at_once(self):
        rig = Rig()
        rig.add(request_of("a", tuple(range(30)), 4))
        rig.schedule()
        rig.schedule()
        rig.abort("a")
        assert rig.kv.num_used_blocks == 0
        assert [rig.apply(), rig.apply()] == [[], []]
        assert rig.kv.num_cached_blocks == 0, "blocks filled for a request that has ended are nobody's"

    def test_its_blocks_may_be_given_away_while_a_plan_that_writes_them_is_in_flight(self):
        rig = Rig(num_blocks=8)
        rig.add(request_of("a", tuple(range(20)), 12))
        rig.schedule()
        rig.schedule()
        rig.abort("a")
        rig.apply()
        rig.add(request_of("b", tuple(range(40, 60)), 12))
        assert rig.schedule().released_seq_ids == (1,)
        rig.drain()

    def test_of_a_preempted_request_with_a_row_in_flight(self):
        rig = preempting_rig()
        rig.abort("b")
        rig.drain()
        assert rig.finished["b"] is Finish.ABORTED


def preempting_rig(max_tokens=8, **kwargs):
    """Two requests in a pool of four blocks, at the plan that just took b's blocks for a; b's last row is in flight."""
    rig = Rig(num_blocks=4, **kwargs)
    rig.add(request_of("a", (1, 2), 12))
    rig.add(request_of("b", (5, 6), max_tokens))
    rig.schedule()
    while rig.scheduler.stats().num_preemptions == 0:
        rig.schedule()
        if rig.scheduler.stats().num_preemptions == 0:
            rig.apply()
    return rig


class TestPreemption:
    def test_the_latest_arrival_gives_way_and_loses_no_token(self):
        rig = preempting_rig()
        assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (1, 1)
        num_tokens = len(rig.tokens["b"])
        rig.apply()
        assert len(rig.tokens["b"]) == num_tokens + 1, "a token sampled before the preemption is valid"
        rig.drain()
        assert [rig.finished[name] for name in "ab"] == [Finish.LENGTH, Finish.LENGTH]

    def test_it_returns_under_a_new_seq_id_with_all_its_tokens_and_hashes(self):
        rig = preempting_rig()
        plan = None
        while plan is None or not plan.new_sequences:
            rig.apply()
            plan = rig.schedule()
        (new,) = plan.new_sequences
        assert new.seq_id == 3
        assert new.token_ids == (5, 6, *rig.tokens["b"])
        assert len(new.block_hashes) == (len(new.token_ids) - 1) // 4
        rig.drain()

    def test_it_may_end_by_the_row_in_flight(self):
        """preempt + finish: the result in flight brings the last token of a request that holds nothing any more."""
        length = len(preempting_rig().tokens["b"]) + 1
        rig = preempting_rig(max_tokens=length)
        assert rig.scheduler.num_waiting == 1
        assert [u.finish for u in rig.apply() if u.request_id == "b"] == [Finish.LENGTH]
        assert rig.scheduler.num_waiting == 0
        rig.drain()

    def test_it_is_not_admitted_again_while_a_plan_in_flight_has_a_row_of_it(self):
        rig = preempting_rig(max_plans_in_flight=3)
        rig.abort("a")
        assert rig.kv.num_used_blocks == 0
        assert rig.schedule() is None
        rig.apply()
        assert len(rig.schedule().new_sequences) == 1
        rig.drain()

    def test_nobody_to_take_from_means_sitting_out_not_losing_blocks(self):
        """The latest arrival keeps its blocks until an older request needs them."""
        rig = Rig(num_blocks=3, max_plans_in_flight=1)
        rig.add(request_of("a", (1, 2), 4))
        rig.add(request_of("b", (3, 4), 8))
        for _ in range(3):
            rig.step()
        assert rows(rig.schedule()) == [(4, 1, True)], "a took the last block"
        assert rig.scheduler.num_running == 2
        rig.drain()
        assert rig.scheduler.stats().num_preemptions == 0

    def test_a_chunk_takes_no_blocks_from_a_row_of_its_own_plan(self):
        """An older prompt waits for a newer decode only until that one needs a block itself."""
        rig = Rig(num_blocks=7, max_plans_in_flight=1, max_chunk_tokens=1)
        rig.add(request_of("a", tuple(range(20)), 2))
        rig.add(request_of("b", (9,), 20))
        for _ in range(12):
            assert len(rig.schedule().slices) == 2
            rig.apply()
        for position in range(12, 16):
            assert rows(rig.schedule()) == [(position, 1, True)], "b has the last block, a sits out"
            rig.apply()
        assert rig.scheduler.stats().num_preemptions == 0
        assert rows(rig.schedule()) == [(12, 1, False)], "a takes b's blocks"
        assert rig.scheduler.stats().num_preemptions == 1
        rig.drain()

    def test_a_chunk_takes_blocks_from_a_later_prompt(self):
        rig = Rig(num_blocks=14, max_plans_in_flight=1, max_chunk_tokens=1)
        for name in ("d1", "d2"):
            rig.add(request_of(name, (7,), 20))
        for name in ("a", "b"):
            rig.add(request_of(name, tuple(range(16)), 2))
        for _ in range(12):
            assert len(rig.schedule().slices) == 4
            rig.apply()
        assert len(rig.schedule().slices) == 3
        assert rig.scheduler.num_waiting == 1
        rig.drain()

    def test_a_request_alone_that_outgrows_the_pool_is_a_bug(self):
        rig = Rig(num_blocks=2)
        rig.add(request_of("a", (1, 2, 3), 5))
        rig.schedule()
        rig.kv.allocate(1, 8)
        rig.scheduler._live_by_id["a"].max_length = 20
        with pytest.raises(AssertionError, match="admission is wrong"):  # noqa: PT012
            for _ in range(10):
                rig.scheduler.schedule(0.0)
                rig.scheduler._in_flight.clear()


class TestWorkerLost:
    def test_requests_go_on_in_their_order_with_the_tokens_that_they_have(self):
        rig = Rig(max_num_seqs=2)
        for name in "abc":
            rig.add(request_of(name, (1, 2, 3), 6))
        rig.schedule()
        rig.schedule()
        rig.apply()
        rig.lose_worker()
        assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (0, 3)
        assert rig.kv.num_cached_blocks == 0
        plan = rig.schedule()
        assert plan.step_id == 3, "step ids go on"
        assert plan.released_seq_ids == (), "a new worker has nothing to release"
        assert [n.token_ids for n in plan.new_sequences] == [(1, 2, 3, *rig.tokens[name]) for name in "ab"]
        rig.drain()

    def test_a_late_result_of_the_lost_worker_changes_nothing(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2, 3), 6))
        rig.schedule()
        rig.schedule()
        rig.lose_worker(late_results=True)
        assert rig.tokens["a"] == []
        rig.drain()

    def test_the_reported_cache_hit_is_that_of_the_first_admission(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2, 3, 4, 5), 1))
        rig.drain()
        rig.add(request_of("b", (1, 2, 3, 4, 5), 4))
        rig.step()
        rig.lose_worker()
        rig.drain()
        assert {u.num_cached_tokens for u in rig.updates["b"]} == {4}

    def test_twice_in_a_row(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2, 3), 6))
        rig.step()
        rig.lose_worker()
        rig.lose_worker()
        rig.drain()


class TestProtocol:
    """A result that cannot be the plan's is refused, since the worker's state is then unknown."""

    def planned(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2, 3, 4, 5, 6, 7, 8, 9), 6))
        rig.schedule()
        return rig, rig.results.popleft()

    def test_a_result_out_of_order(self):
        rig, result = self.planned()
        with pytest.raises(ProtocolError, match="step 2, expected 1"):
            rig.scheduler.apply(replace(result, step_id=2))

    def test_a_result_nobody_waits_for(self):
        with pytest.raises(ProtocolError, match="step 1, expected None"):
            Rig().scheduler.apply(StepResult(1))

    def test_a_token_too_many(self):
        rig, result = self.planned()
        with pytest.raises(ProtocolError, match="sampled 1 tokens and skipped 0 rows, expected 0"):
            rig.scheduler.apply(replace(result, sampled=(Sampled(1, 5, None, False),)))

    def test_a_skipped_row_of_a_sequence_that_has_not_stopped(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2), 6))
        rig.schedule()
        with pytest.raises(ProtocolError, match="skipped sequence 1, which has not stopped"):
            rig.scheduler.apply(StepResult(1, skipped_seq_ids=(1,)))

    @pytest.mark.parametrize(("index", "known"), [(0, "known is [0-9a-f]{32}"), (5, "known is only 2 blocks")])
    def test_a_block_hash_that_contradicts_the_chain(self, index, known):
        rig, result = self.planned()
        block = FilledBlock(1, 0, index, 1, BlockHash(b"x" * 16))
        with pytest.raises(ProtocolError, match=known):
            rig.scheduler.apply(replace(result, filled_blocks=(block,)))

    def test_a_filled_block_that_its_sequence_does_not_hold_there_is_ignored(self):
        rig, result = self.planned()
        moved = tuple(replace(block, block_id=block.block_id + 7) for block in result.filled_blocks)
        assert rig.scheduler.apply(replace(result, filled_blocks=moved)) == []
        assert rig.kv.num_cached_blocks == 0
