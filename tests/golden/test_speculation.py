"""Guessed tokens change nothing: the same answers with every kind of layer, rule and draw, whatever interrupts them."""

import json
import random
from collections import Counter
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm import load

from cluster import grammars
from cluster.config import bundled_model
from cluster.scheduling.request import Finish, LogitRules, Speculation
from cluster.tokenizer import Tokenizer
from tests.golden import scenario
from tests.golden.cases import config_of, make_model
from tests.golden.in_process import InProcessMac
from tests.golden.ruled import MAX_TOKENS, answers_alone, ruled_requests
from tests.golden.test_isolation import PoisonedMac
from tests.golden.test_no_copies import WatchedMac
from tests.worker.families import VOCAB_SIZE
from worker.grammar import GrammarTable

pytestmark = pytest.mark.usefixtures("no_compile")


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("case", ["llama tied", "gemma3_text", "qwen3_next", "jamba", "deepseek_v32"])
def test_drawn_and_ruled_answers_are_those_without_guesses(case, depth):
    """All at once in chunks, guessed rightly and wrongly, preempted and aborted at random; logprobs too."""
    expected = answers_alone(case)
    guessed = [prompt + expected[request_id] for request_id, (prompt, _) in ruled_requests().items()]
    mac = InProcessMac(
        make_model(case), config_of(case), max_drafts=5, answers_to_guess=guessed, max_plans_in_flight=depth
    )
    rng = random.Random(4)
    answers = {}
    for request_id, (prompt, fields) in ruled_requests().items():
        answers[request_id] = mac.add(request_id, prompt, MAX_TOKENS, stop_token_ids=(4,), **fields)
        mac.step()
    left = mac.add("left", list(range(40)), 90)
    while mac.scheduler.has_work():
        live = [request_id for request_id in answers if answers[request_id].finish is None]
        if live and rng.random() < 0.2:
            mac.preempt(rng.choice(live))
        if rng.random() < 0.1:
            mac.abort("left")
        mac.step()
        mac.scheduler.check()
    assert 10 < mac.num_accepted < mac.num_drafted
    assert len(left.tokens) < 90
    assert {request_id: answer.tokens for request_id, answer in answers.items()} == expected
    for answer in answers.values():
        assert [each.token_id for each in answer.logprobs] == answer.tokens


@pytest.mark.parametrize("case", ["llama tied", "qwen3_next"])
def test_draws_have_the_models_distribution(case):
    """Three tokens, the last two guessed, over many seeds: as often as mlx-lm's probabilities say, in every cell.

    Always the likeliest is guessed, and now and then something else; so rows are drawn behind right and wrong guesses.
    """
    model, prompt, num_requests = make_model(case), [7, 3, 9, 1, 4], 1500
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*tokens, following): share * chance
            for tokens, share in expected.items()
            for following, chance in _likeliest(model, [*prompt, *tokens])
        }
    known = [[*prompt, *tokens, 0] for tokens in sorted(expected, key=expected.__getitem__, reverse=True)]
    mac = InProcessMac(model, config_of(case), max_drafts=3, answers_to_guess=known, max_num_seqs=64)
    plain = InProcessMac(model, config_of(case), max_num_seqs=64)
    draws = {"temperature": 1.0, "top_k": _NUM_LIKELIEST, "num_top_logprobs": None}
    for first in range(0, num_requests, 500):
        for seed in range(first, first + 500):
            mac.add(f"{seed}", prompt, 5, seed=seed, **draws)
        mac.run()
    for seed in range(200):
        plain.add(f"{seed}", prompt, 5, seed=seed, **draws)
    plain.run()
    assert all(plain.answers[seed].tokens == mac.answers[seed].tokens for seed in plain.answers)
    counts = Counter(tuple(answer.tokens[:3]) for answer in mac.answers.values())
    assert set(counts) <= set(expected)
    assert num_requests / 8 < mac.num_accepted < mac.num_drafted - num_requests / 8
    for tokens, share in expected.items():
        deviation = (share * (1 - share) / num_requests) ** 0.5
        assert abs(counts[tokens] / num_requests - share) < 4.5 * deviation, (tokens, share, counts[tokens])


_NUM_LIKELIEST = 3


