"""What a resume point costs to keep and to lose: bytes that only it needs, and where a request would fall back to."""

from collections.abc import Sequence

from cluster.kv.group_managers import GroupManager, locals_by_rule
from cluster.kv.layout import NULL_BLOCK
from cluster.kv.prefix_tree import Segment


class PointCosts:
    """Bytes by the rules of a model's groups."""

    def __init__(self, managers: Sequence[GroupManager], block_size: int) -> None:
        self._block_size = block_size
        self._full_page_bytes = sum(m.page_bytes for m in managers if m.is_full)
        self._states = [m for m in managers if m.is_state]
        windows = locals_by_rule(managers)
        self._windows = [(same[0], sum(m.page_bytes for m in same)) for same in windows]

    def leaf_bytes(self, segment: Segment, fallback: int) -> int:
        """What goes with a leaf's point: its window and state, and the blocks that only it can use."""
        top = segment
        while top.parent is not None and top.parent.parent is not None and _is_passage(top.parent):
            top = top.parent
        return self.inner_bytes(segment, fallback) + self._full_page_bytes * (segment.end - top.start)

    def inner_bytes(self, segment: Segment, fallback: int) -> int:
        """What an inner point needs that the one above, at `fallback`, does not: its window and its state.

        Points below may share some of its window; counting all of it lets a chain of close points thin out.
        """
        end = segment.end
        freed = sum(m.page_bytes for m in self._states if segment.blocks[m.group_id][-1] != NULL_BLOCK)
        for manager, page_bytes in self._windows:
            freed += page_bytes * (end - max(manager.first_needed(end * self._block_size), fallback))
        return freed

    def is_free(self, segment: Segment) -> bool:
        """Whether nothing at all is needed there: at a chunk's start, where all layers attend within their chunk."""
        return not self._full_page_bytes and self.inner_bytes(segment, 0) == 0


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
