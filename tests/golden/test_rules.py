"""Rules of rows through the product's scheduler, plans one ahead: whatever interrupts a request, the same tokens."""

import json
import random
from pathlib import Path

import jsonschema
import mlx.core as mx
import pytest
from mlx_lm import load

from cluster import grammars
from cluster.config import bundled_model
from cluster.scheduling.request import Finish, LogitRules
from cluster.tokenizer import Tokenizer
from tests.golden.cases import config_of, make_model
from tests.golden.in_process import InProcessMac
from tests.worker.families import VOCAB_SIZE
from worker.grammar import GrammarTable

_RULES = {
    "penalties": LogitRules(frequency_penalty=0.8, presence_penalty=0.6, repetition_penalty=1.3),
    "bias": LogitRules(logit_bias=((3, 4.0), (9, -100.0), (11, 4.5)), presence_penalty=1.5),
    "bans": LogitRules(banned_sequences=((3,), (5, 7), (1, 2, 3)), min_tokens=10),
    "none": LogitRules(),
}
_DRAWS = ({}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.9, "top_p": 0.9, "xtc_probability": 0.5, "seed": 6})
_MAX_TOKENS = 24
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def _no_compile():
    mx.disable_compile()
    yield
    mx.enable_compile()
    mx.clear_cache()


def _requests() -> dict[str, tuple[list[int], dict]]:
    rng = random.Random(3)
    asked = {}
    for name, rules in _RULES.items():
        for number, draws in enumerate(_DRAWS):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((3, 16, 33, 50)))]
            asked[f"{name} {number}"] = prompt, {"rules": rules, **draws}
    return asked


def _alone(case: str) -> dict[str, list[int]]:
    mac = InProcessMac(make_model(case), config_of(case))
    answers = {}
    for request_id, (prompt, fields) in _requests().items():
        answers[request_id] = mac.add(request_id, prompt, _MAX_TOKENS, stop_token_ids=(4,), **fields)
        mac.run()
    return {request_id: answer.tokens for request_id, answer in answers.items()}


@pytest.mark.parametrize("case", ["llama tied", "gemma3_text", "qwen3_next"])
def test_preempted_answers_are_those_of_requests_alone(case):
    """All at once in chunks, preempted at random, the worker lost once: the tokens of each alone."""
    expected = _alone(case)
    assert any(len(set(tokens)) > 5 for tokens in expected.values())
    mac = InProcessMac(make_model(case), config_of(case))
    rng = random.Random(4)
    answers = {}
    for request_id, (prompt, fields) in _requests().items():
        answers[request_id] = mac.add(request_id, prompt, _MAX_TOKENS, stop_token_ids=(4,), **fields)
        mac.step()
    num_preempted = 0
    while mac.scheduler.has_work():
        live = [request_id for request_id in answers if answers[request_id].finish is None]
        if rng.random() < 0.3:
            mac.preempt(rng.choice(live))
            num_preempted += 1
        mac.step()
    assert num_preempted > 5
    assert {request_id: answer.tokens for request_id, answer in answers.items()} == expected
    assert all(answer.tokens.count(4) <= 1 for answer in answers.values())
    assert all(len(answer.tokens) > 10 for request_id, answer in answers.items() if "bans" in request_id)


def test_another_mac_goes_on_where_a_lost_one_was():
    """It gets prompt and tokens, and nothing else."""
    case = "llama tied"
    expected = _alone(case)
    mac = InProcessMac(make_model(case), config_of(case))
    for request_id, (prompt, fields) in _requests().items():
        for cut in (1, 7, len(expected[request_id]) - 1):
            generated = expected[request_id][:cut]
            other = mac.add(
                f"{request_id} {cut}", prompt, _MAX_TOKENS, generated=generated, stop_token_ids=(4,), **fields
            )
            mac.run()
            assert generated + other.tokens == expected[request_id]


@pytest.fixture(scope="module")
def bundled():
    model, _ = load(bundled_model())
    model.set_dtype(mx.float32)
    return model, json.loads((Path(bundled_model()) / "config.json").read_text())


def test_grammars_survive_preemption_and_stay_in_their_rows(bundled):
    """JSON rows among plain ones, joining late, preempted while a plan with their next row is in flight."""
    model, config = bundled
    tokenizer = Tokenizer(Path(bundled_model()))
    table = GrammarTable(Path(bundled_model()), config["vocab_size"], [config["eos_token_id"]])
    source = grammars.json_schema("schema", _SCHEMA).source
    prompt = list(tokenizer.encode_chat([{"role": "user", "content": "Give me JSON for Mia."}]).token_ids)

    def run(*, is_disturbed: bool) -> dict[str, list[int]]:
        mac = InProcessMac(model, config, grammars=table, max_model_len=256)
        rng, answers = random.Random(7), {}
        for seed in range(8):
            rules = LogitRules(grammar=source, repetition_penalty=1.1) if seed % 2 else LogitRules(presence_penalty=0.5)
            answers[str(seed)] = mac.add(
                *(str(seed), prompt, 150), stop_token_ids=(2,), temperature=1.0, seed=seed, rules=rules
            )
            if is_disturbed:
                mac.step()
            else:
                mac.run()
        while mac.scheduler.has_work():
            live = [request_id for request_id in answers if answers[request_id].finish is None]
            if rng.random() < 0.2:
                mac.preempt(rng.choice(live))
            mac.step()
        held = [answer for request_id, answer in answers.items() if int(request_id) % 2]
        complete = [answer for answer in held if answer.finish is Finish.STOP]
        assert len(complete) >= 3
        for answer in complete:
            jsonschema.validate(json.loads(tokenizer.decode(answer.tokens[:-1])), _SCHEMA)
        return {request_id: answer.tokens for request_id, answer in answers.items()}

    assert run(is_disturbed=True) == run(is_disturbed=False)


def test_a_row_that_fails_is_skipped_by_the_plan_made_ahead(bundled):
    model, config = bundled
    table = GrammarTable(Path(bundled_model()), config["vocab_size"], [config["eos_token_id"]])
    alone = InProcessMac(model, config, grammars=table)
    expected = alone.add("fine", [5, 6, 7], 8)
    alone.run()
    mac = InProcessMac(model, config, grammars=table)
    fine = mac.add("fine", [5, 6, 7], 8)
    broken = mac.add("broken", [5, 6, 7], 8, rules=LogitRules(grammar=grammars.lark("f", "start: no_such").source))
    mac.run()
    assert (broken.finish, broken.tokens) == (Finish.ABORTED, [])
    assert (fine.finish, fine.tokens) == (Finish.LENGTH, expected.tokens)
    assert mac.kv.used_bytes == 0
