"""The two sides of the speculation benchmark."""

import argparse
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load, stream_generate
from mlx_lm.sample_utils import make_sampler

from cluster.config import bundled_model
from cluster.scheduling.request import Speculation
from protos.cidery.worker.v1 import worker_pb2 as pb
from tests.bench import speculation_models as models
from tests.golden.in_process import InProcessMac
from worker import machine

_NUM_NEW = 44
# Requests that run one after the other where one runs at a time.
_NUM_ALONE = 4
_ANIMALS = ("fox", "dog", "cat", "bird", "bear", "frog", "duck", "cow")
_ANIMALS += ("horse", "mouse", "owl", "sheep", "rabbit", "turtle", "goat", "pig")
# Of the matrices' spread: about three of four guesses come true.
_NOISE = 0.1
# By then a request that is alone has guessed: its first step after the prompt is planned before it can ask for guesses.
_FIRST_TOKENS = 3
_KV_BYTES = 1 << 29
_PEER_MODES = ("off", "draft")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stamp:
    """When a step had run, by wall and by CPU clock, and the tokens that it drew, by request."""

    wall_s: float
    cpu_s: float
    drawn: Counter[Any]
    num_guesses: int

    @staticmethod
    def now(drawn: Counter[Any], num_guesses: int) -> "Stamp":
        return Stamp(time.perf_counter(), time.process_time(), drawn, num_guesses)


@dataclass(slots=True)
class _Sums:
    """Over decode steps: from when all prompts have run, of a request alone in both models."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    num_tokens: int = 0
    num_guesses: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    num_rows: int = 0
    tokens: list[list[int]] = field(default_factory=list)

    def add(self, stamps: Sequence[Stamp], num_requests: int, tokens: list[list[int]]) -> None:
        drawn: Counter[Any] = Counter()
        first = 0
        # Of several requests the first would have ended before the last one gets there.
        num_first = _FIRST_TOKENS if num_requests == 1 else 1
        while len(drawn) < num_requests or min(drawn.values()) < num_first:
            drawn += stamps[first].drawn
            first += 1
        self.wall_s += stamps[-1].wall_s - stamps[first - 1].wall_s
        self.cpu_s += stamps[-1].cpu_s - stamps[first - 1].cpu_s
        for stamp in stamps[first:]:
            self.num_tokens += stamp.drawn.total()
            self.num_guesses += stamp.num_guesses
            # Whatever a request draws beyond one token in a step is a guess that came true.
            self.num_accepted += stamp.drawn.total() - len(stamp.drawn)
            self.num_rows += len(stamp.drawn)
            self.num_steps += 1
        self.tokens += tokens

    def row(self) -> Row:
        return {
            "tokens_per_s": self.num_tokens / self.wall_s,
            "tokens_per_cpu_s": self.num_tokens / self.cpu_s,
            "cpu_ms_per_step": 1000 * self.cpu_s / self.num_steps,
            "guessed_per_token": self.num_guesses / self.num_tokens,
            "came_true": self.num_accepted / self.num_guesses if self.num_guesses else None,
            "tokens_per_step": self.num_tokens / self.num_rows,
            "tokens": self.tokens,
        }


class _ClockedMac(InProcessMac):
    """Keeps a stamp of each step."""

    stamps: list[Stamp]

    def _report(self, result: pb.StepResult) -> None:
        super()._report(result)
        drawn = Counter(each.seq_id for each in result.sampled)
        self.stamps.append(Stamp.now(drawn, sum(each.num_drafts for each in result.speculated)))


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each case of one side."""
    machine.prepare()
    folder = Path(bundled_model())
    _, tokenizer = load(str(folder))  # type: ignore[misc]
    large, config = models.make_large(folder)
    draft = models.make_small(folder, _NOISE)
    prompts = {"copy": _copy_prompts(tokenizer, models.make_small(folder)[0]), "unrelated": _random_prompts()}
    for mode in options.modes if options.side == "cidery" else [each for each in options.modes if each in _PEER_MODES]:
        for num_guesses in options.guesses if mode != "off" else [0]:
            for text in options.texts:
                case = {"mode": mode, "guesses": num_guesses, "text": text}
                if options.side == "mlx-lm":
                    yield case | {"batch": 1} | _mlx_lm(large, draft, tokenizer, prompts[text], case)
                    continue
                for batch in options.batches:
                    mac = _make_mac(large, config, draft, mode, num_guesses)
                    yield case | {"batch": batch} | _cidery(mac, prompts[text], batch, text)


