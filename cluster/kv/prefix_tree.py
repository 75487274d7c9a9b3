"""What is cached, by prefix: a radix tree over block hashes (the idea is SGLang's RadixAttention, there over tokens).

A segment is a run of consecutive blocks of one prefix without a branch. Its hashes lie end to end in one bytearray, its
block ids in one array a group, so that a block costs 16 bytes and 4 a group, and matching, storing and forgetting go by
slices. A block hash stands for its whole prefix: a position in the tree is a (prefix, block) as the hash is.

A position may lack its block in some groups (id 0): a window that was left behind, a state that was never kept. Groups
of full attention have theirs at every position, because eviction goes tail first.
"""

from array import array
from collections.abc import Iterator, Sequence

from cluster.kv.ages import Prefix
from cluster.kv.hashing import HASH_BYTES, BlockHash


class Segment(Prefix):
    """Positions `[start, end)` of one prefix. `blocks[group]` holds the block id of each, or the null block."""

    __slots__ = (
        "blocks", "children", "entry", "hashes", "is_point", "kind", "num_cursors", "num_passes", "num_stops", "parent",
        "pinned_until_s", "priority", "start", "thinned",
    )  # fmt: skip

    def __init__(self, parent: "Segment | None", start: int, num_groups: int) -> None:
        super().__init__()
        self.parent = parent
        self.start = start
        self.children: dict[bytes, Segment] = {}
        self.hashes = bytearray()
        self.blocks = [array("i") for _ in range(num_groups)]
        # Its end is worth resuming at: a prompt, turn or hinted message ended, or two prompts parted there.
        self.is_point = False
        # Of that point: a PointKind.
        self.kind = 0
        # Sequences whose newest registered block is its last: they will append below.
        self.num_cursors = 0
        # Its place in the order of eviction, if it has one; owned by `Ranking`.
        self.entry: tuple[float, int, Segment, bool] | None = None
        # Requests that wanted no more than this prefix, and that wanted more.
        self.num_stops = 0
        self.num_passes = 0
        # Blocks below this position that no resume point needs are gone already, by group.
        self.thinned = [start] * num_groups
        self.pinned_until_s = 0.0
        self.priority = 0

    @property
    def num_blocks(self) -> int:
        """Positions in the segment."""
        return len(self.hashes) // HASH_BYTES

    @property
    def end(self) -> int:
        """One past its last position."""
        return self.start + len(self.hashes) // HASH_BYTES

    @property
    def first_hash(self) -> bytes:
        """What its parent knows it by."""
        return bytes(self.hashes[:HASH_BYTES])

    def hash_at(self, position: int) -> BlockHash:
        """Of one of its positions."""
        at = (position - self.start) * HASH_BYTES
        return BlockHash(bytes(self.hashes[at : at + HASH_BYTES]))

    def hashes_between(self, first: int, last: int) -> bytes:
        """Of positions `[first, last)`."""
        return bytes(self.hashes[(first - self.start) * HASH_BYTES : (last - self.start) * HASH_BYTES])

    def hash_before(self, position: int) -> BlockHash | None:
        """Of the position before one of its own; None at the start of the prefix."""
        if position > self.start:
            return self.hash_at(position - 1)
        assert self.parent is not None
        return self.parent.hash_at(position - 1) if position else None


