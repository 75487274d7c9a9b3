"""The blocks of one size in bytes: who is referenced, who holds cached content, who is empty.

State of block b lives at index b of flat arrays, so a block costs no Python object. Groups that share the pool are told
apart by whose content a block holds.

    block             references   cached   counted as
    null (0)          0            no       neither
    in use            > 0          no       used
    in use, cached    > 0          yes      used
    cached            0            yes      evictable
    empty             0            no       empty

Which content a cached block holds is the prefix tree's to know, and which is forgotten first the retention policy's.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence

from cluster.kv.layout import NULL_BLOCK


class BlockPool:
    """Hands out block ids and counts references. Ids that were never used come last: memory is committed lazily."""

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one is the null block), got {num_blocks}")
        self.num_blocks = num_blocks
        self._num_groups = num_groups
        self.reset()

    def reset(self) -> None:
        """Forget everything but the size."""
        self._refs = array("i", bytes(4 * self.num_blocks))
        # One more than the group whose content it holds, or 0.
        self._owners = array("H", bytes(2 * self.num_blocks))
        # A stack: what was given back last is used first, while it is warm.
        self._returned = array("i")
        self._first_unused = NULL_BLOCK + 1
        # By owner.
        self._num_evictable = [0] * (self._num_groups + 1)
        self.num_cached = 0

    @property
    def num_evictable(self) -> int:
        """Cached blocks that nobody references. O(groups)."""
        return sum(self._num_evictable)

    def num_evictable_of(self, group: int) -> int:
        """Those of one group."""
        return self._num_evictable[group + 1]

    @property
    def num_empty(self) -> int:
        """Blocks that can be taken at once."""
        return len(self._returned) + self.num_blocks - self._first_unused

    @property
    def num_free(self) -> int:
        """Blocks that nobody references, whether or not they still hold cached content."""
        return self.num_empty + self.num_evictable

    @property
    def num_used(self) -> int:
        """Blocks that somebody references."""
        return self.num_blocks - 1 - self.num_free

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold the block."""
        return self._refs[block_id]

    def is_evictable(self, block_id: int) -> bool:
        """Whether it holds cached content that nobody references."""
        return self._owners[block_id] > 0 and self._refs[block_id] == 0

    def count(self, block_ids: Iterable[int]) -> tuple[int, int]:
        """How many there are, null blocks apart, and how many of them are evictable. O(blocks)."""
        refs, num_blocks, num_evictable = self._refs, 0, 0
        for block_id in block_ids:
            if block_id != NULL_BLOCK:
                num_blocks += 1
                if refs[block_id] == 0:
                    num_evictable += 1
        return num_blocks, num_evictable

    def allocate(self, num_blocks: int) -> list[int]:
        """Empty blocks, each with one reference. The caller has made sure that there are so many. O(num_blocks)."""
        assert num_blocks <= self.num_empty, f"{num_blocks} blocks asked for, {self.num_empty} empty"
        taken: list[int] = []
        num_returned = min(num_blocks, len(self._returned))
        if num_returned:
            taken = self._returned[-num_returned:].tolist()
            del self._returned[-num_returned:]
        num_unused = num_blocks - num_returned
        if num_unused:
            taken.extend(range(self._first_unused, self._first_unused + num_unused))
            self._first_unused += num_unused
        refs = self._refs
        for block_id in taken:
            refs[block_id] = 1
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        """One more reference to each; null blocks are passed over. O(blocks)."""
        refs, owners = self._refs, self._owners
        # Mostly all are of one owner: their count is kept at hand.
        last, num_taken = 0, 0
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            if refs[block_id] == 0:
                owner = owners[block_id]
                assert owner, f"block {block_id} is empty and can't be shared"
                if owner != last:
                    self._num_evictable[last] -= num_taken
                    last, num_taken = owner, 0
                num_taken += 1
            refs[block_id] += 1
        self._num_evictable[last] -= num_taken

    def free(self, block_ids: Iterable[int]) -> None:
        """One reference less to each; null blocks are passed over. O(blocks)."""
        refs, owners, returned = self._refs, self._owners, self._returned
        last, num_left = 0, 0
        for block_id in block_ids:
            if block_id == NULL_BLOCK:
                continue
            left = refs[block_id] - 1
            assert left >= 0, f"block {block_id} was freed more often than taken"
            refs[block_id] = left
            if left == 0:
                owner = owners[block_id]
                if not owner:
                    returned.append(block_id)
                    continue
                if owner != last:
                    self._num_evictable[last] += num_left
                    last, num_left = owner, 0
                num_left += 1
        self._num_evictable[last] += num_left

    def cache(self, block_ids: Sequence[int], group: int = 0) -> None:
        """From now on these hold cached content of a group. They are referenced. O(blocks)."""
        refs, owners, owner = self._refs, self._owners, group + 1
        for block_id in block_ids:
            assert refs[block_id] > 0, f"block {block_id} is cached but nobody holds it"
            assert not owners[block_id], f"block {block_id} is cached twice"
            owners[block_id] = owner
        self.num_cached += len(block_ids)

    def forget(self, block_ids: Iterable[int]) -> None:
        """Their content is not cached any more; those that nobody references become empty. O(blocks)."""
        refs, owners, returned = self._refs, self._owners, self._returned
        last, num_emptied, num_forgotten = 0, 0, 0
        for block_id in block_ids:
            owner = owners[block_id]
            assert owner, f"block {block_id} is not cached"
            owners[block_id] = 0
            num_forgotten += 1
            if refs[block_id] == 0:
                if owner != last:
                    self._num_evictable[last] -= num_emptied
                    last, num_emptied = owner, 0
                num_emptied += 1
                returned.append(block_id)
        self._num_evictable[last] -= num_emptied
        self.num_cached -= num_forgotten

    def grow(self, num_blocks: int) -> None:
        """So many more blocks."""
        self.num_blocks += num_blocks
        self._refs.frombytes(bytes(4 * num_blocks))
        self._owners.frombytes(bytes(2 * num_blocks))

    def shrink(self, num_blocks: int) -> dict[int, int]:
        """So many blocks less, taken off the end; at least so many are empty. O(blocks).

        Returns the moves, {source: target}, of blocks in use that lay there; whoever knows of them has to follow.
        """
        assert 0 < num_blocks <= self.num_empty, f"{num_blocks} blocks to give up, {self.num_empty} empty"
        end = self.num_blocks - num_blocks
        self._returned = array("i", sorted((b for b in self._returned if b < end), reverse=True))
        moves: dict[int, int] = {}
        for source in range(end, min(self._first_unused, self.num_blocks)):
            if self._refs[source] or self._owners[source]:
                # There is one: none below the end was never used, and so many blocks are empty.
                target = self._returned.pop()
                moves[source] = target
                self._refs[target], self._owners[target] = self._refs[source], self._owners[source]
        del self._refs[end:]
        del self._owners[end:]
        self.num_blocks = end
        self._first_unused = min(self._first_unused, end)
        return moves

    def check(self, held: Sequence[int], cached: Mapping[int, int]) -> None:
        """Assert the table at the top, given how often each block is in a block table and which the tree holds.

        `cached`: group by block.
        """
        assert list(self._refs) == list(held), "reference counts and block tables differ"
        found = {b: owner - 1 for b, owner in enumerate(self._owners) if owner}
        assert found == cached, "owners and the tree differ"
        assert self.num_cached == len(cached), "cached blocks are miscounted"
        assert not held[NULL_BLOCK], "the null block is referenced"
        assert NULL_BLOCK not in cached, "the null block is cached"
        empty = {b for b in range(1, self._first_unused) if not held[b] and b not in cached}
        assert len(self._returned) == len(empty), "a block was returned twice or lost"
        assert set(self._returned) == empty, "returned and empty blocks differ"
        evictable = [0] * (self._num_groups + 1)
        for block_id, group in cached.items():
            evictable[group + 1] += not held[block_id]
        assert self._num_evictable == evictable, "evictable blocks are miscounted"
        assert all(not held[b] and b not in cached for b in range(self._first_unused, self.num_blocks))
