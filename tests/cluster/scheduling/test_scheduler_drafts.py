"""Rows with drafts: what may be guessed, and what becomes of positions, blocks and requests when guesses are wrong."""

from dataclasses import replace

import pytest

from cluster.scheduling.errors import ProtocolError
from cluster.scheduling.plan import Sampled, Speculated
from cluster.scheduling.request import Finish, TokenLogprobs, Update, one_by_one
from tests.cluster.kv.hybrid_machine import FULL, STATE, layout_of, window
from tests.cluster.scheduling.fake_worker import VOCAB_SIZE, Guesser, next_token, undisturbed
from tests.cluster.scheduling.rig import Rig, request_of


class Certain(Guesser):
    """Guesses as much as it may; so many of the guesses are right, the next ones are not."""

    def __init__(self, num_right: int = 99, most: int = 4) -> None:
        super().__init__(0, most=most)
        self.num_right = num_right

    def num_wanted(self) -> int:
        return self.most

    def guess(self, tokens, num_most, stops):
        drafts: list[int] = []
        while len(drafts) < num_most:
            token = (next_token([*tokens, *drafts]) + (len(drafts) >= self.num_right)) % VOCAB_SIZE
            if token in stops:
                break
            drafts.append(token)
        return drafts


def rig_of(guesser=None, **limits) -> Rig:
    return Rig(**{"guesser": guesser or Certain(), "num_speculative_tokens": 4, "max_plans_in_flight": 1} | limits)


def drafts(plan):
    """(start, drafts allowed) of each slice."""
    return [(s.start, s.max_drafts) for s in plan.slices]


class TestWhatMayBeGuessed:
    def test_nothing_before_the_worker_wants_to(self):
        rig = rig_of()
        rig.add(request_of("a", (1, 2, 3), 12))
        assert drafts(rig.schedule()) == [(0, 0)]
        rig.apply()
        assert drafts(rig.schedule()) == [(3, 4)]
        (update,) = rig.apply()
        assert len(update.token_ids) == 5
        assert (update.num_drafted_tokens, update.num_accepted_tokens) == (4, 4)
        stats = rig.scheduler.stats()
        assert (stats.num_drafted_tokens, stats.num_accepted_tokens) == (4, 4)
        rig.drain()

    def test_nothing_at_all_where_no_drafts_are_configured(self):
        rig = rig_of(num_speculative_tokens=0)
        rig.add(request_of("a", (1, 2, 3), 12))
        while rig.scheduler.has_work():
            assert drafts(rig.schedule())[0][1] == 0
            rig.apply()
        rig.verify()

    @pytest.mark.parametrize(("max_tokens", "allowed"), [(2, 0), (3, 1), (4, 2), (6, 4), (7, 4)])
    def test_no_more_than_the_answer_has_room_for_beside_the_token_after_them(self, max_tokens, allowed):
        rig = rig_of()
        rig.add(request_of("a", (1, 2, 3), max_tokens))
        rig.step()
        assert drafts(rig.schedule()) == [(3, allowed)]
        rig.drain()

    def test_everyone_has_a_row_before_anyone_has_drafts(self):
        rig = rig_of(max_num_batched_tokens=7, max_num_seqs=4)
        for name in "abcd":
            rig.add(request_of(name, (ord(name) % 7, 1), 12))
        rig.step()
        rig.step()
        plan = rig.schedule()
        assert [s.max_drafts for s in plan.slices] == [3, 0, 0, 0]
        rig.drain()

    def test_prompts_keep_half_of_what_rows_leave(self):
        rig = rig_of(max_num_batched_tokens=8, max_chunk_tokens=8)
        rig.add(request_of("a", (1, 2), 20))
        rig.step()
        rig.add(request_of("b", tuple(range(10)), 2))
        for _ in range(2):
            assert [(s.num_tokens, s.max_drafts) for s in rig.schedule().slices] == [(1, 3), (4, 0)]
            rig.apply()
        rig.drain()

    def test_nobody_gives_up_blocks_for_a_guess(self):
        """Three blocks of four: the first takes the last one, the second's row fits into what it has."""
        rig = rig_of(num_blocks=3, max_model_len=12, caching=False)
        rig.add(request_of("a", (1, 2), 8))
        rig.add(request_of("b", (2, 3), 8))
        rig.step()
        assert drafts(rig.schedule()) == [(2, 4), (2, 0)]
        assert rig.scheduler.stats().num_preemptions == 0
        rig.drain()


