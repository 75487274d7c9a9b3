"""Which rows run in the next step, and whose memory they take: decodes, then prompts in their turns.

A prompt's turn is what the Mac had prefilled when it came plus what it has to compute itself, in tokens: so short ones
overtake long ones, but only until those have let as many tokens pass as they have themselves.

Whose turn it is among those that wait is the queue's to say. Whoever lacks blocks takes them from the lowest priority,
the latest admitted first. So the first of the highest priority always gets what it needs, and all end. One that higher
priorities kept waiting for too long counts as of the highest from its admission on.
"""

from collections.abc import Callable
from functools import partial

from cluster.kv.manager import KVCacheManager
from cluster.kv.points import PointKind
from cluster.kv.sequence import NO_HIT, ComputedBlocks, GroupBlocks
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.drafts import max_drafts
from cluster.scheduling.live import LiveRequest, priorities_among
from cluster.scheduling.pace import StepPace
from cluster.scheduling.plan import Slice
from cluster.scheduling.resume_points import points_of, tokens_until_stop
from cluster.scheduling.roster import Roster
from cluster.scheduling.siblings import waits_for_blocks, waits_for_state
from cluster.scheduling.step_builder import StepBuilder

# Waiting requests that one step looks at beyond those that wait for a sibling.
_MAX_PASSED_OVER = 64
# Tokens of a long prefill between two states kept on the way, as long as memory lies idle.
_CHECKPOINT_EVERY = 2048


