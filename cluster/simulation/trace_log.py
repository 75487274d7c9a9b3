"""The gateway's own request log as a trace; its format is told in cluster/request_log.py."""

import base64
import binascii
from array import array
from collections.abc import Iterator

from cluster.request_log import HASH_BYTES, VERSION
from cluster.simulation.trace import BlockChains, Trace, TraceRequest
from cluster.simulation.trace_files import Line


def read_log(name: str, lines: Iterator[Line]) -> Trace:
    """Arrivals count from the first one. A request is of the session with which it shares most."""
    chains = BlockChains()
    found: list[TraceRequest] = []
    session_of: dict[int, int] = {}
    block_size = num_sessions = 0
    model: object = None
    for line in lines:
        if line.get("cidery") != VERSION:
            raise line.error(f"is version {line.get('cidery')!r} of the request log; this program reads {VERSION}")
        if line.get("model") != (model := model or line.get("model")):
            raise line.error(f"is of model {line.get('model')!r}, lines before of {model!r}; simulate one at a time")
        own_size = line.int_of("block", least=1)
        if block_size not in (0, own_size):
            raise line.error(f"block is {own_size}, that of the lines before {block_size}")
        block_size = own_size
        num_prompt, num_output = line.int_of("prompt", least=1), line.int_of("output")
        blocks: array[int] = array("I")
        chains.extend(blocks, _hashes(line, (num_prompt + num_output) // block_size))
        session = next((session_of[block] for block in reversed(blocks) if block in session_of), num_sessions)
        num_sessions += session == num_sessions
        for block in blocks:
            session_of.setdefault(block, session)
        found.append(
            TraceRequest(
                session=session,
                at_s=line.number_of("at"),
                num_prompt_tokens=num_prompt,
                num_output_tokens=max(1, num_output),
                blocks=blocks,
                max_tokens=max(1, num_output, line.int_of("max")),
                boundaries=_ends(line, num_prompt),
            )
        )
    found.sort(key=lambda request: request.at_s)
    return Trace(name, block_size, tuple(found), chains)


def _hashes(line: Line, most: int) -> list[bytes]:
    text = line.get("hashes")
    try:
        joined = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise line.error(f"hashes are not base64: {error}") from error
    if len(joined) % HASH_BYTES or len(joined) // HASH_BYTES > most:
        raise line.error(
            f"hashes are {len(joined)} bytes; {most} blocks of {HASH_BYTES} bytes at the most were expected"
        )
    return [joined[i : i + HASH_BYTES] for i in range(0, len(joined), HASH_BYTES)]


def _ends(line: Line, num_prompt: int) -> tuple[int, ...]:
    ends = line.list_of("ends")
    if any(not isinstance(end, int) or not 0 <= end <= num_prompt for end in ends):
        raise line.error(f"ends must be offsets within the {num_prompt} tokens of the prompt, got {ends!r:.80}")
    return tuple(ends)
