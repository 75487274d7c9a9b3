"""The two sides of the engine benchmark: each runs one workload on one model and says how fast it went."""

import importlib
import random
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.generate import BatchGenerator

from tests.bench import serve_report
from tests.bench.bench_engine import _MIXED_ARRIVAL, _PEER_CHUNK
from tests.golden.in_process import InProcessMac
from worker import machine

_CACHED_BYTES = 1 << 29
Row = dict[str, Any]


def measure(side: str, model: tuple[str, dict[str, Any]], workload: tuple[list[int], int, int], is_mixed: bool) -> Row:
    """Output tokens a second of wall and of CPU time, and the 99th percentile of gaps between a request's tokens."""
    # As the worker does on a CPU: each fused kernel would cost seconds of a compiler.
    machine.prepare()
    made = make_model(model)
    lengths, num_new, every = workload
    rng = random.Random(0)
    prompts = [[rng.randrange(1, 8192) for _ in range(length)] for length in lengths]
    arrivals = [index * every for index in range(len(prompts))]
    if is_mixed:
        arrivals[-1] = _MIXED_ARRIVAL
    runner = _Cidery(made, model[1]) if side == "cidery" else _MlxLm(made)
    runner.add([1] * 40, 4)
    runner.drain(lambda *_: None)
    times: dict[Any, list[float]] = {}

    def note(key: Any, num_tokens: int) -> None:
        times.setdefault(key, []).extend([time.perf_counter()] * num_tokens)

    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    waiting = list(zip(arrivals, prompts, strict=True))
    step = 0
    while waiting or runner.has_work():
        while waiting and waiting[0][0] <= step:
            # The long one of a mixed load isn't asked for more than one token.
            runner.add(waiting.pop(0)[1], 1 if is_mixed and len(waiting) == 0 and step else num_new)
        runner.step(note)
        step += 1
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    num_tokens = sum(map(len, times.values()))
    gaps = [later - earlier for stamps in times.values() for earlier, later in pairwise(stamps)]
    return {
        "tokens_per_s": num_tokens / wall_s,
        "tokens_per_cpu_s": num_tokens / cpu_s,
        "gap_p99_ms": 1000 * (serve_report.percentile(gaps, 99) or 0.0),
        "num_tokens": num_tokens,
    }


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
        self._mac = InProcessMac(
            model,
            config,
            kv_budget_bytes=_CACHED_BYTES,
            max_num_batched_tokens=512,
            max_chunk_tokens=512,
            max_num_seqs=64,
            max_model_len=4096,
        )
        self._num_added = 0
        self._seen: dict[str, int] = {}

    def add(self, prompt: list[int], max_tokens: int) -> None:
        self._num_added += 1
        self._mac.add(f"{self._num_added}", prompt, max_tokens, num_top_logprobs=None)

    def has_work(self) -> bool:
        return self._mac.scheduler.has_work()

    def step(self, note: Callable[[Any, int], None]) -> None:
        self._mac.step()
        for request_id, answer in self._mac.answers.items():
            num_new = len(answer.tokens) - self._seen.get(request_id, 0)
            if num_new:
                self._seen[request_id] = len(answer.tokens)
                note(request_id, num_new)

    def drain(self, note: Callable[[Any, int], None]) -> None:
        while self.has_work():
            self.step(note)


class _MlxLm:
    def __init__(self, model: Module) -> None:
        self._generator = BatchGenerator(model, prefill_step_size=_PEER_CHUNK, completion_batch_size=64)
        self._left: dict[int, int] = {}

    def add(self, prompt: list[int], max_tokens: int) -> None:
        (uid,) = self._generator.insert([prompt], max_tokens=[max_tokens])
        self._left[uid] = max_tokens

    def has_work(self) -> bool:
        return bool(self._left)

    def step(self, note: Callable[[Any, int], None]) -> None:
        _, responses = self._generator.next()
        for response in responses:
            note(response.uid, 1)
            self._left[response.uid] -= 1
            if not self._left[response.uid]:
                del self._left[response.uid]

    def drain(self, note: Callable[[Any, int], None]) -> None:
        while self.has_work():
            self.step(note)
