"""One request while it is in the scheduler's hands."""

from dataclasses import dataclass

from cluster.kv.hashing import BlockHash
from cluster.scheduling.request import Request


@dataclass(slots=True, eq=False)
class LiveRequest:
    """Positions of its tokens, when running:

        [0, num_planned)            KV cached, computed, or to be computed by a plan in flight
        [num_planned, num_known)    known tokens still to be planned: prefill
        [num_known, num_ahead)      tokens that plans in flight will sample

    num_known = len(token_ids). A decoding request has num_planned + 1 == num_ahead <= max_length: its next row runs
    the newest token, known or not. Nothing is planned once num_ahead == max_length.
    """

    request: Request
    arrival_s: float
    max_length: int
    token_ids: list[int]
    block_hashes: list[BlockHash]
    num_ahead: int
    num_planned: int = 0
    is_running: bool = False
    # The worker's name for it, new at every admission; 0 before the first, an id that the worker never sees.
    seq_id: int = 0
    # The newest plan that has a row of it.
    last_step_id: int = 0
    num_cached_tokens: int = 0
    # None until it first runs.
    queue_s: float | None = None
