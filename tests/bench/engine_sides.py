"""The two sides of the engine benchmark: each runs one workload on one model and says how fast it went."""

import importlib
import random
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator

from cluster.scheduling.config import SchedulerConfig
from tests.bench import serve_report
from tests.bench.bench_engine import Workload
from tests.golden.in_process import InProcessMac
from worker import machine

_CACHED_BYTES = 1 << 29
_MAX_MODEL_LEN = 8192
Row = dict[str, Any]


def measure(side: str, model: tuple[str, dict[str, Any]], workload: Workload) -> Row:
    """Output tokens a second of wall and of CPU time, and the 99th percentile of gaps between a request's tokens."""
    # As the worker does on a CPU: each fused kernel would cost seconds of a compiler.
    machine.prepare()
    made = make_model(model)
    rng = random.Random(0)
    waiting = [
        (step, [rng.randrange(1, 8192) for _ in range(length)], num_new) for step, length, num_new in workload.requests
    ]
    runner = _Cidery(made, model[1]) if side == "cidery" else _MlxLm(made)
    runner.add([1] * 40, 4)
    while runner.has_work():
        runner.step(lambda *_: None)
    load = _Load(runner, waiting)
    while not load.has_begun():
        load.step()
    started_s, started_cpu_s, num_before = time.perf_counter(), time.process_time(), load.num_tokens
    num_joins = len(load.waiting)
    while load.has_work() and not (workload.is_steady and load.has_ended()):
        load.step()
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    num_tokens = load.num_tokens - num_before
    pairs = [pair for stamps in load.times.values() for pair in pairwise(stamps)]
    gaps = [later - earlier for earlier, later in pairs if earlier >= started_s]
    return {
        "tokens_per_s": num_tokens / wall_s,
        "tokens_per_cpu_s": num_tokens / cpu_s,
        "joins_per_s": num_joins / wall_s,
        "gap_p99_ms": 1000 * (serve_report.percentile(gaps, 99) or 0.0),
        "num_tokens": num_tokens,
        "num_parameters": sum(array.size for _, array in tree_flatten(made.parameters())),
    }


class _Load:
    """Requests on their way through one side; notes when their tokens come."""

    def __init__(self, runner: "_Cidery | _MlxLm", waiting: list[tuple[int, list[int], int]]) -> None:
        self._runner = runner
        self.waiting = waiting
        self._num_first = sum(step == 0 for step, _, _ in waiting)
        self._wanted: dict[Any, int] = {}
        self._num_steps = 0
        self.num_tokens = 0
        self.times: dict[Any, list[float]] = {}

    def step(self) -> None:
        while self.waiting and self.waiting[0][0] <= self._num_steps:
            _, prompt, num_new = self.waiting.pop(0)
            self._wanted[self._runner.add(prompt, num_new)] = num_new
        self._runner.step(self._note)
        self._num_steps += 1

    def has_begun(self) -> bool:
        """All that came first have a token."""
        return len(self.times) >= self._num_first

    def has_ended(self) -> bool:
        """One of them has all."""
        return any(len(times) == self._wanted[key] for key, times in self.times.items())

    def has_work(self) -> bool:
        return bool(self.waiting) or self._runner.has_work()

    def _note(self, key: Any, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.times.setdefault(key, []).extend([time.perf_counter()] * num_tokens)


def make_model(model: tuple[str, dict[str, Any]]) -> Module:
    """Random float32 weights, the same every time."""
    module = importlib.import_module(f"mlx_lm.models.{model[0]}")
    mx.random.seed(0)
    made: Module = module.Model(module.ModelArgs.from_dict({"model_type": model[0], **model[1]}))
    made.eval()
    made.set_dtype(mx.float32)
    mx.eval(made.parameters())
    return made


class _Cidery:
    def __init__(self, model: Module, config: dict[str, Any]) -> None:
        limits = SchedulerConfig(max_model_len=_MAX_MODEL_LEN)
        self._mac = InProcessMac(
            model,
            config,
            kv_budget_bytes=_CACHED_BYTES,
            # What a worker has for strips and mirrors.
            memory_limit_bytes=machine.memory_limit_bytes(),
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_chunk_tokens=limits.max_chunk_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_model_len=_MAX_MODEL_LEN,
        )
        self._num_added = 0
        self._seen: dict[str, int] = {}

    def add(self, prompt: list[int], max_tokens: int) -> str:
        self._num_added += 1
        self._mac.add(f"{self._num_added}", prompt, max_tokens, num_top_logprobs=None)
        return f"{self._num_added}"

    def has_work(self) -> bool:
        return self._mac.scheduler.has_work()

    def step(self, note: Callable[[Any, int], None]) -> None:
        self._mac.step()
        for request_id, answer in self._mac.answers.items():
            num_new = len(answer.tokens) - self._seen.get(request_id, 0)
            if num_new:
                self._seen[request_id] = len(answer.tokens)
                note(request_id, num_new)


class _MlxLm:
    def __init__(self, model: Module) -> None:
        self._generator = BatchGenerator(model)
        self._left: dict[int, int] = {}

    def add(self, prompt: list[int], max_tokens: int) -> int:
        uid: int
        (uid,) = self._generator.insert([prompt], max_tokens=[max_tokens])
        self._left[uid] = max_tokens
        return uid

    def has_work(self) -> bool:
        return bool(self._left)

    def step(self, note: Callable[[Any, int], None]) -> None:
        _, responses = self._generator.next()
        for response in responses:
            note(response.uid, 1)
            self._left[response.uid] -= 1
            if not self._left[response.uid]:
                del self._left[response.uid]
