"""The ledger of one Mac's KV memory, as the scheduler sees it: ids and counts, never a tensor.

Wires together what others own: the pools (references), the prefix tree (what is cached), the retention (what goes
first), the coordinator (block tables) and the event log.
"""

from collections.abc import Mapping

from cluster.kv.caching_coordinator import HybridKVCacheCoordinator, UnitaryKVCacheCoordinator
from cluster.kv.coordinator import KVCacheCoordinator
from cluster.kv.events import BlockEvent, EventLog
from cluster.kv.hashing import BlockHash, split_hashes
from cluster.kv.layout import NULL_BLOCK, KVLayout
from cluster.kv.memory import PoolResize
from cluster.kv.no_cache_coordinator import KVCacheCoordinatorNoPrefixCache
from cluster.kv.planner import kind_name
from cluster.kv.points import PointKind
from cluster.kv.policies import POLICIES
from cluster.kv.sequence import BlockCopy, ComputedBlocks, GroupBlocks, StartedBlocks, TableEdit
from cluster.kv.stats import KVGroupStats, KVPoolStats, KVStats


class KVCacheManager:
    """Every decision about KV memory: what a prefix can reuse, who gets a block, what is forgotten.

    A sequence lives from `start` to `free`. A block is findable only after `register`, which is called when its KV has
    been computed, never when it is merely planned. Raises ValueError for an unknown policy.
    """

    def __init__(self, layout: KVLayout, *, policy: str = "value", enable_prefix_caching: bool = True) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(sorted(POLICIES))}, got {policy!r}")
        self.layout = layout
        self._events = EventLog(len(layout.groups))
        kind: type[KVCacheCoordinator] = HybridKVCacheCoordinator
        if not enable_prefix_caching:
            kind = KVCacheCoordinatorNoPrefixCache
        elif len(layout.groups) == 1 and layout.groups[0].is_full:
            kind = UnitaryKVCacheCoordinator
        self.is_caching = enable_prefix_caching
        self._coordinator = kind(layout, POLICIES[policy](), self._events)

    @property
    def has_states(self) -> bool:
        """Whether some layers are recurrent: then a prefix is resumable only where a checkpoint was made."""
        return any(group.is_state for group in self.layout.groups)

    def get_computed_blocks(self, hashes: bytes, num_tokens: int) -> ComputedBlocks:
        """The longest cached prefix of a sequence of `num_tokens` known tokens with these joined block hashes.

        At most `num_tokens - 1`, because one token must run to sample the next. Does not pin it or count as a use.
        """
        return self._coordinator.find_longest_cache_hit(hashes, num_tokens)

    def is_current(self, computed: ComputedBlocks, hashes: bytes) -> bool:
        """Whether looking up again would find the same. O(1)."""
        return self._coordinator.is_current(computed, hashes)

    def can_allocate(self, computed: ComputedBlocks, num_tokens: int, *, reserved_bytes: int = 0) -> bool:
        """Whether all `num_tokens` known tokens of a new sequence fit, with so many free bytes left to others."""
        coordinator = self._coordinator
        return coordinator.pools.fits(coordinator.blocks_to_start(computed, num_tokens), reserved_bytes)

    def start(
        self,
        seq_id: int,
        computed: ComputedBlocks,
        hashes: bytes = b"",
        *,
        points: Mapping[int, PointKind] | None = None,
        now_s: float = 0.0,
        priority: int = 0,
        pinned_until_s: float = 0.0,
    ) -> StartedBlocks:
        """Open a sequence on the cached prefix just looked up; its blocks stay until `free`. O(cached blocks).

        `points`: token offsets that are worth resuming at, and why; each is rounded down to a block.
        """
        return self._coordinator.open(
            seq_id, computed, hashes, points or {}, now_s=now_s, priority=priority, pinned_until_s=pinned_until_s
        )

    def release_sources(self) -> None:
        """To be called when a plan is complete that has the copies of `start`: their sources are kept until then."""
        self._coordinator.release_sources()

    def num_missing_bytes(self, seq_id: int, num_tokens: int) -> int:
        """What a sequence will still take on its way to `num_tokens` tokens."""
        return self._coordinator.num_missing_bytes(seq_id, num_tokens)

    def allocate(
        self, seq_id: int, num_tokens: int, num_processed: int = 0, num_lookahead: int = 0
    ) -> GroupBlocks | None:
        """Make room for the KV of a sequence's first `num_tokens` positions and `num_lookahead` speculative ones.

        Returns the ids appended to its block tables, empty if it had room already (O(1)); None, with nothing changed
        but windows moved on, if too few blocks are free. `num_processed` tokens have run for certain.
        """
        if num_lookahead:
            num_tokens = min(num_tokens + num_lookahead, max(num_tokens, self.layout.max_model_len))
        return self._coordinator.allocate(seq_id, num_tokens, num_processed)

    def num_registered_blocks(self, seq_id: int) -> int:
        """Blocks of a live sequence that are findable, from its first on: where registering goes on."""
        return self._coordinator.sequences[seq_id].depth

    def register(self, seq_id: int, first_index: int, hashes: bytes) -> list[TableEdit]:
        """Make consecutive blocks findable whose every slot now holds computed KV.

        Where a content is known already the sequence goes over to the known block and its own copy is free: the
        worker must follow the edits. Nothing happens if the sequence has ended.
        """
        return self._coordinator.register(seq_id, first_index, hashes)

    def checkpoint(self, seq_id: int, num_tokens: int, kind: PointKind) -> tuple[BlockCopy, ...]:
        """Copies that keep a recurrent model's state after `num_tokens` tokens, a multiple of the block size.

        To be made before the next token runs. Empty if there is nothing to copy, or no memory for it that is worth
        less: for an INTERVAL only what lies idle. A TURN_END becomes a resume point only if the sequence ends there.
        """
        return self._coordinator.checkpoint(seq_id, num_tokens, kind)

    def confirm_checkpoint(self, seq_id: int, num_tokens: int) -> None:
        """The worker has made those copies."""
        self._coordinator.confirm_checkpoint(seq_id, num_tokens)

    def free(self, seq_id: int, num_processed: int = 0, *, is_settled: bool = True) -> None:
        """End a sequence of which `num_processed` tokens have run. What it registered stays while memory allows.

        `is_settled`: no plan in flight will run more of it, so that its state is the one after those tokens.
        """
        self._coordinator.free(seq_id, num_processed, is_settled=is_settled)

    def block_tables(self, seq_id: int) -> GroupBlocks:
        """The block ids of a live sequence by group, first to last; null where a window has moved on."""
        return {group: tuple(table) for group, table in enumerate(self._coordinator.sequences[seq_id].tables)}

    def take_resizes(self) -> tuple[PoolResize, ...]:
        """Pool boundaries moved since the last call: the worker follows before anything else of its next step."""
        return self._coordinator.take_resizes()

    @property
    def block_bytes(self) -> int:
        """Of one more block in every group that holds tokens."""
        return sum(group.page_bytes for group in self.layout.groups if not group.is_state)

    @property
    def num_blocks(self) -> int:
        """Blocks of all pools that sequences can hold."""
        return sum(pool.num_blocks - 1 for pool in self._coordinator.pools.pools)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no live sequence holds, cached or not."""
        return sum(pool.num_free for pool in self._coordinator.pools.pools)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that live sequences hold; a shared block counts once."""
        return sum(pool.num_used for pool in self._coordinator.pools.pools)

    @property
    def free_bytes(self) -> int:
        """Bytes that no live sequence holds, cached or not."""
        return self._coordinator.pools.free_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that live sequences hold; a shared block counts once."""
        return self._coordinator.pools.used_bytes

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by hash, whether or not a live sequence holds them."""
        return sum(pool.num_cached for pool in self._coordinator.pools.pools)

    def stats(self) -> KVStats:
        """Bytes by state and counts by group. O(sequences)."""
        coordinator = self._coordinator
        memory, evictor = coordinator.pools, coordinator.retention.evictor
        pools = tuple(
            KVPoolStats(page, pool.num_used * page, pool.num_evictable * page, pool.num_empty * page)
            for pool, page in zip(memory.pools, memory.page_bytes, strict=True)
        )
        num_present, num_unfindable = self._events.num_present, coordinator.num_unfindable()
        num_cached = [memory[group.pool_id].num_evictable_of(group.group_id) for group in self.layout.groups]
        groups = tuple(
            KVGroupStats(
                kind=kind_name(group.spec),
                num_layers=len(group.layer_indices),
                page_bytes=group.page_bytes,
                num_queried_tokens=looked_up.num_queried_tokens,
                num_hit_tokens=looked_up.num_hit_tokens,
                num_limited=looked_up.num_limited,
                num_evicted_left_behind=evicted.num_left_behind,
                num_evicted_ranked=evicted.num_ranked,
                num_evicted_orphaned=evicted.num_orphaned,
                pool_id=group.pool_id,
                findable_bytes=findable * group.page_bytes,
                referenced_bytes=(findable - cached + unfindable) * group.page_bytes,
                cached_bytes=cached * group.page_bytes,
            )
            for group, looked_up, evicted, findable, cached, unfindable in zip(
                self.layout.groups,
                coordinator.counts,
                evictor.counts,
                num_present,
                num_cached,
                num_unfindable,
                strict=True,
            )
        )
        cached = sum(pool.cached_bytes for pool in pools)
        pinned = coordinator.retention.pinned_bytes
        return KVStats(memory.used_bytes, cached, memory.free_bytes - cached, pinned, groups, pools)

    def take_events(self) -> tuple[BlockEvent, ...]:
        """Presence transitions since the last call, oldest first; to be taken after every step."""
        return self._events.take()

    def digests(self) -> tuple[int, ...]:
        """Of each group's present hashes: equal exactly if the sets are (XOR; O(1))."""
        return self._events.digests()

    def snapshot(self) -> list[tuple[int, BlockHash]]:
        """(group, block_hash) of all that is present: the state that the events up to now lead to. O(blocks)."""
        present: list[tuple[int, BlockHash]] = []
        for segment in self._coordinator.tree.walk():
            hashes = split_hashes(bytes(segment.hashes))
            for group, blocks in enumerate(segment.blocks):
                present += [(group, h) for h, block_id in zip(hashes, blocks, strict=True) if block_id != NULL_BLOCK]
        return present

    def reset(self) -> None:
        """The worker and its memory are gone: forget all sequences and all content, and untaken events with them.

        Makes no event: the edge starts a new epoch, which says the same in one word.
        """
        self._coordinator.reset()

    def check(self) -> None:
        """Assert that pools, tree, block tables, budget and events agree. O(blocks): for tests and idle moments."""
        self._coordinator.check()
