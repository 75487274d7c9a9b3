"""KV events between a Mac and the router: msgpack, one batch a message."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgpack

from cluster.kv.events import BlockEvent, BlocksStored
from cluster.kv.hashing import BlockHash, split_hashes

# A block's content in one group.
Key = tuple[int, BlockHash]


@dataclass(frozen=True, slots=True)
class Batch:
    """Blocks whose presence on one Mac changed; `seq` numbers a Mac's batches without a gap."""

    mac: str
    epoch: int
    seq: int
    stored: tuple[Key, ...]
    removed: tuple[Key, ...]


class PendingEvents:
    """Transitions not yet sent, reduced to their net effect: of several for one key the last one counts."""

    def __init__(self) -> None:
        self._present: dict[Key, bool] = {}

    def __len__(self) -> int:
        return len(self._present)

    def add(self, events: Iterable[BlockEvent]) -> None:
        """Note what happened, in order."""
        for event in events:
            is_stored, group = isinstance(event, BlocksStored), event.group
            for block_hash in split_hashes(event.hashes):
                self._present[(group, block_hash)] = is_stored

    def take(self, mac: str, epoch: int, seq: int) -> Batch:
        """All that is pending, as one batch."""
        present, self._present = self._present, {}
        stored = tuple(key for key, is_stored in present.items() if is_stored)
        removed = tuple(key for key, is_stored in present.items() if not is_stored)
        return Batch(mac, epoch, seq, stored, removed)

    def clear(self) -> None:
        """Forget: a snapshot or a new epoch makes them moot."""
        self._present.clear()


def pack(batch: Batch) -> bytes:
    """Bytes of one batch."""
    packed: bytes = msgpack.packb((batch.mac, batch.epoch, batch.seq, batch.stored, batch.removed))
    return packed


def unpack(data: bytes) -> Batch:
    """Inverse of `pack`."""
    mac, epoch, seq, stored, removed = msgpack.unpackb(data, use_list=False)
    return Batch(mac, epoch, seq, stored, removed)


def pack_keys(keys: Iterable[Key]) -> bytes:
    """A Mac's whole set, for a snapshot."""
    packed: bytes = msgpack.packb(tuple(keys))
    return packed


def unpack_keys(data: bytes) -> tuple[Key, ...]:
    """Inverse of `pack_keys`."""
    keys: tuple[Key, ...] = msgpack.unpackb(data, use_list=False)
    return keys
