"""A small manager for the engine's tests: allocates blocks, cuts prompts into chunks, preempts and shares prefixes.

Deliberately naive and separate from the product's scheduler, so that a shared mistake cannot hide.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.kv.hashing import BlockHash, hash_blocks, join_hashes
from protos.cidery.v1.sampling_pb2 import SamplingParams, TokenLogprobs
from protos.cidery.worker.v1 import worker_pb2 as pb
from worker import models
from worker.engine import Engine
from worker.metal.dispatch import twin_kernels

ROOT = BlockHash(b"root-of-a-test-x")


def make_engine(model, config, *, block_size=16, num_blocks=256) -> Engine:
    loaded = models.adapt(model, config)
    engine = Engine(loaded, twin_kernels(), memory_limit_bytes=1 << 30)
    engine.configure(configure_of(engine, block_size=block_size, num_blocks=num_blocks))
    return engine


def configure_of(engine: Engine, *, block_size=16, num_blocks=256) -> pb.Configure:
    """All caches in one group."""
    group = pb.Group(pool=0, layers=range(len(engine.describe().layers)))
    return pb.Configure(block_size=block_size, num_blocks=[num_blocks], root_hash=ROOT, groups=[group])


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int = 12
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    stop_token_ids: Sequence[int] = ()
    generated: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    stopped: bool = False
    seq_id: int | None = None
    num_computed: int = 0
    block_table: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def done(self) -> bool:
        return self.stopped or len(self.generated) >= self.max_tokens


class Driver:
    """Runs requests on an engine, one plan at a time, each result read before the next plan is made."""

    def __init__(self, engine: Engine, *, block_size=16, num_blocks=256, chunk=24, seed=0) -> None:
        self.engine = engine
        self.block_size = block_size
        self.chunk = chunk
        self.free = list(range(1, num_blocks))
        self.random = random.Random(seed)
        self.random.shuffle(self.free)
        self.running: list[Request] = []
        self.released: list[int] = []
        self.next_seq_id = 1
        self.step_id = 0
        self.filled: dict[int, BlockHash] = {}
        self.num_results = 0

    def add(self, request: Request, *, cached_blocks: Sequence[int] = ()) -> Request:
        """`cached_blocks` hold the KV of the request's first tokens."""
        request.block_table = list(cached_blocks)
        request.num_computed = len(cached_blocks) * self.block_size
        self.running.append(request)
        return request

    def preempt(self, request: Request) -> None:
        """Take its blocks away; it starts again with everything generated so far."""
        self.released.append(request.seq_id)
        self.free += request.block_table
        self.random.shuffle(self.free)
        request.seq_id, request.num_computed, request.block_table = None, 0, []

    def plan(self, only: Sequence[Request] | None = None) -> pb.StepPlan:
        self.step_id += 1
        plan = pb.StepPlan(step_id=self.step_id, released_seq_ids=self.released)
        self.released = []
        for request in self.running if only is None else only:
            if request.seq_id is None:
                self._introduce(request, plan)
            start, known = request.num_computed, len(request.tokens)
            size = min(self.chunk, known - start)
            piece = plan.slices.add(seq_id=request.seq_id, start=start, num_tokens=size, samples=start + size == known)
            missing = math.ceil((start + size) / self.block_size) - len(request.block_table)
            if missing > 0:
                taken = [self.free.pop() for _ in range(missing)]
                request.block_table += taken
                piece.new_blocks.add(block_ids=taken)
        return plan

    def step(self, only: Sequence[Request] | None = None) -> pb.StepResult:
        plan = self.plan(only)
        result = self.engine.execute(plan)
        self.num_results += 1
        self.read(plan, result)
        return result

    def read(self, plan: pb.StepPlan, result: pb.StepResult) -> None:
        by_id = {request.seq_id: request for request in self.running}
        for piece in plan.slices:
            by_id[piece.seq_id].num_computed += piece.num_tokens
        for sampled in result.sampled:
            request = by_id[sampled.seq_id]
            request.generated.append(sampled.token_id)
            request.stopped = sampled.stopped
            if sampled.HasField("logprobs"):
                request.logprobs.append(sampled.logprobs)
        for block in result.filled_blocks:
            request = by_id[block.seq_id]
            hashes = hash_blocks(ROOT, request.tokens, self.block_size)
            assert block.block_hash == hashes[block.block_index]
            self.filled[request.block_table[block.block_index]] = BlockHash(block.block_hash)
        for request in [r for r in self.running if r.done]:
            self.finish(request)

    def finish(self, request: Request) -> None:
        self.running.remove(request)
        self.released.append(request.seq_id)
        self.free += request.block_table

    def run(self) -> None:
        while self.running:
            self.step()

    def _introduce(self, request: Request, plan: pb.StepPlan) -> None:
        request.seq_id = self.next_seq_id
        self.next_seq_id += 1
        hashes = hash_blocks(ROOT, request.tokens, self.block_size)
        plan.new_sequences.add(
            seq_id=request.seq_id,
            token_ids=request.tokens,
            sampling=request.sampling,
            stop_token_ids=request.stop_token_ids,
            block_hashes=join_hashes(hashes[: len(hashes) // 2]),
            block_tables=[pb.GroupBlocks(block_ids=request.block_table)] if request.block_table else [],
        )
