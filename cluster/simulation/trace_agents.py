"""Sessions of coding agents, each with several lanes of requests; block ids are local to a session.

Clients wait for answers here, so only sessions start at moments on record: every other request comes so long after
the one whose answer it waited for as it did there. That is taken to be the request of the session that had last ended.
"""

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cluster.simulation.arrivals import scaled
from cluster.simulation.trace import BlockChains, Trace, TraceRequest, num_common
from cluster.simulation.trace_files import Line

_Head = tuple[int, int]


@dataclass(slots=True)
class _Request:
    at_s: float
    end_s: float
    lane: str
    num_prompt: int
    num_output: int
    blocks: "array[int]"


def read_agents(name: str, lines: Iterator[Line]) -> Trace:
    """All sessions start at 0; `arrivals.started` spreads them.

    Blocks of tools and system prompt are the same for all sessions in which these are of the same lengths.
    """
    chains = BlockChains()
    requests: list[TraceRequest] = []
    block_size = 0
    for session, line in enumerate(lines):
        own_size = line.int_of("block_size", least=1)
        if block_size not in (0, own_size):
            raise line.error(f"block_size is {own_size}, that of the lines before {block_size}")
        block_size = own_size
        requests += _with_answers(session, _session(session, line, chains, block_size), block_size, len(requests))
    return scaled(Trace(name, block_size, tuple(requests), chains), 1.0)


def _session(session: int, line: Line, chains: BlockChains, block_size: int) -> list[_Request]:
    head = (line.int_of("tool_tokens"), line.int_of("system_tokens"))
    num_head_blocks = sum(head) // block_size
    found: list[_Request] = []
    last_keys, last_blocks = array("I"), array("I")
    for fields in line.list_of("requests"):
        if not isinstance(fields, dict):
            raise line.error(f"requests must be objects, got {fields!r:.80}")
        at_s, num_prompt = line.number_of("t", of=fields), line.int_of("in", least=1, of=fields)
        keys = _unfold(line, fields)[: num_prompt // block_size]
        if not found:
            first_keys = keys[:num_head_blocks]
        num_same = num_common(last_keys, keys)
        blocks = last_blocks[:num_same]
        chains.extend(blocks, _names(session, head, keys, num_same, num_common(first_keys, keys)))
        last_keys, last_blocks = keys, blocks
        # How long the answer took is not always known.
        busy_s = 0.0 if fields.get("api") is None else line.number_of("api", of=fields)
        lane = str(line.get("lane", fields))
        found.append(_Request(at_s, at_s + busy_s, lane, num_prompt, max(1, line.int_of("out", of=fields)), blocks))
    found.sort(key=lambda request: request.at_s)
    return found


def _names(session: int, head: _Head, keys: "array[int]", first: int, num_shared: int) -> list[object]:
    shared: list[object] = [(head, index) for index in range(first, num_shared)]
    return shared + [(session, key) for key in keys[max(first, num_shared) :]]


def _unfold(line: Line, fields: Mapping[str, Any]) -> "array[int]":
    """Block ids out of [[first, count], ...]."""
    keys = array("I")
    for run in line.list_of("h", fields):
        if not (isinstance(run, list) and len(run) == 2 and all(isinstance(n, int) and n >= 0 for n in run)):
            raise line.error(f"h must be pairs of whole numbers, got {run!r:.80}")
        keys.extend(range(run[0], run[0] + run[1]))
    return keys


def _with_answers(session: int, found: list[_Request], block_size: int, first: int) -> Iterator[TraceRequest]:
    for index, request in enumerate(found):
        blocks = request.blocks
        later = next((each for each in found[index + 1 :] if each.lane == request.lane), None)
        if later is not None and num_common(blocks, later.blocks) == len(blocks):
            blocks = later.blocks[: (request.num_prompt + request.num_output) // block_size]
        at_s, num_prompt = request.at_s, request.num_prompt
        made = TraceRequest(session, at_s, num_prompt, request.num_output, blocks, max(4096, request.num_output))
        earlier = [i for i in range(index) if found[i].end_s <= at_s]
        if earlier:
            last = max(earlier, key=lambda i: found[i].end_s)
            made = replace(made, after=first + last, delay_s=at_s - found[last].end_s)
        yield made
