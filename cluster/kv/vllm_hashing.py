"""vLLM's block hashes, for comparing caches with it: what vLLM gives with `--prefix-caching-hash-algo sha256_cbor`.

`h_i = sha256(cbor([h_{i-1}, [tokens of block i], extras or null]))`, in canonical CBOR (RFC 8949, section 4.2), written
out here for the few types that occur. Nothing here addresses our own blocks: that is `cluster/kv/hashing.py`.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TypeAlias

# What vLLM puts into a block's extra keys: LoRA names, cache salts, (image digest, offset), digests of embeddings.
CborValue: TypeAlias = int | bytes | str | Sequence["CborValue"] | None

# Major types, in the upper three bits of an item's first byte.
_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY = (major << 5 for major in range(5))
_NULL = b"\xf6"


def encode_cbor(value: CborValue) -> bytes:
    """Canonical CBOR. Raises TypeError for any other type, OverflowError for an int beyond 64 bits."""
    match value:
        case None:
            return _NULL
        case bool():
            pass  # An int in Python, but not in CBOR.
        case int():
            return _head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value)
        case bytes():
            return _head(_BYTES, len(value)) + value
        case str():
            raw = value.encode()
            return _head(_TEXT, len(raw)) + raw
        case list() | tuple():
            return _head(_ARRAY, len(value)) + b"".join(map(encode_cbor, value))
    raise TypeError(f"cannot encode a {type(value).__name__}; allowed are None, int, bytes, str, list and tuple")


def _head(major: int, argument: int) -> bytes:
    """An item's type and its argument (value or length) in the fewest bytes: what makes the encoding canonical."""
    if argument < 24:
        return bytes((major | argument,))
    for code, num_bytes in ((24, 1), (25, 2), (26, 4)):
        if argument < 1 << 8 * num_bytes:
            return bytes((major | code,)) + argument.to_bytes(num_bytes, "big")
    return bytes((major | 27,)) + argument.to_bytes(8, "big")


def none_hash_of(seed: str) -> bytes:
    """Parent of every first block in a vLLM that runs with PYTHONHASHSEED `seed`."""
    return sha256(encode_cbor(seed)).digest()


# vLLM's without PYTHONHASHSEED, since its pull request 51875 (2026); before, it was drawn anew by every process.
NONE_HASH = none_hash_of("vllm-none-hash")


def hash_blocks_sha256_cbor(
    token_ids: Sequence[int],
    block_size: int,
    extras: Mapping[int, Sequence[CborValue]] | None = None,
    *,
    none_hash: bytes = NONE_HASH,
) -> list[bytes]:
    """vLLM's 32-byte hashes of the full blocks, first to last. O(tokens).

    `extras` are the extra keys of single blocks by block index; no keys and an empty list of them are the same. Raises
    ValueError for a block_size below 1, and what `encode_cbor` raises.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    extras = extras or {}
    parent = none_hash
    hashes: list[bytes] = []
    for index in range(len(token_ids) // block_size):
        tokens = tuple(token_ids[index * block_size : (index + 1) * block_size])
        parent = sha256(encode_cbor((parent, tokens, extras.get(index) or None))).digest()
        hashes.append(parent)
    return hashes


def event_hash(block_hash: bytes) -> int:
    """The form that a hash has in vLLM's KV events unless VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0: its last 64 bits."""
    return int.from_bytes(block_hash[-8:], "big")
