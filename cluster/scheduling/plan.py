"""What the scheduler tells the worker to do in one step, and what the worker says it did.

Mirrors protos/cidery/worker/v1/worker.proto, where the meaning of each field is told; `cluster/wire.py` translates.
Plans are executed in order, and a plan may be made while the one before it is still running.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cluster.kv.hashing import BlockHash
from cluster.scheduling.request import SamplingParams, TokenLogprobs

# Block ids appended to a sequence's block table, by group.
GroupBlocks = Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the worker has not seen, or has been told to release since."""

    seq_id: int
    token_ids: tuple[int, ...]
    block_hashes: tuple[BlockHash, ...]
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    block_tables: GroupBlocks


@dataclass(frozen=True, slots=True)
class Slice:
    """Positions [start, start + num_tokens) of one sequence; `samples` if the token after the last is drawn."""

    seq_id: int
    start: int
    num_tokens: int
    samples: bool
    new_blocks: GroupBlocks


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block's KV in every layer of the group."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step; carried out in the order of the fields."""

    step_id: int
    released_seq_ids: tuple[int, ...] = ()
    new_sequences: tuple[NewSequence, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    zeroes: GroupBlocks | None = None
    slices: tuple[Slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """One drawn token; `stopped` if it is one of the sequence's stop tokens."""

    seq_id: int
    token_id: int
    logprobs: TokenLogprobs | None
    stopped: bool


@dataclass(frozen=True, slots=True)
class FilledBlock:
    """A block whose every slot holds computed KV."""

    seq_id: int
    group: int
    block_index: int
    block_id: int
    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the worker did in one step; `skipped_seq_ids` had ended by a stop token before it ran."""

    step_id: int
    sampled: tuple[Sampled, ...] = ()
    filled_blocks: tuple[FilledBlock, ...] = ()
    skipped_seq_ids: tuple[int, ...] = ()
    run_s: float = 0.0
    idle_s: float = 0.0
