"""What interrupts a request - abort, preemption, a lost worker, a worker that contradicts - and what survives it."""

from dataclasses import replace

import pytest

from cluster.kv.hashing import BlockHash
from cluster.scheduling.errors import ProtocolError
from cluster.scheduling.plan import FilledBlock, Sampled, StepResult
from cluster.scheduling.request import Finish, Reading
from cluster.scheduling.waiting import PATIENCE_S
from tests.cluster.kv.hybrid_machine import FULL, STATE, layout_of, window
from tests.cluster.scheduling.rig import Rig, request_of, rows


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


def admissions(rig):
    """Runs to the end; the first token and the length of every sequence that was begun, in order."""
    begun = []
    while rig.scheduler.has_work():
        begun += [(new.token_ids[0], len(new.token_ids)) for new in rig.schedule().new_sequences]
        rig.apply()
    rig.verify()
    return begun


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
        assert len(new.block_hashes) // 16 == (len(new.token_ids) - 1) // 4
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

    def test_a_flood_of_a_higher_priority_does_not_starve_a_lower_one(self):
        """One seat, and always another of the flood waiting for it."""
        rig = Rig(max_num_seqs=1)
        rig.add(replace(request_of("low", (1, 2, 3), 4), priority=-1))
        num_high = 0
        while "low" not in rig.finished:
            while rig.scheduler.num_waiting < 3:
                rig.add(replace(request_of(f"high{num_high}", (5, 6, num_high), 4), priority=1))
                num_high += 1
            rig.step()
            assert rig.now_s < 3 * PATIENCE_S, "it waits and waits"
        assert rig.updates["low"][0].queue_s == pytest.approx(PATIENCE_S, abs=10), "sooner is out of turn"
        rig.drain()

    def test_one_that_waited_too_long_is_not_preempted_by_who_kept_it_waiting(self):
        """Two seats, blocks for one and a half: without its new rank it would lose them to the next of the flood."""
        rig = Rig(num_blocks=12, max_num_seqs=2)
        rig.add(replace(request_of("low", (1, 2, 3), 28), priority=-1))
        # As if the flood had been there before.
        rig.now_s += PATIENCE_S
        rig.step()
        for i in range(3):
            rig.add(replace(request_of(f"high{i}", (5, 6, i), 28), priority=1))
        while "low" not in rig.finished:
            rig.step()
        assert rig.scheduler.stats().num_preemptions > 0, "memory was meant to be short"
        assert len(rig.finished) == 1, "it was the last to be preempted"
        rig.drain()

    def test_a_higher_priority_takes_blocks_from_a_decode_that_needs_no_more(self):
        """A window's decode goes on in the blocks that it leaves behind: waiting for it to lack one takes long."""
        rig = Rig(layout=layout_of([window(9)], 5, max_model_len=200), max_model_len=200, max_plans_in_flight=1)
        rig.add(request_of("low", (1, 2, 3), 150))
        for _ in range(20):
            rig.step()
        rig.add(replace(request_of("high", (4, 5, 6), 60), priority=1))
        for _ in range(60):
            assert "high" in [update.request_id for update in rig.step()]
        assert rig.scheduler.stats().num_preemptions == 1
        rig.drain()

    def test_a_state_that_a_row_in_flight_will_change_is_not_kept(self):
        """b is preempted at a block's end, but a plan runs one token more: its state will be that of another place."""
        rig = Rig(layout=layout_of([FULL, STATE], 9, max_model_len=64))
        rig.add(request_of("a", (1, 2, 3), 16))
        rig.add(request_of("b", (5, 6, 7, 8), 16))
        rig.schedule()
        while True:
            num_processed = rig.scheduler._roster.by_id["b"].num_processed
            rig.schedule()
            if rig.scheduler.stats().num_preemptions:
                break
            rig.apply()
        assert (num_processed % 4, len(rig.results)) == (0, 2)
        rig.abort("a")
        rig.drain()
        assert rig.finished["b"] is Finish.LENGTH

    def test_it_goes_before_who_was_overtaken_by_it(self):
        """c came first, but waits for what a computes; b was admitted meanwhile."""
        rig = Rig(num_blocks=6, max_chunk_tokens=2, max_plans_in_flight=1)
        rig.add(request_of("a", tuple(range(16)), 6))
        rig.add(request_of("c", tuple(range(16)), 2))
        rig.add(request_of("b", (50, 51), 8))
        assert admissions(rig) == [(0, 16), (50, 2), (50, 9), (0, 16)]
        assert rig.scheduler.stats().num_preemptions == 1

    def test_it_is_charged_once(self):
        """Of two tenants that take turns, y's first request is preempted: that costs it no turn."""
        rig = Rig(num_blocks=4, max_plans_in_flight=1, max_num_seqs=2)
        for name, token, max_tokens in [("x1", 1, 12), ("y1", 11, 10)]:
            rig.add(replace(request_of(name, (token, token + 1), max_tokens), tenant=name[0]))
        for name, token in [("x2", 21), ("y2", 31), ("x3", 41), ("y3", 51)]:
            rig.add(replace(request_of(name, (token, token + 1), 4), tenant=name[0]))
        rig.drain()
        assert rig.scheduler.stats().num_preemptions == 1
        assert list(rig.finished) == ["x1", "y1", "y2", "x2", "y3", "x3"]

    def test_a_chunk_takes_blocks_from_a_later_prompt(self):
        rig = Rig(num_blocks=14, max_plans_in_flight=1, max_chunk_tokens=2, max_scored_tokens=1)
        for name, token in (("d1", 7), ("d2", 8)):
            rig.add(request_of(name, (token,), 20))
        # A token a step, so that the other gets one too.
        rig.add(request_of("a", (97, *range(15)), 2, reading=Reading(0)))
        rig.add(request_of("b", (98, *range(15)), 2))
        rig.step()
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
        rig.scheduler._roster.by_id["a"].max_length = 20
        with pytest.raises(AssertionError, match="admission is wrong"):  # noqa: PT012
            for _ in range(10):
                rig.scheduler.schedule(0.0)
                rig.scheduler._in_flight.forget()


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

    def test_nobody_is_charged_twice(self):
        rig = Rig(max_plans_in_flight=1, max_num_seqs=1)
        for name, length in [("x1", 20), ("x2", 8), ("y1", 8), ("y2", 8), ("y3", 8), ("y4", 8)]:
            prompt = (ord(name[0]), int(name[1]), *range(length - 2))
            rig.add(replace(request_of(name, prompt, 2), tenant=name[0]))
        rig.step()
        rig.lose_worker()
        rig.drain()
        assert list(rig.finished) == ["y1", "y2", "y3", "x1", "x2", "y4"]

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
        assert (rig.scheduler.num_running, rig.scheduler.num_waiting) == (0, 1)
        rig.drain()
        assert rig.finished["a"] is Finish.LENGTH


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
        with pytest.raises(ProtocolError, match="sampled for 1 sequences and skipped 0, expected 0"):
            rig.scheduler.apply(replace(result, sampled=(Sampled(1, 5, None, False),)))

    def test_a_skipped_row_of_a_sequence_that_has_not_stopped(self):
        rig = Rig()
        rig.add(request_of("a", (1, 2), 6))
        rig.schedule()
        with pytest.raises(ProtocolError, match="skipped sequence 1, which has not stopped"):
            rig.scheduler.apply(StepResult(1, skipped_seq_ids=(1,)))

    @pytest.mark.parametrize(("index", "known"), [(0, "there [0-9a-f]{32}"), (5, "known are 2 blocks, there $")])
    def test_a_block_hash_that_contradicts_the_chain(self, index, known):
        rig, result = self.planned()
        block = FilledBlock(1, index, BlockHash(b"x" * 16))
        with pytest.raises(ProtocolError, match=known):
            rig.scheduler.apply(replace(result, filled_blocks=(block,)))

    def test_a_block_reported_before_the_one_before_it(self):
        rig, result = self.planned()
        with pytest.raises(ProtocolError, match="block 1 was reported, block 0 was not"):
            rig.scheduler.apply(replace(result, filled_blocks=result.filled_blocks[1:]))
