"""vLLM's hashes, against vectors made with cbor2, the encoder that vLLM uses, and against vLLM's own known values."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.kv.vllm_hashing import NONE_HASH, encode_cbor, event_hash, hash_blocks_sha256_cbor, none_hash_of

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "vllm_sha256_cbor.json").read_text())
SCALARS = st.none() | st.integers(-(2**64), 2**64 - 1) | st.binary(max_size=300) | st.text(max_size=300)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=30).map(tuple), max_leaves=40)


@pytest.mark.parametrize("chain", GOLDEN["chains"], ids=lambda c: c["name"])
def test_chains_are_those_of_cbor2(chain):
    extras = {int(index): keys for index, keys in chain["extras"].items()}
    hashes = hash_blocks_sha256_cbor(chain["token_ids"], chain["block_size"], extras)
    assert [h.hex() for h in hashes] == chain["block_hashes"]
    assert [event_hash(h) for h in hashes] == chain["event_hashes"]


@pytest.mark.parametrize(("value", "encoded"), GOLDEN["encodings"], ids=lambda v: repr(v)[:20])
def test_encodings_are_those_of_cbor2(value, encoded):
    assert encode_cbor(value).hex() == encoded


def test_the_first_block_of_a_vllm_without_a_hash_seed():
    """Seen in vLLM 0.33: the parent, the digest of tokens 0 to 15, and that block's name in its KV events."""
    assert NONE_HASH.hex() == GOLDEN["none_hash"]
    assert NONE_HASH.hex().startswith("9bd96a48")
    assert NONE_HASH.hex().endswith("81eef0")
    (block_hash,) = hash_blocks_sha256_cbor(range(16), 16)
    assert block_hash.hex().startswith("dc918a88")
    assert block_hash.hex().endswith("ac0749")
    assert event_hash(block_hash) == 2233398808101521225


def test_a_hash_seed_changes_every_block():
    assert none_hash_of("0").hex() == GOLDEN["none_hash_of_seed_0"]
    seeded = hash_blocks_sha256_cbor(range(32), 16, none_hash=none_hash_of("0"))
    assert not set(seeded) & set(hash_blocks_sha256_cbor(range(32), 16))
    assert seeded[0] == sha256(encode_cbor((none_hash_of("0"), tuple(range(16)), None))).digest()


def test_an_empty_list_of_extras_is_none():
    assert hash_blocks_sha256_cbor(range(8), 4, {1: ()}) == hash_blocks_sha256_cbor(range(8), 4)


@given(tokens=st.lists(st.integers(0, 2**32 - 1), max_size=30), block_size=st.integers(1, 9))
def test_a_chain_has_the_full_blocks_only(tokens, block_size):
    hashes = hash_blocks_sha256_cbor(tokens, block_size)
    assert len(hashes) == len(tokens) // block_size
    assert hash_blocks_sha256_cbor(tokens[: len(hashes) * block_size], block_size) == hashes


def decode(raw, at=0):
    """(value, end) of the item at `at`; written from RFC 8949, refuses what canonical encoding would not write."""
    major, low = raw[at] >> 5, raw[at] & 31
    at += 1
    if raw[at - 1] == 0xF6:
        return None, at
    argument = low
    if low >= 24:
        num_bytes = 1 << (low - 24)
        argument = int.from_bytes(raw[at : at + num_bytes], "big")
        at += num_bytes
        assert argument >= (24, 1 << 8, 1 << 16, 1 << 32)[low - 24], "not in the fewest bytes"
    if major <= 1:
        return (argument, -1 - argument)[major], at
    if major <= 3:
        content = raw[at : at + argument]
        return (content if major == 2 else content.decode()), at + argument
    assert major == 4
    items = []
    for _ in range(argument):
        item, at = decode(raw, at)
        items.append(item)
    return tuple(items), at


@given(VALUES)
def test_encoding_is_canonical_and_loses_nothing(value):
    raw = encode_cbor(value)
    assert decode(raw) == (value, len(raw))


@pytest.mark.parametrize("value", [True, 1.5, {"a": 1}, (1, {2})])
def test_types_that_vllm_does_not_hash_are_refused(value):
    with pytest.raises(TypeError, match="allowed are None, int, bytes, str, list and tuple"):
        encode_cbor(value)


@pytest.mark.parametrize("value", [2**64, -(2**64) - 1])
def test_ints_beyond_64_bits_are_refused(value):
    with pytest.raises(OverflowError):
        encode_cbor(value)


def test_a_block_size_below_one_is_refused():
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        hash_blocks_sha256_cbor((1, 2), 0)
