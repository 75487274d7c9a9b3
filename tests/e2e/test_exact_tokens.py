"""Greedy tokens equal mlx-lm's own, request by request, whatever runs beside them."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from cluster.config import bundled_model

pytestmark = [pytest.mark.ray, pytest.mark.slow]

VOCABULARY = range(3, 1500)
LOGPROB_TOLERANCE = 1e-4


def prompts(seed: int, count: int, longest: int) -> list[list[int]]:
    """Random prompts; some share a prefix, some end exactly at a block, one has one token, two are the same."""
    rng = random.Random(seed)
    shared = [rng.choice(VOCABULARY) for _ in range(longest // 2)]
    made = [[rng.choice(VOCABULARY)], shared[:16], shared[:32], shared[:33]]
    while len(made) < count:
        own = [rng.choice(VOCABULARY) for _ in range(rng.randint(1, longest // 2))]
        made.append(rng.choice(([], shared, shared[:48])) + own)
    return [*made[: count - 1], list(made[-2])]


def run(served, jobs: list[tuple[list[int], int]], concurrency: int) -> list[dict]:
    """All jobs, so many at a time: a new one joins when one leaves."""

    def one(job: tuple[list[int], int]) -> dict:
        prompt, max_tokens = job
        return served.complete(prompt, max_tokens=max_tokens, temperature=0, logprobs=0, ignore_eos=True)

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, jobs))


def assert_equal_to_mlx_lm(answer: dict, expected: tuple[list[int], list[float]], tokenizer) -> None:
    tokens, logprobs = expected
    choice = answer["choices"][0]
    assert answer["usage"]["completion_tokens"] == len(tokens)
    assert choice["logprobs"]["tokens"] == [tokenizer.token_text(token) for token in tokens]
    worst = max(abs(ours - theirs) for ours, theirs in zip(choice["logprobs"]["token_logprobs"], logprobs, strict=True))
    assert worst < LOGPROB_TOLERANCE


@pytest.fixture(scope="module")
def tokenizer():
    from pathlib import Path

    from cluster.tokenizer import Tokenizer

    return Tokenizer(Path(bundled_model()))


@pytest.mark.parametrize("concurrency", [1, 8, 32])
def test_tokens_and_logprobs_equal_mlx_lm_with_joins_leaves_and_cache_hits(three_macs, oracle, tokenizer, concurrency):
    rng = random.Random(concurrency)
    jobs = [(prompt, rng.randint(1, 40)) for prompt in prompts(7, max(12, 2 * concurrency), 200)]
    answers = run(three_macs, jobs, concurrency)
    again = run(three_macs, jobs, concurrency)  # now most of it is cached
    assert sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in again) > 0
    for job, first, second in zip(jobs, answers, again, strict=True):
        expected = oracle(*job, ignore_eos=True)
        assert_equal_to_mlx_lm(first, expected, tokenizer)
        assert_equal_to_mlx_lm(second, expected, tokenizer)


@pytest.mark.parametrize("concurrency", [8, 32])
def test_tokens_equal_mlx_lm_under_chunked_prefill_and_preemption(tiny_pool, oracle, tokenizer, concurrency):
    """The pool holds about three of these requests, and a step 64 tokens."""
    rng = random.Random(concurrency)
    jobs = [(prompt, rng.randint(60, 150)) for prompt in prompts(11, concurrency, 240)]
    before = tiny_pool.fleet()[tiny_pool.macs[0]]["scheduling"]
    answers = run(tiny_pool, jobs, concurrency)
    after = tiny_pool.fleet()[tiny_pool.macs[0]]
    assert int(after["scheduling"]["num_preemptions"]) > int(before["num_preemptions"])
    assert after["blocks"]["num_used"] == 0
    for job, answer in zip(jobs, answers, strict=True):
        assert_equal_to_mlx_lm(answer, oracle(*job, ignore_eos=True), tokenizer)


def test_an_answer_ends_where_mlx_lms_ends(three_macs, oracle, tokenizer):
    """With its end-of-sequence token, counted but not shown."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    tokens, _ = oracle(list(tokenizer.encode_chat(messages).token_ids), 100)
    answer = three_macs.chat(messages, temperature=0, max_tokens=100)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(tokens)
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(tokens)
