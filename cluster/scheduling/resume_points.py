"""Where a request's prefix is worth resuming at, and where its prefill stops for that."""

from cluster.kv.points import PointKind
from cluster.kv.sequence import ComputedBlocks
from cluster.scheduling.live import LiveRequest


def points_of(live: LiveRequest, computed: ComputedBlocks, block_size: int) -> dict[int, PointKind]:
    """Offsets worth resuming at: message ends, the prompt's end, and where the content parts from what is known.

    Each is rounded down to a block's end. The last token of a prompt that comes again runs anew: it ends before that.
    """
    request = live.request
    wanted = [(offset, PointKind.MESSAGE) for offset in request.boundaries]
    wanted += [(length - 1, PointKind.PROMPT_END) for length in (request.num_prompt_tokens, len(live.token_ids))]
    if request.boundaries:
        wanted.append((min(request.boundaries), PointKind.HEAD))
    if not computed.copies_last and computed.parts(block_size):
        wanted.append((computed.num_matched_tokens, PointKind.PARTING))
    points: dict[int, PointKind] = {}
    for offset, kind in wanted:
        if block_size <= offset <= len(live.token_ids):
            at = offset // block_size * block_size
            points[at] = max(kind, points.get(at, kind))
    return points


def tokens_until_stop(live: LiveRequest, num_tokens: int, block_size: int) -> int:
    """A recurrent model's chunk ends where a state is to be kept, else at a block's end, where one can be."""
    start = live.num_planned
    num_tokens = min([num_tokens, *(stop - start for stop in live.stops if stop > start)])
    aligned = (start + num_tokens) // block_size * block_size - start
    is_last = start + num_tokens == len(live.token_ids)
    return num_tokens if is_last or aligned <= 0 else aligned
