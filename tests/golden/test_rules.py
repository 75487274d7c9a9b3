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
from tests.golden.ruled import MAX_TOKENS, answers_alone, ruled_requests
from worker.grammar import GrammarTable

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}


pytestmark = pytest.mark.usefixtures("no_compile")


@pytest.mark.parametrize("case", ["llama tied", "gemma3_text", "qwen3_next"])
def test_preempted_answers_are_those_of_requestsanswers_alone(case):
    """All at once in chunks, preempted at random, the worker lost once: the tokens of each alone."""
    expected = answers_alone(case)
    assert any(len(set(tokens)) > 5 for tokens in expected.values())
    mac = InProcessMac(make_model(case), config_of(case))
    rng = random.Random(4)
    answers = {}
    for request_id, (prompt, fields) in ruled_requests().items():
        answers[request_id] = mac.add(request_id, prompt, MAX_TOKENS, stop_token_ids=(4,), **fields)
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
    expected = answers_alone(case)
    mac = InProcessMac(make_model(case), config_of(case))
    for request_id, (prompt, fields) in ruled_requests().items():
        for cut in (1, 7, len(expected[request_id]) - 1):
            generated = expected[request_id][:cut]
            other = mac.add(
                f"{request_id} {cut}", prompt, MAX_TOKENS, generated=generated, stop_token_ids=(4,), **fields
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
