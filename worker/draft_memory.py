"""What a draft model has computed of sequences: blocks of keys and values, recurrent states, of a fixed size in all.

A state can't forget a token. So where a model has any, a sequence has two: one that its tokens have left, and one that
goes on from there with the guesses and is made anew from the first for each step. Guesses that came true run once more.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from worker.batch import Span
from worker.kv_shapes import CacheGroup, CacheShape, LayerShape, StateShape
from worker.kv_tensors import KVTensors
from worker.metal.pool_writer import PoolWriter

BLOCK_SIZE = 16
# Beyond so many sequences no state is kept: no step has as many.
_MAX_SEQUENCES = 256
# Of the bytes of a model that has both, what states may take.
_STATE_SHARE = 0.5


class Guess(NamedTuple):
    """The likeliest token, and the probability that the draft model gives it."""

    token_id: int
    confidence: float


@dataclass(slots=True)
class Followed:
    """What has run of a sequence: tokens whose keys and values are in its blocks; of those, some are certain.

    `states` are the places of two states: after the certain tokens, and after all. Empty for a model without any.
    """

    blocks: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    run: list[int] = field(default_factory=list)
    num_certain: int = 0
    # Behind all of its tokens, as long as they are those that have run: of a state that has seen the last one.
    next_guess: Guess | None = None

    def agree(self, token_ids: Sequence[int]) -> None:
        """Forget what ran of guesses that did not come true, or of all if a state has seen them."""
        if self.states:
            if self.num_certain > len(token_ids):
                self.num_certain = 0
            if self.num_certain != len(token_ids):
                self.next_guess = None
        else:
            place, end = self.num_certain, min(len(self.run), len(token_ids))
            while place < end and self.run[place] == token_ids[place]:
                place += 1
            # The newest token runs anew, if it ran: its logits are gone.
            self.num_certain = min(place, len(token_ids) - 1)
        del self.run[self.num_certain :]

    def span(self, token_ids: Sequence[int], *, samples: bool, num_drafts: int = 0, is_guess: bool = False) -> Span:
        """The next tokens to run; `is_guess`: over the state that may be wrong."""
        start = len(self.run)
        self.run += token_ids
        tables = [table for table in (self.blocks, self.states[is_guess : is_guess + 1]) if table]
        return Span(token_ids, start, self.blocks, samples, tables, num_drafts=num_drafts)

    def take(self, next_guess: Guess, *, num_wrong: int) -> None:
        """What the model says behind the tokens, and how many of those that ran with them it would not have said."""
        if num_wrong:
            del self.run[-num_wrong:]
        if self.states:
            self.next_guess = next_guess


class DraftMemory:
    """Owns the tensors and says which sequence has which part. Who was not served for longest gives way."""

    def __init__(self, caches: Sequence[CacheShape], writer: PoolWriter, num_bytes: int) -> None:
        """Of about `num_bytes`, and enough for one guess of one block at the least."""
        token_bytes = sum(shape.token_bytes for shape in caches if isinstance(shape, LayerShape))
        state_bytes = sum(shape.state_bytes for shape in caches if isinstance(shape, StateShape))
        groups: list[CacheGroup] = []
        sizes: list[int] = []
        # The null block and room for one sequence.
        num_slots = 0
        if state_bytes:
            share = _STATE_SHARE if token_bytes else 1.0
            num_slots = max(3, min(2 * _MAX_SEQUENCES + 1, int(num_bytes * share) // state_bytes))
        num_blocks = 0
        if token_bytes:
            num_blocks = max(3, (num_bytes - num_slots * state_bytes) // (token_bytes * BLOCK_SIZE))
        for kind, size in ((LayerShape, num_blocks), (StateShape, num_slots)):
            members = tuple(index for index, shape in enumerate(caches) if isinstance(shape, kind))
            if members:
                groups.append(CacheGroup(len(groups), members))
                sizes.append(size)
        self.tensors = KVTensors(caches, groups=groups, num_blocks=sizes, block_size=BLOCK_SIZE, writer=writer)
        self.has_states = num_slots > 0
        self.state_group = len(groups) - 1
        self._num_blocks, self._num_slots = num_blocks, num_slots
        self._free_blocks: list[int] = []
        self._free_slots: list[int] = []
        # Those that were served last come last.
        self._followed: dict[int, Followed] = {}
        self.reset()

    def reset(self) -> None:
        """No sequence lives on."""
        self._followed.clear()
        # Low ids first, so that no more memory is committed than is needed.
        self._free_blocks = list(range(self._num_blocks - 1, 0, -1))
        self._free_slots = list(range(self._num_slots - 1, 0, -1))

    def forget(self, seq_id: int) -> None:
        """The sequence has ended, if it was ever here."""
        followed = self._followed.pop(seq_id, None)
        if followed is not None:
            self._free_blocks += followed.blocks
            self._free_slots += followed.states

    def serve(self, seq_id: int, token_ids: Sequence[int]) -> Followed:
        """What has run of a sequence that has these tokens now."""
        followed = self._followed.pop(seq_id) if seq_id in self._followed else Followed()
        followed.agree(token_ids)
        self._followed[seq_id] = followed
        return followed

    def make_room(self, followed: Followed, num_tokens: int, served: Container[int]) -> bool:
        """Places for so many tokens, from those that are not `served` if need be; False if there are none."""
        num_blocks = max(0, -(-num_tokens // BLOCK_SIZE) - len(followed.blocks)) if self._num_blocks else 0
        num_slots = 2 - len(followed.states) if self.has_states else 0
        while num_blocks > len(self._free_blocks) or num_slots > len(self._free_slots):
            other = next((seq_id for seq_id in self._followed if seq_id not in served), None)
            if other is None:
                return False
            self.forget(other)
        for places, free, number, group in (
            (followed.blocks, self._free_blocks, num_blocks, 0),
            (followed.states, self._free_slots, num_slots, self.state_group),
        ):
            for _ in range(number):
                places.append(free.pop())
                self.tensors.reserve(group, places[-1])
        return True