def _likeliest(model, tokens: list[int]) -> list[tuple[int, float]]:
    """The likeliest tokens to follow, with their shares of all three."""
    logits = np.array(model(mx.array([tokens]))[0, -1].astype(mx.float32)).astype(np.float64)
    ids = np.argsort(-logits)[:_NUM_LIKELIEST]
    weights = np.exp(logits[ids] - logits.max())
    return list(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))


@pytest.mark.parametrize("case", ["gemma3_text", "qwen3_next", "deepseek_v2"])
def test_what_was_guessed_wrongly_is_never_read(case):
    model = make_model(case)
    prompts = scenario.prompts_of(VOCAB_SIZE)
    expected = [scenario.reference(model, prompt, 30) for prompt in prompts]
    known = [prompt + one.tokens for prompt, one in zip(prompts, expected, strict=True)]
    mac = PoisonedMac(model, config_of(case), max_drafts=7, answers_to_guess=known)
    answers = [mac.add(f"{number}", prompt, 30) for number, prompt in enumerate(prompts)]
    mac.run()
    assert mac.num_accepted > 10
    assert not [found for pair in zip(answers, expected, strict=True) for found in scenario.problems(*pair, 1e-4)]


@pytest.mark.parametrize("case", ["gemma3_text", "deepseek_v3", "qwen3_next"])
def test_no_step_with_guesses_copies_a_pool(case):
    model = make_model(case)
    prompts = scenario.prompts_of(VOCAB_SIZE)
    known = [prompt + scenario.reference(model, prompt, 30).tokens for prompt in prompts]
    mac = WatchedMac(model, config_of(case), kv_budget_bytes=1 << 28, max_drafts=4, answers_to_guess=known)
    mac.watch()
    for number, prompt in enumerate(prompts):
        mac.add(f"{number}", prompt, 30)
        mac.step()
    mac.run()
    assert 0 < mac.num_accepted < mac.num_drafted


@pytest.fixture(scope="module")
def bundled():
    model, _ = load(bundled_model())
    model.set_dtype(mx.float32)
    return model, json.loads((Path(bundled_model()) / "config.json").read_text())


