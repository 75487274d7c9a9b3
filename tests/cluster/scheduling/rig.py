"""A scheduler, its KV ledger and a fake worker wired together, with results as late as the test wants them."""

from collections import deque
from dataclasses import replace

from cluster.kv.events import BlocksStored
from cluster.kv.hashing import hash_blocks, split_hashes
from cluster.kv.layout import KVGroup, KVLayout, KVPool
from cluster.kv.manager import KVCacheManager
from cluster.kv.spec import FullAttentionSpec
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.plan import StepPlan, StepResult
from cluster.scheduling.request import Finish, Request, SamplingParams, Update
from cluster.scheduling.scheduler import Scheduler
from tests.cluster.scheduling.fake_worker import FakeWorker, fake_root, pooled, score, undisturbed


def layout_of(num_blocks, block_size=4, max_model_len=64):
    """A layout with `num_blocks` usable blocks; not from a budget, so that a pool can be too small on purpose."""
    group = KVGroup(0, 0, FullAttentionSpec(1, 1), (0,), 1)
    return KVLayout(block_size, (group,), (KVPool(0, 1, (0,), num_blocks + 1),), num_blocks + 1, max_model_len)


def request_of(request_id, prompt, max_tokens=4, *, block_size=4, stop=(), generated=(), logprobs=None, reading=None):
    tokens = (*prompt, *generated)
    return Request(
        request_id=request_id,
        token_ids=tokens,
        num_prompt_tokens=len(prompt),
        block_hashes=tuple(hash_blocks(fake_root(block_size), tokens, block_size)),
        max_tokens=max_tokens,
        sampling=SamplingParams(num_top_logprobs=logprobs),
        stop_token_ids=tuple(stop),
        reading=reading,
    )


def rows(plan):
    """(start, num_tokens, samples) of each slice."""
    return [(s.start, s.num_tokens, s.samples) for s in plan.slices]


