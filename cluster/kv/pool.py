"""The blocks of one memory pool: who is free, who is referenced, whose content is known.

Owns the reference counts, the free queue and the map from content to block. State of block b lives at index b of flat
arrays, so a block costs no Python object until it is cached.

    block             ref_count   in the free queue          hash   in the map
    null (0)          0           no: it is the sentinel     no     no
    in use            > 0         no                         no     no
    in use, cached    > 0         no                         yes    yes
    free, empty       0           before all cached ones     no     no
    free, cached      0           least recently used first  yes    yes
"""

from array import array
from collections.abc import Sequence

from cluster.kv.events import EventLog
from cluster.kv.hashing import BlockHash
from cluster.kv.layout import NULL_BLOCK


class BlockPool:
    """Hands out block ids, shares cached ones and forgets the least recently used content when it runs short."""

    def __init__(self, num_blocks: int, num_groups: int, events: EventLog) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self._num_groups = num_groups
        self._events = events
        self.reset()

    def reset(self) -> None:
        """Forget everything. Makes no events: only a new epoch can tell others that a whole cache is gone."""
        num_blocks = self.num_blocks
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._groups = array("H", bytes(2 * num_blocks))
        self._block_by_hash: tuple[dict[BlockHash, int], ...] = tuple({} for _ in range(self._num_groups))
        # A circular doubly linked list through the null block, so that no link needs a special case.
        self._next = array("i", [*range(1, num_blocks), NULL_BLOCK])
        self._prev = array("i", [num_blocks - 1, *range(num_blocks - 1)])
        self._num_free = num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody references, whether or not they still hold cached content."""
        return self._num_free

    @property
    def num_cached(self) -> int:
        """Blocks whose content can be found by its hash, referenced or not."""
        return sum(map(len, self._block_by_hash))

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold the block."""
        return self._ref_counts[block_id]

    def find(self, block_hash: BlockHash, group: int) -> int | None:
        """The block that holds this content. Does not count as a use."""
        return self._block_by_hash[group].get(block_hash)

    def allocate(self, num_blocks: int) -> tuple[int, ...]:
        """Take the first blocks of the free queue, each with one reference; whatever they cached is forgotten.

        The caller has made sure that so many are free. O(num_blocks).
        """
        assert num_blocks <= self._num_free, f"{num_blocks} blocks asked for, {self._num_free} free"
        taken: list[int] = []
        block_id = self._next[NULL_BLOCK]
        for _ in range(num_blocks):
            if self._hashes[block_id] is not None:
                self._evict(block_id)
            self._ref_counts[block_id] = 1
            taken.append(block_id)
            block_id = self._next[block_id]
        self._link(NULL_BLOCK, block_id)
        self._num_free -= num_blocks
        return tuple(taken)

    def touch(self, block_ids: Sequence[int]) -> None:
        """One more reference to each; those that were free leave the free queue. O(len(block_ids))."""
        for block_id in block_ids:
            assert block_id != NULL_BLOCK, "the null block is never shared"
            if self._ref_counts[block_id] == 0:
                self._link(self._prev[block_id], self._next[block_id])
                self._num_free -= 1
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """One reference less to each block of a chain, given first to last. O(len(block_ids)).

        Without its head a chain's tail is useless, so the tail is queued, and later evicted, first. Blocks without
        content worth keeping go to the head of the queue: reusing them costs nobody a hit.
        """
        for block_id in reversed(block_ids):
            ref_count = self._ref_counts[block_id] - 1
            assert ref_count >= 0, f"block {block_id} was freed more often than taken"
            self._ref_counts[block_id] = ref_count
            if ref_count == 0:
                after = NULL_BLOCK if self._hashes[block_id] is None else self._prev[NULL_BLOCK]
                before = self._next[after]
                self._link(after, block_id)
                self._link(block_id, before)
                self._num_free += 1

    def register(
        self, block_id: int, group: int, block_hash: BlockHash, parent_hash: BlockHash | None, block_index: int
    ) -> None:
        """Make the content of a referenced block findable.

        If another block holds the same content already, that one stays the one found and this one stays unknown.
        """
        assert self._ref_counts[block_id] > 0, f"block {block_id} is registered but nobody holds it"
        assert self._hashes[block_id] is None, f"block {block_id} is registered twice"
        if block_hash in self._block_by_hash[group]:
            return
        self._block_by_hash[group][block_hash] = block_id
        self._hashes[block_id] = block_hash
        self._groups[block_id] = group
        self._events.stored(group, block_hash, parent_hash, block_index)

    def snapshot(self) -> list[tuple[int, BlockHash]]:
        """(group, block_hash) of everything cached: what replaying all events of this epoch gives."""
        return [(group, h) for group, block_by_hash in enumerate(self._block_by_hash) for h in block_by_hash]

    def free_queue(self) -> list[int]:
        """Free blocks in the order in which they will be taken. O(num_free): for checks."""
        queue: list[int] = []
        block_id = self._next[NULL_BLOCK]
        while block_id != NULL_BLOCK:
            assert self._prev[self._next[block_id]] == block_id, f"the free queue's links part at block {block_id}"
            queue.append(block_id)
            assert len(queue) < self.num_blocks, "the free queue has a cycle beside its sentinel"
            block_id = self._next[block_id]
        return queue

    def check(self) -> None:
        """Assert the table at the top of this module for every block. O(num_blocks)."""
        queue = self.free_queue()
        assert len(queue) == self._num_free, f"{len(queue)} blocks queued, {self._num_free} counted as free"
        assert self._ref_counts[NULL_BLOCK] == 0, "the null block is referenced"
        assert self._hashes[NULL_BLOCK] is None, "the null block is cached"
        unreferenced = {block_id for block_id in range(1, self.num_blocks) if self._ref_counts[block_id] == 0}
        assert set(queue) == unreferenced, f"queued and unreferenced blocks differ: {set(queue) ^ unreferenced}"
        is_cached = [self._hashes[block_id] is not None for block_id in queue]
        assert is_cached == sorted(is_cached), "a cached block is queued before an empty one"
        mapped = {
            block_id: (group, block_hash)
            for group, block_by_hash in enumerate(self._block_by_hash)
            for block_hash, block_id in block_by_hash.items()
        }
        known = {i: (self._groups[i], h) for i, h in enumerate(self._hashes) if h is not None}
        assert mapped == known, "the map and the blocks' own hashes differ"
        assert len(mapped) == self.num_cached, "a block is mapped twice"

    def _evict(self, block_id: int) -> None:
        block_hash = self._hashes[block_id]
        assert block_hash is not None
        self._hashes[block_id] = None
        group = self._groups[block_id]
        del self._block_by_hash[group][block_hash]
        self._events.removed(group, block_hash)

    def _link(self, first: int, second: int) -> None:
        self._next[first] = second
        self._prev[second] = first
