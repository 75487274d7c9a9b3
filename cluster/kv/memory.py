"""The pools of one model under one byte budget, and the boundary between them.

Unified memory makes the boundary movable: what one pool does not need becomes blocks of another. The moves of blocks
that this takes are computed here; the worker copies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.kv.layout import KVLayout
from cluster.kv.pool import BlockPool

# A boundary moves by at least this share of the giving pool, if it has so much empty: each move costs a copy.
_GRANULE_SHARE = 32


@dataclass(frozen=True, slots=True)
class PoolResize:
    """A pool's new number of blocks, null block included. Moves come before it; all sources lie beyond a new end."""

    pool_id: int
    num_blocks: int
    moves: tuple[tuple[int, int], ...] = ()


class PoolSet:
    """Owns the pools and keeps their bytes within the budget."""

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self.page_bytes = tuple(pool.page_bytes for pool in layout.pools)
        self.pools = _empty_pools(layout)

    def __getitem__(self, pool_id: int) -> BlockPool:
        return self.pools[pool_id]

    @property
    def spare_bytes(self) -> int:
        """Of the budget, what no pool has."""
        return self._layout.budget_bytes - sum(
            pool.num_blocks * page for pool, page in zip(self.pools, self.page_bytes, strict=True)
        )

    @property
    def usable_bytes(self) -> int:
        """What sequences and cache can have at most."""
        return self._layout.usable_bytes

    @property
    def free_bytes(self) -> int:
        """What nobody references, cached or not."""
        return self.spare_bytes + sum(
            pool.num_free * page for pool, page in zip(self.pools, self.page_bytes, strict=True)
        )

    @property
    def used_bytes(self) -> int:
        """What sequences hold; a shared block counts once."""
        return sum(pool.num_used * page for pool, page in zip(self.pools, self.page_bytes, strict=True))

    def fits(self, needs: Sequence[int], reserved_bytes: int = 0) -> bool:
        """Whether so many blocks of each pool could be had: by evicting whatever is cached and moving boundaries."""
        free = [pool.num_free for pool in self.pools]
        if not reserved_bytes and all(need <= num for need, num in zip(needs, free, strict=True)):
            return True
        needed_bytes = sum(need * page for need, page in zip(needs, self.page_bytes, strict=True))
        return needed_bytes + reserved_bytes <= self.free_bytes and self._could_give(needs, free)

    def lacks(self, needs: Sequence[int]) -> bool:
        """Whether some pool has fewer empty blocks than needed."""
        return any(need > pool.num_empty for need, pool in zip(needs, self.pools, strict=True))

    def rebalance(self, needs: Sequence[int]) -> tuple[PoolResize, ...] | None:
        """Give pools that lack empty blocks what others and the spare bytes have; None if that is not enough yet.

        Nothing has changed then.
        """
        if not self._could_give(needs, [pool.num_empty for pool in self.pools]):
            return None
        resizes: list[PoolResize] = []
        for pool_id, (need, pool) in enumerate(zip(needs, self.pools, strict=True)):
            lack = need - pool.num_empty
            if lack > 0:
                missing = lack * self.page_bytes[pool_id] - self.spare_bytes
                for donor_id in range(len(self.pools)):
                    missing = self._take_from(donor_id, needs[donor_id], missing, resizes) if missing > 0 else missing
                pool.grow(lack)
                resizes.append(PoolResize(pool_id, pool.num_blocks))
        return tuple(resizes)

    def reset(self) -> None:
        """Forget all blocks; the boundaries go back to the layout's."""
        self.pools = _empty_pools(self._layout)

    def _could_give(self, needs: Sequence[int], available: Sequence[int]) -> bool:
        """Whether the surplus of some pools, in whole pages, covers the lack of the others."""
        lacking, surplus = 0, self.spare_bytes
        for need, num, page in zip(needs, available, self.page_bytes, strict=True):
            if need > num:
                lacking += (need - num) * page
            else:
                surplus += (num - need) * page
        return lacking <= surplus

    def _take_from(self, donor_id: int, need: int, missing: int, resizes: list[PoolResize]) -> int:
        """Shrink one pool by what is missing, if it has it to spare; returns what is still missing, in bytes."""
        donor, page = self.pools[donor_id], self.page_bytes[donor_id]
        surplus = donor.num_empty - need
        if surplus <= 0:
            return missing
        num_given = min(surplus, max(-(-missing // page), donor.num_blocks // _GRANULE_SHARE))
        moves = donor.shrink(num_given)
        resizes.append(PoolResize(donor_id, donor.num_blocks, tuple(moves.items())))
        return missing - num_given * page


def _empty_pools(layout: KVLayout) -> tuple[BlockPool, ...]:
    return tuple(BlockPool(pool.num_blocks, len(layout.groups)) for pool in layout.pools)
