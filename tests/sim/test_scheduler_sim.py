"""One Mac's scheduler over thousands of seeded steps: chats that come back, aborts, lost workers, a pool too small."""

from random import Random

import pytest

from cluster.scheduling.errors import QueueFull
from tests.cluster.scheduling.fake_worker import VOCAB_SIZE
from tests.cluster.scheduling.rig import Rig, request_of


class Traffic:
    """Sessions over a shared system prompt; a turn sends all before it and some new words."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig = rig
        self.random = Random(seed)
        self.system = tuple(self.random.randrange(VOCAB_SIZE) for _ in range(17))
        self.sessions = [self.system] * 6
        self.turns: dict[str, int] = {}
        self.num_sent = 0
        self.num_refused = 0

    def send(self) -> None:
        session = self.random.randrange(len(self.sessions))
        history = self.sessions[session]
        prompt = (*history, *(self.random.randrange(VOCAB_SIZE) for _ in range(self.random.randint(1, 9))))
        if len(prompt) > 90:
            prompt = self.sessions[session] = self.system
        stop = (self.random.randrange(VOCAB_SIZE),) if self.random.random() < 0.5 else ()
        request_id = f"{session}-{self.num_sent}"
        self.num_sent += 1
        try:
            self.rig.add(request_of(request_id, prompt, self.random.randint(1, 24), stop=stop))
            self.turns[request_id] = session
        except QueueFull:
            self.num_refused += 1

    def hear(self, updates) -> None:
        for update in updates:
            if update.finish is not None:
                request = self.rig.requests[update.request_id]
                self.sessions[self.turns[update.request_id]] = (*request.token_ids, *self.rig.tokens[update.request_id])

    def tick(self, *, aborts: float, losses: float) -> None:
        if self.random.random() < 0.3:
            self.send()
        if self.random.random() < aborts:
            self.rig.abort(self.random.choice(sorted(self.turns) or ["none"]))
        if self.random.random() < losses:
            self.rig.lose_worker(late_results=self.random.random() < 0.5)
        while self.rig.can_schedule and self.rig.schedule() is not None:
            pass
        # Sometimes the worker is late and nothing comes back in this tick.
        if self.rig.results and self.random.random() < 0.95:
            self.hear(self.rig.apply())


@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_steps_of_a_crowded_mac(seed):
    """Every request ends with its undisturbed tokens, whatever was preempted, aborted or lost around it."""
    rig = Rig(48, checked=False, max_model_len=128, max_num_seqs=6, max_num_batched_tokens=24, max_waiting=8)
    traffic = Traffic(rig, seed)
    for tick in range(2500):
        traffic.tick(aborts=0.01, losses=0.002)
        if tick % 50 == 0:
            rig.scheduler.check()
    rig.drain()
    stats = rig.scheduler.stats()
    assert traffic.num_sent > 600
    assert stats.num_preemptions > 10, "the pool was meant to be too small"
    assert stats.num_cached_tokens > stats.num_queried_tokens // 4, "turns were meant to find their history"


def test_the_same_seed_gives_the_same_plans():
    """Nothing in the scheduler depends on hashes of objects, on time or on chance."""

    def run():
        rig = Rig(40, checked=False, max_model_len=128, max_num_seqs=6, max_num_batched_tokens=24, max_waiting=8)
        traffic = Traffic(rig, 7)
        plans = []
        for _ in range(300):
            if traffic.random.random() < 0.4:
                traffic.send()
            plans.append(rig.schedule())
            if rig.results:
                traffic.hear(rig.apply())
        return plans

    assert run() == run()


def test_a_short_request_beside_long_prompts_waits_for_no_more_than_its_turn():
    """While a long prompt is prefilled, a decode gets a token in every step."""
    rig = Rig(200, checked=False, max_model_len=512, max_num_batched_tokens=32, max_chunk_tokens=16)
    rig.add(request_of("decode", (1,), 40))
    rig.step()
    for i in range(3):
        rig.add(request_of(f"long{i}", tuple((i + k) % VOCAB_SIZE for k in range(200)), 2))
    for _ in range(39):
        assert [u.request_id for u in rig.step()][:1] == ["decode"]
    rig.drain()
