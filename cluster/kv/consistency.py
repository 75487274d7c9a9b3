"""Asserts that pools, prefix tree and block tables tell the same. O(blocks): for tests and idle moments."""

from collections.abc import Collection
from collections.abc import Sequence as Seq

from cluster.kv.group_managers import GroupManager
from cluster.kv.layout import NULL_BLOCK
from cluster.kv.memory import PoolSet
from cluster.kv.prefix_tree import PrefixTree
from cluster.kv.sequence import Sequence


def check_references(
    pools: PoolSet,
    managers: Seq[GroupManager],
    tree: PrefixTree,
    sequences: Collection[Sequence],
    sources: Collection[tuple[int, int]],
) -> None:
    """What pools count is what tables, checkpoints and copies not made yet (`sources`) hold and the tree caches."""
    tree.check()
    for pool_id, pool in enumerate(pools.pools):
        held, cached = [0] * pool.num_blocks, dict[int, int]()
        groups = [m.group_id for m in managers if m.pool_id == pool_id]
        for sequence in sequences:
            for group in groups:
                for block_id in _ids(sequence, group):
                    held[block_id] += block_id != NULL_BLOCK
        for group, block_id in sources:
            held[block_id] += group in groups
        for segment in tree.walk():
            for group in groups:
                ids = [b for b in segment.blocks[group] if b != NULL_BLOCK]
                assert not cached.keys() & ids, "a block is at two places of the tree"
                assert not managers[group].is_full or len(ids) == segment.num_blocks, "a hole in full attention"
                cached.update(dict.fromkeys(ids, group))
        pool.check(held, cached)


def check_unfindable(
    num_unfindable: Seq[int], managers: Seq[GroupManager], tree: PrefixTree, sequences: Collection[Sequence]
) -> None:
    """By group, what sequences hold and the tree lacks is as many as was counted."""
    for manager, num_blocks in zip(managers, num_unfindable, strict=True):
        ids = {block_id for sequence in sequences for block_id in _ids(sequence, manager.group_id)}
        for segment in tree.walk():
            ids.difference_update(segment.blocks[manager.group_id])
        assert len(ids - {NULL_BLOCK}) == num_blocks, "blocks that only sequences know are miscounted"


def check_cursors(managers: Seq[GroupManager], tree: PrefixTree, sequences: Collection[Sequence]) -> None:
    """Each sequence ends a segment that knows of it, and no segment is left that nothing can use."""
    counted = dict.fromkeys([tree.root, *tree.walk()], 0)
    for sequence in sequences:
        assert sequence.cursor in counted, "a cursor lies in a segment that is gone"
        counted[sequence.cursor] += 1
        assert sequence.depth == sequence.cursor.end, "a cursor lies inside a segment"
    for segment, num_cursors in counted.items():
        assert segment.num_cursors == num_cursors, "cursors are miscounted"
        is_useful = segment.children or num_cursors or segment.is_point or segment is tree.root
        assert is_useful or all(m.is_full for m in managers), "an orphan is left"


def _ids(sequence: Sequence, group: int) -> list[int]:
    return sequence.tables[group] + [pages[group] for pages in sequence.checkpoints() if group in pages]
