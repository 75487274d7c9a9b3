"""Comparing two sets of block hashes without sending them: XOR of all, then of 256 buckets, then what differs.

A set's bucket is a hash's first byte. The XOR of a set's hashes is what `KVCacheManager.digests()` keeps.
"""

from collections.abc import Collection, Iterable
from struct import iter_unpack
from typing import cast

from cluster.kv.events import xor_of
from cluster.kv.hashing import HASH_BYTES, BlockHash

NUM_BUCKETS = 256
_FORMAT = f"{HASH_BYTES}s"


def hashes_in(joined: bytes | bytearray) -> list[BlockHash]:
    """As `split_hashes`, at half its cost. Raises ValueError unless the length is a multiple of the digest's."""
    if len(joined) % HASH_BYTES:
        raise ValueError(f"block hashes must be a multiple of {HASH_BYTES} bytes, got {len(joined)}")
    return cast(list[BlockHash], [block_hash for (block_hash,) in iter_unpack(_FORMAT, joined)])


def content_of(blocks: Iterable[tuple[int, BlockHash]], num_groups: int) -> tuple[bytes, ...]:
    """What a snapshot of (group, block_hash) holds, as joined hashes by group."""
    by_group: list[list[BlockHash]] = [[] for _ in range(num_groups)]
    for group, block_hash in blocks:
        by_group[group].append(block_hash)
    return tuple(map(b"".join, by_group))


def bucket_digests(hashes: Iterable[BlockHash]) -> tuple[int, ...]:
    """XOR of the hashes of each bucket."""
    buckets: list[list[BlockHash]] = [[] for _ in range(NUM_BUCKETS)]
    for block_hash in hashes:
        buckets[block_hash[0]].append(block_hash)
    return tuple(xor_of(b"".join(bucket)) for bucket in buckets)


def in_buckets(hashes: Iterable[BlockHash], buckets: Collection[int]) -> bytes:
    """The hashes of these buckets, joined."""
    wanted = frozenset(buckets)
    return b"".join(block_hash for block_hash in hashes if block_hash[0] in wanted)
