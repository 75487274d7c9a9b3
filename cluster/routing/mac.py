"""A Mac as the router knows it."""

from dataclasses import dataclass
from enum import Enum, auto

from cluster.kv.hashing import BlockHash
from cluster.routing.load import MacLoad


class MacState(Enum):
    """Whether a Mac takes requests: only READY does."""

    # Joined; what it holds is not known before its first snapshot.
    STARTING = auto()
    READY = auto()
    # Finishes what it runs until an operator resumes it.
    DRAINING = auto()
    # Not reachable; its bookings count until their leases end, its blocks don't.
    LOST = auto()


@dataclass(frozen=True, slots=True)
class MacInfo:
    """What a Mac says of itself when it joins. `epoch` differs at each incarnation; `address` is its node service."""

    name: str
    epoch: int
    model: str
    root_hash: BlockHash
    block_size: int
    address: str
    max_model_len: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class MacStatus:
    """One row of the fleet."""

    info: MacInfo
    state: MacState
    load: MacLoad
    prefill_tokens_per_s: float
