"""The scheduler with recurrent models: where states are kept, who waits for one, what is resumed."""

from dataclasses import replace

import pytest

from tests.cluster.kv.hybrid_machine import FULL, STATE, layout_of, window
from tests.cluster.scheduling.rig import Rig, request_of, rows


class TestRecurrentModels:
    """A prefix is resumable only where a state was kept."""

    def rig(self, **limits):
        options = {"max_model_len": 6000, "max_num_batched_tokens": 600, "max_chunk_tokens": 500}
        return Rig(layout=layout_of([FULL, STATE], 4000, max_model_len=6000), checked=False, **options | limits)

    def test_a_turn_is_resumed_where_it_ended(self):
        rig = self.rig()
        prompt = tuple(range(101))
        rig.add(request_of("a", prompt, 30))
        rig.drain()
        rig.add(request_of("b", (*prompt, *rig.tokens["a"], 7, 8, 9), 4))
        assert rows(rig.schedule())[0][0] == 128
        rig.drain()

    @pytest.mark.parametrize("num_tokens", [99, 100, 101, 4, 5])
    def test_a_prompt_sent_again_runs_its_last_block_alone(self, num_tokens):
        """Its last token runs anew, so the state that helps is the one before that, also where a block just ends."""
        rig = self.rig()
        for name in "ab":
            rig.add(request_of(name, tuple(range(num_tokens)), 2))
            plan = rig.schedule()
            rig.drain()
        assert rows(plan)[0][0] == (num_tokens - 1) // 4 * 4

    def test_states_on_the_way_are_kept_at_block_ends_only(self):
        """The first place for one had no memory, and chunks have gone on at odd places since."""
        limits = {"max_num_batched_tokens": 3, "max_chunk_tokens": 3, "max_num_seqs": 1, "max_plans_in_flight": 1}
        rig = self.rig(**limits)
        prompt = tuple(range(3000))
        rig.add(request_of("a", prompt, 2))
        pool, live = rig.kv._coordinator.pools[0], rig.scheduler._roster.by_id["a"]
        while live.num_planned < 2048:
            rig.schedule()
            rig.apply()
        held = pool.allocate(pool.num_empty - 1)
        rig.schedule()
        rig.apply()
        pool.free(held)
        while live.num_planned < 2100:
            rig.schedule()
            rig.apply()
        rig.add(request_of("b", (*prompt[:2060], 7, 7, 7), 2))
        rig.abort("a")
        # The worker looks at every state that it reads.
        starts = []
        while rig.scheduler.has_work():
            starts += [start for start, _, _ in rows(rig.schedule())]
            rig.apply()
        assert starts[0] == 2052, "the first block end after the memory was back"

    def test_a_hinted_boundary_is_shared_from_the_second_request_on(self):
        rig = self.rig()
        system = tuple(range(50))
        for name, start in (("a", 100), ("b", 200)):
            request = replace(request_of(name, (*system, *range(start, start + 30)), 2), boundaries=(50,))
            rig.add(request)
            plan = rig.schedule()
            rig.drain()
        assert rows(plan)[0][0] == 48

    def test_an_abort_with_a_state_under_way_keeps_nothing_of_it(self):
        rig = self.rig()
        rig.add(replace(request_of("a", tuple(range(90)), 2), boundaries=(50,)))
        while not rig.schedule().copies:
            rig.apply()
        rig.abort("a")
        while rig.results:
            rig.apply()
        assert rig.kv.used_bytes == 0
        rig.add(request_of("b", tuple(range(90)), 2))
        assert rows(rig.schedule())[0][0] == 0
        rig.drain()

    def test_a_prompt_shorter_than_a_block_waits_for_nobody(self):
        rig = self.rig()
        rig.add(request_of("a", tuple(range(90)), 2))
        rig.add(request_of("b", (0, 1), 2))
        assert len(rig.schedule().new_sequences) == 2
        rig.drain()

    def test_siblings_wait_for_the_state_where_they_part(self):
        """As long as the first has not passed that place."""
        rig = self.rig(max_chunk_tokens=256)
        system = tuple(range(400))
        for name, start in (("a", 1000), ("b", 2000), ("c", 3000)):
            rig.add(request_of(name, (*system, *range(start, start + 300)), 2))
        rig.drain()
        assert rig.worker.num_run_tokens <= 400 + 3 * 302, "the shared part was computed once"

    def test_nobody_waits_for_a_state_that_will_not_be_kept(self):
        """The running prompt has passed the place where they part."""
        rig = self.rig()
        system = tuple(range(400))
        rig.add(request_of("a", (*system, *range(1000, 1600)), 2))
        assert rows(rig.schedule()) == [(0, 500, False)]
        rig.add(request_of("b", (*system, *range(2000, 2100)), 2))
        assert rows(rig.schedule()) == [(500, 496, False), (0, 4, False)]
        rig.drain()

    def test_a_state_that_nothing_is_free_for_is_not_kept(self):
        """Memory for one request and no more: it goes over its last block's end without one."""
        rig = Rig(layout=layout_of([FULL, STATE], 6, max_model_len=20), max_model_len=20, max_plans_in_flight=1)
        rig.add(request_of("a", (1, 2, 3), 17))
        num_copies = {}
        while rig.scheduler.has_work():
            plan = rig.schedule()
            num_copies[plan.slices[0].start] = len(plan.copies)
            rig.apply()
        assert {start: num_copies[start] for start in (4, 8, 12, 16)} == {4: 1, 8: 1, 12: 1, 16: 0}
        rig.verify()

    def test_a_long_prefill_keeps_states_on_the_way_while_memory_lies_idle(self):
        rig = self.rig()
        prompt = tuple(range(5000))
        rig.add(request_of("a", prompt, 1))
        for _ in range(9):
            rig.step()
        rig.abort("a")
        rig.add(request_of("b", prompt, 1))
        assert rows(rig.schedule())[0][0] >= 2048
        rig.drain()


class TestWindows:
    def test_siblings_wait_for_windows_that_come_back_too(self):
        """Their content is known and its windows are gone: it is computed again, once."""
        limits = {"max_num_batched_tokens": 64, "max_chunk_tokens": 32, "max_num_seqs": 8}
        layout = layout_of([FULL, window(65)], 600, max_model_len=600)
        rig = Rig(layout=layout, checked=False, max_model_len=600, **limits)
        prompt = tuple(range(300))
        rig.add(request_of("before", prompt, 2))
        rig.drain()
        coordinator = rig.kv._coordinator
        for segment in list(coordinator.tree.walk()):
            coordinator.retention.evictor.thin(segment)
        rig.kv.take_events()
        rig.present = set(rig.kv.snapshot())
        num_run = rig.worker.num_run_tokens
        for number, name in enumerate("abc", start=1):
            rig.add(request_of(name, (*prompt[:200], *range(1000 * number, 1000 * number + 20)), 2))
        rig.drain()
        assert rig.worker.num_run_tokens - num_run <= 200 + 3 * 22
