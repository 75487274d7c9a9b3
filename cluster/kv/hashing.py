"""The hash of the system: content addresses of KV blocks, equal on every machine and Python.

`h_i = blake2b-128(h_{i-1}, tokens of block i as little-endian u32, extras)`. The root pins everything that makes KV
interchangeable, so two Macs agree on a block_hash exactly when either could use the other's block.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from struct import iter_unpack
from sys import byteorder
from typing import NewType, cast

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


def hash_blocks(
    root: BlockHash, token_ids: Sequence[int], block_size: int, extras: Mapping[int, Sequence[str]] | None = None
) -> list[BlockHash]:
    """Addresses of the full blocks of a sequence, first to last; a trailing partial block has none. O(tokens).

    The same as `hash_block` block by block, in under half its time. `extras` are those of single blocks by block index;
    those of blocks that are not full wait for them to be. Raises ValueError for a block_size below 1 or a negative
    index, OverflowError for a token outside 32 bits.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    num_blocks = len(token_ids) // block_size
    tokens = array("I", token_ids[: num_blocks * block_size])
    if byteorder == "big":  # pragma: no cover
        tokens.byteswap()
    contents = [content for (content,) in iter_unpack(f"{tokens.itemsize * block_size}s", tokens)]
    for index, fields in (extras or {}).items():
        if index < 0:
            raise ValueError(f"extras are keyed by block indices of at least 0, got {index}")
        if index < num_blocks:
            contents[index] += _typed(fields)
    hashes: list[bytes] = []
    parent: bytes = root
    # Copying an empty state costs less than the constructor, whose many parameters are parsed at every call.
    new_state = blake2b(digest_size=HASH_BYTES).copy
    for content in contents:
        digest = new_state()
        digest.update(parent + content)
        parent = digest.digest()
        hashes.append(parent)
    return cast(list[BlockHash], hashes)


def first_extras(salt: str, adapter: str = "") -> dict[int, tuple[str, ...]]:
    """Extras that keep what is cached under one salt, or by one adapter (its digest), from all else; none without."""
    extras = (("lora", adapter) if adapter else ()) + (("salt", salt) if salt else ())
    return {0: extras} if extras else {}


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
