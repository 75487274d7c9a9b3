"""The product's scheduler and KV manager on the product's engine, in one process: a Mac without sockets."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
from mlx.nn.layers.base import Module

from cluster import wire
from cluster.kv.hashing import first_extras, hash_blocks, root_hash
from cluster.kv.manager import KVCacheManager
from cluster.kv.planner import plan_layout
from cluster.mac_memory import kv_format, layer_specs
from cluster.scheduling.config import SchedulerConfig
from cluster.scheduling.plan import StepPlan, StepResult
from cluster.scheduling.request import Finish, Reading, Request, SamplingParams, Speculation, TokenLogprobs
from cluster.scheduling.scheduler import Scheduler
from protos.cidery.worker.v1 import worker_pb2 as pb
from worker import kv_quantization, models
from worker.draft import DraftModel
from worker.engine import Engine
from worker.grammar import GrammarTable
from worker.metal.dispatch import Kernels, twin_kernels
from worker.models import LoadedModel
from worker.speculation import Speculation as WorkerSpeculation

BLOCK_SIZE = 16
MAX_MODEL_LEN = 256


class Oracle(WorkerSpeculation):
    """Guesses answers that are known; every few tokens one is wrong, and some steps have none or few."""

    def __init__(self, answers: Sequence[Sequence[int]], *, max_drafts: int, has_states: bool) -> None:
        super().__init__(max_drafts=max_drafts, has_states=has_states)
        self._answers = [list(answer) for answer in answers]
        self._random = random.Random(5)

    def drafts(self, granted, num_rows):
        return {sequence.seq_id: self._guess(sequence, max_drafts) for sequence, max_drafts in granted}

    def _guess(self, sequence, max_drafts):
        known = list(sequence.token_ids)
        follows = next((a[len(known) :] for a in self._answers if a[: len(known)] == known), [])
        drafts = follows[: self._random.randint(0, max_drafts)]
        if drafts and self._random.random() < 0.4:
            place = self._random.randrange(len(drafts))
            drafts[place] = drafts[place] - 1 if drafts[place] else 1
        return sequence.drafting.before_stop(drafts)

    def num_wanted(self, sequence, num_rows):
        return self._random.choice((0, self.max_drafts, self.max_drafts, self.max_drafts))


@dataclass
class Answer:
    """What came of a request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    embedding: tuple[float, ...] = ()
    failure: str = ""


def _draft(loaded: LoadedModel, kernels: Kernels, model: tuple[Module, dict] | None, kv_bytes: int):
    if model is None:
        return None
    return DraftModel(models.adapt(*model), kernels, vocab_size=loaded.vocab_size, kv_bytes=kv_bytes)


def _guesses(loaded: LoadedModel, max_drafts: int, answers: Sequence[Sequence[int]], draft: DraftModel | None):
    if answers:
        return Oracle(answers, max_drafts=max_drafts, has_states=loaded.has_states)
    return WorkerSpeculation(max_drafts=max_drafts, has_states=loaded.has_states, draft=draft)


