"""One Mac under a fake clock: the real scheduler and KV manager, a worker that takes time, plans one ahead.

Whatever must hold at every step is asserted here, while it runs; what is a matter of averages is left to the tests.
"""

from array import array
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from random import Random

from cluster.kv.hashing import hash_blocks
from cluster.kv.manager import KVCacheManager
from cluster.kv.planner import plan_layout
from cluster.kv.spec import FullAttentionSpec, RecurrentStateSpec, SlidingWindowSpec, StateTensor
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.errors import QueueFull
from cluster.scheduling.plan import StepPlan, StepResult
from cluster.scheduling.request import Finish, Request, SamplingParams
from cluster.scheduling.scheduler import Scheduler
from tests.cluster.scheduling.fake_worker import FakeWorker, fake_root, undisturbed

BLOCK_SIZE = 16
FULL = FullAttentionSpec(1, 8)
WINDOW = SlidingWindowSpec(1, 8, window=128)
STATE = RecurrentStateSpec("delta", (StateTensor((1024,), 4),))
DENSE = (FULL,)
MODELS = {
    "dense": DENSE,
    "windows": (FULL, WINDOW, WINDOW),
    "states": (FULL, STATE, STATE),
    "windows and states": (WINDOW, STATE),
}
# A step costs its launch and its tokens: the ratio is what matters.
STEP_S = 0.005
TOKEN_S = 0.0005


def layout_for(specs, num_longest, config):
    """Memory for so many sequences of max_model_len at once, at least 1."""
    options = {
        "max_model_len": config.max_model_len,
        "block_size": BLOCK_SIZE,
        "max_in_flight_tokens": config.max_plans_in_flight * config.max_num_batched_tokens,
    }
    ample = plan_layout(specs, kv_budget_bytes=1 << 40, **options)
    null_bytes = ample.budget_bytes - ample.usable_bytes
    budget = null_bytes + int(num_longest * ample.bytes_for(config.max_model_len))
    return plan_layout(specs, kv_budget_bytes=budget, **options)


def make_request(request_id, tokens, max_tokens, **fields):
    """Greedy; `tokens` are the prompt."""
    tokens = tuple(tokens)
    hashes = tuple(hash_blocks(fake_root(BLOCK_SIZE), tokens, BLOCK_SIZE))
    return Request(request_id, tokens, len(tokens), hashes, max_tokens, SamplingParams(), **fields)


