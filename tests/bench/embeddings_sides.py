"""The two sides of the embeddings benchmark."""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import make_prompt_cache

from cluster.scheduling.request import Pooling, Reading
from tests.bench.bench_embeddings import LENGTHS
from tests.bench.bench_engine import KINDS
from tests.bench.engine_sides import make_model
from tests.golden.in_process import InProcessMac
from worker import machine

_VOCAB_SIZE = 8192
_KV_BYTES = 1 << 29
_STEP_TOKENS = 512
_PREFIX = "mlx-lm, "

Text = list[int]
Vectors = list[list[float]]
Row = dict[str, Any]


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each case of one side, its vectors among the rest."""
    machine.prepare()
    kind = KINDS[options.kinds[0]]
    model = make_model(kind)
    sides: dict[str, Callable[[list[Text]], Vectors]]
    if options.side == "cidery":
        sides = {"cidery": _Cidery(model, kind[1]).embed}
    else:
        peer = _MlxLm(model, options.padded)
        sides = {
            f"{_PREFIX}one by one": peer.one_by_one,
            f"{_PREFIX}padded": peer.padded,
            f"{_PREFIX}padded, sorted": peer.padded_by_length,
        }
    for lengths in options.lengths:
        texts = make_texts(options.texts, *LENGTHS[lengths])
        for how, embed in sides.items():
            # Other texts: these must not be found in a cache.
            embed([[token ^ 1 for token in text] for text in texts[:4]])
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            vectors = embed(texts)
            wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
            num_tokens = sum(map(len, texts))
            yield {
                "lengths": lengths,
                "how": how,
                "texts_per_s": len(texts) / wall_s,
                "tokens_per_s": num_tokens / wall_s,
                "texts_per_cpu_s": len(texts) / cpu_s,
                "tokens_per_cpu_s": num_tokens / cpu_s,
                "vectors": vectors,
            }


def make_texts(number: int, least: int, most: int) -> list[Text]:
    """Random tokens, lengths spread evenly over the logarithms of their range."""
    rng = random.Random(0)
    lengths = [round(least * (most / least) ** rng.random()) for _ in range(number)]
    return [[rng.randrange(2, _VOCAB_SIZE) for _ in range(length)] for length in lengths]


class _Cidery:
    def __init__(self, model: Module, config: dict[str, Any]) -> None:
        self._mac = InProcessMac(
            model,
            config,
            kv_budget_bytes=_KV_BYTES,
            max_num_batched_tokens=_STEP_TOKENS,
            max_chunk_tokens=_STEP_TOKENS,
            max_num_seqs=64,
            max_model_len=1024,
        )
        self._num_added = 0

    def embed(self, texts: list[Text]) -> Vectors:
        answers = []
        for text in texts:
            self._num_added += 1
            reading = Reading(pooling=Pooling.MEAN)
            answers.append(self._mac.add(f"{self._num_added}", text, 0, num_top_logprobs=None, reading=reading))
        self._mac.run()
        return [list(answer.embedding) for answer in answers]


class _MlxLm:
    def __init__(self, model: Module, num_padded: int) -> None:
        self._model: Any = model
        self._num_padded = num_padded
        text_model = getattr(model, "language_model", model)
        # Without the projection to logits.
        self._body: Any = text_model.backbone if hasattr(text_model, "backbone") else text_model.model

    def one_by_one(self, texts: list[Text]) -> Vectors:
        return [self._embed([text])[0] for text in texts]

    def padded(self, texts: list[Text]) -> Vectors:
        vectors: Vectors = []
        for first in range(0, len(texts), self._num_padded):
            vectors += self._embed(texts[first : first + self._num_padded])
        return vectors

    def padded_by_length(self, texts: list[Text]) -> Vectors:
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        by_place = dict(zip(order, self.padded([texts[place] for place in order]), strict=True))
        return [by_place[place] for place in range(len(texts))]

    def _embed(self, texts: list[Text]) -> Vectors:
        """On the right: what comes behind a text changes nothing of it."""
        longest = max(map(len, texts))
        tokens = mx.array([text + [0] * (longest - len(text)) for text in texts])
        # Over caches, as when it generates: without them some families forget their windows.
        hidden = self._body(tokens, cache=make_prompt_cache(self._model)).astype(mx.float32)
        lengths = mx.array([[len(text)] for text in texts])
        is_text = mx.arange(longest)[None] < lengths
        vectors: Vectors = (mx.where(is_text[..., None], hidden, 0).sum(axis=1) / lengths).tolist()
        return vectors
