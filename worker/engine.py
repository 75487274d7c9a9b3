"""Executes step plans: the worker's whole behaviour, without sockets.

A step is one forward pass over the ragged batch and one evaluation. While one runs, the graph of the next is built.
Everything here runs on one thread, but for evaluation on a CPU (`worker.evaluation`).
"""

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from cluster.kv.hashing import BlockHash
from protos.cidery.worker.v1 import worker_pb2 as pb
from worker import blas, cpu_math, description, evaluation, inspection, machine, mixers, models, reading, strips
from worker.adapters import Adapters
from worker.attention import Step
from worker.batch import Batch, Span
from worker.cores import CoreChoice
from worker.errors import AdapterRefused, ProtocolError
from worker.grammar import GrammarTable
from worker.kv_tensors import KVTensors
from worker.lanes import Lanes
from worker.metal.dispatch import Kernels
from worker.models import Layout, LoadedModel
from worker.plan_blocks import PlanBlocks
from worker.row_rules import make_rules
from worker.running_step import RunningStep
from worker.sequences import SequenceState, TableLayout
from worker.speculation import Speculation

# The shortest of so many steps is what the next one takes at the least.
_REMEMBERED_RUNS = 8
# A manager answers within that, or is busy.
_MOST_PATIENCE_S = 0.005


