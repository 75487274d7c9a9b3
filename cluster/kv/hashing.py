"""The only hash in the system: content addresses of KV blocks, equal on every machine and Python.

`h_i = blake2b-128(h_{i-1}, tokens of block i as little-endian u32, extras)`. The root pins everything that makes KV
interchangeable, so two Macs agree on a block_hash exactly when either could use the other's block.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from sys import byteorder
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16


def root_hash(*, model: str, tokenizer: str, kv_format: str, block_size: int) -> BlockHash:
    """Parent of every first block.

    `model` and `tokenizer` identify content (digests or hub revisions), not paths; `kv_format` names dtype and layout.
    Raises ValueError if block_size is not positive.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    fields = (model, tokenizer, kv_format, str(block_size))
    return BlockHash(blake2b(_typed(fields), digest_size=HASH_BYTES, person=b"cidery-root-v1").digest())


def hash_block(parent: BlockHash, token_ids: Sequence[int], extras: Iterable[str] = ()) -> BlockHash:
    """Address of the block that holds `token_ids` after the prefix that `parent` stands for.

    `extras` (LoRA, tenant salt, image digests) go into the block in which they take effect; the chain carries them on.
    """
    tokens = array("I", token_ids)
    if byteorder == "big":  # pragma: no cover
        tokens.byteswap()
    digest = blake2b(parent, digest_size=HASH_BYTES)
    digest.update(tokens.tobytes())
    extra_bytes = _typed(extras)
    if extra_bytes:
        digest.update(extra_bytes)
    return BlockHash(digest.digest())


def hash_blocks(root: BlockHash, token_ids: Sequence[int], block_size: int) -> list[BlockHash]:
    """Addresses of the full blocks of a sequence, first to last; a trailing partial block has none. O(tokens)."""
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


def join_hashes(hashes: Iterable[BlockHash]) -> bytes:
    """The wire form: digests end to end."""
    return b"".join(hashes)


def split_hashes(joined: bytes) -> list[BlockHash]:
    """Inverse of `join_hashes`. Raises ValueError unless the length is a multiple of the digest's."""
    if len(joined) % HASH_BYTES:
        raise ValueError(f"block hashes must be a multiple of {HASH_BYTES} bytes, got {len(joined)}")
    return [BlockHash(joined[i : i + HASH_BYTES]) for i in range(0, len(joined), HASH_BYTES)]


def _typed(fields: Iterable[str]) -> bytes:
    """Length-prefixed, so that no two lists of fields share an encoding."""
    parts: list[bytes] = []
    for field in fields:
        raw = field.encode()
        parts.append(b"s" + len(raw).to_bytes(4, "little") + raw)
    return b"".join(parts)