def _copy_prompts(tokenizer: Any, model: Any) -> list[list[int]]:
    """The small model tells what the large one would."""
    prompts = []
    for animal in _ANIMALS:
        question = {"role": "user", "content": f"Tell me a story about a {animal}."}
        asked = tokenizer.apply_chat_template([question], add_generation_prompt=True)
        told = "".join(each.text for each in stream_generate(model, tokenizer, asked, max_tokens=60))
        talk = [question, {"role": "assistant", "content": told.removesuffix("<|im_end|>")}, question]
        prompts.append(list(tokenizer.apply_chat_template(talk, add_generation_prompt=True)))
    return prompts


def _random_prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 1536) for _ in range(100)] for _ in _ANIMALS]


def _make_mac(model: Any, config: dict[str, Any], draft: Any, mode: str, num_guesses: int) -> _ClockedMac:
    mac = _ClockedMac(
        model,
        config,
        kv_budget_bytes=_KV_BYTES,
        max_num_batched_tokens=512,
        max_chunk_tokens=512,
        max_num_seqs=64,
        max_model_len=1024,
        max_drafts=num_guesses,
        speculation=Speculation(mode),
        draft_model=draft if mode in ("draft", "auto") else None,
    )
    mac.stamps = []
    mac.add("warm up", _random_prompts()[-1], 12)
    mac.run()
    return mac


def _cidery(mac: _ClockedMac, prompts: list[list[int]], batch: int, text: str) -> Row:
    """The first requests together, or some one after the other."""
    sums = _Sums()
    for first in range(_NUM_ALONE if batch == 1 else 1):
        mac.stamps.clear()
        numbers = range(first, first + batch)
        for number in numbers:
            draws: dict[str, Any] = {"temperature": 1.0, "seed": number} if text == "unrelated" else {}
            mac.add(f"{number}", prompts[number], _NUM_NEW, num_top_logprobs=None, **draws)
        mac.run()
        sums.add(mac.stamps, batch, [mac.answers[f"{number}"].tokens for number in numbers])
    return sums.row()


def _mlx_lm(model: Any, draft: Any, tokenizer: Any, prompts: list[list[int]], case: dict[str, Any]) -> Row:
    # Its own count stops at an end token; ours goes on, as a request with ignore_eos does.
    tokenizer._eos_token_ids = set()
    num_drafts = case["guesses"]
    guessing = {"draft_model": draft[0], "num_draft_tokens": num_drafts} if num_drafts else {}
    sampler = make_sampler(temp=1.0 if case["text"] == "unrelated" else 0.0)
    mx.random.seed(0)
    sums = _Sums()
    for prompt in prompts[:_NUM_ALONE]:
        stamps: list[Stamp] = []
        tokens: list[int] = []
        num_before = 0
        for response in stream_generate(model, tokenizer, prompt, max_tokens=_NUM_NEW, sampler=sampler, **guessing):
            tokens.append(response.token)
            # A step's guesses that came true are followed by its own token, unless the answer is long enough.
            if not response.from_draft or len(tokens) == _NUM_NEW:
                num_guesses = min(num_drafts, _NUM_NEW - num_before)
                stamps.append(Stamp.now(Counter({0: len(tokens) - num_before}), num_guesses))
                num_before = len(tokens)
        sums.add(stamps, 1, [tokens])
    return sums.row()