class Rig:
    def __init__(self, num_blocks=16, *, block_size=4, caching=True, checked=True, layout=None, guesser=None, **limits):
        self.config = SchedulerConfig(
            **{"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_chunk_tokens": 8} | limits
        )
        self.layout = layout or layout_of(num_blocks, block_size, self.config.max_model_len)
        self.kv = KVCacheManager(self.layout, enable_prefix_caching=caching)
        self.scheduler = Scheduler(self.kv, self.config)
        self.guesser = guesser
        self.worker = FakeWorker(self.layout, guesser)
        self.checked = checked
        self.now_s = 0.0
        self.results: deque[StepResult] = deque()
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.updates: dict[str, list[Update]] = {}
        self.finished: dict[str, Finish] = {}
        self.present: set = set()
        self.links: set = set()

    @property
    def can_schedule(self):
        return len(self.results) < self.config.max_plans_in_flight

    def add(self, request: Request) -> None:
        self.now_s += 1.0
        update = self.scheduler.add(request, self.now_s)
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = list(request.token_ids[request.num_prompt_tokens :])
        self.updates[request.request_id] = []
        if update is not None:
            self._note(update)
        self.check()

    def abort(self, request_id: str) -> bool:
        was_live = self.scheduler.abort(request_id)
        assert was_live == (request_id in self.requests and request_id not in self.finished)
        if was_live:
            self.finished[request_id] = Finish.ABORTED
        self.check()
        return was_live

    def schedule(self) -> StepPlan | None:
        """Plans a step; the worker runs it at once, the result waits for `apply`."""
        self.now_s += 1.0
        plan = self.scheduler.schedule(self.now_s)
        if plan is None:
            assert self.results or not self.scheduler.has_work(), "work, nothing in flight, and no plan"
        else:
            assert sum(s.num_tokens + s.max_drafts for s in plan.slices) <= self.config.max_num_batched_tokens
            assert all(s.num_tokens <= self.config.max_chunk_tokens for s in plan.slices)
            self.results.append(self.worker.run(plan))
        self.check()
        return plan

    def apply(self) -> list[Update]:
        updates = self.scheduler.apply(self.results.popleft())
        for update in updates:
            self._note(update)
        self.check()
        return updates

    def step(self) -> list[Update]:
        self.schedule()
        return self.apply()

    def lose_worker(self, *, late_results=False) -> None:
        late = list(self.results) if late_results else []
        self.results.clear()
        self.worker = FakeWorker(self.layout, self.guesser)
        self.scheduler.worker_lost()
        self.present.clear()
        for result in late:
            assert self.scheduler.apply(result) == []
        self.check()

    def drain(self) -> None:
        """Run to the end, one plan ahead, and hold every request against its undisturbed run."""
        for _ in range(100_000):
            if self.can_schedule and self.schedule() is not None:
                continue
            if not self.results:
                break
            self.apply()
        assert not self.scheduler.has_work()
        assert self.kv.used_bytes == 0
        self.verify()

    def verify(self) -> None:
        known = set()
        for request in self.requests.values():
            whole = (*request.token_ids[: request.num_prompt_tokens], *undisturbed(request, self.config.max_model_len))
            chain = hash_blocks(self.worker.root, whole, self.worker.block_size)
            known |= set(zip(range(len(chain)), [None, *chain], chain, strict=False))
        assert self.links <= known, "an event names a block, a parent or a place that no request has"
        for request_id, request in self.requests.items():
            expected = undisturbed(request, self.config.max_model_len)
            tokens = self.tokens[request_id]
            self._verify_reading(request)
            if self.finished.get(request_id) in (Finish.STOP, Finish.LENGTH):
                assert tokens == expected, request_id
                stopped = bool(tokens) and tokens[-1] in request.stop_token_ids
                assert (self.finished[request_id] is Finish.STOP) == stopped
            else:
                assert tokens == expected[: len(tokens)], request_id

    def _verify_reading(self, request: Request) -> None:
        """Each log-probability once and in order, before any token; one vector at the end."""
        updates, reading = self.updates[request.request_id], request.reading
        prompt = request.token_ids[: request.num_prompt_tokens]
        told = [each for update in updates for each in update.prompt_logprobs]
        first = reading.first_scored if reading is not None else 1
        wanted = reading is not None and reading.num_top_logprobs is not None
        expected = [(prompt[at], score(prompt, at)) for at in range(first, len(prompt))] if wanted else []
        has_finished = self.finished.get(request.request_id) in (Finish.STOP, Finish.LENGTH)
        assert [(each.token_id, each.logprob) for each in told] == expected[: len(told)]
        if has_finished or any(update.token_ids for update in updates):
            assert len(told) == len(expected)
        embeddings = [update.embedding for update in updates if update.embedding]
        is_pooled = has_finished and reading is not None and reading.pooling is not None
        assert embeddings == ([pooled(reading.pooling, prompt)] if is_pooled and reading else [])

    def check(self) -> None:
        """After every action: invariants, and events that lead to exactly what is present."""
        for event in self.kv.take_events():
            hashes = split_hashes(event.hashes)
            keys = {(event.group, block_hash) for block_hash in hashes}
            if isinstance(event, BlocksStored):
                assert not keys & self.present, "stored twice"
                parents = [event.parent_hash, *hashes]
                self.links |= set(
                    zip(range(event.first_index, event.first_index + len(hashes)), parents, hashes, strict=False)
                )
                self.present |= keys
            else:
                assert keys <= self.present
                self.present -= keys
        if self.checked:
            self.scheduler.check()
            assert set(self.kv.snapshot()) == self.present

    def _note(self, update: Update) -> None:
        request_id = update.request_id
        assert request_id not in self.finished, "an update after the end"
        self.updates[request_id].append(update)
        changing = {"token_ids": (), "logprobs": (), "finish": None, "prompt_logprobs": (), "embedding": ()}
        changing |= {"num_drafted_tokens": 0, "num_accepted_tokens": 0}
        assert replace(update, **changing) == replace(self.updates[request_id][0], **changing), (
            "what is told once is told the same every time"
        )
        assert update.num_accepted_tokens <= update.num_drafted_tokens
        assert update.num_accepted_tokens == max(0, len(update.token_ids) - 1)
        self.tokens[request_id] += update.token_ids
        wants = self.requests[request_id].sampling.num_top_logprobs is not None
        assert tuple(x.token_id for x in update.logprobs) == (update.token_ids if wants else ())
        if update.finish is not None:
            self.finished[request_id] = update.finish
