"""How far an engine with quantised KV is from one with plain KV. Logits come chunk by chunk, so that chunks after the
first see what was read back from the pools.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import load
from numpy.typing import NDArray

from tests.worker.driver import configure_of
from training.examples import examples
from worker import kv_quantization, models
from worker.batch import Batch, Span
from worker.engine import Engine
from worker.kv_shapes import LayerShape
from worker.metal.dispatch import twin_kernels

_CHUNK_TOKENS = 64
_WINDOW_TOKENS = 512
_NUM_BLOCKS = 64
_DECODE_STEPS = 32
_FORMATS = ((None, None), (8, 64), (8, 32), (4, 64), (4, 32))


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens, and from where on they count."""

    token_ids: list[int]
    first: int


class Scorer:
    """The engine with KV in one format, asked for all logits of a text."""

    def __init__(self, model: Any, config: dict[str, Any], bits: int | None, group_size: int | None) -> None:
        self._loaded = kv_quantization.quantise(models.adapt(model, config), bits, group_size)
        self._engine = Engine(self._loaded, twin_kernels(), memory_limit_bytes=1 << 32)
        self._engine.configure(configure_of(self._engine, num_blocks=_NUM_BLOCKS))

    @property
    def token_bytes(self) -> int:
        """Of all layers."""
        return sum(shape.token_bytes for shape in self._loaded.caches if isinstance(shape, LayerShape))

    def logprobs(self, token_ids: list[int]) -> NDArray[np.float32]:
        """Of every next token, `[len(token_ids), vocab]`."""
        rows = []
        for start in range(0, len(token_ids), _CHUNK_TOKENS):
            rows.append(self._forward(token_ids[start : start + _CHUNK_TOKENS], start))
        return np.concatenate(rows)

    def decode_cpu_s(self, num_before: int) -> float:
        """CPU time of one token after so many, the best of some: a busy machine disturbs it least."""
        times = []
        for step in range(_DECODE_STEPS):
            started_s = time.process_time()
            self._forward([1], num_before + step)
            times.append(time.process_time() - started_s)
        return min(times)

    def _forward(self, token_ids: list[int], start: int) -> NDArray[np.float32]:
        engine, table = self._engine, list(range(1, _NUM_BLOCKS))
        tensors = engine._configured()
        # No row samples: then the head computes all of them.
        batch = Batch([Span(token_ids, start, table, False, (table,))], block_size=tensors.block_size)
        engine._step.begin(batch, tensors)
        logits = self._loaded.model(batch.tokens, cache=engine.caches.nested)[0].astype(mx.float32)
        engine.caches.forget()
        logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        tensors.evaluate(logits)
        engine._step.end()
        return np.array(logits)


def answers(tokenizer: Any, seed: int, share: float) -> Iterator[Text]:
    """Chats whose last answer counts."""
    for example in examples(seed, share):
        prompt = tokenizer.apply_chat_template(list(example.messages), add_generation_prompt=True, return_dict=False)
        answer = tokenizer.encode(example.accepted[0], add_special_tokens=False)
        yield Text([*prompt, *answer], len(prompt))


def prose(tokenizer: Any, folder: Path, num_windows: int) -> Iterator[Text]:
    """Windows of the documents, each by itself."""
    text = "\n".join((folder / name).read_text() for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"))
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for start in range(0, min(num_windows * _WINDOW_TOKENS, len(token_ids)), _WINDOW_TOKENS):
        yield Text(token_ids[start : start + _WINDOW_TOKENS], 1)


def measure(name: str, folder: Path, texts_of: Callable[[Any], Iterable[Text]]) -> list[dict[str, Any]]:
    """A row for each format that the model's heads allow; the first is plain KV."""
    model, tokenizer = load(str(folder))[:2]
    if mx.default_device() == mx.Device(mx.cpu):
        model.set_dtype(mx.float32)
    config = json.loads((folder / "config.json").read_text())
    texts = list(texts_of(tokenizer))
    plain: list[NDArray[np.float32]] = []
    rows = []
    for bits, group_size in _FORMATS:
        if group_size is not None and config["hidden_size"] // config["num_attention_heads"] % group_size:
            continue
        scorer = Scorer(model, config, bits, group_size)
        scorer.logprobs(texts[0].token_ids)
        started_s = time.process_time()
        found = [scorer.logprobs(text.token_ids)[text.first - 1 : -1] for text in texts]
        cpu_s = time.process_time() - started_s
        plain = plain or found
        num_tokens = sum(len(text.token_ids) for text in texts)
        rows.append(
            {"model": name, "bits": bits, "group_size": group_size, "kv_bytes_per_token": scorer.token_bytes}
            | _quality(texts, plain, found)
            | {"prefill_tokens_per_cpu_s": num_tokens / cpu_s, "decode_cpu_ms_at_512": 1000 * scorer.decode_cpu_s(512)}
        )
    return rows


def _quality(texts: list[Text], plain: list[NDArray[np.float32]], found: list[NDArray[np.float32]]) -> dict[str, float]:
    """Of the tokens that count: perplexity, and how far the distributions are from those over plain KV."""
    own, other = np.concatenate(found), np.concatenate(plain)
    targets = np.concatenate([np.array(text.token_ids[text.first :]) for text in texts])
    logprobs, before = (rows[np.arange(len(targets)), targets] for rows in (own, other))
    return {
        "num_tokens": len(targets),
        "perplexity": float(np.exp(-logprobs.mean())),
        "mean_kl": float((np.exp(other) * (other - own)).sum(axis=-1).mean()),
        "same_top_token": float((own.argmax(axis=-1) == other.argmax(axis=-1)).mean()),
        "logprob_change_p99": float(np.quantile(np.abs(logprobs - before), 0.99)),
    }
