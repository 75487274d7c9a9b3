"""The two sides of the host benchmark: a Mac that notes the parts of its steps, and mlx-lm's batch cache."""

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import mlx.core as mx
from mlx import nn
from mlx.nn.layers.base import Module
from mlx_lm.models import qwen3
from mlx_lm.models.cache import BatchKVCache

from cluster import wire
from cluster.scheduling.plan import StepPlan
from protos.cidery.worker.v1 import worker_pb2 as pb
from tests.golden.in_process import InProcessMac
from worker import attention, machine, models
from worker.models import LoadedModel

Result = TypeVar("Result")


def make_model(config: dict[str, Any]) -> Module:
    """Of random float32 weights."""
    machine.prepare()
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.eval()
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    made: Module = model
    return made


class _HollowLayer(nn.Module):
    """Nothing but what the engine does for a layer: write keys and values, attend."""

    def __call__(self, x: mx.array, rows: mx.array, cache: Any) -> mx.array:
        keys, values = cache.update_and_fetch(rows, rows)
        output: mx.array = attention.scaled_dot_product_attention(x, keys, values, cache=cache, scale=1.0, mask=None)
        return output


class _HollowModel(nn.Module):
    """A model that costs nothing: a gather, a product, and layers without any arithmetic of their own."""

    def __init__(self, num_layers: int, num_heads: int, head_dim: int, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, head_dim)
        self.layers = [_HollowLayer() for _ in range(num_layers)]
        self.lm_head = nn.Linear(head_dim, vocab_size, bias=False)
        self._num_heads = num_heads

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        rows = self.embed(tokens)[:, None]
        x = mx.repeat(rows, self._num_heads, axis=1)
        for layer, layer_cache in zip(self.layers, cache, strict=True):
            x = layer(x, rows, layer_cache)
        logits: mx.array = self.lm_head(x[:, 0])
        return logits


def hollow_model(config: dict[str, Any]) -> LoadedModel:
    """In the place of the config's model, with as many layers and heads."""
    loaded = models.adapt(make_model(config), config)
    model = _HollowModel(
        config["num_hidden_layers"], config["num_attention_heads"], config["head_dim"], config["vocab_size"]
    )
    mx.eval(model.parameters())
    return replace(loaded, model=model, family="hollow")


class TimedMac(InProcessMac):
    """CPU seconds of this thread, by part of a step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # One thing after the other: a step that runs beside it would make the interpreter slower.
        self._builds_ahead = False
        self._parts: dict[str, float] = {}
        tensors = self.engine._configured()
        # Evaluating is neither graph nor report, but lies among both.
        tensors.start = self._noted("evaluate_ms", tensors.start)  # type: ignore[method-assign]
        tensors.finish = self._noted("evaluate_ms", tensors.finish)  # type: ignore[method-assign]
        self.engine._finish_running = self._noted("report_ms", self.engine._finish_running)  # type: ignore[method-assign]

    def timed_step(self) -> dict[str, float]:
        """One step: from asking for a plan to the end of the result before."""
        self._parts = dict.fromkeys(("wire_ms", "graph_ms", "report_ms", "evaluate_ms"), 0.0)
        started_s = time.thread_time()
        self.step()
        total_s = time.thread_time() - started_s
        # What is neither message nor engine is the scheduler: the plan, and the result before it.
        return self._parts | {"schedule_ms": total_s - sum(self._parts.values())}

    def execute(self, plan: StepPlan) -> None:
        """As on a Mac: the plan goes to the worker as bytes, and so does the result come back."""
        self._timed("evaluate_ms", self.drain)
        message = self._timed("wire_ms", self._sent, plan)
        self._timed("graph_ms", self.engine.submit, message, self._report)

    def _sent(self, plan: StepPlan) -> pb.StepPlan:
        return pb.StepPlan.FromString(wire.plan_to_proto(plan).plan.SerializeToString())

    def _report(self, result: pb.StepResult) -> None:
        self._timed("wire_ms", super()._report, result)

    def _noted(self, part: str, function: Callable[..., Result]) -> Callable[..., Result]:
        return functools.partial(self._timed, part, function)

    def _timed(self, part: str, function: Callable[..., Result], *args: Any) -> Result:
        """Its time, without that of other parts in it."""
        before_s, started_s = sum(self._parts.values()), time.thread_time()
        result = function(*args)
        others_s = sum(self._parts.values()) - before_s
        self._parts[part] = self._parts.get(part, 0.0) + time.thread_time() - started_s - others_s
        return result


def peer_graphs(config: dict[str, Any], num_rows: int, num_tokens: int, num_steps: int) -> list[float]:
    """CPU seconds of this thread for the graph of each decode step over mlx-lm's batch cache, logits included."""
    model: Any = make_model(config)
    caches = [BatchKVCache([0] * num_rows) for _ in model.layers]
    mx.eval(model(mx.ones((num_rows, num_tokens), mx.int32), cache=caches))
    seconds = []
    tokens = mx.ones((num_rows, 1), mx.int32)
    for _ in range(num_steps):
        started_s = time.thread_time()
        logits = model(tokens, cache=caches)
        tokens = mx.argmax(logits[:, -1], axis=-1)[:, None]
        seconds.append(time.thread_time() - started_s)
        mx.eval(tokens, [cache.state for cache in caches])
    return seconds
