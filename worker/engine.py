"""Executes step plans: the worker's whole behaviour, without sockets or threads.

One call of `execute` is one forward pass over the ragged batch and one evaluation. Everything here runs on the one
thread that owns MLX.
"""

import os
import time
from collections.abc import Iterable

import mlx.core as mx

from cluster.kv.hashing import HASH_BYTES, BlockHash
from protos.cidery.v1 import sampling_pb2
from protos.cidery.worker.v1 import worker_pb2 as pb
from worker import models
from worker.attention import Step
from worker.batch import Batch, Span
from worker.errors import ProtocolError
from worker.grammar import GrammarTable
from worker.kv_tensors import KVTensors
from worker.metal.dispatch import Kernels
from worker.models import LoadedModel
from worker.row_rules import make_rules, shape
from worker.sampler import Draw, RowLogprobs
from worker.sequences import SequenceState, check_group

_DTYPE_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}


class Engine:
    """A loaded model, the KV pools and the sequences of one Run stream."""

    def __init__(
        self, loaded: LoadedModel, kernels: Kernels, *, memory_limit_bytes: int, grammars: GrammarTable | None = None
    ) -> None:
        """Without `grammars` no sequence may have a grammar."""
        self._loaded = loaded
        self._kernels = kernels
        self._memory_limit_bytes = memory_limit_bytes
        self._grammars = grammars
        self._step = Step(kernels)
        self._caches = models.attach(loaded, self._step)
        self._tensors: KVTensors | None = None
        self._root = BlockHash(b"")
        self._sequences: dict[int, SequenceState] = {}
        self._idle_since_s = time.perf_counter()

    def describe(self) -> pb.Description:
        """What the manager plans with."""
        loaded = self._loaded
        layers = [
            pb.Layer(
                kind=pb.LAYER_KIND_FULL_ATTENTION,
                num_kv_heads=layer.num_kv_heads,
                head_dim=layer.head_dim,
                dtype=_DTYPE_NAMES[layer.dtype],
            )
            for layer in loaded.layers
        ]
        return pb.Description(
            layers=layers,
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            weights_bytes=loaded.weights_bytes,
            memory_limit_bytes=self._memory_limit_bytes,
            device=str(mx.device_info().get("device_name", mx.default_device())),
            kernels=self._kernels.name,
            pid=os.getpid(),
            is_gpu=mx.default_device() == mx.gpu,
        )

    def configure(self, message: pb.Configure) -> pb.Configured:
        """Make the pools. Raises ProtocolError if they exist, or for a size that no pool can have."""
        if self._tensors is not None:
            raise ProtocolError("Configure came twice; it is the first message of a stream and comes once")
        if message.block_size < 1:
            raise ProtocolError(f"block_size is {message.block_size}; at least 1 is needed")
        if message.num_blocks < 2:
            raise ProtocolError(f"num_blocks is {message.num_blocks}; at least 2 are needed: block 0 is the null block")
        if len(message.root_hash) != HASH_BYTES:
            raise ProtocolError(f"root_hash has {len(message.root_hash)} bytes; {HASH_BYTES} are needed")
        self._root = BlockHash(message.root_hash)
        self._tensors = KVTensors(self._loaded.layers, block_size=message.block_size, num_blocks=message.num_blocks)
        self._idle_since_s = time.perf_counter()
        return pb.Configured(kv_bytes=self._tensors.total_bytes)

    def reset(self) -> None:
        """Drop all sequences and the pools, and give the memory back."""
        self._sequences.clear()
        self._tensors = None
        self._step.end()
        mx.clear_cache()

    def execute(self, plan: pb.StepPlan) -> pb.StepResult:
        """Carry out one plan. Raises ProtocolError, after which the stream's state is undefined: `reset`."""
        started_s = time.perf_counter()
        tensors = self._configured()
        for seq_id in plan.released_seq_ids:
            self._release(seq_id)
        for edit in plan.edits:
            self._edit_table(edit, tensors)
        for message in plan.new_sequences:
            self._admit(message, tensors)
        self._move_blocks(plan, tensors)
        skipped, slices = self._take_slices(plan, tensors)
        result = pb.StepResult(step_id=plan.step_id, skipped_seq_ids=skipped)
        if slices:
            self._forward(slices, tensors, result)
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

    def _edit_table(self, edit: pb.TableEdit, tensors: KVTensors) -> None:
        sequence = self._sequences.get(edit.seq_id)
        if sequence is None:
            raise ProtocolError(f"block table edit of sequence {edit.seq_id}, which is unknown")
        check_group(edit.group, f"sequence {edit.seq_id}")
        self._check_block_ids((edit.block_id,), f"sequence {edit.seq_id}", tensors)
        sequence.replace_block(edit.index, edit.block_id)

    def _admit(self, message: pb.NewSequence, tensors: KVTensors) -> None:
        if message.seq_id in self._sequences:
            raise ProtocolError(f"new sequence {message.seq_id} is already known; ids are unique in a stream")
        vocab_size = self._loaded.vocab_size
        what = f"sequence {message.seq_id}"
        if message.token_ids and max(message.token_ids) >= vocab_size:
            raise ProtocolError(f"{what}: token id {max(message.token_ids)} is not below the vocabulary's {vocab_size}")
        self._check_blocks(message.block_tables, what, tensors)
        sequence = SequenceState(
            message, block_size=tensors.block_size, root=self._root, defaults=self._loaded.sampling_defaults
        )
        sequence.rules = make_rules(message, vocab_size, self._grammars)
        self._sequences[message.seq_id] = sequence

    def _move_blocks(self, plan: pb.StepPlan, tensors: KVTensors) -> None:
        if plan.copies:
            for copy in plan.copies:
                check_group(copy.group, "block copy")
                self._check_block_ids((copy.source, copy.target), "block copy", tensors)
            tensors.copy_blocks([copy.source for copy in plan.copies], [copy.target for copy in plan.copies])
        for blocks in plan.zeroes:
            self._check_blocks((blocks,), "zeroing", tensors)
            if blocks.block_ids:
                tensors.zero_blocks(blocks.block_ids)

    def _take_slices(self, plan: pb.StepPlan, tensors: KVTensors) -> tuple[list[int], list[tuple[SequenceState, Span]]]:
        """Ids of the sequences to skip, and the rest with their tokens and blocks."""
        skipped, slices = [], []
        seen: set[int] = set()
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
            if piece.new_blocks:
                self._check_blocks(piece.new_blocks, f"sequence {piece.seq_id}", tensors)
                sequence.append_blocks(piece.new_blocks)
            slices.append((sequence, sequence.span(piece)))
        return skipped, slices

    def _forward(self, slices: list[tuple[SequenceState, Span]], tensors: KVTensors, result: pb.StepResult) -> None:
        spans = [span for _, span in slices]
        batch = Batch(spans, block_size=tensors.block_size, decodes_together=self._kernels.takes_ragged_rows)
        self._step.begin(batch, tensors)
        logits = self._loaded.model(batch.tokens, cache=self._caches)
        sampling = [slices[index][0] for index in batch.order if slices[index][1].samples]
        if sampling:
            positions = [len(sequence.token_ids) for sequence in sampling]
            sampled_logits = models.sampled_logits(logits, batch)
            shaped = shape(sampled_logits, [sequence.rules for sequence in sampling], self._grammars)
            draw = Draw(sampled_logits, [sequence.sampling for sequence in sampling], positions, shaped)
            tensors.evaluate(*draw.outputs)
            self._report_sampled(sampling, draw, result)
        else:
            tensors.evaluate()
        self._step.end()
        for sequence, span in slices:
            for index, block_hash in sequence.filled_blocks(span.start, span.end):
                result.filled_blocks.add(seq_id=sequence.seq_id, block_index=index, block_hash=block_hash)

    def _report_sampled(self, sampling: list[SequenceState], draw: Draw, result: pb.StepResult) -> None:
        logprobs = draw.logprobs()
        for row, (sequence, token_id) in enumerate(zip(sampling, draw.token_ids(), strict=True)):
            failure = sequence.failure
            if failure:
                sequence.has_ended = True
                result.sampled.add(seq_id=sequence.seq_id, failure=failure)
                continue
            stopped = sequence.append_token(token_id)
            sampled = result.sampled.add(seq_id=sequence.seq_id, token_id=token_id, stopped=stopped)
            if row in logprobs:
                sampled.logprobs.CopyFrom(_logprobs_message(token_id, logprobs[row]))

    def _check_blocks(self, groups: Iterable[pb.GroupBlocks], what: str, tensors: KVTensors) -> None:
        for blocks in groups:
            check_group(blocks.group, what)
            self._check_block_ids(blocks.block_ids, what, tensors)

    def _check_block_ids(self, block_ids: Iterable[int], what: str, tensors: KVTensors) -> None:
        """Also commits the memory of ids that were never used."""
        highest = 0
        for block_id in block_ids:
            if not 0 < block_id < tensors.num_blocks:
                raise ProtocolError(f"{what}: block id {block_id} is not in [1, {tensors.num_blocks})")
            highest = max(highest, block_id)
        tensors.reserve(highest)


def _logprobs_message(token_id: int, logprobs: RowLogprobs) -> sampling_pb2.TokenLogprobs:
    top = [sampling_pb2.TopLogprob(token_id=token, logprob=value) for token, value in logprobs.top]
    return sampling_pb2.TokenLogprobs(token_id=token_id, logprob=logprobs.logprob, top=top)
