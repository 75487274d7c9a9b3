"""What the router learns of a Mac's cache: blocks' content became present (0 -> 1) or absent (1 -> 0).

There is one copy of a content in a group, so replaying a Mac's events gives exactly its set of block hashes. Hashes go
end to end in one bytes object: an event costs the same for one block and for a thousand.
"""

from typing import NamedTuple

from cluster.kv.hashing import HASH_BYTES, BlockHash


class BlocksStored(NamedTuple):
    """The KV of consecutive blocks of one prefix is present in a group.

    `first_index` is the first one's index in the prefix, `parent_hash` the hash before it, None at the prefix's start.
    In a group of recurrent states a hash stands for the state after that block.
    """

    group: int
    hashes: bytes
    parent_hash: BlockHash | None
    first_index: int


class BlocksRemoved(NamedTuple):
    """No block here holds these contents any more."""

    group: int
    hashes: bytes


BlockEvent = BlocksStored | BlocksRemoved


class EventLog:
    """Transitions since they were last taken, in order, and a digest of what is present.

    Grows until they are taken: take them after every step. The digest of a group is the XOR of its present hashes:
    independent of order, updated with the transitions, equal for equal sets.
    """

    def __init__(self, num_groups: int) -> None:
        self._events: list[BlockEvent] = []
        self._digests = [0] * num_groups
        # Blocks present in each group.
        self.num_present = [0] * num_groups

    def stored(self, group: int, hashes: bytes, parent_hash: BlockHash | None, first_index: int) -> None:
        """Note that blocks' content became present."""
        self._events.append(BlocksStored(group, hashes, parent_hash, first_index))
        self.num_present[group] += len(hashes) // HASH_BYTES
        self._digests[group] ^= xor_of(hashes)

    def removed(self, group: int, hashes: bytes) -> None:
        """Note that blocks' content is gone."""
        self._events.append(BlocksRemoved(group, hashes))
        self.num_present[group] -= len(hashes) // HASH_BYTES
        self._digests[group] ^= xor_of(hashes)

    def take(self) -> tuple[BlockEvent, ...]:
        """All events since the last call, oldest first."""
        taken = tuple(self._events)
        self._events.clear()
        return taken

    def digests(self) -> tuple[int, ...]:
        """One of each group."""
        return tuple(self._digests)

    def reset(self) -> None:
        """Everything is gone, and so are the events not taken."""
        self._events.clear()
        self._digests = [0] * len(self._digests)
        self.num_present = [0] * len(self.num_present)


def xor_of(hashes: bytes) -> int:
    """XOR of all hashes, as an integer. O(bytes), in O(log hashes) steps: the halves are folded onto each other."""
    value, num_hashes = int.from_bytes(hashes, "little"), len(hashes) // HASH_BYTES
    while num_hashes > 1:
        num_hashes = -(-num_hashes // 2)
        num_bits = num_hashes * HASH_BYTES * 8
        value = (value & ((1 << num_bits) - 1)) ^ (value >> num_bits)
    return value