class TestGuessesThatAreWrong:
    @pytest.mark.parametrize("depth", [1, 2, 3])
    @pytest.mark.parametrize("num_right", [0, 1, 2, 3, 99])
    def test_plans_ahead_of_results_run_from_wherever_the_sequence_is(self, depth, num_right):
        rig = rig_of(Certain(num_right), max_plans_in_flight=depth, max_model_len=64)
        rig.add(request_of("a", (1, 2, 3), 40))
        rig.add(request_of("b", (4, 5, 6, 7, 1), 33, logprobs=2))
        rig.drain()
        assert rig.tokens["a"] == undisturbed(rig.requests["a"], 64)
        assert rig.worker.num_drafts > 0
        assert (rig.worker.num_accepted == 0) == (num_right == 0)

    def test_what_is_planned_ahead_is_the_furthest_and_results_take_back(self):
        rig = rig_of(Certain(1), max_plans_in_flight=2)
        rig.add(request_of("a", (1, 2, 3), 30))
        rig.schedule()
        rig.schedule()
        rig.apply()
        rig.apply()
        assert drafts(rig.schedule()) == [(4, 4)]
        # All four may come true, and one more token follows.
        assert drafts(rig.schedule()) == [(9, 4)]
        (update,) = rig.apply()
        assert len(update.token_ids) == 2
        assert drafts(rig.schedule()) == [(11, 4)]
        rig.drain()

    def test_a_preempted_request_keeps_what_came_true(self):
        rig = rig_of(Certain(2), max_plans_in_flight=2)
        rig.add(request_of("a", (1, 2, 3), 30))
        rig.step()
        rig.schedule()
        live = rig.scheduler._roster.by_id["a"]
        rig.scheduler._roster.preempt(live)
        rig.check()
        assert rig.schedule() is None
        (update,) = rig.apply()
        assert len(update.token_ids) == 3
        rig.drain()

    def test_a_lost_worker_forgets_what_was_wanted(self):
        rig = rig_of(max_plans_in_flight=2)
        rig.add(request_of("a", (1, 2, 3), 30))
        rig.step()
        rig.schedule()
        rig.lose_worker(late_results=True)
        assert rig.schedule().slices[0].max_drafts == 0
        rig.drain()

    @pytest.mark.parametrize("num_right", [0, 2, 99])
    def test_an_answer_ends_at_its_stop_token_whatever_was_guessed(self, num_right):
        request = request_of("a", (1, 2, 3), 30)
        stop = undisturbed(request, 64)[7]
        rig = rig_of(Certain(num_right), max_plans_in_flight=2)
        rig.add(request_of("a", (1, 2, 3), 30, stop=(stop,)))
        rig.drain()
        assert rig.finished["a"] is Finish.STOP

    def test_windows_move_on_by_what_is_certain(self):
        rig = rig_of(Certain(1), max_plans_in_flight=2, layout=layout_of([FULL, window(6)], 60, max_model_len=64))
        rig.add(request_of("a", (1, 2, 3), 50))
        most_used = 0
        while rig.scheduler.has_work():
            rig.step()
            most_used = max(most_used, rig.kv.num_used_blocks)
        rig.verify()
        assert rig.worker.num_accepted > 10
        # Blocks of four: fourteen of full attention, and of the window what six tokens and the guesses lie in.
        assert most_used <= 14 + 4


class TestStates:
    def rig(self, guesser, **limits):
        layout = layout_of([FULL, STATE], 100, max_model_len=64)
        return rig_of(guesser, **{"layout": layout, "max_plans_in_flight": 2} | limits)

    def test_no_plan_is_made_ahead_of_one_with_drafts(self):
        rig = self.rig(Certain())
        rig.add(request_of("a", (1, 2), 12))
        rig.schedule()
        rig.schedule()
        rig.apply()
        rig.apply()
        assert drafts(rig.schedule()) == [(3, 0)]
        assert drafts(rig.schedule()) == [(4, 3)]
        rig.apply()
        assert rig.schedule() is None
        rig.drain()

    @pytest.mark.parametrize("num_right", [0, 1, 2, 99])
    def test_drafts_end_with_the_block_so_that_its_end_is_kept(self, num_right):
        rig = self.rig(Certain(num_right), max_plans_in_flight=1)
        rig.add(request_of("a", (1, 2, 3, 4, 5), 30))
        while rig.scheduler.has_work():
            for start, allowed in drafts(rig.schedule()):
                assert start // 4 == (start + allowed) // 4
            rig.apply()
        rig.verify()
        # The turn is resumed where it ended.
        rig.add(request_of("b", (1, 2, 3, 4, 5, *rig.tokens["a"], 7), 2))
        assert rig.schedule().slices[0].start == 32
        rig.drain()


class TestResults:
    def test_more_tokens_than_there_was_room_for(self):
        rig = rig_of()
        rig.add(request_of("a", (1, 2), 12))
        rig.schedule()
        result = rig.results.popleft()
        with pytest.raises(ProtocolError, match="sampled 2 tokens of sequence 1, which has room for 1"):
            rig.scheduler.apply(replace(result, sampled=result.sampled * 2))

    def test_what_is_told_of_an_ended_request_is_nobodys(self):
        rig = rig_of()
        rig.add(request_of("a", (1, 2), 12))
        rig.schedule()
        rig.abort("a")
        result = rig.results.popleft()
        assert rig.scheduler.apply(replace(result, speculated=(Speculated(1, 0, 3),))) == []

    def test_a_failed_row_has_no_drafts_to_tell_of(self):
        rig = rig_of()
        rig.add(request_of("a", (1, 2), 12))
        rig.schedule()
        failed = Sampled(1, 0, None, stopped=False, failure="too complex")
        (update,) = rig.scheduler.apply(replace(rig.results.popleft(), sampled=(failed,)))
        assert (update.finish, update.failure, update.num_accepted_tokens) == (Finish.ABORTED, "too complex", 0)


class TestOneByOne:
    def test_several_tokens_are_told_in_order(self):
        logprobs = tuple(TokenLogprobs(token, -1.0) for token in (5, 6, 7))
        update = Update("a", (5, 6, 7), logprobs, Finish.STOP, 3, 0.5, num_drafted_tokens=4, num_accepted_tokens=2)
        parts = one_by_one(update)
        assert [part.token_ids for part in parts] == [(5,), (6,), (7,)]
        assert [part.logprobs[0].token_id for part in parts] == [5, 6, 7]
        assert [part.finish for part in parts] == [None, None, Finish.STOP]
        assert sum(part.num_drafted_tokens for part in parts) == 4
        assert [part.num_accepted_tokens for part in parts] == [1, 1, 0]

    def test_one_token_and_none_are_themselves(self):
        for tokens in ((), (5,)):
            update = Update("a", tokens, (), Finish.LENGTH, 3, 0.5)
            assert one_by_one(update) == [update]
