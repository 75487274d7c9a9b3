"""Continuous batching: what runs in the next step, and what a step's result means for each request.

Owns the queue of waiting requests, the list of running ones and the plans in flight. Both lists are in order of
arrival, and every running request arrived before every waiting one: admission is first come, first served, and the
latest arrival is preempted first. So the oldest request always gets what it needs, and all requests end.

Plans are executed in order, which is why blocks may be given away while a plan that writes them is in flight: whoever
gets them writes them in a later plan, and blocks found by their hash are full and never written again.
"""

from collections import deque
from dataclasses import dataclass

from cluster.kv.coordinator import ComputedBlocks, GroupBlocks
from cluster.kv.manager import KVCacheManager
from cluster.scheduling.admission import check_request, max_length
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.errors import DuplicateRequest, ProtocolError, QueueFull
from cluster.scheduling.live import LiveRequest
from cluster.scheduling.plan import FilledBlock, NewSequence, Sampled, Slice, StepPlan, StepResult
from cluster.scheduling.request import Finish, Request, Update


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counts since the start, but for the first three, which are of now."""

    num_running: int
    num_waiting: int
    num_plans_in_flight: int
    num_preemptions: int
    # Over first admissions: tokens looked up in the prefix cache and tokens found there.
    num_queried_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class _PlanInFlight:
    step_id: int
    num_samples: int


class Scheduler:
    """Decides rows and memory of every step; the caller carries plans to the worker and results back, in order."""

    def __init__(self, kv: KVCacheManager, config: SchedulerConfig) -> None:
        self._kv = kv
        self._config = config
        self._waiting: deque[LiveRequest] = deque()
        self._running: list[LiveRequest] = []
        self._live_by_id: dict[str, LiveRequest] = {}
        # Also holds the old seq_id of a preempted request, whose rows in flight still bring valid tokens.
        self._live_by_seq: dict[int, LiveRequest] = {}
        self._in_flight: deque[_PlanInFlight] = deque()
        self._released_seq_ids: list[int] = []
        self._next_seq_id = 1
        self._next_step_id = 1
        self._first_step_id = 1
        self._num_preemptions = 0
        self._num_queried_tokens = 0
        self._num_cached_tokens = 0

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
            raise QueueFull(
                f"request {request.request_id}: {len(self._waiting)} requests are waiting, "
                f"max_waiting is {self._config.max_waiting}"
            )
        live = LiveRequest(
            request=request,
            arrival_s=now_s,
            max_length=length,
            token_ids=list(request.token_ids),
            block_hashes=list(request.block_hashes),
            num_ahead=len(request.token_ids),
        )
        self._live_by_id[request.request_id] = live
        self._waiting.append(live)
        return None

    def abort(self, request_id: str) -> bool:
        """End a request at any moment; its blocks are free at once, results in flight for it will be ignored.

        Returns whether it was live; a second call does nothing.
        """
        live = self._live_by_id.get(request_id)
        if live is None:
            return False
        self._drop(live)
        return True

    def schedule(self, now_s: float) -> StepPlan | None:
        """Plan one step; None if no row can run before a result comes or a request arrives.

        To be called with fewer than `max_plans_in_flight` results outstanding. A sequence's release travels with the
        next plan that has rows.
        """
        assert len(self._in_flight) < self._config.max_plans_in_flight, f"{len(self._in_flight)} plans are in flight"
        step_id = self._next_step_id
        slices: list[Slice] = []
        prefilling = self._plan_decodes(step_id, slices)
        budget = self._config.max_num_batched_tokens - len(slices)
        budget = self._plan_prefills(prefilling, budget, step_id, slices)
        new_sequences = self._admit(budget, step_id, now_s, slices) if self._waiting else []
        if not slices:
            return None
        self._next_step_id += 1
        self._in_flight.append(_PlanInFlight(step_id, num_samples=sum(s.samples for s in slices)))
        released_seq_ids = tuple(self._released_seq_ids)
        self._released_seq_ids.clear()
        return StepPlan(step_id, released_seq_ids, tuple(new_sequences), slices=tuple(slices))

    def apply(self, result: StepResult) -> list[Update]:
        """Take in the result of the oldest plan in flight; returns what is new for each request that got a token.

        The result of a plan that `worker_lost` forgot changes nothing. Raises ProtocolError if the result cannot be
        that of the plan; the worker is then to be restarted and reported by `worker_lost`.
        """
        if result.step_id < self._first_step_id:
            return []
        self._match_plan(result)
        # Before the tokens: a request that ends here leaves its blocks findable.
        for block in result.filled_blocks:
            self._register(block)
        updates: list[Update] = []
        for sampled in result.sampled:
            live = self._live_by_seq.get(sampled.seq_id)
            if live is not None:
                updates.append(self._accept(live, sampled))
        return updates

    def worker_lost(self) -> None:
        """The worker and all KV are gone: running requests wait again, with the tokens that they have so far."""
        for live in self._running:
            live.is_running = False
        self._waiting.extendleft(reversed(self._running))
        self._running.clear()
        for live in self._waiting:
            live.num_planned = 0
            live.num_ahead = len(live.token_ids)
        self._live_by_seq.clear()
        self._in_flight.clear()
        self._released_seq_ids.clear()
        self._first_step_id = self._next_step_id
        self._kv.reset()

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and a place in the batch."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, or preempted."""
        return len(self._waiting)

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
        )

    def check(self) -> None:
        """Assert every invariant of the scheduler and of the KV cache under it. O(blocks + requests)."""
        self._kv.check()
        assert len(self._running) <= self._config.max_num_seqs
        in_order = [*self._running, *self._waiting]
        assert sorted(map(id, in_order)) == sorted(map(id, self._live_by_id.values())), "a request is lost or doubled"
        arrivals = [live.arrival_s for live in in_order]
        assert arrivals == sorted(arrivals), "a request overtook an older one"
        for live in in_order:
            num_known = len(live.token_ids)
            assert num_known <= live.num_ahead <= live.max_length
            assert num_known < live.max_length, "a complete request is still live"
            assert live.num_ahead - num_known <= len(self._in_flight)
            assert live.is_running == (live in self._running)
            if live.is_running:
                assert self._live_by_seq[live.seq_id] is live
                assert live.num_planned < live.num_ahead
                assert live.num_ahead == num_known or live.num_planned + 1 == live.num_ahead
            else:
                assert live.num_planned == 0
        held = sum(len(t) for live in self._running for t in self._kv.block_tables(live.seq_id).values())
        assert held >= self._kv.num_used_blocks, "somebody who is not running holds a block"

    def _plan_decodes(self, step_id: int, slices: list[Slice]) -> list[LiveRequest]:
        """One row for every running request that needs just one to reach its next token; returns the others."""
        prefilling: list[LiveRequest] = []
        # Preemption takes requests off the end, beyond the one in hand.
        for live in self._running:
            start = live.num_planned
            if start + 1 != live.num_ahead:
                prefilling.append(live)
            elif live.num_ahead < live.max_length:
                new_blocks = self._allocate(live, start + 1, step_id)
                if new_blocks is not None:
                    live.num_planned = start + 1
                    live.num_ahead += 1
                    live.last_step_id = step_id
                    slices.append(Slice(live.seq_id, start, 1, True, new_blocks))
        return prefilling

    def _plan_prefills(self, prefilling: list[LiveRequest], budget: int, step_id: int, slices: list[Slice]) -> int:
        """Chunks for admitted requests, oldest first; returns what is left of the budget."""
        for live in prefilling:
            # A chunk may have preempted a later one of these.
            if live.is_running and budget > 0:
                budget -= self._plan_chunk(live, budget, step_id, slices)
        return budget

    def _plan_chunk(self, live: LiveRequest, budget: int, step_id: int, slices: list[Slice]) -> int:
        """The next chunk of one prompt; returns its tokens, 0 if there are no blocks for it in this step."""
        start, num_known = live.num_planned, len(live.token_ids)
        num_tokens = min(num_known - start, budget, self._config.max_chunk_tokens)
        new_blocks = self._allocate(live, start + num_tokens, step_id)
        if new_blocks is None:
            return 0
        live.num_planned = start + num_tokens
        samples = live.num_planned == num_known
        live.num_ahead = num_known + samples
        live.last_step_id = step_id
        slices.append(Slice(live.seq_id, start, num_tokens, samples, new_blocks))
        return num_tokens

    def _allocate(self, live: LiveRequest, num_tokens: int, step_id: int) -> GroupBlocks | None:
        """Blocks for a running request, taken from later arrivals if need be; None if it must sit this step out.

        It keeps its blocks meanwhile: an older request that needs them takes them, and until then recomputing them
        would help nobody. A victim that has a row in this very plan is spared; it will need a block itself soon.
        """
        while True:
            new_blocks = self._kv.allocate(live.seq_id, num_tokens)
            if new_blocks is not None:
                return new_blocks
            victim = self._running[-1]
            if victim is live:
                assert live is not self._running[0], "a request alone in the pool outgrew it: admission is wrong"
                return None
            if victim.last_step_id == step_id:
                return None
            self._preempt(victim)

    def _preempt(self, live: LiveRequest) -> None:
        """Take back the blocks of the latest arrival; its tokens stay, and what is cached of it often does too."""
        self._running.pop()
        self._stop(live)
        live.num_planned = 0
        self._waiting.appendleft(live)
        self._num_preemptions += 1

    def _admit(self, budget: int, step_id: int, now_s: float, slices: list[Slice]) -> list[NewSequence]:
        """Let waiting requests in, oldest first, as long as all their known tokens fit."""
        admitted: list[NewSequence] = []
        # Left free: what admitted prompts still need, and a block to grow into for everyone, or the newcomer would soon
        # be preempted again.
        num_reserved = sum(1 + self._num_owed_blocks(live) for live in self._running)
        while self._waiting and budget > 0 and len(self._running) < self._config.max_num_seqs:
            live = self._waiting[0]
            if self._in_flight and live.last_step_id >= self._in_flight[0].step_id:
                break  # Preempted, and a plan in flight still brings a token of it.
            if self._kv.num_free_blocks <= num_reserved:
                break  # Spares the look-up, whose cost grows with the prompt, in every step of a full pool.
            computed = self._kv.get_computed_blocks(live.block_hashes, len(live.token_ids))
            if not self._kv.can_allocate(computed, len(live.token_ids), num_reserved_blocks=num_reserved):
                break
            self._waiting.popleft()
            admitted.append(self._start(live, computed, now_s))
            num_tokens = self._plan_chunk(live, budget, step_id, slices)
            assert num_tokens > 0, "admission promised room for the whole sequence"
            budget -= num_tokens
            num_reserved += 1 + self._num_owed_blocks(live)
        return admitted

    def _num_owed_blocks(self, live: LiveRequest) -> int:
        if live.num_planned >= len(live.token_ids):
            return 0
        return self._kv.num_missing_blocks(live.seq_id, len(live.token_ids))

    def _start(self, live: LiveRequest, computed: ComputedBlocks, now_s: float) -> NewSequence:
        """Pin the cached prefix and give the sequence a name that no earlier result can mean."""
        assert live.num_ahead == len(live.token_ids), "a token of it is still in flight"
        self._live_by_seq.pop(live.seq_id, None)
        live.seq_id = self._next_seq_id
        self._next_seq_id += 1
        self._live_by_seq[live.seq_id] = live
        self._kv.start(live.seq_id, computed)
        live.num_planned = computed.num_tokens
        live.is_running = True
        self._running.append(live)
        if live.queue_s is None:
            live.queue_s = now_s - live.arrival_s
            live.num_cached_tokens = computed.num_tokens
            self._num_queried_tokens += len(live.token_ids)
            self._num_cached_tokens += computed.num_tokens
        return NewSequence(
            seq_id=live.seq_id,
            token_ids=tuple(live.token_ids),
            block_hashes=tuple(live.block_hashes),
            sampling=live.request.sampling,
            stop_token_ids=live.request.stop_token_ids,
            block_tables=computed.block_ids,
        )

    def _match_plan(self, result: StepResult) -> None:
        """Take the plan off the list if the result fits it."""
        expected = self._in_flight[0] if self._in_flight else None
        if expected is None or expected.step_id != result.step_id:
            raise ProtocolError(f"got the result of step {result.step_id}, expected {expected and expected.step_id}")
        # A row is skipped only after a stop token, so it would have sampled.
        num_answers = len(result.sampled) + len(result.skipped_seq_ids)
        if num_answers != expected.num_samples:
            raise ProtocolError(
                f"step {result.step_id} sampled {len(result.sampled)} tokens and skipped "
                f"{len(result.skipped_seq_ids)} rows, expected {expected.num_samples} in sum"
            )
        # The stop token came in an earlier result; ending the request undid all that was assumed of this row.
        for seq_id in result.skipped_seq_ids:
            if seq_id in self._live_by_seq:
                raise ProtocolError(f"step {result.step_id} skipped sequence {seq_id}, which has not stopped")
        self._in_flight.popleft()

    def _register(self, block: FilledBlock) -> None:
        """Extend the request's hash chain and make the block findable if the request still holds it."""
        live = self._live_by_seq.get(block.seq_id)
        if live is None:
            return
        chain, index = live.block_hashes, block.block_index
        if index == len(chain):
            chain.append(block.block_hash)
        elif index > len(chain) or chain[index] != block.block_hash:
            known = chain[index].hex() if index < len(chain) else f"only {len(chain)} blocks"
            raise ProtocolError(
                f"request {live.request.request_id}: block {index} was reported as {block.block_hash.hex()}, "
                f"known is {known}"
            )
        parent_hash = chain[index - 1] if index else None
        self._kv.register(block.seq_id, block.group, index, block.block_id, block.block_hash, parent_hash)

    def _accept(self, live: LiveRequest, sampled: Sampled) -> Update:
        """Append a token. Valid for a preempted request too: the step ran while the blocks were still its own."""
        live.token_ids.append(sampled.token_id)
        finish: Finish | None = None
        if sampled.stopped:
            finish = Finish.STOP
        elif len(live.token_ids) == live.max_length:
            finish = Finish.LENGTH
        if finish is not None:
            self._drop(live)
        assert live.queue_s is not None
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        return Update(
            live.request.request_id, (sampled.token_id,), logprobs, finish, live.num_cached_tokens, live.queue_s
        )

    def _drop(self, live: LiveRequest) -> None:
        """Forget a request that has ended, wherever it is."""
        del self._live_by_id[live.request.request_id]
        self._live_by_seq.pop(live.seq_id, None)
        if live.is_running:
            self._running.remove(live)
            self._stop(live)
        else:
            self._waiting.remove(live)

    def _stop(self, live: LiveRequest) -> None:
        """Give back the blocks, and tell the worker with the next plan."""
        live.is_running = False
        self._kv.free(live.seq_id)
        self._released_seq_ids.append(live.seq_id)
