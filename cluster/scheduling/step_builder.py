"""One step plan while it is being made.

Making room may move blocks between pools, and then whatever the plan holds already speaks of blocks that have moved:
every call that may do so goes through here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from cluster.kv.manager import KVCacheManager
from cluster.kv.memory import PoolResize
from cluster.kv.points import PointKind
from cluster.kv.sequence import BlockCopy, ComputedBlocks, GroupBlocks, StartedBlocks, TableEdit
from cluster.scheduling.live import LiveRequest
from cluster.scheduling.plan import NewSequence, Slice, StepPlan


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A state kept by this plan: of the sequence, after so many tokens."""

    seq_id: int
    num_tokens: int


class StepBuilder:
    """Rows, new sequences and copies of one step."""

    def __init__(self, kv: KVCacheManager, step_id: int, edits: list[TableEdit], resizes: list[PoolResize]) -> None:
        self._kv = kv
        self.step_id = step_id
        # Both go with the first plan that has rows.
        self.edits = edits
        self.resizes = resizes
        self.slices: list[Slice] = []
        self.checkpoints: list[Checkpoint] = []
        # Of prompts.
        self.num_prefill_tokens = 0
        # Rows whose logits are wanted for what they say of a prompt.
        self.num_scored = 0
        self._new_sequences: list[NewSequence] = []
        self._copies: list[BlockCopy] = []
        self._zeroes: dict[int, tuple[int, ...]] = {}

    def allocate(self, live: LiveRequest, num_tokens: int, num_lookahead: int = 0) -> GroupBlocks | None:
        """See `KVCacheManager.allocate`."""
        blocks = self._kv.allocate(live.seq_id, num_tokens, live.num_processed, num_lookahead)
        self._follow_moves()
        return blocks

    def start(self, live: LiveRequest, computed: ComputedBlocks, points: Mapping[int, PointKind], now_s: float) -> None:
        """Open the sequence and tell the worker of it."""
        request = live.request
        started = self._kv.start(
            live.seq_id,
            computed,
            bytes(live.hashes),
            points=points,
            now_s=now_s,
            priority=request.retention_priority,
            pinned_until_s=now_s + request.pin_s if request.pin_s else 0.0,
        )
        self._follow_moves()
        self._copies += started.copies
        self._zero(started)
        self._new_sequences.append(
            NewSequence(
                seq_id=live.seq_id,
                token_ids=tuple(live.token_ids),
                block_hashes=bytes(live.hashes),
                sampling=request.sampling,
                stop_token_ids=request.stop_token_ids,
                block_tables=started.tables,
                num_prompt_tokens=request.num_prompt_tokens,
                cache_salt=request.cache_salt,
                adapter=request.adapter,
                reading=live.reading,
                reads_only=request.reads_only,
            )
        )

    def checkpoint(self, live: LiveRequest, num_tokens: int, kind: PointKind) -> None:
        """Keep the state that the sequence has before its row of this plan, if there is memory for it.

        Only after the row is part of the plan: a request without one may still be preempted by it.
        """
        copies = self._kv.checkpoint(live.seq_id, num_tokens, kind)
        self._follow_moves()
        if copies:
            live.kept_at = num_tokens
            self._copies += copies
            self.checkpoints.append(Checkpoint(live.seq_id, num_tokens))

    def finish(self, released_seq_ids: list[int]) -> StepPlan:
        """The plan."""
        self._kv.release_sources()
        return StepPlan(
            step_id=self.step_id,
            released_seq_ids=tuple(released_seq_ids),
            resizes=tuple(self.resizes),
            edits=tuple(self.edits),
            new_sequences=tuple(self._new_sequences),
            copies=tuple(self._copies),
            zeroes=self._zeroes,
            slices=tuple(self.slices),
        )

    def _zero(self, started: StartedBlocks) -> None:
        for group, ids in started.zeroes.items():
            self._zeroes[group] = self._zeroes.get(group, ()) + ids

    def _follow_moves(self) -> None:
        """Rename what the plan holds; the worker does all moves before anything else of the plan."""
        resizes = self._kv.take_resizes()
        self.resizes += resizes
        for resize in resizes:
            if resize.moves:
                moves, groups = dict(resize.moves), self._kv.layout.pools[resize.pool_id].group_ids
                self._rename(moves, groups)

    def _rename(self, moves: dict[int, int], groups: tuple[int, ...]) -> None:
        def renamed(blocks: GroupBlocks) -> GroupBlocks:
            return {g: tuple(moves.get(b, b) for b in ids) if g in groups else ids for g, ids in blocks.items()}

        self.edits[:] = [
            replace(e, block_id=moves.get(e.block_id, e.block_id)) if e.group in groups else e for e in self.edits
        ]
        self.slices[:] = [replace(s, new_blocks=renamed(s.new_blocks)) for s in self.slices]
        self._new_sequences[:] = [replace(n, block_tables=renamed(n.block_tables)) for n in self._new_sequences]
        self._zeroes = dict(renamed(self._zeroes))
        self._copies[:] = [
            BlockCopy(c.group, moves.get(c.source, c.source), moves.get(c.target, c.target)) if c.group in groups else c
            for c in self._copies
        ]
