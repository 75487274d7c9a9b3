"""Where Macs can resume a prompt: one pass over its block hashes for all Macs at once.

A set of Macs is a bit mask. An answer is a list of (mask, depth): disjoint sets, deepest first, depths in blocks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import and_

from cluster.kv.group_managers import GroupManager
from cluster.kv.hashing import BlockHash

Depths = list[tuple[int, int]]
Masks = Mapping[BlockHash, int]

# States are looked up so many blocks at a time: most prompts end a few blocks after one.
_STATE_STRIDE = 64


def leading_runs(get: Callable[[BlockHash, int], int], hashes: Sequence[BlockHash], macs: int) -> Depths:
    """How far each of `macs` holds the chain without a hole; those without its first block are left out.

    `get` is that of the group's masks. Wants every Mac's blocks to be closed under prefixes, as full attention's are:
    then Macs only ever fall out along a chain, and a span with the same Macs at both ends needs no look inside. About
    2 log2(blocks) look-ups for each set of Macs that falls out.
    """
    num_blocks = len(hashes)
    alive = get(hashes[0], 0) & macs if num_blocks else 0
    if not alive:
        return []
    runs: Depths = []
    # `alive` hold all up to `low`; positions looked at beyond it, nearest last.
    low, seen = 0, [(num_blocks - 1, get(hashes[-1], 0) & alive)]
    while seen:
        high, mask = seen[-1]
        if mask == alive:
            low = high
            seen.pop()
        elif high - low == 1:
            runs.append((alive & ~mask, high))
            low, alive = high, mask
            seen.pop()
            if not alive:
                break
        else:
            middle = (low + high) // 2
            seen.append((middle, get(hashes[middle], 0) & alive))
    else:
        runs.append((alive, num_blocks))
    runs.reverse()
    return runs


class ResumePass:
    """The longest prefixes at whose end every group has what it needs: the fixed point of HybridKVCacheCoordinator.

    Macs are lowered together as long as they stand at the same depth. `lowered` tells afterwards which group lowered
    which Macs, from where to where.
    """

    def __init__(
        self, managers: Sequence[GroupManager], masks: Sequence[Masks], hashes: Sequence[BlockHash], block_size: int
    ) -> None:
        self._managers = managers
        self._masks = masks
        self._hashes = hashes
        self._block_size = block_size
        # Masks along the prompt by group, and from where on they have been looked up.
        self._rows: dict[int, list[int]] = {}
        self._lows: dict[int, int] = {}
        self.lowered: list[tuple[int, int, int, int]] = []

    def run(self, limits: Depths) -> Depths:
        """Lower these depths until they can be resumed at; Macs that end at 0 are left out."""
        waiting: dict[int, int] = {}
        for mask, depth in limits:
            waiting[depth] = waiting.get(depth, 0) | mask
        settled: Depths = []
        while waiting:
            depth = max(waiting)
            mask = waiting.pop(depth)
            if not depth:
                break
            for manager in self._managers:
                for macs, lower in self._lower(manager, mask, depth):
                    self.lowered.append((manager.group_id, macs, depth, lower))
                    waiting[lower] = waiting.get(lower, 0) | macs
                    mask &= ~macs
                if not mask:
                    break
            else:
                settled.append((mask, depth))
        return settled

    def holders(self, first: int, end: int, group: int, macs: int) -> int:
        """Those of `macs` that hold all of these blocks."""
        get = self._masks[group].get
        return reduce(and_, [get(block_hash, 0) for block_hash in self._hashes[first:end]], macs)

    def _row(self, group: int, first: int, depth: int) -> list[int]:
        """The masks along the prompt, looked up from `first` to `depth`: depths only fall, so it grows downwards."""
        row = self._rows.get(group)
        if row is None:
            row = self._rows[group] = [0] * depth
            self._lows[group] = depth
        low = self._lows[group]
        if first < low:
            get = self._masks[group].get
            row[first:low] = [get(block_hash, 0) for block_hash in self._hashes[first:low]]
            self._lows[group] = first
        return row

    def _lower(self, manager: GroupManager, macs: int, depth: int) -> Depths:
        """Macs for which the group can't end at `depth` > 0, and the next depth to try."""
        group = manager.group_id
        if manager.is_state:
            return self._to_last_state(group, macs, depth)
        lowered: Depths = []
        if manager.num_sink_blocks:
            get, num_sinks = self._masks[group].get, min(depth, manager.num_sink_blocks)
            sinks = [get(block_hash, 0) for block_hash in self._hashes[:num_sinks]]
            lowered = _to_first_hole(sinks, range(num_sinks), macs)
            for mask, _ in lowered:
                macs &= ~mask
        needed = range(manager.first_needed(depth * self._block_size), depth)
        return lowered + _to_first_hole(self._row(group, needed.start, depth), needed, macs)

    def _to_last_state(self, group: int, macs: int, depth: int) -> Depths:
        lowered: Depths = []
        low = max(0, depth - _STATE_STRIDE)
        row = self._row(group, low, depth)
        left = macs & ~row[depth - 1]
        for position in range(depth - 2, -1, -1):
            if not left:
                return lowered
            if position < low:
                low = max(0, low - _STATE_STRIDE)
                row = self._row(group, low, depth)
            found = row[position] & left
            if found:
                lowered.append((found, position + 1))
                left ^= found
        if left:
            lowered.append((left, 0))
        return lowered


def _to_first_hole(row: Sequence[int], needed: range, macs: int) -> Depths:
    """Every depth between a missing block and the present one needs that block too, because needs never fall."""
    left = reduce(and_, row[needed.start : needed.stop], macs)
    if left == macs:
        return []
    lowered: Depths = []
    for position in needed:
        gone = macs & ~row[position]
        if gone:
            lowered.append((gone, position))
            macs ^= gone
    return lowered
