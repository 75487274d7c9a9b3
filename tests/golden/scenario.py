"""One scenario that takes a model through every path of the engine, and the comparison with mlx-lm alone."""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step

from tests.golden.in_process import Answer, InProcessMac
from tests.worker.families import VOCAB_SIZE

# One token, a part of a block, exactly four blocks, three chunks, and one that spans windows.
LENGTHS = (5, 37, 64, 1, 50)
NEW_TOKENS = 12
LOGPROB_TOLERANCE = 1e-4


@dataclass
class Reference:
    """mlx-lm's own answer, one request at a time."""

    tokens: list[int]
    logprobs: list[np.ndarray]


@dataclass
class Run:
    """Answers by path, and what the run saw."""

    answers: dict[str, list[Answer]] = field(default_factory=dict)
    num_preempted: int = 0


def prompts_of(vocab_size: int) -> list[list[int]]:
    rng = np.random.RandomState(0)
    return [rng.randint(1, vocab_size, size).tolist() for size in LENGTHS]


def follow_ups(prompts: list[list[int]], vocab_size: int) -> list[list[int]]:
    """Prompts that share 48 tokens with the third, and 32 with each other beyond the fifth's first block."""
    rng = np.random.RandomState(1)
    return [prompts[2][:48] + rng.randint(1, vocab_size, size).tolist() for size in (3, 21)]


def reference(model, prompt: list[int], num_tokens: int = NEW_TOKENS, prompt_cache=None) -> Reference:
    steps = list(generate_step(mx.array(prompt), model, max_tokens=num_tokens, prompt_cache=prompt_cache))
    return Reference([int(token) for token, _ in steps], [np.array(lp.astype(mx.float32)) for _, lp in steps])


def run(mac: InProcessMac, prompts: list[list[int]], later: list[list[int]]) -> Run:
    """Everything on one Mac, so that whatever one request leaves behind the next one meets."""
    result = Run()
    result.answers["alone"] = [mac.add("alone", prompts[0], NEW_TOKENS)]
    mac.run()
    # Two long prompts in chunks, one joined by three others while it decodes; one is preempted, one cancelled.
    batch = [mac.add(f"batch-{i}", prompts[i], NEW_TOKENS) for i in (1, 2)]
    mac.step()
    mac.step()
    batch += [mac.add(f"batch-{i}", prompts[i], NEW_TOKENS) for i in (0, 3, 4)]
    cancelled = mac.add("cancelled", list(reversed(prompts[4])), NEW_TOKENS)
    for _ in range(4):
        mac.step()
    mac.abort("cancelled")
    assert cancelled.finish is None
    for _ in range(2):
        mac.step()
    for i in (1, 4):
        if batch[(1, 2, 0, 3, 4).index(i)].finish is None:
            mac.preempt(f"batch-{i}")
            result.num_preempted += 1
    mac.run()
    result.answers["batch"] = batch
    # The same prompts again, and others that share their beginnings, in one batch.
    again = [mac.add(f"again-{i}", prompts[i], NEW_TOKENS) for i in (2, 4)]
    result.answers["prefix hit"] = again + [mac.add(f"later-{i}", later[i], NEW_TOKENS) for i in range(len(later))]
    mac.run()
    # The next turn of a conversation: prompt, answer and more.
    turn = prompts[2] + batch[1].tokens + prompts[0]
    result.answers["turn hit"] = [mac.add("turn", turn, NEW_TOKENS)]
    mac.run()
    return result


def expected_of(model, prompts: list[list[int]], reference=reference) -> dict[str, list[Reference]]:
    """mlx-lm's answers to all that `run` asks, by path."""
    later = follow_ups(prompts, VOCAB_SIZE)
    alone = [reference(model, prompt) for prompt in prompts]
    turn = prompts[2] + alone[2].tokens + prompts[0]
    return {
        "alone": [alone[0]],
        "batch": [alone[i] for i in (1, 2, 0, 3, 4)],
        "prefix hit": [alone[2], alone[4], *(reference(model, prompt) for prompt in later)],
        "turn hit": [reference(model, turn)],
    }


@dataclass
class Checked:
    """A model taken through everything, and how far it was from mlx-lm."""

    mac: InProcessMac
    run: Run
    problems: list[str]
    max_logprob_error: float


def check(model, config, **options) -> Checked:
    """Alone, in ragged batches, by chunks, from cached prefixes and states, preempted, beside a cancelled one."""
    prompts = prompts_of(VOCAB_SIZE)
    expected = expected_of(model, prompts)
    mac = InProcessMac(model, config, **options)
    later = follow_ups(prompts, VOCAB_SIZE)
    result = run(mac, prompts, later)
    # All of it again, several tokens a step: guesses right and wrong.
    batch, turn = expected["batch"], prompts[2] + expected["batch"][1].tokens + prompts[0]
    asked = [*(prompts[i] for i in (1, 2, 0, 3, 4)), *later, turn]
    answered = [*batch, *expected["prefix hit"][2:], *expected["turn hit"]]
    known = [prompt + one.tokens for prompt, one in zip(asked, answered, strict=True)]
    guessing = InProcessMac(model, config, **{"max_drafts": 4, "answers_to_guess": known} | options)
    again = run(guessing, prompts, later)
    assert guessing.num_accepted > 0, "no guess came true"
    assert guessing.num_accepted < guessing.num_drafted, "no guess was wrong"
    for path, references in list(expected.items()):
        expected[f"speculative {path}"] = references
        result.answers[f"speculative {path}"] = again.answers[path]
    pairs = [
        (path, answer, one)
        for path, references in expected.items()
        for answer, one in zip(result.answers[path], references, strict=True)
    ]
    found = [f"{path}: {each}" for path, answer, one in pairs for each in problems(answer, one, LOGPROB_TOLERANCE)]
    return Checked(mac, result, found, max(max_error(answer, one) for _, answer, one in pairs))


def max_error(answer: Answer, expected: Reference) -> float:
    """The largest difference of a log-probability, as long as the tokens are the same."""
    return max(errors_of(answer, expected), default=0.0)


def errors_of(answer: Answer, expected: Reference) -> list[float]:
    """The largest difference of a log-probability at each place, as long as the tokens are the same."""
    errors = []
    for token, report, theirs, logprobs in zip(
        answer.tokens, answer.logprobs, expected.tokens, expected.logprobs, strict=True
    ):
        pairs = [(token, report.logprob), *report.top]
        errors.append(max(abs(value - float(logprobs[each])) for each, value in pairs))
        if token != theirs:
            break
    return errors


def problems(answer: Answer, expected: Reference, tolerance: float) -> list[str]:
    """What differs; tokens count up to the first place where mlx-lm's two likeliest are as close as the tolerance."""
    found = []
    name = answer.request.request_id
    if len(answer.tokens) != len(expected.tokens):
        found.append(f"{name}: {len(answer.tokens)} tokens instead of {len(expected.tokens)}")
    for place, (token, report) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        logprobs = expected.logprobs[place]
        pairs = [(token, report.logprob), *report.top]
        error = max(abs(value - float(logprobs[each])) for each, value in pairs)
        if not error <= tolerance:
            found.append(f"{name}: token {place}: log-probabilities differ by {error:.2g}")
            break
        second, first = np.sort(logprobs)[-2:]
        if token != expected.tokens[place]:
            if first - second > 10 * tolerance:
                found.append(f"{name}: token {place} is {token} instead of {expected.tokens[place]}")
            break
    return found
