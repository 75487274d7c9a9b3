"""Blocks that a routed request is about to compute: counted as present until the Mac confirms them or the lease ends.

A bit is a Mac's slot in the prefix index, 1 << slot.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from cluster.kv.hashing import BlockHash


@dataclass(frozen=True, slots=True)
class _Expectation:
    """`own` are blocks that only this request was booked for, `shared` those that one before it is computing."""

    own: set[BlockHash]
    shared: set[BlockHash]


@dataclass(frozen=True, slots=True)
class _OneMac:
    by_request: dict[str, _Expectation] = field(default_factory=dict)
    num_requests_by_hash: dict[BlockHash, int] = field(default_factory=dict)


class ExpectedBlocks:
    """Masks of the Macs on which each block is expected. Memory is bounded by the bookings that are held."""

    def __init__(self) -> None:
        self._masks: dict[BlockHash, int] = {}
        self._macs: dict[int, _OneMac] = {}
        self._bit_by_request: dict[str, int] = {}

    @property
    def masks(self) -> Mapping[BlockHash, int]:
        """Live view, not to be changed."""
        return self._masks

    def add(self, request_id: str, bit: int, own: Iterable[BlockHash], shared: Iterable[BlockHash]) -> None:
        """Replaces what the request was expected to compute before."""
        self.discard(request_id)
        expectation = _Expectation(set(own), set(shared))
        hashes = expectation.own | expectation.shared
        if not hashes:
            return
        mac = self._macs.setdefault(bit, _OneMac())
        mac.by_request[request_id] = expectation
        self._bit_by_request[request_id] = bit
        masks, counts = self._masks, mac.num_requests_by_hash
        for block_hash in hashes:
            masks[block_hash] = masks.get(block_hash, 0) | bit
            counts[block_hash] = counts.get(block_hash, 0) + 1

    def discard(self, request_id: str) -> None:
        """The request's lease has ended; no effect if it expects nothing."""
        bit = self._bit_by_request.pop(request_id, None)
        if bit is None:
            return
        mac = self._macs[bit]
        expectation = mac.by_request.pop(request_id)
        counts = mac.num_requests_by_hash
        for block_hash in expectation.own | expectation.shared:
            counts[block_hash] -= 1
            if not counts[block_hash]:
                del counts[block_hash]
                self._clear(block_hash, bit)
        if not mac.by_request:
            del self._macs[bit]

    def confirm(self, bit: int, block_hashes: Iterable[BlockHash]) -> dict[str, int]:
        """The Mac has announced these blocks: from now on its events alone say whether it holds them.

        Returns how many of its own blocks each request is now known to have computed.
        """
        num_computed: dict[str, int] = {}
        mac = self._macs.get(bit)
        if mac is None:
            return num_computed
        for block_hash in block_hashes:
            if not mac.num_requests_by_hash.pop(block_hash, 0):
                continue
            self._clear(block_hash, bit)
            for request_id, expectation in mac.by_request.items():
                expectation.shared.discard(block_hash)
                if block_hash in expectation.own:
                    expectation.own.remove(block_hash)
                    num_computed[request_id] = num_computed.get(request_id, 0) + 1
        return num_computed

    def drop(self, bit: int) -> None:
        """The Mac is gone; no effect if nothing is expected of it."""
        mac = self._macs.pop(bit, _OneMac())
        for request_id in mac.by_request:
            del self._bit_by_request[request_id]
        for block_hash in mac.num_requests_by_hash:
            self._clear(block_hash, bit)

    def check(self) -> None:
        """Raises AssertionError unless masks, counts and requests tell the same story."""
        masks: dict[BlockHash, int] = {}
        bit_by_request: dict[str, int] = {}
        for bit, mac in self._macs.items():
            assert mac.by_request
            counts: dict[BlockHash, int] = {}
            for request_id, expectation in mac.by_request.items():
                assert not expectation.own & expectation.shared
                bit_by_request[request_id] = bit
                for block_hash in expectation.own | expectation.shared:
                    counts[block_hash] = counts.get(block_hash, 0) + 1
                    masks[block_hash] = masks.get(block_hash, 0) | bit
            assert counts == mac.num_requests_by_hash
        assert masks == self._masks
        assert bit_by_request == self._bit_by_request

    def _clear(self, block_hash: BlockHash, bit: int) -> None:
        mask = self._masks[block_hash] & ~bit
        if mask:
            self._masks[block_hash] = mask
        else:
            del self._masks[block_hash]
