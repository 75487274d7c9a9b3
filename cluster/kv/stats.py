"""What the KV cache counts, for metrics and the admin API."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroupStats:
    """One group. Counts are since the start.

    `num_hit_tokens` is what the group alone could have resumed of the tokens looked up, `num_limited` how often it was
    the one that ended a hit. Blocks are evicted because windows moved on (left behind), because of the rank of their
    resume point (ranked), or because with it nothing could use them any more (orphaned): none such is kept.

    `findable_bytes` are of blocks and states with a hash, held by a sequence or not; `referenced_bytes` of those that
    sequences hold, findable or not; `cached_bytes` of the findable rest. What is free belongs to no group.
    """

    kind: str
    num_layers: int
    page_bytes: int
    num_queried_tokens: int
    num_hit_tokens: int
    num_limited: int
    num_evicted_left_behind: int
    num_evicted_ranked: int
    num_evicted_orphaned: int
    pool_id: int
    findable_bytes: int
    referenced_bytes: int
    cached_bytes: int


@dataclass(frozen=True, slots=True)
class KVPoolStats:
    """One pool's bytes by state, null block apart; what the boundary between pools has not given out is in none."""

    page_bytes: int
    referenced_bytes: int
    cached_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class KVStats:
    """Bytes by state: what live sequences hold, what they don't but is findable, the rest.

    `pinned_bytes` are of the cached and referenced ones, as of the last time that memory was short.
    """

    referenced_bytes: int
    cached_bytes: int
    free_bytes: int
    pinned_bytes: int
    groups: tuple[KVGroupStats, ...]
    pools: tuple[KVPoolStats, ...]
