"""Continuous batching: what runs in the next step, and what a step's result means for each request.

Who lives is the roster's, which rows run the planner's; here requests come and go, plans leave and results return.

Plans are executed in order, which is why blocks may be given away while a plan that writes them is in flight: whoever
gets them writes them in a later plan, and blocks found by their hash are full and never written again.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from cluster.kv.hashing import join_hashes
from cluster.kv.manager import KVCacheManager
from cluster.kv.memory import PoolResize
from cluster.kv.sequence import TableEdit
from cluster.scheduling.admission import check_request, max_length
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.errors import DuplicateRequest, ProtocolError, QueueFull
from cluster.scheduling.in_flight import PlanInFlight, PlansInFlight
from cluster.scheduling.live import LiveRequest
from cluster.scheduling.plan import Sampled, StepPlan, StepResult, by_sequence, runs_of
from cluster.scheduling.request import Finish, Request, Update
from cluster.scheduling.roster import Roster
from cluster.scheduling.stats import SchedulerStats
from cluster.scheduling.step_builder import StepBuilder
from cluster.scheduling.step_planner import StepPlanner


class Scheduler:
    """Decides rows and memory of every step; the caller carries plans to the worker and results back, in order."""

    def __init__(self, kv: KVCacheManager, config: SchedulerConfig) -> None:
        self._kv = kv
        self._config = config
        self._in_flight = PlansInFlight()
        self._roster = Roster(kv, self._in_flight)
        self._planner = StepPlanner(kv, config, self._roster)
        # Both go with the next plan that has rows.
        self._edits: list[TableEdit] = []
        self._resizes: list[PoolResize] = []
        self._num_drafted_tokens = 0
        self._num_accepted_tokens = 0

    def add(self, request: Request, now_s: float) -> Update | None:
        """Queue a request.

        Returns its only update if it is complete already: one that continues after a loss may have all its tokens.
        Raises DuplicateRequest, QueueFull, and what `check_request` raises; then nothing has changed.
        """
        check_request(request, self._config, self._kv.layout)
        if request.request_id in self._roster.by_id:
            raise DuplicateRequest(f"request {request.request_id}: a live request has this id")
        length = max_length(request, self._config)
        if len(request.token_ids) >= length:
            return Update(request.request_id, (), (), Finish.LENGTH, num_cached_tokens=0, queue_s=0.0)
        if len(self._roster.waiting) >= self._config.max_waiting:
            drain_s = self._roster.drain.seconds(self._roster.num_waiting_tokens)
            raise QueueFull(
                f"request {request.request_id}: {len(self._roster.waiting)} requests are waiting, "
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
        self._roster.add(live)
        return None

    def abort(self, request_id: str) -> bool:
        """End a request at any moment; its blocks are free at once, results in flight for it will be ignored.

        Returns whether it was live; a second call does nothing.
        """
        live = self._roster.by_id.get(request_id)
        if live is None:
            return False
        self._roster.forget(live, is_settled=self._roster.is_settled(live))
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
        self._edits = [edit for edit in self._edits if edit.seq_id in self._roster.by_seq]
        step = StepBuilder(self._kv, self._in_flight.next_step_id, self._edits, self._resizes)
        self._planner.fill(step, now_s)
        if not step.slices:
            return None
        step.edits = [edit for edit in self._edits if edit.seq_id not in self._roster.released_seq_ids]
        plan = step.finish(self._roster.released_seq_ids)
        self._in_flight.push(plan, tuple(step.checkpoints), step.num_prefill_tokens)
        self._roster.released_seq_ids.clear()
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
            if seq_id in self._roster.by_seq:
                raise ProtocolError(f"step {result.step_id} skipped sequence {seq_id}, which has not stopped")
        self._roster.drain.step_ran(plan.num_tokens, result.run_s)
        self._planner.pace.step_ran(plan.num_prefill_tokens, result.run_s)
        tokens = by_sequence(result.sampled)
        # Before the tokens: a request that ends here leaves its blocks findable.
        self._confirm(plan, result, tokens)
        speculated = {each.seq_id: each for each in result.speculated}
        updates = self._tell_scores(result) if result.prompt_logprobs else []
        for seq_id, sampled in tokens.items():
            live = self._roster.by_seq.get(seq_id)
            if live is not None:
                num_drafts = 0
                if seq_id in speculated:
                    num_drafts, live.num_wanted_drafts = speculated[seq_id].num_drafts, speculated[seq_id].num_wanted
                self._take_back(live, 1 + plan.max_drafts[seq_id] - len(sampled))
                updates.append(self._accept(live, sampled, num_drafts))
        return updates

    def worker_lost(self) -> None:
        """The worker and all KV are gone: running requests wait again, with the tokens that they have so far."""
        self._roster.worker_lost()
        self._in_flight.forget()
        self._edits.clear()
        self._resizes.clear()
        self._kv.reset()

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and a place in the batch."""
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """Requests not admitted yet, or preempted."""
        return len(self._roster.waiting)

    def adapter_of(self, request_id: str) -> str:
        """Digest of the adapter of a live request; empty if it has none, or isn't live."""
        live = self._roster.by_id.get(request_id)
        return live.request.adapter if live is not None else ""

    def uses_adapter(self, digest: str) -> bool:
        """Whether any live request runs with it. O(requests)."""
        return any(live.request.adapter == digest for live in self._roster.by_id.values())

    def has_work(self) -> bool:
        """Whether any request is live."""
        return bool(self._roster.by_id)

    def stats(self) -> SchedulerStats:
        """A snapshot for metrics."""
        return SchedulerStats(
            num_running=len(self._roster.running),
            num_waiting=len(self._roster.waiting),
            num_plans_in_flight=len(self._in_flight),
            num_preemptions=self._roster.num_preemptions,
            num_queried_tokens=self._planner.num_queried_tokens,
            num_cached_tokens=self._planner.num_cached_tokens,
            num_drafted_tokens=self._num_drafted_tokens,
            num_accepted_tokens=self._num_accepted_tokens,
        )

    def check(self) -> None:
        """Assert every invariant of the scheduler and of the KV cache under it. O(blocks + requests)."""
        self._kv.check()
        self._roster.check()
        assert len(self._roster.running) <= self._config.max_num_seqs
        for live in self._roster.by_id.values():
            num_known = len(live.token_ids)
            assert num_known <= live.num_ahead <= live.max_length
            assert num_known < live.max_length, "a complete request is still live"
            assert live.num_ahead - num_known <= len(self._in_flight) * (1 + self._config.num_speculative_tokens)
            if live.is_running:
                assert live.num_planned < live.num_ahead
                assert live.num_ahead == num_known or live.num_planned + 1 == live.num_ahead
        assert bool(self._roster.running) or self._kv.used_bytes == 0, "somebody who is not running holds a block"

    def _confirm(self, plan: PlanInFlight, result: StepResult, tokens: Mapping[int, Seq[Sampled]]) -> None:
        """What the plan computed is computed: states kept, blocks filled, rows run."""
        for checkpoint in plan.checkpoints:
            if checkpoint.seq_id in self._roster.by_seq:
                self._kv.confirm_checkpoint(checkpoint.seq_id, checkpoint.num_tokens)
        for seq_id, first_index, hashes in runs_of(result.filled_blocks):
            live = self._roster.by_seq.get(seq_id)
            if live is not None:
                live.extend_chain(first_index, hashes)
                if live.is_running and live.seq_id == seq_id:
                    self._check_order(seq_id, first_index)
                self._edits += self._kv.register(seq_id, first_index, hashes)
        for seq_id in (*plan.ends, *tokens):
            live = self._roster.by_seq.get(seq_id)
            if live is not None and live.is_running and live.seq_id == seq_id:
                # Who sampled has run all known tokens, and the drafts that came true.
                sampled = tokens.get(seq_id)
                live.num_processed = plan.ends[seq_id] if sampled is None else len(live.token_ids) + len(sampled) - 1

    def _tell_scores(self, result: StepResult) -> list[Update]:
        """Log-probabilities of prompts, of preempted requests too: the rows ran, and will not run again for them."""
        updates = []
        for scores in result.prompt_logprobs:
            live = self._roster.by_seq.get(scores.seq_id)
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
            self._roster.forget(live, is_settled=True)
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
            self._roster.forget(live, is_settled=True)
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