class InProcessMac:
    """Plans run one ahead of results, as on a Mac."""

    def __init__(
        self,
        model: Module | LoadedModel,
        config: dict,
        *,
        kv_budget_bytes: int = 1 << 24,
        memory_limit_bytes: int = 1 << 30,
        max_num_batched_tokens: int = 64,
        max_chunk_tokens: int = 24,
        max_num_seqs: int = 16,
        max_plans_in_flight: int = 2,
        max_model_len: int = MAX_MODEL_LEN,
        kernels: Kernels | None = None,
        grammars: GrammarTable | None = None,
        max_drafts: int = 0,
        speculation: Speculation = Speculation.NGRAM,
        answers_to_guess: Sequence[Sequence[int]] = (),
        draft_model: tuple[Module, dict] | None = None,
        draft_kv_bytes: int = 1 << 24,
        kv_bits: int | None = None,
        kv_group_size: int | None = None,
    ) -> None:
        """`answers_to_guess`: prompts with their answers, which are then guessed, wrongly now and then."""
        kernels = kernels or twin_kernels()
        loaded = model if isinstance(model, LoadedModel) else models.adapt(model, config)
        loaded = kv_quantization.quantise(loaded, kv_bits, kv_group_size)
        guesses = _guesses(loaded, max_drafts, answers_to_guess, _draft(loaded, kernels, draft_model, draft_kv_bytes))
        self.engine = Engine(
            loaded, kernels, memory_limit_bytes=memory_limit_bytes, grammars=grammars, speculation=guesses
        )
        self.speculation = speculation if max_drafts else Speculation.OFF
        self.num_drafted = self.num_accepted = 0
        described = self.engine.describe()
        self.layout = plan_layout(
            layer_specs(described),
            kv_budget_bytes=kv_budget_bytes,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            max_in_flight_tokens=max_plans_in_flight * max_num_batched_tokens,
        )
        self.root = root_hash(model="m", tokenizer="t", kv_format=kv_format(described), block_size=BLOCK_SIZE)
        self.configure()
        self.kv = KVCacheManager(self.layout)
        self.scheduler = Scheduler(
            self.kv,
            SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_chunk_tokens=max_chunk_tokens,
                max_model_len=max_model_len,
                max_plans_in_flight=max_plans_in_flight,
                num_speculative_tokens=max_drafts,
            ),
        )
        self.answers: dict[str, Answer] = {}
        self.results: deque[StepResult] = deque()
        self.max_plans_in_flight = max_plans_in_flight
        # On the harness a kernel runs when it is called: no graph may be built before its tokens are known.
        self._builds_ahead = kernels.name == "mlx" or mx.metal.is_available()
        self.now_s = 0.0
        self.num_steps = 0
        self.num_resizes = 0
        self.num_copies = 0

    def configure(self) -> None:
        """A worker's first message, also of one that comes after another."""
        self.engine.configure(wire.layout_to_proto(self.layout, self.root))

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        *,
        generated=(),
        stop_token_ids=(),
        reading: Reading | None = None,
        adapter: str = "",
        **sampling,
    ) -> Answer:
        """`generated` is what another Mac made of it before."""
        tokens = (*prompt, *generated)
        request = Request(
            request_id=request_id,
            token_ids=tokens,
            num_prompt_tokens=len(prompt),
            block_hashes=tuple(hash_blocks(self.root, tokens, BLOCK_SIZE, first_extras("", adapter))),
            max_tokens=max_tokens,
            sampling=SamplingParams(
                **{"temperature": 0.0, "num_top_logprobs": 5, "speculation": self.speculation} | sampling
            ),
            stop_token_ids=tuple(stop_token_ids),
            reading=reading,
            adapter=adapter,
        )
        self.answers[request_id] = Answer(request)
        self.scheduler.add(request, self.now_s)
        return self.answers[request_id]

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def preempt(self, request_id: str) -> None:
        """As if others needed its blocks: it computes again what is not cached."""
        live = self.scheduler._roster.by_id[request_id]
        if live.is_running:
            self.scheduler._roster.preempt(live)

    def step(self) -> bool:
        """Plan and start one step, and take in the result of the one before; False if there was nothing to do."""
        self.now_s += 0.1
        plan = self.scheduler.schedule(self.now_s)
        if plan is not None:
            self.execute(plan)
        if plan is None or self.max_plans_in_flight == 1:
            self.drain()
        if not self.results:
            return plan is not None
        self.apply()
        return True

    def execute(self, plan: StepPlan) -> None:
        """Start it; the result before it is among the results then."""
        self.num_steps += 1
        self.num_resizes += len(plan.resizes)
        self.num_copies += len(plan.copies)
        message = type(wire.plan_to_proto(plan)).FromString(wire.plan_to_proto(plan).SerializeToString())
        if not self._builds_ahead:
            self.drain()
        self.engine.submit(message.plan, self._report)

    def drain(self) -> None:
        """Wait for the step that runs."""
        self.engine.drain(self._report)

    def _report(self, result: pb.StepResult) -> None:
        self.results.append(wire.result_from_proto(pb.StepResult.FromString(result.SerializeToString())))

    def apply(self) -> None:
        for update in self.scheduler.apply(self.results.popleft()):
            answer = self.answers[update.request_id]
            answer.tokens += update.token_ids
            answer.logprobs += update.logprobs
            answer.finish = update.finish or answer.finish
            answer.num_cached_tokens = update.num_cached_tokens
            self.num_drafted += update.num_drafted_tokens
            self.num_accepted += update.num_accepted_tokens
            answer.prompt_logprobs += update.prompt_logprobs
            answer.embedding = update.embedding or answer.embedding
            answer.failure = update.failure
        self.kv.take_events()

    def run(self) -> None:
        while self.step():
            pass
        assert not self.scheduler.has_work()
        self.scheduler.check()
