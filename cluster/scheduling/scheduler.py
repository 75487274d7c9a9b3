"""Continuous batching: what runs in the next step, and what a step's result means for each request.

Owns the queue of waiting requests, the list of running ones and the plans in flight. Whose turn it is among those that
wait is the queue's to say. Running ones are in order of admission; whoever lacks blocks takes them from the lowest
priority, the latest admitted first. So the first of the highest priority always gets what it needs, and all end. One
that higher priorities kept waiting for too long counts as of the highest from its admission on.

Plans are executed in order, which is why blocks may be given away while a plan that writes them is in flight: whoever
gets them writes them in a later plan, and blocks found by their hash are full and never written again.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import partial

from cluster.kv.hashing import join_hashes
from cluster.kv.manager import KVCacheManager
from cluster.kv.memory import PoolResize
from cluster.kv.points import PointKind
from cluster.kv.sequence import NO_HIT, ComputedBlocks, GroupBlocks, TableEdit
from cluster.scheduling.admission import check_request, max_length
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.drafts import max_drafts
from cluster.scheduling.drain import DrainEstimate
from cluster.scheduling.errors import DuplicateRequest, ProtocolError, QueueFull
from cluster.scheduling.in_flight import PlanInFlight, PlansInFlight
from cluster.scheduling.live import LiveRequest, priorities_among
from cluster.scheduling.plan import Sampled, Slice, StepPlan, StepResult, by_sequence, runs_of
from cluster.scheduling.request import Finish, Request, Update
from cluster.scheduling.resume_points import points_of, tokens_until_stop
from cluster.scheduling.siblings import waits_for_blocks, waits_for_state
from cluster.scheduling.stats import SchedulerStats
from cluster.scheduling.step_builder import StepBuilder
from cluster.scheduling.waiting import WaitingQueue

# Waiting requests that one step looks at beyond those that wait for a sibling.
_MAX_PASSED_OVER = 64
# Tokens of a long prefill between two states kept on the way, as long as memory lies idle.
_CHECKPOINT_EVERY = 2048


class Scheduler:
    """Decides rows and memory of every step; the caller carries plans to the worker and results back, in order."""

    def __init__(self, kv: KVCacheManager, config: SchedulerConfig) -> None:
        self._kv = kv
        self._config = config
        self._waiting: WaitingQueue[LiveRequest] = WaitingQueue()
        self._num_waiting_tokens = 0
        self._drain = DrainEstimate()
        self._running: list[LiveRequest] = []
        self._live_by_id: dict[str, LiveRequest] = {}
        # Also holds the old seq_id of a preempted request, whose rows in flight still bring valid tokens.
        self._live_by_seq: dict[int, LiveRequest] = {}
        self._in_flight = PlansInFlight()
        self._released_seq_ids: list[int] = []
        self._edits: list[TableEdit] = []
        self._waits_for_sibling = partial(waits_for_state if kv.has_states else waits_for_blocks, kv.layout.block_size)
        self._resizes: list[PoolResize] = []
        self._next_seq_id = 1
        self._num_preemptions = 0
        self._num_queried_tokens = 0
        self._num_cached_tokens = 0
        self._num_drafted_tokens = 0
        self._num_accepted_tokens = 0

    def add(self, request: Request, now_s: float) -> Update | None:
        """Queue a request.

        Returns its only update if it is complete already: one that continues after a loss may have all its tokens.
        Raises DuplicateRequest, QueueFull, and what `check_request` raises; then nothing has changed.
        """
        check_request(request, self._config, self._kv.layout)
        if request.request_id in self._live_by_id:
            raise DuplicateRequest(f"request {request.request_id}: a live request has this id")
        length = max_length(request, self._config)
        if len(request.token_ids) >= length:
            return Update(request.request_id, (), (), Finish.LENGTH, num_cached_tokens=0, queue_s=0.0)
        if len(self._waiting) >= self._config.max_waiting:
            drain_s = self._drain.seconds(self._num_waiting_tokens)
            raise QueueFull(
                f"request {request.request_id}: {len(self._waiting)} requests are waiting, "
                f"max_waiting is {self._config.max_waiting}; at the present speed they take {drain_s:.0f} s",
                retry_after_s=drain_s,
            )
        live = LiveRequest(
            request=request,
            arrival_s=now_s,
            max_length=length,
            token_ids=list(request.token_ids),
            hashes=bytearray(join_hashes(request.block_hashes)),
            num_ahead=len(request.token_ids),
            next_scored=request.reading.first_scored if request.reading else 1,
        )
        self._live_by_id[request.request_id] = live
        self._waiting.push(live)
        self._num_waiting_tokens += live.cost_tokens
        return None

    def abort(self, request_id: str) -> bool:
        """End a request at any moment; its blocks are free at once, results in flight for it will be ignored.

        Returns whether it was live; a second call does nothing.
        """
        live = self._live_by_id.get(request_id)
        if live is None:
            return False
        self._drop(live, is_settled=self._is_settled(live))
        return True

    def schedule(self, now_s: float) -> StepPlan | None:
        """Plan one step; None if no row can run before a result comes or a request arrives.

        To be called with fewer than `max_plans_in_flight` results outstanding. A sequence's release travels with the
        next plan that has rows.
        """
        assert len(self._in_flight) < self._config.max_plans_in_flight, f"{len(self._in_flight)} plans are in flight"
        if self._kv.has_states and self._in_flight.has_drafts:
            # States are kept at block ends, so it must be known where a sequence is.
            return None
        self._edits = [edit for edit in self._edits if edit.seq_id in self._live_by_seq]
        step = StepBuilder(self._kv, self._in_flight.next_step_id, self._edits, self._resizes)
        prefilling = self._plan_decodes(step)
        budget = self._config.max_num_batched_tokens - len(step.slices) - sum(s.max_drafts for s in step.slices)
        budget = self._plan_prefills(prefilling, budget, step)
        if self._waiting:
            self._admit(budget, step, now_s)
        if not step.slices:
            return None
        step.edits = [edit for edit in self._edits if edit.seq_id not in self._released_seq_ids]
        plan = step.finish(self._released_seq_ids)
        self._in_flight.push(plan, tuple(step.checkpoints))
        self._released_seq_ids.clear()
        self._edits.clear()
        self._resizes.clear()
        return plan

    def apply(self, result: StepResult) -> list[Update]:
        """Take in the result of the oldest plan in flight; returns what is new for each request that got a token.

        The result of a plan that `worker_lost` forgot changes nothing. Raises ProtocolError if the result cannot be
        that of the plan; the worker is then to be restarted and reported by `worker_lost`.
        """
        plan = self._in_flight.take(result)
        if plan is None:
            return []
        # The stop token came in an earlier result; ending the request undid all that was assumed of this row.
        for seq_id in result.skipped_seq_ids:
            if seq_id in self._live_by_seq:
                raise ProtocolError(f"step {result.step_id} skipped sequence {seq_id}, which has not stopped")
        self._drain.step_ran(plan.num_tokens, result.run_s)
        tokens = by_sequence(result.sampled)
        # Before the tokens: a request that ends here leaves its blocks findable.
        self._confirm(plan, result, tokens)
        speculated = {each.seq_id: each for each in result.speculated}
        updates = self._tell_scores(result) if result.prompt_logprobs else []
        for seq_id, sampled in tokens.items():
            live = self._live_by_seq.get(seq_id)
            if live is not None:
                num_drafts = 0
                if seq_id in speculated:
                    num_drafts, live.num_wanted_drafts = speculated[seq_id].num_drafts, speculated[seq_id].num_wanted
                self._take_back(live, 1 + plan.max_drafts[seq_id] - len(sampled))
                updates.append(self._accept(live, sampled, num_drafts))
        return updates

    def worker_lost(self) -> None:
        """The worker and all KV are gone: running requests wait again, with the tokens that they have so far."""
        for live in reversed(self._running):
            live.is_running = False
            self._waiting.push_front(live)
            self._num_waiting_tokens += live.cost_tokens
        self._running.clear()
        for live in self._waiting:
            live.num_run = max(live.num_run, live.num_planned)
            live.num_planned = live.num_processed = 0
            live.num_ahead = len(live.token_ids)
            live.computed = None
        self._live_by_seq.clear()
        self._in_flight.forget()
        self._released_seq_ids.clear()
        self._edits.clear()
        self._resizes.clear()
        self._kv.reset()

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and a place in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, or preempted."""
        return len(self._waiting)

    def adapter_of(self, request_id: str) -> str:
        """Digest of the adapter of a live request; empty if it has none, or isn't live."""
        live = self._live_by_id.get(request_id)
        return live.request.adapter if live is not None else ""

    def uses_adapter(self, digest: str) -> bool:
        """Whether any live request runs with it. O(requests)."""
        return any(live.request.adapter == digest for live in self._live_by_id.values())

    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self._live_by_id)

    def stats(self) -> SchedulerStats:
        """A snapshot for metrics."""
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_plans_in_flight=len(self._in_flight),
            num_preemptions=self._num_preemptions,
            num_queried_tokens=self._num_queried_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_drafted_tokens=self._num_drafted_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
        )

    def check(self) -> None:
        """Assert every invariant of the scheduler and of the KV cache under it. O(blocks + requests)."""
        self._kv.check()
        assert len(self._running) <= self._config.max_num_seqs
        self._waiting.check()
        everyone = [*self._running, *self._waiting]
        assert sorted(map(id, everyone)) == sorted(map(id, self._live_by_id.values())), "a request is lost or doubled"
        assert self._num_waiting_tokens == sum(live.cost_tokens for live in self._waiting)
        for live in everyone:
            num_known = len(live.token_ids)
            assert num_known <= live.num_ahead <= live.max_length
            assert num_known < live.max_length, "a complete request is still live"
            assert live.num_ahead - num_known <= len(self._in_flight) * (1 + self._config.num_speculative_tokens)
            assert live.is_running == (live in self._running)
            if live.is_running:
                assert self._live_by_seq[live.seq_id] is live
                assert live.num_planned < live.num_ahead
                assert live.num_ahead == num_known or live.num_planned + 1 == live.num_ahead
            else:
                assert live.num_planned == live.num_processed == 0
        assert bool(self._running) or self._kv.used_bytes == 0, "somebody who is not running holds a block"

    def _plan_decodes(self, step: StepBuilder) -> list[LiveRequest]:
        """One row for every running request that needs just one to reach its next token; returns the others."""
        block_size = self._kv.layout.block_size if self._kv.has_states else 0
        # Everyone's row comes before anyone's drafts, and prompts keep half of what is left.
        num_spare = self._config.max_num_batched_tokens - len(self._running)
        if self._waiting or any(live.num_planned + 1 != live.num_ahead for live in self._running):
            num_spare //= 2
        # Highest first: its row spares a request, and where windows move on it may never need a block again.
        for live in sorted(self._running, key=priorities_among(self._running), reverse=True):
            start = live.num_planned
            if live.is_running and start + 1 == live.num_ahead < live.max_length:
                num_drafts = max_drafts(live, self._config.num_speculative_tokens, num_spare, block_size)
                new_blocks = step.allocate(live, start + 1, num_drafts) if num_drafts else None
                if new_blocks is None:
                    # Nobody gives up blocks for a guess.
                    num_drafts, new_blocks = 0, self._allocate(live, start + 1, step)
                if new_blocks is not None:
                    live.num_planned += 1 + num_drafts
                    live.num_ahead += 1 + num_drafts
                    live.last_step_id = step.step_id
                    num_spare -= num_drafts
                    step.slices.append(Slice(live.seq_id, start, 1, True, new_blocks, num_drafts))
                    if block_size and start % block_size == 0:
                        step.checkpoint(live, start, live.stops.get(start, PointKind.TURN_END))
        return [live for live in self._running if live.num_planned + 1 != live.num_ahead]

    def _plan_prefills(self, prefilling: list[LiveRequest], budget: int, step: StepBuilder) -> int:
        """Chunks for admitted requests, in order of admission; returns what is left of the budget."""
        for live in prefilling:
            # A chunk may have preempted a later one of these.
            if live.is_running and budget > 0 and self._has_room(live, step):
                budget -= self._plan_chunk(live, budget, step)
        return budget

    def _plan_chunk(self, live: LiveRequest, budget: int, step: StepBuilder) -> int:
        """The next chunk of one prompt; returns its tokens, 0 if there are no blocks for it in this step."""
        start, num_known = live.num_planned, len(live.token_ids)
        num_tokens = min(num_known - start, budget, self._config.max_chunk_tokens)
        if live.is_scoring:
            num_tokens = min(num_tokens, self._config.max_scored_tokens - step.num_scored)
        if self._kv.has_states:
            num_tokens = tokens_until_stop(live, num_tokens, self._kv.layout.block_size)
        new_blocks = self._allocate(live, start + num_tokens, step)
        if new_blocks is None:
            return 0
        step.num_scored += num_tokens if live.is_scoring else 0
        live.num_planned = start + num_tokens
        samples = live.num_planned == num_known
        live.num_ahead = num_known + samples
        live.last_step_id = step.step_id
        step.slices.append(Slice(live.seq_id, start, num_tokens, samples, new_blocks))
        if start in live.stops:
            step.checkpoint(live, start, live.stops[start])
        elif self._keeps_on_the_way(live, start):
            step.checkpoint(live, start, PointKind.INTERVAL)
        return num_tokens

    def _has_room(self, live: LiveRequest, step: StepBuilder) -> bool:
        """Each row that is scored takes a vocabulary's worth of memory."""
        return not live.is_scoring or step.num_scored < self._config.max_scored_tokens

    def _keeps_on_the_way(self, live: LiveRequest, start: int) -> bool:
        is_block_end = self._kv.has_states and start % self._kv.layout.block_size == 0
        return is_block_end and start >= live.kept_at + _CHECKPOINT_EVERY

    def _allocate(self, live: LiveRequest, num_tokens: int, step: StepBuilder) -> GroupBlocks | None:
        """Blocks for a running request, taken from others if need be; None if it must sit this step out.

        It keeps its blocks meanwhile: whoever needs them more takes them, and until then recomputing them would help
        nobody. A victim that has a row in this very plan is spared; it will need a block itself soon.
        """
        while True:
            new_blocks = step.allocate(live, num_tokens)
            if new_blocks is not None:
                return new_blocks
            # Lowest priority, then latest admitted.
            victim = min(reversed(self._running), key=priorities_among(self._running))
            if victim is live:
                assert len(self._running) > 1, "a request alone in the pool outgrew it: admission is wrong"
                return None
            if victim.last_step_id == step.step_id:
                return None
            self._preempt(victim)

    def _preempt(self, live: LiveRequest) -> None:
        """Take back a request's blocks; its tokens stay, and what is cached of it often does too."""
        self._running.remove(live)
        self._stop(live, is_settled=self._is_settled(live))
        live.num_run = max(live.num_run, live.num_planned)
        live.num_planned = live.num_processed = 0
        live.computed = None
        self._waiting.push_front(live)
        self._num_waiting_tokens += live.cost_tokens
        self._num_preemptions += 1

    def _admit(self, budget: int, step: StepBuilder, now_s: float) -> None:
        """Let waiting requests in, in the queue's order, as long as all their known tokens fit.

        Only those are passed over whose prefix is being computed for another: they wait for it.
        """
        # Left free: what admitted prompts still need, and a block to grow into for everyone, or the newcomer would soon
        # be preempted again.
        block_bytes = self._kv.block_bytes
        reserved_bytes = sum(block_bytes + self._owed_bytes(live) for live in self._running)
        num_passed_over = 0
        for live in self._waiting.candidates(now_s):
            if budget <= 0 or len(self._running) >= self._config.max_num_seqs or num_passed_over > _MAX_PASSED_OVER:
                return
            if not self._is_settled(live):
                return  # Preempted, and a plan in flight still brings a token of it.
            if not self._has_room(live, step):
                num_passed_over += 1
                continue
            computed = self._look_up(live)
            # Whoever has to run its rows in any case gains nothing by waiting.
            if not live.runs_all and self._waits_for_sibling(live, computed, self._running):
                num_passed_over += 1
                continue
            if not self._running and not self._kv.can_allocate(computed, len(live.token_ids)):
                # What it would go on from is in its own way: it has the whole cache, but not a block more.
                computed = NO_HIT
            if not self._kv.can_allocate(computed, len(live.token_ids), reserved_bytes=reserved_bytes):
                return
            live.is_overdue |= self._waiting.admit(live, now_s)
            self._num_waiting_tokens -= live.cost_tokens
            self._start(live, computed, step, now_s)
            num_tokens = self._plan_chunk(live, budget, step)
            assert num_tokens > 0, "admission promised room for the whole sequence"
            budget -= num_tokens
            reserved_bytes += block_bytes + self._owed_bytes(live)

    def _look_up(self, live: LiveRequest) -> ComputedBlocks:
        """The cached prefix; looked up again only if the answer may have changed."""
        hashes = live.reusable_hashes(self._kv.layout.block_size)
        if live.computed is None or not self._kv.is_current(live.computed, hashes):
            live.computed = self._kv.get_computed_blocks(hashes, len(live.token_ids))
        return live.computed

    def _owed_bytes(self, live: LiveRequest) -> int:
        if live.num_planned >= len(live.token_ids):
            return 0
        return self._kv.num_missing_bytes(live.seq_id, len(live.token_ids))

    def _start(self, live: LiveRequest, computed: ComputedBlocks, step: StepBuilder, now_s: float) -> None:
        """Pin the cached prefix and give the sequence a name that no earlier result can mean."""
        assert live.num_ahead == len(live.token_ids), "a token of it is still in flight"
        self._live_by_seq.pop(live.seq_id, None)
        live.seq_id = self._next_seq_id
        self._next_seq_id += 1
        self._live_by_seq[live.seq_id] = live
        points = points_of(live, computed, self._kv.layout.block_size)
        step.start(live, computed, points, now_s)
        live.stops = {at: why for at, why in points.items() if at > computed.num_tokens} if self._kv.has_states else {}
        live.num_planned = live.num_processed = live.kept_at = computed.num_tokens
        live.num_wanted_drafts = 0
        live.is_running = True
        live.computed = None
        self._running.append(live)
        if live.queue_s is None:
            live.queue_s = now_s - live.arrival_s
            live.num_cached_tokens = computed.num_tokens
            self._num_queried_tokens += len(live.token_ids)
            self._num_cached_tokens += computed.num_tokens

    def _confirm(self, plan: PlanInFlight, result: StepResult, tokens: Mapping[int, Seq[Sampled]]) -> None:
        """What the plan computed is computed: states kept, blocks filled, rows run."""
        for checkpoint in plan.checkpoints:
            if checkpoint.seq_id in self._live_by_seq:
                self._kv.confirm_checkpoint(checkpoint.seq_id, checkpoint.num_tokens)
        for seq_id, first_index, hashes in runs_of(result.filled_blocks):
            live = self._live_by_seq.get(seq_id)
            if live is not None:
                live.extend_chain(first_index, hashes)
                if live.is_running and live.seq_id == seq_id:
                    self._check_order(seq_id, first_index)
                self._edits += self._kv.register(seq_id, first_index, hashes)
        for seq_id in (*plan.ends, *tokens):
            live = self._live_by_seq.get(seq_id)
            if live is not None and live.is_running and live.seq_id == seq_id:
                # Who sampled has run all known tokens, and the drafts that came true.
                sampled = tokens.get(seq_id)
                live.num_processed = plan.ends[seq_id] if sampled is None else len(live.token_ids) + len(sampled) - 1

    def _tell_scores(self, result: StepResult) -> list[Update]:
        """Log-probabilities of prompts, of preempted requests too: the rows ran, and will not run again for them."""
        updates = []
        for scores in result.prompt_logprobs:
            live = self._live_by_seq.get(scores.seq_id)
            if live is not None:
                assert live.queue_s is not None
                told = live.request.request_id, (), (), None, live.num_cached_tokens, live.queue_s
                updates.append(Update(*told, prompt_logprobs=live.take_scores(scores)))
        return updates

    def _check_order(self, seq_id: int, first_index: int) -> None:
        num_registered = self._kv.num_registered_blocks(seq_id)
        if first_index > num_registered and self._kv.is_caching:
            raise ProtocolError(f"sequence {seq_id}: block {first_index} was reported, block {num_registered} was not")

    def _take_back(self, live: LiveRequest, num_tokens: int) -> None:
        """Drafts that did not come true."""
        live.num_ahead -= num_tokens
        if live.is_running:
            live.num_planned -= num_tokens

    def _accept(self, live: LiveRequest, sampled: Seq[Sampled], num_drafts: int) -> Update:
        """Append tokens. Valid for a preempted request too: the step ran while the blocks were still its own."""
        assert live.queue_s is not None
        first = sampled[0]
        if first.failure or first.is_read:
            self._drop(live, is_settled=True)
            ended = live.request.request_id, (), (), Finish.ABORTED if first.failure else Finish.LENGTH
            told = live.num_cached_tokens, live.queue_s
            return Update(*ended, *told, failure=first.failure, embedding=first.embedding)
        self._num_drafted_tokens += num_drafts
        self._num_accepted_tokens += len(sampled) - 1
        live.token_ids += (each.token_id for each in sampled)
        finish: Finish | None = None
        if sampled[-1].stopped:
            finish = Finish.STOP
        elif len(live.token_ids) == live.max_length:
            finish = Finish.LENGTH
        if finish is not None:
            # A row in flight after a stop token will be skipped.
            self._drop(live, is_settled=True)
        return Update(
            live.request.request_id,
            tuple(each.token_id for each in sampled),
            tuple(each.logprobs for each in sampled if each.logprobs is not None),
            finish,
            live.num_cached_tokens,
            live.queue_s,
            num_drafted_tokens=num_drafts,
            num_accepted_tokens=len(sampled) - 1,
        )

    def _is_settled(self, live: LiveRequest) -> bool:
        """Whether no plan in flight has a row of it."""
        return live.last_step_id < self._in_flight.first_step_id

    def _drop(self, live: LiveRequest, *, is_settled: bool) -> None:
        """Forget a request that has ended, wherever it is."""
        del self._live_by_id[live.request.request_id]
        self._live_by_seq.pop(live.seq_id, None)
        if live.is_running:
            self._running.remove(live)
            self._stop(live, is_settled=is_settled)
        else:
            self._waiting.remove(live)
            self._num_waiting_tokens -= live.cost_tokens
        if live.queue_s is not None:
            # The newest token was sampled and not run.
            num_used = max(live.num_run, live.num_planned) - live.num_cached_tokens
            self._drain.request_ended(num_used, live.cost_tokens)
            self._waiting.charge(live.tenant, num_used - live.cost_tokens, priority=live.priority, weight=live.weight)

    def _stop(self, live: LiveRequest, *, is_settled: bool) -> None:
        """Give back the blocks, and tell the worker with the next plan."""
        live.is_running = False
        self._kv.free(live.seq_id, live.num_processed, is_settled=is_settled)
        self._released_seq_ids.append(live.seq_id)
