"""How many distinct tokens each Mac's requests have used of late: what a new prompt would push out in the end.

Every booking leaves a record under the hash of its prompt's last full block. A later turn of the same conversation has
that block a little before where its cached prefix ends (an answer lies between), and takes the record over: so a
conversation counts once, with its present length, and one that has been silent for a while no longer counts.
"""

from collections import OrderedDict
from collections.abc import Sequence

from cluster.kv.hashing import BlockHash

# Blocks between two prompts of a conversation: an answer of 1,024 tokens.
_MAX_ANSWER_BLOCKS = 64


class HotSets:
    """Records by slot, newest last; `num_blocks` are their sums."""

    def __init__(self, horizon_s: float) -> None:
        self.num_blocks: list[int] = []
        self._horizon_s = horizon_s
        self._records: list[OrderedDict[BlockHash, tuple[int, float]]] = []

    def add_slot(self) -> None:
        """One more Mac."""
        self.num_blocks.append(0)
        self._records.append(OrderedDict())

    def touch(self, slot: int, block_hashes: Sequence[BlockHash], num_matched: int, now_s: float) -> None:
        """A prompt was booked there whose first `num_matched` blocks are there already. O(1)."""
        if not block_hashes:
            return
        records, last = self._records[slot], len(block_hashes) - 1
        num_known, num_new = 0, last + 1 - num_matched
        first = max(0, num_matched - _MAX_ANSWER_BLOCKS)
        # Two passes: most prompts begin a conversation, or go on with one, and looking for nothing must be cheap.
        if not records.keys().isdisjoint([block_hashes[last], *block_hashes[first:num_matched]]):
            index = next(i for i in (last, *range(num_matched - 1, -1, -1)) if block_hashes[i] in records)
            num_known, num_new = records.pop(block_hashes[index])[0], last - index
        records[block_hashes[last]] = (num_known + num_new, now_s)
        self.num_blocks[slot] += num_new

    def expire(self, slot: int, now_s: float) -> None:
        """Forget what has been silent for longer than the horizon. O(what is forgotten)."""
        records = self._records[slot]
        while records:
            key, (num_blocks, used_s) = next(iter(records.items()))
            if now_s - used_s <= self._horizon_s:
                return
            del records[key]
            self.num_blocks[slot] -= num_blocks

    def clear(self, slot: int) -> None:
        """The Mac has lost what it held."""
        self._records[slot].clear()
        self.num_blocks[slot] = 0

    def check(self) -> None:
        """Raises AssertionError unless sums and records agree."""
        for num_blocks, records in zip(self.num_blocks, self._records, strict=True):
            assert num_blocks == sum(count for count, _ in records.values())