class Engine:
    """A loaded model, the KV pools and the sequences of one Run stream."""

    def __init__(
        self,
        loaded: LoadedModel,
        kernels: Kernels,
        *,
        memory_limit_bytes: int,
        grammars: GrammarTable | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """Without `grammars` no sequence may have a grammar, without `speculation` none guesses tokens."""
        num_cores = blas.most_threads()
        self._loaded = loaded
        self._kernels = kernels
        self._memory_limit_bytes = memory_limit_bytes
        self._grammars = grammars
        self._speculation = speculation or Speculation()
        self._core_choice = CoreChoice(num_cores, blas.use_threads)
        self._step = Step(kernels)
        self._strip_bytes = strips.install(loaded.model, machine.strip_bytes(memory_limit_bytes))
        # What the model is given as its cache.
        self.caches = models.attach(loaded, self._step)
        is_plain_cpu = cpu_math.is_available() and kernels.are_plain
        self._mirror_bytes = machine.kept_bytes(memory_limit_bytes) if is_plain_cpu else 0
        self._evaluator: evaluation.Evaluator = evaluation.Inline()
        if is_plain_cpu and not self._needs_tokens:
            # Whoever evaluates beside can't be asked for numbers while a graph is built, nor for what others began.
            self._evaluator = evaluation.beside()
            mx.eval(inspection.arrays_of(loaded.model))
        self._lanes = Lanes(self._evaluator.streams(num_cores - 1))
        self._parts_rows = num_cores > 1 and models.part_rows(loaded, self._lanes)
        self._adapters = Adapters(loaded.model, self._step, mixes_rows=loaded.layout is not Layout.DENSE)
        self._tensors: KVTensors | None = None
        self._blocks: PlanBlocks | None = None
        self._tables: TableLayout | None = None
        self._root = BlockHash(b"")
        self._sequences: dict[int, SequenceState] = {}
        self._running: RunningStep | None = None
        self._launched_s = 0.0
        self._last_runs_s: deque[float] = deque(maxlen=_REMEMBERED_RUNS)
        self._idle_since_s = time.perf_counter()
        # What the largest step takes beside weights and pools; 0 until it is measured (`worker.dry_run`).
        self.activation_bytes = 0

    def describe(self) -> pb.Description:
        """What the manager plans with."""
        loaded = self._loaded
        return pb.Description(
            layers=[description.of_cache(shape) for shape in loaded.caches],
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            weights_bytes=loaded.weights_bytes + self._strip_bytes + self._speculation.num_bytes,
            memory_limit_bytes=self._memory_limit_bytes,
            device=str(mx.device_info().get("device_name", mx.default_device())),
            kernels=self._kernels.name,
            pid=os.getpid(),
            is_gpu=mx.default_device() == mx.gpu,
            activation_bytes=self.activation_bytes + self._mirror_bytes,
            failed_kernels=self._kernels.failed,
        )

    def configure(self, message: pb.Configure) -> pb.Configured:
        """Make the pools. Raises ProtocolError if they exist, or for a layout that the model can't have."""
        if self._tensors is not None:
            raise ProtocolError("Configure came twice; it is the first message of a stream and comes once")
        groups = description.checked_groups(message, self._loaded.caches)
        if self._kernels.block_size not in (0, message.block_size):
            raise ProtocolError(
                f"block_size is {message.block_size}; the kernels were tested for {self._kernels.block_size}: start "
                f"the worker with --block-size {message.block_size}"
            )
        self._root = BlockHash(message.root_hash)
        self._tensors = KVTensors(
            self._loaded.caches,
            groups=groups,
            num_blocks=message.num_blocks,
            block_size=message.block_size,
            writer=self._kernels.make_writer(self._evaluator),
            mirror_bytes=self._mirror_bytes,
        )
        self._blocks = PlanBlocks(self._tensors, self._sequences)
        self._tables = description.table_layout(self._loaded.caches, groups, message.block_size)
        self._idle_since_s = time.perf_counter()
        return pb.Configured(kv_bytes=self._tensors.total_bytes)

    def commit_pools(self) -> None:
        """Allocate every block of the pools now, not when it is first used."""
        tensors = self._configured()
        for group, of_group in enumerate(tensors.groups):
            tensors.reserve(group, tensors.num_blocks[of_group.pool] - 1)
        tensors.evaluate()

    def reset(self) -> None:
        """Drop all sequences and the pools, and give the memory back. What runs is not reported."""
        self._running = None
        self._evaluator.abandon()
        self._sequences.clear()
        self._speculation.reset()
        self._tensors = self._blocks = self._tables = None
        self._step.end()
        self.caches.forget()
        self._adapters.clear()
        mx.clear_cache()

    def load_adapter(self, message: pb.LoadAdapter) -> pb.AdapterLoaded:
        """Sequences may name it from now on, unless it was refused."""
        if not message.digest or message.digest in self._adapters:
            raise ProtocolError(f"adapter to load has the digest {message.digest!r}, which is empty or loaded already")
        loaded = pb.AdapterLoaded(digest=message.digest)
        try:
            loaded.num_bytes = self._adapters.load(message.digest, Path(message.folder))
        except AdapterRefused as error:
            loaded.refusal = str(error)
        return loaded

    def unload_adapter(self, message: pb.UnloadAdapter) -> None:
        """Sequences that have it may still be known, but can't run any more. No effect on one that was refused."""
        self._adapters.unload(message.digest)

    def submit(self, plan: pb.StepPlan, report: Callable[[pb.StepResult], None]) -> None:
        """Start one step. The graph is built while the step before runs, whose result is then waited for and reported.

        Raises ProtocolError for a plan that can't be carried out, after which the stream's state is undefined: `reset`.
        """
        if not self._goes_ahead(plan):
            self.drain(report)
        step = self._build(plan)
        # A pool that is still read would be copied by the next write: one step runs at a time.
        result = self._finish_running()
        self._launch(step)
        if result is not None:
            report(result)

    def drain(self, report: Callable[[pb.StepResult], None]) -> None:
        """Wait for the step that runs, if any, and report its result."""
        result = self._finish_running()
        if result is not None:
            report(result)

    @property
    def is_running(self) -> bool:
        """Whether a step was started whose result has not been reported."""
        return self._running is not None

    def sure_to_run_s(self) -> float:
        """How long it does no harm to look away from the step that runs: it will hardly end before."""
        if self._running is None or not self._last_runs_s:
            return 0.0
        enough_s = min(_MOST_PATIENCE_S, min(self._last_runs_s) / 2)
        return max(0.0, self._launched_s + enough_s - time.perf_counter())

    def execute(self, plan: pb.StepPlan) -> pb.StepResult:
        """One step from its plan to its result; none must be running. Raises as `submit`."""
        assert self._running is None, "another step runs"
        results: list[pb.StepResult] = []
        self.submit(plan, results.append)
        self.drain(results.append)
        return results[0]

    def _goes_ahead(self, plan: pb.StepPlan) -> bool:
        """Whether a plan's graph can be built before the step that runs has ended."""
        running = self._running
        return running is None or not (self._needs_tokens or plan.resizes or running.may_draft)

    @property
    def _needs_tokens(self) -> bool:
        """Whether a step's tokens must be known while its graph is built."""
        return self._loaded.layout is Layout.DENSE or self._loaded.reads_values

    def _build(self, plan: pb.StepPlan) -> RunningStep:
        started_s = time.perf_counter()
        tensors = self._configured()
        assert self._blocks is not None
        for seq_id in plan.released_seq_ids:
            self._release(seq_id)
        with self._evaluator.building():
            self._blocks.resize(plan.resizes)
        self._blocks.edit(plan.edits)
        for message in plan.new_sequences:
            self._admit(message, self._blocks)
        with self._evaluator.building():
            self._blocks.move(plan.copies, plan.zeroes)
        skipped, slices = self._take_slices(plan, tensors, self._blocks)
        step = RunningStep(pb.StepResult(step_id=plan.step_id, skipped_seq_ids=skipped), started_s, slices)
        if slices:
            self._share_out(step)
            with self._evaluator.building():
                with self._lanes.building(are_used=step.cores.are_many, has_rows=step.cores.has_lanes):
                    self._forward(step, tensors)
                step.make_draw(self._grammars, self._evaluator, is_early=True)
        return step

    def _launch(self, step: RunningStep) -> None:
        self._launched_s = time.perf_counter()
        step.fill_in()
        with self._evaluator.building():
            step.make_draw(self._grammars, self._evaluator)
        self._core_choice.begin(step.cores)
        self._configured().start(*step.outputs())
        self._running = step
        step.await_tokens()

    def _finish_running(self) -> pb.StepResult | None:
        """The result of the step that runs, if any, as soon as it is there."""
        step, self._running = self._running, None
        if step is None:
            return None
        tensors, result = self._configured(), step.result
        tensors.finish()
        self._core_choice.ended(step.cores, time.perf_counter() - self._launched_s)
        wrong = step.report()
        # Of another step nothing is to be settled, but the next one may have been built, and have drafts.
        if step.has_drafts:
            with self._evaluator.building():
                tensors.settle_drafts([each.sequence.block_tables for each in wrong])
        self._report_drafts(step)
        ended_s = time.perf_counter()
        began_s = max(step.started_s, self._idle_since_s)
        if step.slices and step.is_decoding:
            self._speculation.cost.ran(step.num_rows, ended_s - began_s)
        self._last_runs_s.append(ended_s - began_s)
        result.timings.idle_s, result.timings.run_s = began_s - self._idle_since_s, ended_s - began_s
        result.memory.active_bytes = mx.get_active_memory()
        result.memory.peak_bytes = mx.get_peak_memory()
        result.memory.cache_bytes = mx.get_cache_memory()
        self._idle_since_s = ended_s
        return result

    def _configured(self) -> KVTensors:
        if self._tensors is None:
            raise ProtocolError("a plan came before Configure, which must be the first message of a stream")
        return self._tensors

    def _release(self, seq_id: int) -> None:
        if self._sequences.pop(seq_id, None) is None:
            raise ProtocolError(f"released sequence {seq_id} is unknown")
        self._speculation.forget(seq_id)

    def _admit(self, message: pb.NewSequence, blocks: PlanBlocks) -> None:
        if message.seq_id in self._sequences:
            raise ProtocolError(f"new sequence {message.seq_id} is already known; ids are unique in a stream")
        vocab_size = self._loaded.vocab_size
        what = f"sequence {message.seq_id}"
        if message.token_ids and max(message.token_ids) >= vocab_size:
            raise ProtocolError(f"{what}: token id {max(message.token_ids)} is not below the vocabulary's {vocab_size}")
        blocks.check_tables(message.block_tables, what)
        assert self._tables is not None
        sequence = SequenceState(message, layout=self._tables, root=self._root, defaults=self._loaded.sampling_defaults)
        sequence.rules = make_rules(message, vocab_size, self._grammars)
        stops = frozenset(message.stop_token_ids)
        sequence.drafting = self._speculation.begin(message.sampling.speculation, sequence.token_ids, stops)
        self._sequences[message.seq_id] = sequence

    def _take_slices(
        self, plan: pb.StepPlan, tensors: KVTensors, blocks: PlanBlocks
    ) -> tuple[list[int], list[tuple[SequenceState, Span]]]:
        """Ids of the sequences to skip, and the rest with their tokens and blocks."""
        skipped, slices = [], []
        seen: set[int] = set()
        drafts = self._drafts(plan)
        for piece in plan.slices:
            sequence = self._sequences.get(piece.seq_id)
            if sequence is None:
                raise ProtocolError(f"slice of sequence {piece.seq_id}, which is unknown")
            if piece.seq_id in seen:
                raise ProtocolError(f"sequence {piece.seq_id} has two slices in one plan; one is allowed")
            seen.add(piece.seq_id)
            if sequence.has_ended:
                skipped.append(piece.seq_id)
                continue
            if sequence.adapter and sequence.adapter not in self._adapters:
                raise ProtocolError(f"sequence {piece.seq_id}: adapter {sequence.adapter!r} is not loaded")
            if piece.new_blocks:
                blocks.check_tables(piece.new_blocks, f"sequence {piece.seq_id}")
                sequence.append_blocks(piece.new_blocks)
            slices.append((sequence, sequence.span(piece, drafts.get(piece.seq_id, ()))))
        if not self._kernels.reads_seen_slots_alone:
            self._clear_open_blocks([span for _, span in slices], tensors)
        return skipped, slices

    def _drafts(self, plan: pb.StepPlan) -> dict[int, list[int]]:
        """Guesses by sequence, for the slices that may have some."""
        granted = [
            (sequence, piece.max_drafts)
            for piece in plan.slices
            if piece.max_drafts and (sequence := self._sequences.get(piece.seq_id)) is not None
            if not sequence.has_ended and sequence.is_open(piece)
        ]
        return self._speculation.drafts(granted, len(plan.slices)) if granted else {}

    def _clear_open_blocks(self, spans: list[Span], tensors: KVTensors) -> None:
        """Blocks that a step begins and does not fill: plain MLX gathers them whole."""
        size = tensors.block_size
        opened = [span for span in spans if span.end % size and span.end // size * size >= span.start]
        for group in range(len(tensors.groups)):
            if opened and not tensors.is_state_group(group):
                tensors.clear_values(group, [span.tables[group][span.end // size] for span in opened])

    def _share_out(self, step: RunningStep) -> None:
        """Whether its rows run in lanes; those of adapters are counted by the step, so they stay together."""
        allows_lanes = self._parts_rows and not any(sequence.adapter for sequence, _ in step.slices)
        step.cores = self._core_choice.choose(step.num_rows, allows_lanes=allows_lanes)

    def _forward(self, step: RunningStep, tensors: KVTensors) -> None:
        """The graph up to the logits."""
        spans = [span for _, span in step.slices]
        if self._loaded.layout is Layout.DENSE:
            order, step.logits, step.pooled = self._run_one_by_one(spans, tensors)
        else:
            step.batch, step.logits, step.pooled = self._run_together(spans, tensors)
            order = step.batch.order
        step.packed = [step.slices[index] for index in order]
        self._step.end()

    def _run_together(self, spans: list[Span], tensors: KVTensors) -> tuple[Batch, mx.array | None, list[mx.array]]:
        """All rows in one forward: the packed spans, the logits of those that need them, and what was pooled."""
        batch = Batch(
            spans,
            block_size=tensors.block_size,
            decodes_together=self._kernels.takes_ragged_rows,
            allows_flat=self._loaded.layout is Layout.FLAT,
        )
        logits = self._run(batch, tensors)
        return batch, logits, reading.pool_rows(batch, self._step.hidden)

    def _run_one_by_one(
        self, spans: list[Span], tensors: KVTensors
    ) -> tuple[list[int], mx.array | None, list[mx.array]]:
        """One forward for each sequence, each evaluated: a pool read by one would be copied by the next one's write."""
        found, pooled = [], []
        for span in spans:
            batch = Batch([span], block_size=tensors.block_size)
            logits = self._run(batch, tensors, is_dense=True)
            pooled += reading.pool_rows(batch, self._step.hidden)
            found += [] if logits is None else [logits]
            tensors.evaluate(*found, *pooled)
        return list(range(len(spans))), mx.concatenate(found) if found else None, pooled

    def _run(self, batch: Batch, tensors: KVTensors, *, is_dense: bool = False) -> mx.array | None:
        """The graph of one forward; its logits `[num_logits, vocab]`, if any row needs them."""
        self._step.begin(batch, tensors, is_dense=is_dense)
        with mixers.states_of(self.caches.states, self._step):
            logits = self._loaded.model(batch.tokens, cache=self.caches.nested)
        self.caches.forget()
        return models.sampled_logits(logits, batch) if batch.sampled_rows else None

    def _report_drafts(self, step: RunningStep) -> None:
        for each in step.verified:
            sequence, drafting = each.sequence, each.sequence.drafting
            num_wanted = 0
            if drafting is not None and not sequence.has_ended:
                drafting.follow(each.span.num_drafts, each.num_accepted)
                num_wanted = self._speculation.num_wanted(sequence, len(step.verified))
            if each.drafts or num_wanted or (drafting is not None and drafting.num_wanted):
                step.result.speculated.add(seq_id=sequence.seq_id, num_drafts=len(each.drafts), num_wanted=num_wanted)
            if drafting is not None:
                drafting.num_wanted = num_wanted
