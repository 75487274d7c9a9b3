"""What one Mac holds in one group: bits in the group's masks, and a log that finds them again.

The log has each stored hash once more, end to end: 16 bytes a block instead of a set's 60. What was removed meanwhile
stays in it until a quarter of it is stale; a mask says whether an entry still counts.
"""

from collections.abc import Sequence

from cluster.kv.events import xor_of
from cluster.kv.hashing import HASH_BYTES, BlockHash
from cluster.routing.digests import hashes_in

# Removed entries that the log may carry beside a quarter of the live ones.
_SPARE_ENTRIES = 1024


class Holding:
    """One Mac, one group. `masks` is shared by all Macs of the group; `bit` is this one's."""

    __slots__ = ("_log", "bit", "digest", "masks", "num_blocks")

    def __init__(self, masks: dict[BlockHash, int], bit: int) -> None:
        self.masks = masks
        self.bit = bit
        self.num_blocks = 0
        # XOR of what is held.
        self.digest = 0
        self._log = bytearray()

    def store(self, joined: bytes) -> int:
        """Returns how many were held already: those change nothing."""
        masks, bit = self.masks, self.bit
        hashes = hashes_in(joined)
        new = dict.fromkeys(hashes, bit)
        known: list[BlockHash] = []
        if len(new) == len(hashes) and masks.keys().isdisjoint(new.keys()):
            # The usual case, at a fifth of the cost: nobody has any of them.
            masks.update(new)
        else:
            known = self._store_each(hashes)
        self._log += joined
        self.digest ^= xor_of(joined) ^ xor_of(b"".join(known))
        self.num_blocks += len(hashes) - len(known)
        self._tidy()
        return len(known)

    def remove(self, joined: bytes) -> int:
        """Returns how many were not held: those change nothing."""
        masks, bit = self.masks, self.bit
        get = masks.get
        absent: list[BlockHash] = []
        last, left = 0, 0
        for block_hash in hashes_in(joined):
            mask = get(block_hash, 0)
            if mask is not last or not mask:
                if not mask & bit:
                    absent.append(block_hash)
                    continue
                last, left = mask, mask ^ bit
            if left:
                masks[block_hash] = left
            else:
                del masks[block_hash]
        self.digest ^= xor_of(joined) ^ xor_of(b"".join(absent))
        self.num_blocks -= len(joined) // HASH_BYTES - len(absent)
        self._tidy()
        return len(absent)

    def blocks(self) -> list[BlockHash]:
        """All that is held, each once. O(blocks)."""
        get, bit = self.masks.get, self.bit
        return [each for each in dict.fromkeys(hashes_in(self._log)) if get(each, 0) & bit]

    def clear(self) -> None:
        """Hold nothing. O(blocks)."""
        self.remove(b"".join(self.blocks()))

    def check(self) -> None:
        """Raises AssertionError unless log, count and digest tell what the masks do. O(all blocks of the group)."""
        held = {each for each, mask in self.masks.items() if mask & self.bit}
        assert held == set(self.blocks()), "the log has lost blocks"
        assert len(held) == self.num_blocks, f"{len(held)} blocks are held, {self.num_blocks} counted"
        assert xor_of(b"".join(held)) == self.digest, "the digest is of another set"

    def _store_each(self, hashes: Sequence[BlockHash]) -> list[BlockHash]:
        """Returns those that were held already."""
        masks, bit = self.masks, self.bit
        get = masks.get
        known: list[BlockHash] = []
        # Neighbours are held by the same Macs: one int serves for all of them, and is tested by identity.
        last, united = 0, bit
        for block_hash in hashes:
            mask = get(block_hash, 0)
            if mask is not last:
                if mask & bit:
                    known.append(block_hash)
                    continue
                last, united = mask, mask | bit
            masks[block_hash] = united
        return known

    def _tidy(self) -> None:
        if len(self._log) // HASH_BYTES > self.num_blocks * 5 // 4 + _SPARE_ENTRIES:
            self._log = bytearray().join(self.blocks())
