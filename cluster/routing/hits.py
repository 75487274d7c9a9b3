"""How many tokens of a prompt each Mac will have, by slot: what is held, and what prompts under way will compute."""

from collections.abc import Sequence

from cluster.kv.hashing import BlockHash
from cluster.routing.index import Match
from cluster.routing.load import LoadBook
from cluster.routing.match import Depths


def with_pending(
    num_held: Sequence[int],
    match: Match,
    loads: LoadBook,
    hashes: Sequence[BlockHash],
    num_tokens: int,
    size: int,
    *,
    keeps_ends: bool,
) -> Sequence[int]:
    """What prompts under way will have computed too; of a whole prompt, its last token still runs.

    `size` is that of blocks; `keeps_ends`: beside content, Macs keep what only lives at some places, states or windows.
    Returns `num_held` itself if that is nowhere more.
    """
    most = (num_tokens - 1) // size * size
    num_matched = None
    for mask, depth in loads.pending.match(hashes, -1):
        to_come = min(depth * size, most)
        for held_mask, held_tokens in match.resumable:
            if held_tokens >= to_come:
                mask &= ~held_mask
        if mask and num_matched is None:
            num_matched = list(num_held)
        while mask and num_matched is not None:
            lowest = mask & -mask
            slot = lowest.bit_length() - 1
            mask ^= lowest
            if keeps_ends:
                not_passed = loads.num_to_come(slot, hashes, size) * size
                num_matched[slot] = max(num_held[slot], min(not_passed, most))
            else:
                num_matched[slot] = to_come
    return num_held if num_matched is None else num_matched


def parting(match: Match, slot: int) -> int:
    """The block up to which a Mac holds the content, if it is further than it can be resumed: there it stops anew."""
    bit = 1 << slot
    content = next((depth for mask, depth in match.content if mask & bit), 0)
    return content if any(mask & bit and depth > lower for _, mask, depth, lower in match.lowered) else 0


def by_slot(depths: Depths, num_slots: int) -> list[int]:
    """Depths of all slots, 0 where there is none. The commonest depth is filled in at once."""
    every = (1 << num_slots) - 1
    rest = every
    for mask, _ in depths:
        rest &= ~mask
    sets = [*depths, (rest, 0)]
    common_mask, common = max(sets, key=lambda each: each[0].bit_count())
    values = [common] * num_slots
    for mask, depth in sets:
        if mask is common_mask:
            continue
        while mask:
            lowest = mask & -mask
            values[lowest.bit_length() - 1] = depth
            mask ^= lowest
    return values
