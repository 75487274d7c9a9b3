"""What the router learns of a Mac's cache: a block's content became present (0 -> 1) or absent (1 -> 0).

Second copies of the same content make no event, so replaying a Mac's events gives exactly its set of block hashes.
All of them are plain tuples of ints, bytes and None: any encoder can carry them.
"""

from typing import NamedTuple

from cluster.kv.hashing import BlockHash


class BlockStored(NamedTuple):
    """The KV of block `block_index` of a prefix was computed here; `parent_hash` is None for a prefix's first block."""

    group: int
    block_hash: BlockHash
    parent_hash: BlockHash | None
    block_index: int


class BlockRemoved(NamedTuple):
    """No block here holds this content any more."""

    group: int
    block_hash: BlockHash


BlockEvent = BlockStored | BlockRemoved


class EventLog:
    """Transitions since they were last taken, in order. Grows until they are: take them after every step."""

    def __init__(self) -> None:
        self._events: list[BlockEvent] = []

    def stored(self, group: int, block_hash: BlockHash, parent_hash: BlockHash | None, block_index: int) -> None:
        """Note that a block's content became present."""
        self._events.append(BlockStored(group, block_hash, parent_hash, block_index))

    def removed(self, group: int, block_hash: BlockHash) -> None:
        """Note that a block's content is gone."""
        self._events.append(BlockRemoved(group, block_hash))

    def take(self) -> tuple[BlockEvent, ...]:
        """All events since the last call, oldest first."""
        taken = tuple(self._events)
        self._events.clear()
        return taken
