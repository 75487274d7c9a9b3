"""KV events between a Mac and the router: msgpack, one batch a message."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from cluster.kv.events import BlockEvent, BlocksRemoved, BlocksStored


@dataclass(frozen=True, slots=True)
class Batch:
    """What changed on one Mac, in order; `seq` numbers a Mac's batches without a gap."""

    mac: str
    epoch: int
    seq: int
    events: Sequence[BlockEvent]


def pack(batch: Batch) -> bytes:
    """Bytes of one batch."""
    packed: bytes = msgpack.packb((batch.mac, batch.epoch, batch.seq, batch.events))
    return packed


def unpack(data: bytes) -> Batch:
    """Inverse of `pack`. Stored runs have four fields, removed ones two."""
    mac, epoch, seq, events = msgpack.unpackb(data, use_list=False)
    return Batch(
        mac, epoch, seq, tuple(BlocksStored(*each) if len(each) == 4 else BlocksRemoved(*each) for each in events)
    )
