"""How unmodified mlx-lm models run their recurrent layers over states in pools.

A recurrent mixer isn't token-parallel, so in a step of token rows it can't take all rows at once: a wrapper around the
call of each reviewed mixer class cuts the rows into parts that it can take, decode rows together and prefills of
one length, and hands it the states of that part. A flat step has one part, so the state is simply laid in.

Where kernels update states in their slots, nothing is cut: what is laid in are `SlotStates`, over all rows of the step.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache

from worker.attention import Step
from worker.batch import Batch, Part
from worker.errors import UnsupportedModelError
from worker.kv_shapes import StateShape
from worker.kv_tensors import KVTensors
from worker.metal import state_convs, state_updates
from worker.metal.state_updates import SlotStates


class StateCache(ArraysCache):
    """One recurrent cache in mlx-lm's protocol. Models test for the class, so it must be one of theirs."""

    def __init__(self, step: Step, index: int, shape: StateShape) -> None:
        super().__init__(size=len(shape.shapes))
        self.cache: list[mx.array | None] = [None] * len(shape.shapes)  # type: ignore[assignment]
        self._step = step
        self._index = index

    def __getitem__(self, index: int) -> mx.array | None:
        self._check_flat()
        item: mx.array | None = self.cache[index]
        return item

    def __setitem__(self, index: int, value: mx.array) -> None:
        self._check_flat()
        self.cache[index] = value

    @property
    def is_cut(self) -> bool:
        """Whether rows of several sequences run, so that a mixer can't have the state as it is."""
        step = self._step
        return step.is_running and not (step.batch.is_flat or step.updates_states_in_place)

    def empty(self) -> bool:
        """A cache is always there."""
        return False

    def begin(self) -> None:
        """Of a flat step: lay the sequence's state in. Of one whose states are updated in place: where they are."""
        if self._step.updates_states_in_place:
            self.cache = [self._slot_states(number) for number in range(len(self.cache))]  # type: ignore[misc]
            return
        (part,) = self._step.batch.parts
        self.cache = self.take(part)

    def end(self) -> None:
        """Of a flat step: keep what the layer left."""
        if not self._step.updates_states_in_place:
            (part,) = self._step.batch.parts
            self.put(part, self.cache)
        self.forget()

    def forget(self) -> None:
        """Let go of the step's arrays."""
        self.cache = [None] * len(self.cache)

    def take(self, part: Part) -> list[mx.array | None]:
        """The state of a part's sequences; None where they begin."""
        return self._step.tensors.take_state(self._index, self._slots(part))

    def put(self, part: Part, arrays: Sequence[mx.array | None]) -> None:
        """The state after the part's rows."""
        self._step.tensors.put_state(self._index, self._slots(part), arrays)

    @property
    def offset(self) -> int | mx.array:
        """Positions of the step's rows, which some mixers are given beside their cache."""
        return self._step.batch.offset

    def position_of(self, part: Part) -> int | mx.array:
        """Position of the first token of each batch row of a part."""
        spans = self._step.batch.spans
        starts = [spans[index].start for index in part.spans]
        return starts[0] if len(starts) == 1 else mx.array(starts, mx.int32)

    def running(self, part: Part) -> AbstractContextManager[None]:
        """While a mixer runs the rows of a part."""
        adapters = self._step.adapters
        return nullcontext() if adapters is None else adapters.within(part)

    def parts(self) -> list[Part]:
        """Of the step."""
        return self._step.batch.parts

    def _slot_states(self, number: int) -> SlotStates:
        step = self._step
        update = functools.partial(step.tensors.update_state, self._index, number)
        return SlotStates(update, step.batch.state_parts(step.tensors.group_of[self._index]), step.kernels.states)

    def _slots(self, part: Part) -> tuple[int, ...]:
        step = self._step
        return step.batch.slots(part, step.tensors.group_of[self._index])

    def _check_flat(self) -> None:
        if self.is_cut:
            raise UnsupportedModelError("a layer reads a recurrent state outside of a mixer that is known")


@contextmanager
def states_of(states: Sequence[StateCache], step: Step) -> Iterator[None]:
    """While the model runs the rows of a step that has begun: its recurrent states are there, and kept."""
    batch, tensors, in_place = step.batch, step.tensors, step.updates_states_in_place
    if states and in_place:
        # Of a step that was not in place.
        tensors.settle_states()
    elif states:
        begin_states(batch, tensors)
    lays_in = states if batch.is_flat or in_place else []
    for state in lays_in:
        state.begin()
    yield
    for state in lays_in:
        state.end()


def begin_states(batch: Batch, tensors: KVTensors) -> None:
    """Tell the pools which states the parts of a step will take, and which of them begin."""
    parts = batch.parts
    groups = [group for group in range(len(tensors.groups)) if tensors.is_state_group(group)]
    slots = {group: [batch.slots(part, group) for part in parts] for group in groups}
    fresh = {
        group: frozenset(s for s, part in zip(slots[group], parts, strict=True) if part.is_fresh) for group in groups
    }
    revocable = {
        group: frozenset(s for s, part in zip(slots[group], parts, strict=True) if part.has_drafts) for group in groups
    }
    tensors.begin_states(slots, fresh, revocable)


def install_over_slots(mixer: type) -> None:
    """Have a mixer class, whose module's name says where it looks its updates up, take states in slots too."""
    module = sys.modules[mixer.__module__]
    state_updates.install(module)
    state_convs.install(module)


def install(mixer: type) -> None:
    """Cut the rows for a mixer class; its call has a parameter `cache`."""
    if not hasattr(mixer.__call__, "cidery_inner"):
        mixer.__call__ = _by_parts(mixer.__call__)  # type: ignore[method-assign]


def _by_parts(call: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def by_parts(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        cache = bound.arguments.get("cache")
        if not isinstance(cache, StateCache) or not cache.is_cut:
            return call(self, *args, **kwargs)
        parts = cache.parts()
        num_rows = parts[-1].last
        outputs = []
        for part in parts:
            local: Any = ArraysCache(size=len(cache.cache))
            local.cache[:] = cache.take(part)
            arguments = {
                name: cache.position_of(part) if value is cache.offset else _cut(value, part, num_rows)
                for name, value in bound.arguments.items()
                if name != "cache"
            }
            with cache.running(part):
                outputs.append(_uncut(call(**arguments, cache=local), part))
            cache.put(part, local.cache)
        return _joined(outputs)

    by_parts.cidery_inner = call  # type: ignore[attr-defined]
    return by_parts


def _cut(value: Any, part: Part, num_rows: int) -> Any:
    """A part's rows of an array `[rows, 1, …]`, as `[sequences, tokens, …]`; anything else as it is."""
    if not isinstance(value, mx.array) or value.shape[:2] != (num_rows, 1):
        return value
    rows = value if part.last - part.first == num_rows else value[part.first : part.last]
    return rows if part.num_tokens == 1 else rows.reshape(-1, part.num_tokens, *rows.shape[2:])


def _uncut(output: Any, part: Part) -> Any:
    if isinstance(output, tuple):
        return tuple(_uncut(item, part) for item in output)
    return output if part.num_tokens == 1 else output.reshape(-1, 1, *output.shape[2:])


def _joined(outputs: list[Any]) -> Any:
    if len(outputs) == 1:
        return outputs[0]
    if isinstance(outputs[0], tuple):
        return tuple(mx.concatenate(list(items)) for items in zip(*outputs, strict=True))
    return mx.concatenate(outputs)