class StepPlanner:
    """Fills steps from the roster; counts what it decided."""

    def __init__(self, kv: KVCacheManager, config: SchedulerConfig, roster: Roster) -> None:
        self._kv = kv
        self._config = config
        self._roster = roster
        self._waits_for_sibling = partial(waits_for_state if kv.has_states else waits_for_blocks, kv.layout.block_size)
        self.pace = StepPace(config.target_step_s)
        # Over first admissions.
        self.num_queried_tokens = 0
        self.num_cached_tokens = 0

    def fill(self, step: StepBuilder, now_s: float) -> None:
        """All rows of one step."""
        prefilling = sorted(self._plan_decodes(step), key=self._turns())
        budget = self._config.max_num_batched_tokens - len(step.slices) - sum(s.max_drafts for s in step.slices)
        if step.slices:
            budget = self.pace.max_prefill_tokens(budget)
        if self._roster.waiting and prefilling:
            # Those that go before all who are being prefilled.
            budget = self._admit(budget, step, now_s, before=prefilling[0])
        budget = self._plan_prefills(prefilling, budget, step)
        if self._roster.waiting:
            self._admit(budget, step, now_s)

    def _turns(self) -> Callable[[LiveRequest], tuple[int, int]]:
        """A sort key: the higher priority first, then who will have waited least beside its own length."""
        priority_of = priorities_among(self._roster.running)
        return lambda live: (-priority_of(live), live.turn or 0)

    def _plan_decodes(self, step: StepBuilder) -> list[LiveRequest]:
        """One row for every running request that needs just one to reach its next token; returns the others."""
        block_size = self._kv.layout.block_size if self._kv.has_states else 0
        # Everyone's row comes before anyone's drafts, and prompts keep half of what is left.
        num_spare = self._config.max_num_batched_tokens - len(self._roster.running)
        if self._roster.waiting or any(live.num_planned + 1 != live.num_ahead for live in self._roster.running):
            num_spare //= 2
        # Highest first: its row spares a request, and where windows move on it may never need a block again.
        for live in sorted(self._roster.running, key=priorities_among(self._roster.running), reverse=True):
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
        return [live for live in self._roster.running if live.num_planned + 1 != live.num_ahead]

    def _plan_prefills(self, prefilling: list[LiveRequest], budget: int, step: StepBuilder) -> int:
        """Chunks for admitted requests, in their turns; returns what is left of the budget."""
        for live in prefilling:
            # A chunk may have preempted a later one of these.
            if live.is_running and budget > 0 and self._has_room(live, step):
                budget -= self._plan_chunk(live, budget, step)
        return budget

    def _plan_chunk(self, live: LiveRequest, budget: int, step: StepBuilder) -> int:
        """The next chunk of one prompt; returns its tokens, 0 if there are no blocks for it in this step."""
        start, num_known = live.num_planned, len(live.token_ids)
        num_tokens = self._chunk_of(num_known - start, budget, step)
        if not num_tokens:
            return 0
        if live.is_scoring:
            num_tokens = min(num_tokens, self._config.max_scored_tokens - step.num_scored)
        if self._kv.has_states:
            num_tokens = tokens_until_stop(live, num_tokens, self._kv.layout.block_size)
        new_blocks = self._allocate(live, start + num_tokens, step)
        if new_blocks is None:
            return 0
        step.num_scored += num_tokens if live.is_scoring else 0
        step.num_prefill_tokens += num_tokens
        self._roster.num_prefilled_tokens += num_tokens
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

    def _chunk_of(self, num_left: int, budget: int, step: StepBuilder) -> int:
        """Tokens of a prompt in this step.

        Prompts that end in it may fill it. The others make up for one chunk at most, or the first tokens of those and
        the rows that decode would have to wait for them.
        """
        chunk = self._config.max_chunk_tokens
        if num_left <= min(budget, chunk):
            return num_left
        return min(budget, max(0, chunk - step.num_prefill_tokens))

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
            victim = min(reversed(self._roster.running), key=priorities_among(self._roster.running))
            if victim is live:
                assert len(self._roster.running) > 1, "a request alone in the pool outgrew it: admission is wrong"
                return None
            if victim.last_step_id == step.step_id:
                return None
            self._roster.preempt(victim)

    def _admit(self, budget: int, step: StepBuilder, now_s: float, before: LiveRequest | None = None) -> int:
        """Let waiting requests in, in the queue's order, as long as all their known tokens fit.

        Only those are passed over whose prefix is being computed for another: they wait for it.
        """
        # Left free: what admitted prompts still need, and a block to grow into for everyone, or the newcomer would soon
        # be preempted again.
        block_bytes = self._kv.block_bytes
        reserved_bytes = sum(block_bytes + self._owed_bytes(live) for live in self._roster.running)
        running, num_passed_over = self._roster.running, 0
        turns = self._turns()
        passed_tenant: str | None = None
        for live in self._roster.waiting.candidates(now_s):
            if budget <= 0 or len(running) >= self._config.max_num_seqs or num_passed_over > _MAX_PASSED_OVER:
                return budget
            if not self._roster.is_settled(live):
                return budget  # Preempted, and a plan in flight still brings a token of it.
            if not self._has_room(live, step):
                num_passed_over += 1
                continue
            computed = self._look_up(live)
            if live.turn is None:
                live.turn = live.came_at + len(live.token_ids) - computed.num_tokens
            # Whoever has to run its rows in any case gains nothing by waiting.
            if not live.runs_all and self._waits_for_sibling(live, computed, running):
                num_passed_over += 1
                continue
            has_turn = before is None or turns(live) < turns(before)
            if not self._chunk_of(len(live.token_ids) - computed.num_tokens, budget, step):
                has_turn = False
            if not has_turn or passed_tenant not in (None, live.tenant):
                # Whose turn it is among tenants is the queue's to say, however short their prompts are.
                passed_tenant = live.tenant if passed_tenant is None else passed_tenant
                num_passed_over += 1
                continue
            if not running and not self._kv.can_allocate(computed, len(live.token_ids)):
                # What it would go on from is in its own way: it has the whole cache, but not a block more.
                computed = NO_HIT
            if not self._kv.can_allocate(computed, len(live.token_ids), reserved_bytes=reserved_bytes):
                return budget
            self._roster.admit(live, now_s)
            self._start(live, computed, step, now_s)
            num_tokens = self._plan_chunk(live, budget, step)
            assert num_tokens > 0, "admission promised room for the whole sequence"
            budget -= num_tokens
            reserved_bytes += block_bytes + self._owed_bytes(live)
        return budget

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
        """Pin the cached prefix of one just admitted."""
        points = points_of(live, computed, self._kv.layout.block_size)
        step.start(live, computed, points, now_s)
        live.stops = {at: why for at, why in points.items() if at > computed.num_tokens} if self._kv.has_states else {}
        live.num_planned = live.num_processed = live.kept_at = computed.num_tokens
        live.num_wanted_drafts = 0
        live.computed = None
        if live.queue_s is None:
            live.queue_s = now_s - live.arrival_s
            live.num_cached_tokens = computed.num_tokens
            self.num_queried_tokens += len(live.token_ids)
            self.num_cached_tokens += computed.num_tokens
