"""Who evaluates the graph of a step: whoever built it, or a thread that does nothing else.

MLX's CPU build computes on threads of its own, but whoever evaluates a graph hands over each operation, and waits until
all but some hundred of them have run (MLX 0.32: ten tasks of ten). So that the next graph can be built meanwhile, a
thread beside does this. Metal takes whole command buffers and lets go.

MLX's streams belong to the thread that made them: what a thread is to evaluate must have been built on its streams,
and nobody else can evaluate it. What has been evaluated is anyone's.
"""

import atexit
import functools
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import mlx.core as mx


class Evaluator(Protocol):
    """One evaluation at a time, for one thread that asks."""

    def building(self) -> AbstractContextManager[object]:
        """Where what `start` is given must be built."""
        ...

    def streams(self, num: int) -> list[mx.Stream]:
        """Streams of a CPU beside the one that `building` builds on, for parts of a graph."""
        ...

    def start(self, arrays: Iterable[mx.array]) -> None:
        """Begin to compute, after what was started before. Raises what that raised."""
        ...

    def wait(self) -> None:
        """Until what was started is done. Raises what it raised."""
        ...

    def abandon(self) -> None:
        """Nobody wants to know any more what came of it."""
        ...


class Inline:
    """By whoever asks. On a CPU `start` returns shortly before all is done."""

    def building(self) -> AbstractContextManager[object]:
        """Anywhere."""
        return nullcontext()

    def streams(self, num: int) -> list[mx.Stream]:
        """New ones."""
        return [mx.new_stream(mx.cpu) for _ in range(num)]

    def start(self, arrays: Iterable[mx.array]) -> None:
        """See `Evaluator`."""
        mx.async_eval(*arrays)  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See `Evaluator`."""
        mx.synchronize()

    def abandon(self) -> None:
        """MLX keeps what it still needs."""


class Beside:
    """By a thread of its own, for a CPU."""

    def __init__(self) -> None:
        self._asked, self._began, self._ended = (_closed() for _ in range(3))
        self._task: Callable[[], object] | None = None
        self._is_busy = False
        self._failure: Exception | None = None
        self._streams: list[mx.Stream] = []
        self._thread = threading.Thread(target=self._work, name="evaluation", daemon=True)
        self._thread.start()
        (self._stream,) = self.streams(1)
        self._streams.clear()
        # While a daemon's streams live, MLX aborts the process at its end.
        atexit.register(self._end)

    def building(self) -> AbstractContextManager[object]:
        """On the thread's stream."""
        return mx.stream(self._stream)

    def streams(self, num: int) -> list[mx.Stream]:
        """The same ones whoever asks."""
        missing = range(num - len(self._streams))
        if missing:
            self._ask(lambda: self._streams.extend(mx.new_stream(mx.cpu) for _ in missing))
            self.wait()
        return self._streams[:num]

    def start(self, arrays: Iterable[mx.array]) -> None:
        """See `Evaluator`."""
        self._ask(functools.partial(mx.eval, list(arrays)))

    def wait(self) -> None:
        """See `Evaluator`."""
        failure = self._end_of_task()
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Waits for it all the same."""
        self._end_of_task()

    def _end_of_task(self) -> Exception | None:
        if not self._is_busy:
            return None
        self._ended.acquire()
        self._is_busy = False
        # Dropped here: if the thread did it, references would come and go that `PoolWriter.read` counts.
        self._task = None
        failure, self._failure = self._failure, None
        return failure

    def _ask(self, task: Callable[[], object] | None) -> None:
        self.wait()
        self._task, self._is_busy = task, True
        self._asked.release()
        # It has let go of the interpreter then; without this it would wait for its turn for milliseconds.
        self._began.acquire()

    def _work(self) -> None:
        while True:
            self._asked.acquire()
            self._began.release()
            if self._task is None:
                return
            try:
                self._task()
            except Exception as error:  # noqa: BLE001 - whoever waits raises it
                self._failure = error
            self._ended.release()

    def _end(self) -> None:
        self.abandon()
        self._ask(None)
        self._thread.join()


@functools.cache
def beside() -> Beside:
    """The one of this process: each stream is a thread."""
    return Beside()


def _closed() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
