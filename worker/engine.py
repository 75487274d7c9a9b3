"""Executes step plans: the worker's whole behaviour, without sockets or threads.

One call of `execute` is one forward pass over the ragged batch and one evaluation. Everything here runs on the one
thread that owns MLX.
"""

import os
import time
from pathlib import Path

import mlx.core as mx

from cluster.kv.hashing import BlockHash
from protos.cidery.v1 import sampling_pb2
from protos.cidery.worker.v1 import worker_pb2 as pb
from worker import description, mixers, models, reading
from worker.adapters import Adapters
from worker.attention import Step
from worker.batch import Batch, Span
from worker.errors import AdapterRefused, ProtocolError
from worker.grammar import GrammarTable
from worker.kv_tensors import KVTensors
from worker.metal.dispatch import Kernels
from worker.models import Layout, LoadedModel
from worker.plan_blocks import PlanBlocks
from worker.row_rules import make_rules, shape
from worker.sampler import Draw, RowLogprobs
from worker.sequences import SequenceState, TableLayout
from worker.speculation import Speculation
from worker.verification import Verified, rows_of


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
        self._loaded = loaded
        self._kernels = kernels
        self._memory_limit_bytes = memory_limit_bytes
        self._grammars = grammars
        self._speculation = speculation or Speculation()
        self._step = Step(kernels)
        # What the model is given as its cache.
        self.caches = models.attach(loaded, self._step)
        self._adapters = Adapters(loaded.model, self._step, mixes_rows=loaded.layout is not Layout.DENSE)
        self._tensors: KVTensors | None = None
        self._blocks: PlanBlocks | None = None
        self._tables: TableLayout | None = None
        self._root = BlockHash(b"")
        self._sequences: dict[int, SequenceState] = {}
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
            weights_bytes=loaded.weights_bytes + self._speculation.num_bytes,
            memory_limit_bytes=self._memory_limit_bytes,
            device=str(mx.device_info().get("device_name", mx.default_device())),
            kernels=self._kernels.name,
            pid=os.getpid(),
            is_gpu=mx.default_device() == mx.gpu,
            activation_bytes=self.activation_bytes,
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
            writer=self._kernels.make_writer(),
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
        """Drop all sequences and the pools, and give the memory back."""
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

    def execute(self, plan: pb.StepPlan) -> pb.StepResult:
        """Carry out one plan. Raises ProtocolError, after which the stream's state is undefined: `reset`."""
        started_s = time.perf_counter()
        tensors = self._configured()
        assert self._blocks is not None
        for seq_id in plan.released_seq_ids:
            self._release(seq_id)
        self._blocks.resize(plan.resizes)
        self._blocks.edit(plan.edits)
        for message in plan.new_sequences:
            self._admit(message, self._blocks)
        self._blocks.move(plan.copies, plan.zeroes)
        skipped, slices = self._take_slices(plan, tensors, self._blocks)
        result = pb.StepResult(step_id=plan.step_id, skipped_seq_ids=skipped)
        if slices:
            forward_s = time.perf_counter()
            self._forward(slices, tensors, result)
            if all(span.samples and len(span.token_ids) <= 1 + 2 * span.num_drafts for _, span in slices):
                num_rows = sum(len(span.token_ids) for _, span in slices)
                self._speculation.cost.ran(num_rows, time.perf_counter() - forward_s)
        elif plan.copies or plan.zeroes:
            tensors.evaluate()
        ended_s = time.perf_counter()
        result.timings.idle_s, result.timings.run_s = started_s - self._idle_since_s, ended_s - started_s
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

    def _forward(self, slices: list[tuple[SequenceState, Span]], tensors: KVTensors, result: pb.StepResult) -> None:
        spans = [span for _, span in slices]
        if self._loaded.layout is Layout.DENSE:
            order, logits, pooled = self._run_one_by_one(spans, tensors)
        else:
            order, logits, pooled = self._run_together(spans, tensors)
        if logits is None:
            tensors.evaluate(*pooled)
        else:
            self._draw([slices[index] for index in order], logits, pooled, tensors, result)
        self._step.end()
        for sequence, span in slices:
            if not span.samples:
                sequence.ran(span)
            for index, block_hash in sequence.filled_blocks(span.start, sequence.num_certain):
                result.filled_blocks.add(seq_id=sequence.seq_id, block_index=index, block_hash=block_hash)
            if span.reading is not None and span.reading.is_complete(span):
                sequence.has_ended = True
                reading.report_complete(sequence.seq_id, span.reading, result)

    def _draw(
        self,
        packed: list[tuple[SequenceState, Span]],
        logits: mx.array,
        pooled: list[mx.array],
        tensors: KVTensors,
        result: pb.StepResult,
    ) -> None:
        """The next tokens, and what the rows say of prompts. `logits` are those of the packed spans."""
        of_drawing = reading.drawing_rows([span for _, span in packed])
        verified = [rows_of(sequence, span) for sequence, span in packed if span.samples]
        if len(of_drawing) < len(logits):
            pooled.append(logits)
        if verified:
            drawing = logits if len(of_drawing) == len(logits) else logits[mx.array(of_drawing, mx.int32)]
            rows = [row for each in verified for row in each.rows]
            shaped = shape(drawing, [row.rules for row in rows], self._grammars)
            draw = Draw(drawing, [row.sampling for row in rows], [row.position for row in rows], shaped)
            tensors.evaluate(*draw.outputs, *pooled)
            self._report_sampled(verified, draw, tensors, result)
        else:
            tensors.evaluate(*pooled)
        if len(of_drawing) < len(logits):
            reading.report_scores(packed, logits, result)

    def _run_together(self, spans: list[Span], tensors: KVTensors) -> tuple[list[int], mx.array | None, list[mx.array]]:
        """All rows in one forward: the order of the spans, the logits of those that need them, and what was pooled."""
        batch = Batch(
            spans,
            block_size=tensors.block_size,
            decodes_together=self._kernels.takes_ragged_rows,
            allows_flat=self._loaded.layout is Layout.FLAT,
        )
        logits = self._run(batch, tensors)
        return batch.order, logits, reading.pool_rows(batch, self._step.hidden)

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
        in_place = self._step.updates_states_in_place
        states = self.caches.states
        if states and in_place:
            # Of a step that was not in place.
            tensors.settle_states()
        elif states:
            mixers.begin_states(batch, tensors)
        lays_in = states if batch.is_flat or in_place else []
        for state in lays_in:
            state.begin()
        logits = self._loaded.model(batch.tokens, cache=self.caches.nested)
        for state in lays_in:
            state.end()
        self.caches.forget()
        return models.sampled_logits(logits, batch) if batch.sampled_rows else None

    def _report_sampled(self, verified: list[Verified], draw: Draw, tensors: KVTensors, result: pb.StepResult) -> None:
        drawn = draw.token_ids()
        logprobs = draw.logprobs()
        first, wrong = 0, []
        for each in verified:
            sequence, num_rows = each.sequence, len(each.rows)
            if sequence.failure:
                sequence.has_ended = True
                result.sampled.add(seq_id=sequence.seq_id, failure=sequence.failure)
                first += num_rows
                continue
            num_taken = 0
            for row in each.true_rows(drawn[first : first + num_rows]):
                token_id = drawn[first + row]
                stopped = sequence.append_token(token_id)
                sampled = result.sampled.add(seq_id=sequence.seq_id, token_id=token_id, stopped=stopped)
                if first + row in logprobs:
                    sampled.logprobs.CopyFrom(_logprobs_message(token_id, logprobs[first + row]))
                num_taken += 1
            each.num_accepted = num_taken - 1
            if not sequence.ran(each.span, each.num_accepted):
                wrong.append(sequence.block_tables)
            first += num_rows
        tensors.settle_drafts(wrong)
        self._report_drafts(verified, result)

    def _report_drafts(self, verified: list[Verified], result: pb.StepResult) -> None:
        for each in verified:
            sequence, drafting = each.sequence, each.sequence.drafting
            num_wanted = 0
            if drafting is not None and not sequence.has_ended:
                drafting.follow(each.span.num_drafts, each.num_accepted)
                num_wanted = self._speculation.num_wanted(sequence, len(verified))
            if each.drafts or num_wanted or (drafting is not None and drafting.num_wanted):
                result.speculated.add(seq_id=sequence.seq_id, num_drafts=len(each.drafts), num_wanted=num_wanted)
            if drafting is not None:
                drafting.num_wanted = num_wanted


def _logprobs_message(token_id: int, logprobs: RowLogprobs) -> sampling_pb2.TokenLogprobs:
    top = [sampling_pb2.TopLogprob(token_id=token, logprob=value) for token, value in logprobs.top]
    return sampling_pb2.TokenLogprobs(token_id=token_id, logprob=logprobs.logprob, top=top)