_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "favourite_colour": {"enum": ["red", "blue"]}},
    "required": ["name", "favourite_colour"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("method", [Speculation.NGRAM, Speculation.AUTO])
def test_grammars_guess_what_they_force_and_hold_what_is_guessed(bundled, method):
    """Rows of JSON among plain ones, preempted now and then: the tokens of each without guesses."""
    model, config = bundled
    tokenizer = Tokenizer(Path(bundled_model()))
    table = GrammarTable(Path(bundled_model()), config["vocab_size"], [config["eos_token_id"]])
    source = grammars.json_schema("schema", _SCHEMA).source
    prompt = list(
        tokenizer.encode_chat([{"role": "user", "content": "Give me JSON for Mia, who likes blue."}]).token_ids
    )

    def run(**guessing) -> tuple[dict[str, list[int]], InProcessMac]:
        mac = InProcessMac(model, config, grammars=table, **guessing)
        rng, answers = random.Random(7), {}
        for seed in range(6):
            rules = LogitRules(grammar=source, repetition_penalty=1.1) if seed % 2 else LogitRules(presence_penalty=0.5)
            answers[str(seed)] = mac.add(
                *(str(seed), prompt, 60), stop_token_ids=(2,), temperature=1.0, seed=seed, rules=rules
            )
            mac.step()
        while mac.scheduler.has_work():
            live = [request_id for request_id in answers if answers[request_id].finish is None]
            if guessing and rng.random() < 0.1:
                mac.preempt(rng.choice(live))
            mac.step()
        for seed in (1, 3, 5):
            assert answers[str(seed)].finish is Finish.STOP
            assert set(json.loads(tokenizer.decode(answers[str(seed)].tokens[:-1]))) == set(_SCHEMA["required"])
        return {request_id: answer.tokens for request_id, answer in answers.items()}, mac

    plain, _ = run()
    guessed, mac = run(max_drafts=6, speculation=method)
    assert guessed == plain
    # "favourite_colour" and the like are forced, three times.
    assert mac.num_accepted > 15
    assert mac.num_accepted > 0.5 * mac.num_drafted


def test_text_that_repeats_itself_takes_fewer_steps_and_other_text_no_more(bundled):
    """By look-up, when it pays: what is guessed in vain stays a small share of the rows."""
    model, config = bundled
    rng = random.Random(1)
    story = [rng.randrange(3, 1536) for _ in range(40)]

    def num_steps(prompt, **fields) -> tuple[int, InProcessMac]:
        mac = InProcessMac(model, config, max_drafts=8, speculation=Speculation.AUTO)
        mac.add("a", prompt, 60, **fields)
        mac.run()
        return mac.num_steps, mac

    steps, mac = num_steps([5] * 30, rules=LogitRules(logit_bias=((5, 100.0),)))
    assert steps < 25
    assert mac.num_accepted > 40
    steps, mac = num_steps(story, temperature=2.0, seed=3)
    assert mac.num_drafted <= 6


@pytest.mark.parametrize("noise", [0.0, 0.3, 3.0], ids=["the same", "alike", "another"])
@pytest.mark.parametrize(
    ("case", "source"),
    [
        ("llama tied", "llama tied"),
        ("gemma3_text", "gemma3_text"),
        ("qwen3_next", "llama tied"),
        ("qwen3_next", "qwen3_next"),
        ("mamba2", "mamba2"),
        ("llama tied", "lfm2"),
    ],
)
def test_a_draft_model_changes_nothing_however_good_it_is(case, source, noise):
    """Itself, one that errs and one that knows nothing, with memory for few; drawn, preempted, in batches."""
    draft = make_model(source)
    mx.random.seed(2)
    draft.update(tree_map(lambda w: w + noise * w.std() * mx.random.normal(w.shape), draft.parameters()))
    requests = {name: asked for name, asked in ruled_requests().items() if name.split()[0] in ("none", "penalties")}
    expected = {name: tokens for name, tokens in answers_alone(case).items() if name in requests}
    mac = InProcessMac(
        make_model(case),
        config_of(case),
        max_drafts=4,
        speculation=Speculation.DRAFT,
        draft_model=(draft, config_of(source)),
        draft_kv_bytes=1 << 16,
    )
    answers, rng = {}, random.Random(1)
    for request_id, (prompt, fields) in requests.items():
        answers[request_id] = mac.add(request_id, prompt, MAX_TOKENS, stop_token_ids=(4,), **fields)
        mac.step()
    while mac.scheduler.has_work():
        live = [request_id for request_id in answers if answers[request_id].finish is None]
        if live and rng.random() < 0.1:
            mac.preempt(rng.choice(live))
        mac.step()
        mac.scheduler.check()
    assert {request_id: answer.tokens for request_id, answer in answers.items()} == expected
    assert mac.num_drafted > 0
    if case == source and not noise:
        num_drafted, num_accepted = mac.num_drafted, mac.num_accepted
        mac.add("greedy", [5, 4, 3], 40)
        mac.run()
        # Not as many as there could be: of random weights nobody is sure, and that it is right all the same is learned.
        assert mac.num_accepted - num_accepted == mac.num_drafted - num_drafted > 10


def test_a_request_may_be_left_alone(bundled):
    model, config = bundled
    mac = InProcessMac(model, config, max_drafts=8)
    answer = mac.add("a", [5] * 30, 30, rules=LogitRules(logit_bias=((5, 100.0),)), speculation=Speculation.OFF)
    mac.run()
    assert (mac.num_drafted, answer.tokens) == (0, [5] * 30)


def test_another_mac_goes_on_where_a_lost_one_was(bundled):
    """The worker is lost in the middle of steps with guesses; what was told stands, the rest comes again the same."""
    model, config = bundled
    prompt = [9, 8, 7] * 12
    alone = InProcessMac(model, config)
    expected = alone.add("a", prompt, 50, temperature=0.7, seed=2)
    alone.run()
    mac = InProcessMac(model, config, max_drafts=4)
    answer = mac.add("a", prompt, 50, temperature=0.7, seed=2)
    for _ in range(3):
        for _ in range(4):
            mac.step()
        mac.results.clear()
        mac.engine.reset()
        mac.scheduler.worker_lost()
        mac.configure()
    mac.run()
    assert answer.tokens == expected.tokens
