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
from queue import SimpleQueue
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
        # True: do the task. False: end. What is told back is that it has begun, and how it ended.
        self._asked: SimpleQueue[bool] = SimpleQueue()
        self._began: SimpleQueue[None] = SimpleQueue()
        self._ended: SimpleQueue[Exception | None] = SimpleQueue()
        self._task: Callable[[], object] | None = None
        self._streams: list[mx.Stream] = []
        self._thread = threading.Thread(target=self._work, name="evaluation", daemon=True)
        self._thread.start()
        self._need_streams(1)
        # While a daemon's streams live, MLX aborts the process at its end.
        atexit.register(self._end)

    def building(self) -> AbstractContextManager[object]:
        """On the thread's first stream."""
        return mx.stream(self._streams[0])

    def streams(self, num: int) -> list[mx.Stream]:
        """The same ones whoever asks."""
        self._need_streams(1 + num)
        return self._streams[1 : 1 + num]

    def start(self, arrays: Iterable[mx.array]) -> None:
        """See `Evaluator`."""
        self._do(functools.partial(mx.eval, list(arrays)))

    def wait(self) -> None:
        """See `Evaluator`."""
        failure = self._end_of_task()
        if failure is not None:
            raise failure

    def abandon(self) -> None:
        """Waits for it all the same."""
        self._end_of_task()

    def _need_streams(self, num: int) -> None:
        missing = range(num - len(self._streams))
        if missing:
            self._do(lambda: self._streams.extend(mx.new_stream(mx.cpu) for _ in missing))
            self.wait()

    def _do(self, task: Callable[[], object]) -> None:
        self.wait()
        self._task = task
        self._asked.put(True)
        # It has let go of the interpreter then; without this it would wait for its turn for milliseconds.
        self._began.get()

    def _end_of_task(self) -> Exception | None:
        if self._task is None:
            return None
        failure = self._ended.get()
        # Dropped here: if the thread did it, references would come and go that `PoolWriter.read` counts.
        self._task = None
        return failure

    def _work(self) -> None:
        while self._asked.get():
            self._began.put(None)
            assert self._task is not None, "asked without a task"
            try:
                self._task()
            except Exception as error:  # noqa: BLE001 - whoever waits raises it
                self._ended.put(error)
            else:
                self._ended.put(None)

    def _end(self) -> None:
        """Once it has done what it does; nothing that was interrupted can keep it."""
        self._asked.put(False)
        self._thread.join()


@functools.cache
def beside() -> Beside:
    """The one of this process: each stream is a thread."""
    return Beside()
