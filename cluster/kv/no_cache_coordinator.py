"""Models served without a prefix cache: memory is given and taken back, nothing is found again."""

from cluster.kv.coordinator import KVCacheCoordinator
from cluster.kv.points import PointKind
from cluster.kv.sequence import BlockCopy, ComputedBlocks, TableEdit


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Nothing is ever found or kept; any number of groups."""

    def find_longest_cache_hit(self, hashes: bytes, num_tokens: int) -> ComputedBlocks:
        """Always nothing."""
        return ComputedBlocks(0, None, 0)

    def register(self, seq_id: int, first_index: int, hashes: bytes) -> list[TableEdit]:
        """Never kept."""
        return []

    def is_current(self, computed: ComputedBlocks, hashes: bytes) -> bool:
        """Always."""
        return True

    def checkpoint(self, seq_id: int, num_tokens: int, kind: PointKind) -> tuple[BlockCopy, ...]:
        """Never kept."""
        return ()

    def confirm_checkpoint(self, seq_id: int, num_tokens: int) -> None:
        """There are none."""

    def free(self, seq_id: int, num_processed: int, *, is_settled: bool) -> None:
        """See the base class."""
        self._close(self.sequences[seq_id])