class QuickWorker(FakeWorker):
    """Watches order and tables as the other does, but keeps no memory: for thousands of long prompts."""

    def _resize(self, plan):
        super()._resize(plan)
        self.memory.clear()

    def _copy(self, plan):
        for copy in plan.copies:
            assert self._key(copy.group, copy.source) != self._key(copy.group, copy.target)

    def _run_slice(self, sequence, part, start, drafts):
        assert not drafts, "nobody guesses here"
        assert start == sequence.num_computed or sequence.num_computed is None, "positions run in order"
        end = start + part.num_tokens
        assert end <= len(sequence.tokens), "a token is run before it is known"
        for manager in self.managers:
            table = sequence.tables.setdefault(manager.group_id, [])
            table += part.new_blocks.get(manager.group_id, ())
            last = table[0] if manager.is_state else table[(end - 1) // self.block_size]
            self._key(manager.group_id, last)
        sequence.num_computed = end
        self.num_run_tokens += part.num_tokens


@dataclass(eq=False)
class Trace:
    """What became of one request."""

    request: Request
    arrival_s: float
    # Tokens run by the Mac before it came, and before its first row.
    arrival_work: int
    arrival_order: int
    first_work: int | None = None
    first_order: int = 0
    end_work: int = 0
    cost_tokens: int = 0
    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    end_s: float = 0.0
    # Positions found in the cache or run by some plan, and those of them that were run for the first time.
    high: int = 0
    num_run: int = 0
    num_preemptions: int = 0
    # Others' tokens since its newest sampled row; None while it is not decoding.
    others: int | None = None
    # Plans in a row in which it lacked a block.
    num_sat_out: int = 0
    is_all_planned: bool = False
    seq_id: int = 0


@dataclass(frozen=True)
class PlanSeen:
    """Tokens of one plan, and how many of its rows follow a sampled token."""

    num_tokens: int
    num_decodes: int


class MacSim:
    """Events in the order of their time; the worker runs one plan after the other."""

    def __init__(
        self,
        specs,
        config: SchedulerConfig,
        *,
        num_longest,
        worker=QuickWorker,
        check_every=0,
        late_share=0.0,
        slowness=1.0,
    ):
        self.config = config
        self.layout = layout_for(specs, num_longest, config)
        self.kv = KVCacheManager(self.layout)
        self.scheduler = Scheduler(self.kv, config)
        self._make_worker = worker
        self.worker = worker(self.layout)
        self.now_s = 0.0
        self.busy_until_s = 0.0
        self.results: deque[tuple[float, StepResult]] = deque()
        self._agenda: list[tuple[float, int, object]] = []
        self._num_agenda = 0
        self._check_every = check_every
        self._slowness = slowness
        # How often whoever plans is not there when something has happened.
        self._late_share = late_share
        self._random = Random(0)
        self._num_events = 0
        self.traces: dict[str, Trace] = {}
        self.by_seq: dict[int, Trace] = {}
        self.running: dict[str, Trace] = {}
        self.work = 0
        self.plans: list[PlanSeen] = []
        # (work done, tenant, tokens of it that were not recomputed) for each row.
        self.rows: list[tuple[float, str, int]] = []
        # (request, drain hint, when).
        self.refusals: list[tuple[Request, float, float]] = []
        self.just_preempted: list[str] = []
        # Called after the plan that preempted somebody, before any other.
        self.on_preempted = lambda sim: None
        self.just_finished: list[str] = []
        self.num_sat_out = 0
        self.num_lost = 0

    def at(self, time_s, action):
        """Have `action(self)` called, or a Request arrive, at that time."""
        self._num_agenda += 1
        heappush(self._agenda, (time_s, self._num_agenda, action))

    def run(self, until_s=float("inf")):
        """Until then, or until nothing is left to do."""
        self._plan()
        while True:
            next_result = self.results[0][0] if self.results else float("inf")
            next_action = self._agenda[0][0] if self._agenda else float("inf")
            time_s = min(next_result, next_action)
            if time_s == float("inf") or time_s > until_s:
                break
            self.now_s = max(self.now_s, time_s)
            if next_action <= next_result:
                action = heappop(self._agenda)[2]
                self.arrive(action) if isinstance(action, Request) else action(self)
            else:
                self._apply()
            is_late = self._late_share and (self.results or self._agenda) and self._random.random() < self._late_share
            if not is_late:
                self._plan()
            self._num_events += 1
            if self._check_every and self._num_events % self._check_every == 0:
                self.scheduler.check()
        self.kv.take_events()

    def arrive(self, request: Request) -> bool:
        trace = Trace(request, self.now_s, self.work, self._num_events)
        trace.cost_tokens = min(len(request.token_ids) + request.max_tokens, self.config.max_model_len)
        try:
            update = self.scheduler.add(request, self.now_s)
        except QueueFull as error:
            self.refusals.append((request, error.retry_after_s, self.now_s))
            return False
        self.traces[request.request_id] = trace
        if update is not None:
            self._end(trace, update.finish)
        return True

    def abort(self, request_id):
        trace = self.traces[request_id]
        was_live = self.scheduler.abort(request_id)
        assert was_live == (trace.finish is None)
        assert not self.scheduler.abort(request_id), "a second call does nothing"
        if was_live:
            self._end(trace, Finish.ABORTED)
        if self._check_every:
            self.scheduler.check()

    def lose_worker(self):
        self.results.clear()
        self.busy_until_s = self.now_s
        self.worker = self._make_worker(self.layout)
        self.scheduler.worker_lost()
        self.num_lost += 1
        for trace in self.running.values():
            trace.others, trace.is_all_planned, trace.high = None, False, 0
        self.running.clear()
        self.by_seq.clear()
        self.kv.take_events()

    def live(self, request_id):
        return self.scheduler._roster.by_id[request_id]

    def verify(self):
        """Everything has ended, with the tokens of an undisturbed run, and no block is anybody's."""
        assert not self.scheduler.has_work()
        self.scheduler.check()
        for request_id, trace in self.traces.items():
            assert trace.finish is not None, f"{request_id} never ended"
            expected = undisturbed(trace.request, self.config.max_model_len)
            if trace.finish is Finish.ABORTED:
                expected = expected[: len(trace.tokens)]
            assert trace.tokens == expected, request_id
        assert self.kv.used_bytes == 0
        for pool in self.kv._coordinator.pools.pools:
            assert pool.num_used == 0
            assert pool.num_evictable == pool.num_cached
            assert pool.num_empty + pool.num_cached == pool.num_blocks - 1

    def _plan(self):
        while len(self.results) < self.config.max_plans_in_flight:
            plan = self.scheduler.schedule(self.now_s)
            self._observe(plan)
            self.kv.take_events()
            if self.just_preempted:
                self.on_preempted(self)
            if plan is None:
                assert self.results or not self.scheduler.has_work(), "work, nothing in flight, and no plan"
                break
            result = self.worker.run(plan)
            run_s = self._slowness * (STEP_S + TOKEN_S * sum(s.num_tokens for s in plan.slices))
            self.busy_until_s = max(self.now_s, self.busy_until_s) + run_s
            self.results.append((self.busy_until_s, replace(result, run_s=run_s)))

    def _apply(self):
        self.just_finished = []
        for update in self.scheduler.apply(self.results.popleft()[1]):
            trace = self.traces[update.request_id]
            assert trace.finish is None, "an update after the end"
            trace.tokens += update.token_ids
            if update.finish is not None:
                self._end(trace, update.finish)
                self.just_finished.append(update.request_id)

    def _end(self, trace, finish):
        trace.finish, trace.end_s, trace.end_work = finish, self.now_s, self.work
        self.running.pop(trace.request.request_id, None)

    def _observe(self, plan: StepPlan | None):
        """Who runs, who was preempted, who waits for memory; what others got since each one's newest token."""
        self.just_preempted = []
        for request_id in [r for r in self.running if not self.live(r).is_running]:
            trace = self.running.pop(request_id)
            trace.num_preemptions += 1
            trace.others, trace.is_all_planned = None, False
            self.just_preempted.append(request_id)
        rows = () if plan is None else plan.slices
        for new in () if plan is None else plan.new_sequences:
            trace = self.traces[self.scheduler._roster.by_seq[new.seq_id].request.request_id]
            self.by_seq[new.seq_id] = self.running[trace.request.request_id] = trace
            trace.seq_id = new.seq_id
            if trace.first_work is None:
                trace.first_work, trace.first_order = self.work, new.seq_id
        num_tokens = sum(row.num_tokens for row in rows)
        assert num_tokens <= self.config.max_num_batched_tokens
        assert all(row.num_tokens <= self.config.max_chunk_tokens for row in rows)
        self.work += num_tokens
        if rows:
            decodes = [r for r in rows if self.by_seq[r.seq_id].others is not None]
            self.plans.append(PlanSeen(num_tokens, len(decodes)))
        with_row = set()
        for row in rows:
            trace = self.by_seq[row.seq_id]
            with_row.add(trace)
            if not trace.high:
                trace.high = row.start
            fresh = max(0, row.start + row.num_tokens - max(row.start, trace.high))
            trace.high += fresh
            trace.num_run += fresh
            self.rows.append((self.now_s, trace.request.tenant, fresh))
            self._check_gap(trace, row, num_tokens)
        for trace in self.running.values():
            if trace not in with_row and trace.others is not None and not trace.is_all_planned:
                self._check_sitting_out(trace, with_row, num_tokens)

    def _check_gap(self, trace, row, num_tokens):
        if trace.others is not None and not trace.num_sat_out:
            waited = trace.others + num_tokens - row.num_tokens
            assert waited <= self.config.max_num_batched_tokens, "a decode waited for more than one budget"
        if row.samples:
            trace.others = 0
            length = min(trace.request.num_prompt_tokens + trace.request.max_tokens, self.config.max_model_len)
            trace.is_all_planned = row.start + row.num_tokens + 1 == length
        trace.num_sat_out = 0

    def _check_sitting_out(self, trace, with_row, num_tokens):
        """A decode without a row lacks a block, and there is nobody to take one from."""
        live = self.live(trace.request.request_id)
        is_short = self.kv.free_bytes < sum(g.page_bytes for g in self.layout.groups) or bool(self.just_preempted)
        assert is_short, "a decode waited although there was memory"
        lowest = min(reversed(self.scheduler._roster.running), key=lambda each: each.priority)
        spared = self.traces[lowest.request.request_id] in with_row
        assert lowest is live or spared, "a lower one kept its blocks without a row"
        first = max(self.scheduler._roster.running, key=lambda each: each.priority)
        trace.num_sat_out += 1
        self.num_sat_out += 1
        assert first is not live, "the first of all got nothing"
        trace.others += num_tokens


@dataclass(frozen=True)
class Tenant:
    """Poisson arrivals of prompts whose lengths are drawn from a list, most of which begin as one of its stems."""

    name: str
    rate_per_s: float
    prompt_tokens: tuple[int, ...]
    max_tokens: tuple[int, ...]
    weight: float = 1.0
    priority: int = 0
    num_stems: int = 0
    stem_tokens: int = 0
    stop_share: float = 0.0

    def requests(self, until_s, random: Random, *, most=1 << 30):
        """(time, request) of each until then."""
        stems = [_words(random, self.stem_tokens) for _ in range(self.num_stems)]
        time_s, number = random.expovariate(self.rate_per_s), 0
        while time_s < until_s and number < most:
            stem = random.choice(stems) if stems else ()
            prompt = (*stem, *_words(random, random.choice(self.prompt_tokens)))
            stop = (random.randrange(11),) if random.random() < self.stop_share else ()
            request = make_request(
                f"{self.name}{number}",
                prompt,
                random.choice(self.max_tokens),
                stop_token_ids=stop,
                tenant=self.name,
                tenant_weight=self.weight,
                priority=self.priority,
            )
            yield time_s, request
            number += 1
            time_s += random.expovariate(self.rate_per_s)


def _words(random, num_tokens):
    return tuple(array("H", random.randbytes(2 * num_tokens)))


def fill(sim, tenants, until_s, seed):
    """Schedule all tenants' arrivals."""
    random = Random(seed)
    for tenant in tenants:
        for time_s, request in tenant.requests(until_s, random):
            sim.at(time_s, request)


def shares(sim, from_s, until_s):
    """Each tenant's tokens of work in that time, without what was recomputed."""
    work = Counter()
    for time_s, tenant, num_tokens in sim.rows:
        if from_s <= time_s < until_s:
            work[tenant] += num_tokens
    return work
