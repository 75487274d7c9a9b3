"""What one live sequence holds, and what a look-up found for one that is to begin."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from cluster.kv.points import PointKind
from cluster.kv.prefix_tree import Segment

# Block ids by group.
GroupBlocks = Mapping[int, tuple[int, ...]]

NO_BLOCKS: GroupBlocks = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """The longest cached prefix that a sequence can go on from.

    `limited_by` is the group that ended it: the one that lacks a window or a state where others have blocks further
    on, or the first group where the content itself was never here; None if everything that may hit did.
    `num_matched_tokens` is how far the content is known: beyond `num_tokens`, a prefix that this one shares with
    somebody's but can't resume.
    """

    num_tokens: int
    limited_by: int | None
    num_matched_tokens: int
    path: tuple[Segment, ...] = ()
    # Tokens that each group could go on from, if it were alone; empty: all the same.
    group_hits: tuple[int, ...] = ()
    # The hit ends inside its last block, which is copied before it is written.
    copies_last: bool = False
    # What it was found in: a look-up in another state may find something else.
    stamp: tuple[int, int, int] = (0, 0, 0)

    def parts(self, block_size: int) -> bool:
        """Whether something known goes on after what is matched, but otherwise: prompts part there."""
        if not self.path:
            return False
        end = self.path[-1]
        return self.num_matched_tokens < end.end * block_size or bool(end.children)


NO_HIT = ComputedBlocks(0, None, 0)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy one block in every layer of the group."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class TableEdit:
    """Entry `index` of a block table is now another block, which holds the same content."""

    seq_id: int
    group: int
    index: int
    block_id: int


@dataclass(frozen=True, slots=True)
class StartedBlocks:
    """Block tables of a new sequence, and what to do before it runs: state blocks are in the tables of their group."""

    tables: GroupBlocks
    copies: tuple[BlockCopy, ...]
    zeroes: GroupBlocks


# Pages of one checkpoint by group.
Pages = dict[int, int]


@dataclass(slots=True, eq=False)
class Sequence:
    """One live sequence. `cursor` is the segment that its newest registered block ends, at `depth`."""

    seq_id: int
    tables: list[list[int]]
    # Tokens whose KV has a place in every group.
    num_slots: int
    cursor: Segment
    depth: int
    # By group, the first table entry that it still holds; sinks apart.
    first_held: list[int]
    # Depths, in blocks, at which resume points are to be made, ascending.
    points: list[tuple[int, PointKind]] = field(default_factory=list)
    # Checkpoints planned and not confirmed yet, by depth.
    pending: dict[int, tuple[PointKind, Pages]] = field(default_factory=dict)
    # The newest confirmed checkpoint that is its own: it becomes a resume point when the sequence ends.
    tail: tuple[int, Pages] | None = None
    # Since a longer prefix of it was here, for what it registers.
    gap: int = -1
    priority: int = 0
    pinned_until_s: float = 0.0

    def checkpoints(self) -> list[Pages]:
        """Pages of all states that it keeps beside the one it works on."""
        kept = [pages for _, pages in self.pending.values()]
        return kept if self.tail is None else [*kept, self.tail[1]]
