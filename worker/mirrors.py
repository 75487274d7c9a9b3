"""What decode rows see, kept in a row from one step to the next, for MLX's CPU build.

A row sees in each step what it saw in the last one and one token more, but its blocks lie anywhere, and gathering them
takes two to five times as long as attention to the copy. So the copy of a decode group is kept, with room behind it,
and each step adds a token a row. It is made again when rows come or go or the room is used up; a group that changes in
every step is gathered as before. Pools stay the truth: a mirror is only read, and dropped when a step does without it.

A row is known by the block table that its sequence owns. Tables are edited only to name other blocks of the same
content, so what a mirror has copied stays right until the row is another one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from worker.batch_index import pool_rows
from worker.group_rows import DecodeGroup, Seen
from worker.kv_shapes import Reach
from worker.metal import twins
from worker.metal.kv_pools import KVPool

# Tokens that rows may grow by until their mirror is made again.
_ROOM_TOKENS = 64
# Of fewer numbers of a layer's keys there is little to gain: one row of 16 thousand gained a tenth of a step.
MIN_KEYS = 1 << 13


# What the rows of a group see of one cache, over its pools; None if it is to be gathered.
Mirror = Callable[[DecodeGroup, Sequence[KVPool]], Seen | None]


@dataclass(frozen=True, slots=True)
class Layer:
    """Whose keys: an attention cache. `dim` is a key's; `slot_bytes` a token's, in all caches of its group."""

    cache: int
    group: int
    reach: Reach
    num_kv_heads: int
    dim: int
    slot_bytes: int


# Group, reach, whether a prefix is read apart, and the block tables of rows.
_Key = tuple[int, Reach, bool, tuple[int, ...]]


class Mirrors:
    """The mirrors of one model's pools; `limit_bytes` bounds them all."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._mirrors: dict[_Key, _Mirror] = {}
        # Groups of the step before and of this one; they keep the tables alive that keys are made of.
        self._before: dict[_Key, DecodeGroup] = {}
        self._now: dict[_Key, DecodeGroup] = {}

    @property
    def num_bytes(self) -> int:
        """Of all mirrors."""
        return sum(mirror.num_bytes for mirror in self._mirrors.values())

    def begin(self) -> None:
        """Before each step: what the one before did without is dropped."""
        self._mirrors = {key: mirror for key, mirror in self._mirrors.items() if key in self._now}
        self._before, self._now = self._now, {}

    def seen(self, layer: Layer, group: DecodeGroup, pools: Sequence[KVPool]) -> Seen | None:
        """What the group's rows see, this step's tokens included; None if it is to be gathered."""
        if not group.owners or group.num_slots * layer.num_kv_heads * layer.dim < MIN_KEYS:
            return None
        key = (layer.group, layer.reach, group.is_sharing, group.owner_ids)
        if key not in self._now:
            self._now[key] = group
            self._turn(key, layer, group)
        mirror = self._mirrors.get(key)
        return None if mirror is None else mirror.seen(layer, pools)

    def _turn(self, key: _Key, layer: Layer, group: DecodeGroup) -> None:
        """Move the group's mirror on to this step, or begin one for rows that were there in the step before."""
        mirror = self._mirrors.get(key)
        if mirror is not None and mirror.move_on(group):
            return
        self._mirrors.pop(key, None)
        before = self._before.get(key)
        if before is None or not np.array_equal(before.ends + 1, group.ends):
            return
        mirror = _Mirror(group, layer.slot_bytes)
        if self.num_bytes + mirror.num_bytes <= self._limit_bytes:
            self._mirrors[key] = mirror


class _Mirror:
    """Of one decode group, over all caches that see it alike."""

    def __init__(self, group: DecodeGroup, slot_bytes: int) -> None:
        room = np.zeros((len(group.owners), _ROOM_TOKENS // group.block_size), np.int32)
        self._tables = np.concatenate([group.block_tables, room], axis=1)
        self._starts = group.starts
        self._capacity = self._tables.shape[1] * group.block_size
        self.num_bytes = len(group.owners) * self._capacity * slot_bytes
        self._number = 0
        self._newest = _Newest(group, self._starts)
        # By cache: the number of the step it was last seen in, and `[rows * num_kv_heads, capacity, dim]` each.
        self._kept: dict[int, tuple[int, list[mx.array]]] = {}

    def move_on(self, group: DecodeGroup) -> bool:
        """False if the rows are not one token longer, see what is not here, or have no room left."""
        is_next = np.array_equal(self._newest.ends + 1, group.ends)
        if not is_next or (group.firsts_seen < self._starts).any():
            return False
        if int((group.ends - self._starts).max()) > self._capacity:
            return False
        self._number += 1
        self._newest = _Newest(group, self._starts)
        return True

    def seen(self, layer: Layer, pools: Sequence[KVPool]) -> Seen | None:
        last, vectors = self._kept.get(layer.cache, (-1, []))
        if self._number == 0 and not vectors:
            index = pool_rows(self._tables, layer.num_kv_heads)
            vectors = [twins.gather(pool, index).flatten(0, 1) for pool in pools]
        elif last == self._number - 1:
            for vector, pool in zip(vectors, pools, strict=True):
                self._newest.add_to(vector, pool, layer.num_kv_heads)
        elif last != self._number:
            # A layer that did without in between.
            return None
        self._kept[layer.cache] = self._number, vectors
        newest, shape = self._newest, (len(self._starts), layer.num_kv_heads, self._capacity, -1)
        return Seen(tuple(vector.reshape(shape)[:, :, : newest.num_keys] for vector in vectors), newest.mask)


class _Newest:
    """The newest tokens of a step's rows: where they lie in pools and in a mirror that begins at `starts`."""

    def __init__(self, group: DecodeGroup, starts: NDArray[np.int32]) -> None:
        self.ends = group.ends
        lens, hidden = self.ends - starts, group.firsts_seen - starts
        self.num_keys = int(lens.max())
        self._places = lens - 1
        self._blocks = group.block_tables[np.arange(len(starts)), (group.context_lens - 1) // group.block_size]
        self._offsets = (group.context_lens - 1) % group.block_size
        self.mask = _mask(lens, hidden, self.num_keys)
        self._index: dict[int, tuple[mx.array, ...]] = {}

    def add_to(self, vector: mx.array, pool: KVPool, num_kv_heads: int) -> None:
        """In place: the step before, which read it, is over when this is computed."""
        if len(self._places) == 1 and isinstance(pool, mx.array):
            block, offset, place = int(self._blocks[0]), int(self._offsets[0]), int(self._places[0])
            first = block * num_kv_heads
            vector[:, place : place + 1] = pool[first : first + num_kv_heads, offset : offset + 1]
            return
        if num_kv_heads not in self._index:
            self._index[num_kv_heads] = (
                pool_rows(self._blocks[:, None], num_kv_heads).flatten(),
                mx.array(np.repeat(self._offsets, num_kv_heads)),
                mx.arange(len(self._places) * num_kv_heads),
                mx.array(np.repeat(self._places, num_kv_heads)),
            )
        rows, offsets, heads, places = self._index[num_kv_heads]
        vector[heads, places] = twins.gather_slots(pool, rows, offsets)


def _mask(lens: NDArray[np.int32], hidden: NDArray[np.int32], num_keys: int) -> mx.array | None:
    if int(lens.min()) == num_keys and not hidden.any():
        return None
    slots = np.arange(num_keys, dtype=np.int32)
    return mx.array(((slots < lens[:, None]) & (slots >= hidden[:, None]))[:, None, None, :])
