"""What a listener knows of a ledger's blocks, from its snapshots and events alone."""

from cluster.kv.events import BlocksStored


class MirrorIndex:
    """A set of (group, block_hash), and digests of its own."""

    def __init__(self, num_groups):
        self.present = set()
        self._digests = [0] * num_groups

    def load(self, snapshot):
        """Forget all else."""
        self.present.clear()
        self._digests = [0] * len(self._digests)
        for group, block_hash in snapshot:
            self._change(group, block_hash, is_stored=True)

    def apply(self, event):
        """An event that says what is known already changes nothing."""
        for at in range(0, len(event.hashes), 16):
            self._change(event.group, event.hashes[at : at + 16], is_stored=isinstance(event, BlocksStored))

    def digests(self):
        return tuple(self._digests)

    def _change(self, group, block_hash, *, is_stored):
        key = (group, block_hash)
        if (key in self.present) != is_stored:
            (self.present.add if is_stored else self.present.remove)(key)
            self._digests[group] ^= int.from_bytes(block_hash, "little")
