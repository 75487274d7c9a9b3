"""What the scheduler tells the worker to do in one step, and what the worker says it did.

Mirrors protos/cidery/worker/v1/worker.proto, where the meaning of each field is told; `cluster/wire.py` translates.
Plans are executed in order, and a plan may be made while the one before it is still running.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.kv.hashing import HASH_BYTES, BlockHash
from cluster.kv.memory import PoolResize
from cluster.kv.sequence import BlockCopy, GroupBlocks, TableEdit
from cluster.scheduling.request import Reading, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the worker has not seen, or has been told to release since."""

    seq_id: int
    token_ids: tuple[int, ...]
    # Joined hashes of its full blocks.
    block_hashes: bytes
    sampling: SamplingParams
    stop_token_ids: tuple[int, ...]
    block_tables: GroupBlocks
    # Of token_ids; the rest was generated.
    num_prompt_tokens: int
    # Part of the first block's hash, both.
    cache_salt: str = ""
    adapter: str = ""
    reading: Reading | None = None
    # No token is drawn after the prompt.
    reads_only: bool = False


@dataclass(frozen=True, slots=True)
class Slice:
    """Positions [start, start + num_tokens) of one sequence; `samples` if the token after the last is drawn.

    Where drafts are allowed, `start` is the furthest that the sequence can have got to.
    """

    seq_id: int
    start: int
    num_tokens: int
    samples: bool
    new_blocks: GroupBlocks
    max_drafts: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step; carried out in the order of the fields."""

    step_id: int
    released_seq_ids: tuple[int, ...] = ()
    # Ids in all that follows are those after the moves; the worker renames those that it knows.
    resizes: tuple[PoolResize, ...] = ()
    edits: tuple[TableEdit, ...] = ()
    new_sequences: tuple[NewSequence, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    zeroes: GroupBlocks | None = None
    slices: tuple[Slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """One drawn token, of maybe several of its sequence; `stopped` if it is one of the sequence's stop tokens.

    `failure` not empty: there is no token, and the sequence can't go on. `is_read`: there is none, and none was wanted;
    `embedding` is what was pooled then.
    """

    seq_id: int
    token_id: int
    logprobs: TokenLogprobs | None
    stopped: bool
    failure: str = ""
    is_read: bool = False
    embedding: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of consecutive tokens of a prompt, the first at position `start`: each one's own, and its likeliest rivals'."""

    seq_id: int
    start: int
    logprobs: tuple[float, ...]
    # One tuple for each token, likeliest first.
    top: tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True, slots=True)
class FilledBlock:
    """A block of a sequence whose every slot holds computed KV, in all groups."""

    seq_id: int
    block_index: int
    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class Speculated:
    """What became of a sequence's drafts; `num_wanted` are to be allowed in its next slice."""

    seq_id: int
    num_drafts: int
    num_wanted: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the worker did in one step; `skipped_seq_ids` had ended by a stop token before it ran."""

    step_id: int
    sampled: tuple[Sampled, ...] = ()
    filled_blocks: tuple[FilledBlock, ...] = ()
    skipped_seq_ids: tuple[int, ...] = ()
    run_s: float = 0.0
    idle_s: float = 0.0
    speculated: tuple[Speculated, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


def by_sequence(sampled: Iterable[Sampled]) -> dict[int, list[Sampled]]:
    """The tokens of each sequence, in order."""
    found: dict[int, list[Sampled]] = {}
    for each in sampled:
        found.setdefault(each.seq_id, []).append(each)
    return found


def runs_of(blocks: Iterable[FilledBlock]) -> list[tuple[int, int, bytes]]:
    """(seq_id, first index, joined hashes) of consecutive blocks of one sequence."""
    runs: list[tuple[int, int, bytearray]] = []
    for block in blocks:
        if runs and runs[-1][0] == block.seq_id and runs[-1][1] + len(runs[-1][2]) // HASH_BYTES == block.block_index:
            runs[-1][2].extend(block.block_hash)
        else:
            runs.append((block.seq_id, block.block_index, bytearray(block.block_hash)))
    return [(seq_id, first, bytes(hashes)) for seq_id, first, hashes in runs]
