"""One class a kind of attention: what a sequence must hold to go on at a position, and where a cached prefix can end.

Positions and lengths are in blocks unless named otherwise. `present` has one byte a position, 1 where the group has its
block (or its state after the block).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

from cluster.kv.layout import KVGroup
from cluster.kv.spec import ChunkedLocalSpec, RecurrentStateSpec, SlidingWindowSpec

_PRESENT = b"\x01"
_ABSENT = b"\x00"


class GroupManager(ABC):
    """The rule of one group."""

    # Holds every position from the start, so that it never limits where the others have something.
    is_full = False
    is_state = False

    def __init__(self, group: KVGroup, block_size: int) -> None:
        self.group_id = group.group_id
        self.pool_id = group.pool_id
        self.page_bytes = group.page_bytes
        self.num_sink_blocks = 0
        self._block_size = block_size

    @abstractmethod
    def first_needed(self, num_tokens: int) -> int:
        """The first block that the tokens from position `num_tokens` on see, never falling; sinks apart."""

    def longest_hit(self, present: bytes, limit: int) -> int:
        """The longest prefix of at most `limit` blocks at whose end the group has all that it needs.

        Searches bytes, once for each span of needed blocks with one missing.
        """
        while limit > 0:
            absent = present.find(_ABSENT, self.first_needed(limit * self._block_size), limit)
            if absent < 0:
                break
            # Every longer prefix, up to the limit, needs that block too.
            limit = absent
        return limit


class FullAttentionManager(GroupManager):
    """Full attention, latent or not: everything from the start."""

    is_full = True

    def first_needed(self, num_tokens: int) -> int:
        """See the base class."""
        return 0


class LocalManager(GroupManager):
    """Layers that see only what is near: what they need begins at the spec's first token."""

    def __init__(self, group: KVGroup, block_size: int) -> None:
        super().__init__(group, block_size)
        assert isinstance(group.spec, SlidingWindowSpec | ChunkedLocalSpec)
        self._spec = group.spec

    @property
    def rule(self) -> tuple[object, ...]:
        """Equal for groups that need the same positions."""
        if isinstance(self._spec, ChunkedLocalSpec):
            return ("chunk", self._spec.chunk)
        return ("window", self._spec.window, self._spec.num_sink_tokens)

    def first_needed(self, num_tokens: int) -> int:
        """See the base class."""
        return self._spec.first_needed_token(num_tokens) // self._block_size


class SlidingWindowManager(LocalManager):
    """The last `window - 1` tokens before the next one, and the sinks."""

    def __init__(self, group: KVGroup, block_size: int) -> None:
        super().__init__(group, block_size)
        assert isinstance(group.spec, SlidingWindowSpec)
        self.num_sink_blocks = -(-group.spec.num_sink_tokens // block_size)

    def longest_hit(self, present: bytes, limit: int) -> int:
        """See the base class."""
        absent_sink = present.find(_ABSENT, 0, min(limit, self.num_sink_blocks))
        return super().longest_hit(present, limit if absent_sink < 0 else absent_sink)


class ChunkedLocalManager(LocalManager):
    """The tokens of the present chunk; at a chunk's start nothing."""


class RecurrentStateManager(GroupManager):
    """One state, exactly at the end."""

    is_state = True

    def first_needed(self, num_tokens: int) -> int:
        """The block whose end is the position, a multiple of the block size."""
        return max(0, num_tokens // self._block_size - 1)

    def longest_hit(self, present: bytes, limit: int) -> int:
        """Right to left to the first state."""
        return present.rfind(_PRESENT, 0, limit) + 1


def locals_by_rule(managers: Iterable[GroupManager]) -> list[list[LocalManager]]:
    """Windows and chunks, those that need the same positions together: one window's layers may be in several groups."""
    groups: dict[tuple[object, ...], list[LocalManager]] = {}
    for manager in (m for m in managers if isinstance(m, LocalManager)):
        groups.setdefault(manager.rule, []).append(manager)
    return list(groups.values())


def make_manager(group: KVGroup, block_size: int) -> GroupManager:
    """The manager for a group's kind."""
    spec = group.spec
    if isinstance(spec, SlidingWindowSpec):
        return SlidingWindowManager(group, block_size)
    if isinstance(spec, ChunkedLocalSpec):
        return ChunkedLocalManager(group, block_size)
    if isinstance(spec, RecurrentStateSpec):
        return RecurrentStateManager(group, block_size)
    return FullAttentionManager(group, block_size)
