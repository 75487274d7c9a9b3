"""The two sides of the speculation benchmark."""

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_lm import load, stream_generate
from mlx_lm.sample_utils import make_sampler

from cluster.config import bundled_model
from cluster.scheduling.request import Speculation
from tests.bench import speculation_models as models
from tests.golden.in_process import InProcessMac
from worker import machine

_NUM_NEW = 44
_ANIMALS = ("fox", "dog", "cat", "bird", "bear", "frog", "duck", "cow")
_ANIMALS += ("horse", "mouse", "owl", "sheep", "rabbit", "turtle", "goat", "pig")
# Of the matrices' spread: about three of four guesses come true.
_NOISE = 0.1
_KV_BYTES = 1 << 29
Row = dict[str, Any]


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each case of one side."""
    machine.prepare()
    folder = Path(bundled_model())
    _, tokenizer = load(str(folder))  # type: ignore[misc]
    large, config = models.make_large(folder)
    draft = models.make_small(folder, _NOISE)
    prompts = {"copy": _copy_prompts(tokenizer, models.make_small(folder)[0]), "unrelated": _random_prompts()}
    if options.side == "mlx-lm":
        for mode in [mode for mode in options.modes if mode in ("off", "draft")]:
            for text in options.texts:
                yield _mlx_lm(large, draft[0] if mode == "draft" else None, tokenizer, prompts[text][0], text, options)
        return
    for mode in options.modes:
        for text in options.texts:
            for batch in options.batches:
                yield _cidery(large, config, draft, mode, prompts[text][:batch], text, options)


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


def _cidery(
    model: Any, config: dict[str, Any], draft: Any, mode: str, prompts: list[list[int]], text: str, options: Any
) -> Row:
    is_guessing = mode != "off"
    mac = InProcessMac(
        model,
        config,
        kv_budget_bytes=_KV_BYTES,
        max_num_batched_tokens=512,
        max_chunk_tokens=512,
        max_num_seqs=64,
        max_model_len=1024,
        max_drafts=options.num_speculative_tokens if is_guessing else 0,
        speculation=Speculation(mode),
        draft_model=draft if mode in ("draft", "auto") else None,
    )
    mac.add("warm up", prompts[0], 12)
    mac.run()
    num_drafted, num_accepted = mac.num_drafted, mac.num_accepted
    for number, prompt in enumerate(prompts):
        draws = {"temperature": 1.0, "seed": number} if text == "unrelated" else {}
        mac.add(f"{number}", prompt, _NUM_NEW, num_top_logprobs=None, **draws)
    # Prompts first: what is measured is decoding.
    while any(not mac.answers[f"{number}"].tokens for number in range(len(prompts))):
        mac.step()
    num_before = sum(len(answer.tokens) for answer in mac.answers.values())
    num_steps, started_s, started_cpu_s = mac.num_steps, time.perf_counter(), time.process_time()
    mac.run()
    seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    num_tokens = sum(len(answer.tokens) for answer in mac.answers.values()) - num_before
    return {
        "mode": mode,
        "text": text,
        "batch": len(prompts),
        "tokens_per_s": num_tokens / seconds,
        "tokens_per_cpu_s": num_tokens / cpu_s,
        "drafted_per_token": (mac.num_drafted - num_drafted) / num_tokens,
        "accepted_per_token": (mac.num_accepted - num_accepted) / num_tokens,
        "tokens_per_step": num_tokens / len(prompts) / (mac.num_steps - num_steps),
        "tokens": [mac.answers[f"{number}"].tokens for number in range(len(prompts))],
    }


def _mlx_lm(model: Any, draft: Any, tokenizer: Any, prompt: list[int], text: str, options: Any) -> Row:
    guessing = {} if draft is None else {"num_draft_tokens": options.num_speculative_tokens}
    sampler = make_sampler(temp=1.0 if text == "unrelated" else 0.0)
    # Its own count stops at an end token; ours goes on, as a request with ignore_eos does.
    tokenizer._eos_token_ids = set()
    stamps: list[tuple[float, float]] = []
    tokens: list[int] = []
    num_accepted = 0
    for response in stream_generate(
        model, tokenizer, prompt, max_tokens=_NUM_NEW, draft_model=draft, sampler=sampler, **guessing
    ):
        stamps.append((time.perf_counter(), time.process_time()))
        tokens.append(response.token)
        num_accepted += bool(response.from_draft)
    num_steps = len(tokens) - num_accepted
    return {
        "mode": "off" if draft is None else "draft",
        "text": text,
        "batch": 1,
        "tokens_per_s": (len(tokens) - 1) / (stamps[-1][0] - stamps[0][0]),
        "tokens_per_cpu_s": (len(tokens) - 1) / (stamps[-1][1] - stamps[0][1]),
        "drafted_per_token": guessing.get("num_draft_tokens", 0) * num_steps / len(tokens),
        "accepted_per_token": num_accepted / len(tokens),
        "tokens_per_step": len(tokens) / num_steps,
        "tokens": [tokens],
    }
