"""Block hashes: golden vectors, and what must and must not change them."""

import json
import struct
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.kv.hashing import HASH_BYTES, first_extras, hash_block, hash_blocks, join_hashes, root_hash, split_hashes

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "block_hashes.json").read_text())
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
ROOT = root_hash(model="m", tokenizer="t", kv_format="float16", block_size=4)


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda v: v["name"])
def test_golden_vectors(vector):
    """Every machine and every version gives these digests; a change makes all caches of a fleet strangers."""
    root = root_hash(**vector["root"])
    assert root.hex() == vector["root_hash"]
    parent = root
    for block in vector["blocks"]:
        parent = hash_block(parent, block["token_ids"], block["extras"])
        assert parent.hex() == block["block_hash"]


@pytest.mark.parametrize("vector", GOLDEN, ids=lambda v: v["name"])
def test_golden_vectors_of_whole_sequences(vector):
    root = root_hash(**vector["root"])
    tokens = [token for block in vector["blocks"] for token in block["token_ids"]]
    extras = {index: block["extras"] for index, block in enumerate(vector["blocks"])}
    hashes = hash_blocks(root, tokens, vector["root"]["block_size"], extras)
    assert [h.hex() for h in hashes] == [block["block_hash"] for block in vector["blocks"]]


@given(
    tokens=TOKENS | TOKENS.map(tuple) | st.just(range(40)),
    block_size=st.integers(1, 9),
    extras=st.none() | st.dictionaries(st.integers(0, 12), st.lists(st.text(max_size=3), max_size=3), max_size=5),
)
def test_a_sequence_is_hashed_as_its_blocks_are(tokens, block_size, extras):
    parent, expected = ROOT, []
    for index in range(len(tokens) // block_size):
        block = tokens[index * block_size : (index + 1) * block_size]
        parent = hash_block(parent, block, (extras or {}).get(index, ()))
        expected.append(parent)
    assert hash_blocks(ROOT, tokens, block_size, extras) == expected


def test_a_salt_in_the_first_block_parts_two_tenants_for_good():
    plain = hash_blocks(ROOT, range(16), 4)
    salted = hash_blocks(ROOT, range(16), 4, {0: ("salt", "tenant-7")})
    assert not set(plain) & set(salted)


def test_extras_leave_earlier_blocks_alone():
    """An image in block 2 does not cost the prefix before it."""
    plain = hash_blocks(ROOT, range(16), 4)
    with_image = hash_blocks(ROOT, range(16), 4, {2: ("image", "0f1e")})
    assert [a == b for a, b in zip(plain, with_image, strict=True)] == [True, True, False, False]


def test_extras_of_a_block_that_is_not_full_wait_for_it():
    extras = {1: ("image", "0f1e")}
    assert hash_blocks(ROOT, range(7), 4, extras) == hash_blocks(ROOT, range(7), 4)
    assert hash_blocks(ROOT, range(8), 4, extras)[1] != hash_blocks(ROOT, range(8), 4)[1]


def test_extras_at_a_negative_index_are_refused():
    with pytest.raises(ValueError, match="block indices of at least 0, got -1"):
        hash_blocks(ROOT, range(8), 4, {-1: ("salt",)})


@given(tokens=TOKENS, extras=st.lists(st.text(max_size=5), max_size=3))
def test_the_encoding_is_what_the_module_says(tokens, extras):
    """Written a second time from the description: parent, little-endian u32 tokens, length-prefixed extras."""
    fields = b"".join(b"s" + struct.pack("<I", len(e.encode())) + e.encode() for e in extras)
    expected = blake2b(ROOT + struct.pack(f"<{len(tokens)}I", *tokens) + fields, digest_size=16).digest()
    assert hash_block(ROOT, tokens, extras) == expected


@given(tokens=TOKENS, index=st.integers(0, 39), other=st.integers(0, 2**32 - 1))
def test_one_token_changes_its_block_and_all_later_ones_only(tokens, index, other):
    if index >= len(tokens) or tokens[index] == other:
        return
    changed = [*tokens[:index], other, *tokens[index + 1 :]]
    for block, (a, b) in enumerate(zip(hash_blocks(ROOT, tokens, 4), hash_blocks(ROOT, changed, 4), strict=True)):
        assert (a == b) == (block < index // 4)


@given(tokens=TOKENS, block_size=st.integers(1, 9))
def test_a_chain_has_the_full_blocks_only(tokens, block_size):
    hashes = hash_blocks(ROOT, tokens, block_size)
    assert len(hashes) == len(tokens) // block_size
    assert hash_blocks(ROOT, tokens[: len(hashes) * block_size], block_size) == hashes


def test_extras_of_other_cuts_differ():
    """Length prefixes keep ("ab",), ("a", "b") and ("", "ab") apart; no extras are not one empty extra."""
    lists = [(), ("",), ("ab",), ("a", "b"), ("", "ab"), ("b", "a")]
    assert len({hash_block(ROOT, (1,), extras) for extras in lists}) == len(lists)


@pytest.mark.parametrize("field", ["model", "tokenizer", "kv_format"])
def test_the_root_holds_all_that_makes_kv_interchangeable(field):
    fields = {"model": "m", "tokenizer": "t", "kv_format": "float16", "block_size": 4}
    assert root_hash(**fields | {field: "other"}) != ROOT
    assert root_hash(**fields | {"block_size": 8}) != ROOT


def test_a_block_size_below_one_is_refused():
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        root_hash(model="m", tokenizer="t", kv_format="f", block_size=0)
    with pytest.raises(ValueError, match="block_size must be at least 1, got -1"):
        hash_blocks(ROOT, (1, 2), -1)


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_outside_32_bits_is_refused(token):
    with pytest.raises(OverflowError):
        hash_block(ROOT, (token,))
    with pytest.raises(OverflowError):
        hash_blocks(ROOT, (1, token), 2)


@given(st.lists(st.binary(min_size=HASH_BYTES, max_size=HASH_BYTES), max_size=5))
def test_join_and_split_are_inverse(hashes):
    assert split_hashes(join_hashes(hashes)) == hashes


def test_a_torn_list_of_hashes_is_refused():
    with pytest.raises(ValueError, match="multiple of 16 bytes, got 17"):
        split_hashes(b"x" * 17)


def test_a_salt_separates_from_the_first_block_on():
    root, tokens = root_hash(model="m", tokenizer="t", kv_format="f", block_size=4), list(range(16))
    chains = [hash_blocks(root, tokens, 4, first_extras(salt)) for salt in ("", "a", "b")]
    assert chains[0] == hash_blocks(root, tokens, 4)
    assert len({block_hash for chain in chains for block_hash in chain}) == 12
    assert chains[1] == hash_blocks(root, tokens, 4, first_extras("a"))


def test_an_adapter_parts_chains_from_the_first_block_on_and_is_no_salt():
    root = root_hash(model="m", tokenizer="t", kv_format="f", block_size=4)
    keys = [("", ""), ("x", ""), ("", "x"), ("x", "x"), ("x", "y"), ("y", "x")]
    chains = [hash_blocks(root, range(12), 4, first_extras(salt, adapter)) for salt, adapter in keys]
    assert len({block_hash for chain in chains for block_hash in chain}) == len(keys) * 3
    assert chains[0] == hash_blocks(root, range(12), 4)
    assert chains[1] == hash_blocks(root, range(12), 4, {0: ("salt", "x")})
