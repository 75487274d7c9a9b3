"""Requests that share a prefix which another one is just computing: the later ones wait rather than compute it too."""

from collections.abc import Iterable

from cluster.kv.hashing import HASH_BYTES
from cluster.kv.points import PointKind
from cluster.kv.sequence import ComputedBlocks
from cluster.scheduling.live import LiveRequest


def waits_for_blocks(
    block_size: int, live: LiveRequest, computed: ComputedBlocks, running: Iterable[LiveRequest]
) -> bool:
    """Whether a running prefill will soon have computed the block at which `live` could go on. O(running).

    Content that is known, but whose window is gone, counts as lacking.
    """
    depth = computed.num_tokens // block_size
    wanted = _hash_at(live, depth)
    if not wanted or (depth + 1) * block_size > len(live.token_ids) - 1:
        return False
    for other in running:
        end = min((depth + 1) * block_size, len(other.token_ids))
        if other.num_processed < end and _hash_at(other, depth) == wanted:
            return True
    return False


def waits_for_state(
    block_size: int, live: LiveRequest, computed: ComputedBlocks, running: Iterable[LiveRequest]
) -> bool:
    """Whether a running prefill will keep a state that `live` can go on from, further on than it can now.

    Content that can't be resumed is no reason to wait. Where the prompts part is a place to keep one, unless the other
    has passed it: it becomes a stop of the other. O(running), and O(shared blocks) for each that shares some.
    """
    depth = computed.num_tokens // block_size
    wanted = _hash_at(live, depth)
    if not wanted or (depth + 1) * block_size > len(live.token_ids) - 1:
        return False
    for other in running:
        if _hash_at(other, depth) != wanted:
            continue
        parting = _num_common(live, other, (len(live.token_ids) - 1) // block_size) * block_size
        if parting > other.num_planned:
            other.stops[parting] = PointKind.PARTING
        # A state is kept by the plan after the one that reaches it.
        if any(max(computed.num_tokens, other.num_processed - 1) < stop <= parting for stop in other.stops):
            return True
    return False


def _hash_at(live: LiveRequest, index: int) -> bytes:
    """Of a block, empty where it is not known."""
    return bytes(live.hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES])


def _num_common(live: LiveRequest, other: LiveRequest, limit: int) -> int:
    limit = min(limit, len(live.hashes) // HASH_BYTES, len(other.hashes) // HASH_BYTES)
    return next((i for i in range(limit) if _hash_at(live, i) != _hash_at(other, i)), limit)