class PrefixTree:
    """Owns the segments. Knows nothing of references or memory."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.root = Segment(None, 0, self.num_groups)
        self.num_segments = 0
        # Grows with every split: paths found before name segments that have shrunk.
        self.num_splits = 0

    def match(self, hashes: bytes, max_blocks: int) -> tuple[list[Segment], int]:
        """Segments that a prefix leads through, the last one perhaps in part, and how many positions it finds.

        O(segments + log blocks) comparisons of bytes.
        """
        path: list[Segment] = []
        segment, depth = self.root, 0
        limit = min(max_blocks, len(hashes) // HASH_BYTES)
        while depth < limit:
            at = depth * HASH_BYTES
            child = segment.children.get(hashes[at : at + HASH_BYTES])
            if child is None:
                break
            path.append(child)
            num_common = _num_common(child.hashes, 0, hashes, depth, limit - depth)
            depth += num_common
            if num_common < child.num_blocks:
                break
            segment = child
        return path, depth

    def split(self, segment: Segment, at: int) -> Segment:
        """Cut a segment before position `at`, strictly inside it; returns the new upper part. O(blocks moved)."""
        assert segment.start < at < segment.end
        assert segment.parent is not None
        upper = Segment(segment.parent, segment.start, self.num_groups)
        num_blocks = at - segment.start
        segment.parent.children[segment.first_hash] = upper
        upper.hashes = segment.hashes[: num_blocks * HASH_BYTES]
        del segment.hashes[: num_blocks * HASH_BYTES]
        for group, blocks in enumerate(segment.blocks):
            upper.blocks[group] = blocks[:num_blocks]
            del blocks[:num_blocks]
            upper.thinned[group] = min(segment.thinned[group], at)
            segment.thinned[group] = max(segment.thinned[group], at)
        for name in ("last_use", "gap", "pinned_until_s", "priority"):
            setattr(upper, name, getattr(segment, name))
        upper.num_passes = segment.num_passes + segment.num_stops
        segment.start, segment.parent = at, upper
        upper.children[segment.first_hash] = segment
        self.num_segments += 1
        self.num_splits += 1
        return upper

    def cut(self, segment: Segment, at: int) -> Segment:
        """The segment that ends at `at`, which lies in `(start, end]`: the same one, or its new upper part."""
        return segment if at == segment.end else self.split(segment, at)

    def append(self, segment: Segment, hashes: bytes, blocks: Sequence[Sequence[int]]) -> Segment:
        """Add positions after the end of a segment that has no child of that hash; returns where they are.

        They lengthen it unless something ends there: a resume point, a branch, another sequence. O(blocks).
        """
        if segment.parent is None or segment.is_point or segment.children or segment.num_cursors > 1:
            child = Segment(segment, segment.end, self.num_groups)
            child.last_use, child.priority = segment.last_use, segment.priority
            segment.children[hashes[:HASH_BYTES]] = child
            self.num_segments += 1
            segment = child
        segment.hashes += hashes
        for own, new in zip(segment.blocks, blocks, strict=True):
            own.extend(new)
        return segment

    def trim(self, segment: Segment, end: int) -> None:
        """Drop the positions from `end` on of a leaf; with the last of them goes the segment."""
        assert not segment.children
        assert segment.parent is not None
        num_blocks = end - segment.start
        if num_blocks == 0:
            del segment.parent.children[segment.first_hash]
            segment.parent = None
            self.num_segments -= 1
            return
        del segment.hashes[num_blocks * HASH_BYTES :]
        for blocks in segment.blocks:
            del blocks[num_blocks:]

    def present(self, path: Sequence[Segment], depth: int, group: int) -> bytes:
        """One byte for each of the first `depth` positions: 1 if the group has its block there. O(depth)."""
        parts = [bytes(map(bool, segment.blocks[group])) for segment in path]
        return b"".join(parts)[:depth]

    def walk(self) -> Iterator[Segment]:
        """All segments, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            segment = stack.pop()
            yield segment
            stack.extend(segment.children.values())

    def check(self) -> None:
        """Assert that links, counts and lengths agree. O(blocks)."""
        num_segments = 0
        for segment in self.walk():
            num_segments += 1
            assert segment.num_blocks > 0, "an empty segment is left"
            assert len(segment.hashes) % HASH_BYTES == 0
            assert all(len(blocks) == segment.num_blocks for blocks in segment.blocks), "a group lacks positions"
            for first_hash, child in segment.children.items():
                assert child.parent is segment
                assert child.start == segment.end, "positions have a hole"
                assert child.first_hash == first_hash
        assert num_segments == self.num_segments, "segments are miscounted"
        assert all(child.parent is self.root and child.start == 0 for child in self.root.children.values())


def _num_common(mine: bytearray, my_first: int, other: bytes, other_first: int, max_blocks: int) -> int:
    """How many hashes agree from there on: usually all, else found by bisection over slices."""
    limit = min(max_blocks, len(mine) // HASH_BYTES - my_first)
    a, b = my_first * HASH_BYTES, other_first * HASH_BYTES
    low, high = 0, limit
    if mine[a : a + limit * HASH_BYTES] == other[b : b + limit * HASH_BYTES]:
        return limit
    # A chain hash agrees only where all before it do.
    while high - low > 1:
        middle = (low + high) // 2
        at = (middle - 1) * HASH_BYTES
        if mine[a + at : a + at + HASH_BYTES] == other[b + at : b + at + HASH_BYTES]:
            low = middle
        else:
            high = middle
    return low


def num_common(segment: Segment, position: int, hashes: bytes, first: int) -> int:
    """How many of `hashes` from index `first` on agree with the segment's from `position` on."""
    return _num_common(segment.hashes, position - segment.start, hashes, first, len(hashes) // HASH_BYTES - first)
