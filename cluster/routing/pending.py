"""Prompts under way: what routed requests are about to compute, before their Macs confirm it.

A radix tree of the block hashes of live bookings. Hashes are chained, so equal at one place means equal before it: a
booking costs a few look-ups for each place where prompts part, not one for each block.
"""

from collections.abc import Mapping, Sequence

from cluster.kv.hashing import BlockHash
from cluster.routing.match import Depths


class PendingNode:
    """A run of blocks without a branch. `counts` are the chains through it by slot, and `mask` has their bits."""

    __slots__ = ("children", "counts", "end", "hashes", "mask", "parent", "start")

    def __init__(self, parent: "PendingNode | None", hashes: Sequence[BlockHash], start: int, end: int) -> None:
        self.parent = parent
        self.hashes = hashes
        self.start = start
        self.end = end
        self.children: dict[BlockHash, PendingNode] = {}
        self.counts: dict[int, int] = {}
        self.mask = 0


class PendingChains:
    """Chains by slot; one chain may be there many times. Memory is that of the chains that are held."""

    def __init__(self) -> None:
        self._root = PendingNode(None, (), 0, 0)

    def __bool__(self) -> bool:
        return bool(self._root.children)

    def add(self, slot: int, hashes: Sequence[BlockHash]) -> PendingNode:
        """Count a chain of at least one block; what it returns is for `discard`. `hashes` must not change."""
        node, depth, end = self._root, 0, len(hashes)
        while depth < end:
            child = node.children.get(hashes[depth])
            if child is None:
                child = node.children[hashes[depth]] = PendingNode(node, hashes, depth, end)
            else:
                depth = _common(child, hashes)
                if depth < child.end:
                    child = self._split(child, depth)
            node, depth = child, child.end
            node.counts[slot] = node.counts.get(slot, 0) + 1
            node.mask |= 1 << slot
        return node

    def discard(self, slot: int, node: PendingNode) -> None:
        """Take back one chain of a slot that ends in this node."""
        parent = node.parent
        while parent is not None:
            node.counts[slot] -= 1
            if not node.counts[slot]:
                del node.counts[slot]
                node.mask ^= 1 << slot
                if not node.counts:
                    del parent.children[node.hashes[node.start]]
            node, parent = parent, parent.parent

    def match(self, hashes: Sequence[BlockHash], macs: int) -> Depths:
        """How far a chain of each of `macs` goes along this prompt, deepest first, in blocks."""
        path: Depths = []
        node, depth = self._root, 0
        while depth < len(hashes) and depth == node.end:
            child = node.children.get(hashes[depth])
            if child is None:
                break
            node, depth = child, _common(child, hashes)
            path.append((node.mask, depth))
        depths: Depths = []
        for mask, depth in reversed(path):
            if mask & macs:
                depths.append((mask & macs, depth))
                macs &= ~mask
        return depths

    def check(self, ends: Mapping[int, Mapping[PendingNode, int]]) -> None:
        """Raises AssertionError unless the chains are exactly those that end in these nodes, by slot and node."""
        counts: dict[PendingNode, dict[int, int]] = {}
        for slot, nodes in ends.items():
            for end, count in nodes.items():
                node, parent = end, end.parent
                while parent is not None:
                    by_slot = counts.setdefault(node, {})
                    by_slot[slot] = by_slot.get(slot, 0) + count
                    node, parent = parent, parent.parent
        stack = list(self._root.children.values())
        num_nodes = 0
        while stack:
            node = stack.pop()
            num_nodes += 1
            assert node.parent is not None
            assert node.parent.children[node.hashes[node.start]] is node
            assert node.parent.end == node.start < node.end
            assert node.counts == counts[node]
            assert node.mask == sum(1 << slot for slot in node.counts)
            stack.extend(node.children.values())
        assert num_nodes == len(counts), "a node without chains, or chains without a node"

    def _split(self, lower: PendingNode, at: int) -> PendingNode:
        """The new node is the upper one, so that ends that callers keep stay ends."""
        assert lower.parent is not None
        upper = PendingNode(lower.parent, lower.hashes, lower.start, at)
        upper.counts = dict(lower.counts)
        upper.mask = lower.mask
        lower.parent.children[lower.hashes[lower.start]] = upper
        upper.children[lower.hashes[at]] = lower
        lower.parent, lower.start = upper, at
        return upper


def _common(node: PendingNode, hashes: Sequence[BlockHash]) -> int:
    """Where a prompt parts from the node's run, whose first block it has."""
    return num_common(node.hashes, hashes, node.start + 1, min(node.end, len(hashes)))


def num_common(own: Sequence[BlockHash], hashes: Sequence[BlockHash], low: int, high: int) -> int:
    """How many of their first `high` blocks two chains share, if they do the first `low`. O(log blocks)."""
    if high <= low or own[high - 1] == hashes[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if own[middle] == hashes[middle]:
            low = middle + 1
        else:
            high = middle
    return low
