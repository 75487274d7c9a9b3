"""Any order of arrivals, aborts, steps, late results and lost workers gives every request its undisturbed tokens."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cluster.scheduling.errors import InvalidRequest, QueueFull, RequestTooLong
from cluster.scheduling.request import Pooling, Reading
from tests.cluster.kv.hybrid_machine import MODELS, layout_of
from tests.cluster.scheduling.fake_worker import VOCAB_SIZE, Guesser, undisturbed
from tests.cluster.scheduling.rig import Rig, request_of

# Few shared beginnings, so that prefixes meet; block_size 4.
STEMS = [(1,) * 9, (1, 1, 1, 1, 2, 2, 2, 2, 3), (7, 7, 7, 7, 7), (7,), (5, 6, 7, 8)]
READINGS = [
    Reading(num_top_logprobs=0),
    Reading(num_top_logprobs=2, first_scored=4),
    *(Reading(pooling=how) for how in Pooling),
]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(5, 14),
        max_num_seqs=st.integers(1, 5),
        chunk=st.integers(1, 8),
        scored=st.integers(1, 8),
        depth=st.integers(1, 3),
        caching=st.booleans() | st.just(True),
        specs=st.sampled_from(MODELS),
        pages=st.lists(st.sampled_from([10, 10, 20]), min_size=4, max_size=4),
        num_drafts=st.integers(0, 6),
        seed=st.integers(0, 1000),
    )
    def begin(self, num_blocks, max_num_seqs, chunk, scored, depth, caching, specs, pages, num_drafts, seed):
        in_flight = depth * (max_num_seqs + 7)
        num_pages = num_blocks * len(specs) * 2
        self.rig = Rig(
            layout=layout_of(specs, num_pages, pages=pages[: len(specs)], in_flight=in_flight, max_model_len=24),
            caching=caching,
            max_model_len=24,
            max_num_seqs=max_num_seqs,
            max_chunk_tokens=chunk,
            max_scored_tokens=scored,
            max_num_batched_tokens=max_num_seqs + 7,
            max_waiting=6,
            max_plans_in_flight=depth,
            num_speculative_tokens=num_drafts,
            guesser=Guesser(seed) if num_drafts else None,
        )
        self.num_added = 0

    @rule(
        stem=st.sampled_from(STEMS),
        tail=st.lists(st.integers(0, 2), max_size=6),
        max_tokens=st.integers(0, 12),
        stop=st.sets(st.integers(0, VOCAB_SIZE - 1), max_size=2),
        num_generated=st.integers(0, 5) | st.just(0),
        reading=st.none() | st.sampled_from(READINGS),
    )
    def add(self, stem, tail, max_tokens, stop, num_generated, reading):
        request_id = f"r{self.num_added}"
        if reading is not None and reading.pooling is not None:
            max_tokens = 0
        fresh = request_of(request_id, (*stem, *tail), max_tokens, stop=stop)
        # What another Mac generated; had a stop token been among it, the request would not have come here.
        generated = [t for t in undisturbed(fresh, 24)[:num_generated] if t not in stop]
        if generated != undisturbed(fresh, 24)[: len(generated)]:
            generated = []
        try:
            num_prompt = len(stem) + len(tail)
            if reading is not None and generated:  # all of the prompt had been told before
                reading = Reading(0, first_scored=num_prompt)
            self.rig.add(
                request_of(request_id, (*stem, *tail), max_tokens, stop=stop, generated=generated, reading=reading)
            )
        except QueueFull:
            assert self.rig.scheduler.num_waiting >= 6
        except InvalidRequest:
            assert reading is not None
            assert reading.first_scored > num_prompt
        except RequestTooLong:
            layout = self.rig.layout
            assert layout.bytes_for(min(len(stem) + len(tail) + max_tokens, 24)) > layout.usable_bytes
        self.num_added += 1

    @rule(data=st.data())
    def abort(self, data):
        if self.num_added:
            self.rig.abort(f"r{data.draw(st.integers(0, self.num_added - 1))}")

    @precondition(lambda self: self.rig.can_schedule)
    @rule(times=st.integers(1, 3))
    def schedule(self, times):
        for _ in range(times):
            if self.rig.can_schedule:
                self.rig.schedule()

    @precondition(lambda self: self.rig.results)
    @rule()
    def apply(self):
        self.rig.apply()

    @rule(steps=st.integers(1, 12))
    def run(self, steps):
        for _ in range(steps):
            if self.rig.can_schedule:
                self.rig.schedule()
            if self.rig.results:
                self.rig.apply()

    @rule(late=st.booleans())
    def lose_worker(self, late):
        self.rig.lose_worker(late_results=late)

    @invariant()
    def no_block_is_lost(self):
        if hasattr(self, "rig"):
            kv = self.rig.kv
            assert kv.free_bytes + kv.used_bytes == kv.layout.usable_bytes

    def teardown(self):
        if hasattr(self, "rig"):
            self.rig.drain()


SchedulerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestScheduler = SchedulerMachine.TestCase
