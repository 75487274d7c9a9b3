"""What a resume point costs to keep and to lose: bytes that only it needs, and where a request would fall back to."""

from collections.abc import Sequence

from cluster.kv.group_managers import GroupManager
from cluster.kv.layout import NULL_BLOCK
from cluster.kv.prefix_tree import Segment


class PointCosts:
    """Bytes by the rules of a model's groups."""

    def __init__(self, managers: Sequence[GroupManager], block_size: int) -> None:
        self._managers = managers
        self._block_size = block_size

    def leaf_bytes(self, segment: Segment, fallback: int) -> int:
        """What goes with a leaf's point: its window and state, and the blocks that only it can use."""
        top = segment
        while top.parent is not None and top.parent.parent is not None and _is_passage(top.parent):
            top = top.parent
        freed = self.inner_bytes(segment, fallback)
        return freed + sum(m.page_bytes for m in self._managers if m.is_full) * (segment.end - top.start)

    def inner_bytes(self, segment: Segment, fallback: int) -> int:
        """What an inner point needs that the one above, at `fallback`, does not: its window and its state.

        Points below may share some of its window; counting all of it lets a chain of close points thin out.
        """
        freed = 0
        for manager in self._managers:
            if manager.is_state:
                freed += manager.page_bytes * (segment.blocks[manager.group_id][-1] != NULL_BLOCK)
            elif not manager.is_full:
                first = max(manager.first_needed(segment.end * self._block_size), fallback)
                freed += manager.page_bytes * (segment.end - first)
        return freed


def fallback_of(segment: Segment) -> int:
    """Where a request would resume if this point were gone: the nearest point above, in blocks."""
    node = segment.parent
    while node is not None and node.parent is not None:
        if node.is_point:
            return node.end
        node = node.parent
    return 0


def _is_passage(segment: Segment) -> bool:
    """Nothing ends or branches there: only what lies below makes it useful."""
    return len(segment.children) == 1 and not segment.is_point and segment.num_cursors == 0
