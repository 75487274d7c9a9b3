"""A Mac as the router knows it."""

from dataclasses import dataclass
from enum import Enum, auto

from cluster.kv.hashing import BlockHash
from cluster.kv.layout import KVGroup


class MacState(Enum):
    """Where a Mac stands: READY and STARTING take requests."""

    # What it holds is not known yet: it takes requests by load alone.
    STARTING = auto()
    READY = auto()
    # Takes nothing new until an operator says so; it goes on with what it runs.
    CORDONED = auto()
    # As CORDONED, on its way out: when nothing is booked there any more it is drained.
    DRAINING = auto()
    # Not reachable; its bookings count until their leases end.
    LOST = auto()


@dataclass(frozen=True, slots=True)
class MacInfo:
    """What a Mac says of itself when it joins.

    `name` is the host's and stays; `epoch` differs at each incarnation; `address` is its node service. `groups` are
    those of its KV layout: they say where a prefix can be resumed. `token_capacity`: tokens of long sequences that its
    KV memory holds. `max_num_seqs` run at once, `max_num_batched_tokens` in one step,
    of which one prompt gets at most `max_chunk_tokens`.
    """

    name: str
    epoch: int
    model: str
    root_hash: BlockHash
    block_size: int
    address: str
    max_model_len: int
    num_blocks: int
    groups: tuple[KVGroup, ...]
    token_capacity: int
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_chunk_tokens: int = 256
    # False: it keeps no prefix.
    is_caching: bool = True


@dataclass(frozen=True, slots=True)
class MacLoad:
    """Booked on one Mac: requests, prompt tokens still to be prefilled, and requests past their first token."""

    num_requests: int = 0
    num_prefill_tokens: int = 0
    num_decoding: int = 0


@dataclass(frozen=True, slots=True)
class Drift:
    """Prompt tokens found in a Mac's cache: as predicted when requests were routed, and as the Mac then counted.

    `num_error_tokens` adds up the differences of single requests. `is_alarming`: of late they are too large.
    """

    num_requests: int = 0
    num_predicted_tokens: int = 0
    num_actual_tokens: int = 0
    num_error_tokens: int = 0
    is_alarming: bool = False


@dataclass(frozen=True, slots=True)
class MacStatus:
    """One row of the fleet. `note` is why it is cordoned or draining, in the operator's words."""

    info: MacInfo
    state: MacState
    load: MacLoad
    prefill_tokens_per_s: float
    decode_step_s: float
    # Distinct tokens that requests of the last minutes used there.
    hot_tokens: int
    drift: Drift
    note: str = ""


def kind_of(group: KVGroup) -> str:
    """A group's kind, for people."""
    return type(group.spec).__name__.removesuffix("Spec")
