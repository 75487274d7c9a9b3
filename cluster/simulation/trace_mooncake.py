"""The trace format of Mooncake (FAST'25): arrivals on record, block ids that stand for a block and all before it."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cluster.simulation.trace import BlockChains, Trace, TraceRequest
from cluster.simulation.trace_files import Line

BLOCK_SIZE = 512


@dataclass(frozen=True, slots=True)
class _Row:
    at_s: float
    num_prompt: int
    num_output: int
    blocks: "array[int]"
    # How many of the blocks somebody had before.
    num_known: int
    session: int


def read_mooncake(name: str, lines: Iterator[Line]) -> Trace:
    """Answers are not in the trace: where a later prompt goes on after a new one, the answer is what stands there.

    A request is of the session that brought the deepest block that it shares with an earlier one, unless that is only
    the first block, which nearly all share.
    """
    chains, rows = BlockChains(), []
    owner: dict[int, int] = {}
    num_sessions = 0
    for line in lines:
        num_prompt, num_output = line.int_of("input_length", least=1), line.int_of("output_length")
        keys = line.list_of("hash_ids")
        if any(not isinstance(key, int) for key in keys):
            raise line.error("hash_ids must be whole numbers")
        if len(keys) != -(-num_prompt // BLOCK_SIZE):
            raise line.error(f"{num_prompt} tokens take {-(-num_prompt // BLOCK_SIZE)} blocks, got {len(keys)} ids")
        blocks: array[int] = array("I")
        chains.extend(blocks, keys[: num_prompt // BLOCK_SIZE])
        num_known = next((i for i, block in enumerate(blocks) if block not in owner), len(blocks))
        session = owner[blocks[num_known - 1]] if num_known > 1 else num_sessions
        num_sessions += session == num_sessions
        for block in blocks[num_known:]:
            owner[block] = session
        at_s = line.number_of("timestamp") / 1000
        rows.append(_Row(at_s, num_prompt, max(1, num_output), blocks, num_known, session))
    rows.sort(key=lambda row: row.at_s)
    return Trace(name, BLOCK_SIZE, tuple(_with_answers(rows)), chains)


def _with_answers(rows: list[_Row]) -> Iterator[TraceRequest]:
    next_by_block: dict[int, list[_Row]] = {}
    for row in rows:
        for block in row.blocks[:-1]:
            next_by_block.setdefault(block, []).append(row)
    for row in rows:
        blocks = row.blocks
        num_whole = (row.num_prompt + row.num_output) // BLOCK_SIZE
        if row.num_known < len(blocks) < num_whole:
            later = _later(row, next_by_block.get(blocks[-1], []))
            if later is not None:
                blocks = later.blocks[:num_whole]
        yield TraceRequest(row.session, row.at_s, row.num_prompt, row.num_output, blocks)


def _later(row: _Row, others: list[Any]) -> _Row | None:
    """The first request whose prompt can hold this one's prompt and answer."""
    at_least = row.num_prompt + row.num_output
    return next((each for each in others if each.at_s > row.at_s and each.num_prompt >= at_least), None)
