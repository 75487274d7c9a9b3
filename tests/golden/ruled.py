"""Requests with every kind of rule and draw, and what each answers alone."""

import random

from cluster.scheduling.request import LogitRules
from tests.golden.cases import config_of, make_model
from tests.golden.in_process import InProcessMac
from tests.worker.families import VOCAB_SIZE

# With another order, hence other prompts, a draw may lie within rounding of the boundary between two tokens: a step of
# other rows rounds otherwise, and the answer parts there, as it may in any batch.
RULES = {
    "none": LogitRules(),
    "penalties": LogitRules(frequency_penalty=0.8, presence_penalty=0.6, repetition_penalty=1.3),
    "bias": LogitRules(logit_bias=((3, 4.0), (9, -100.0), (11, 4.5)), presence_penalty=1.5),
    "bans": LogitRules(banned_sequences=((3,), (5, 7), (1, 2, 3)), min_tokens=10),
}
_DRAWS = ({}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.9, "top_p": 0.9, "xtc_probability": 0.5, "seed": 6})
MAX_TOKENS = 24


def ruled_requests() -> dict[str, tuple[list[int], dict]]:
    """By id: prompt and sampling."""
    rng = random.Random(3)
    asked = {}
    for name, rules in RULES.items():
        for number, draws in enumerate(_DRAWS):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((3, 16, 33, 50)))]
            asked[f"{name} {number}"] = prompt, {"rules": rules, **draws}
    return asked


def answers_alone(case: str) -> dict[str, list[int]]:
    """Of each request by itself, without guesses."""
    mac = InProcessMac(make_model(case), config_of(case))
    answers = {}
    for request_id, (prompt, fields) in ruled_requests().items():
        answers[request_id] = mac.add(request_id, prompt, MAX_TOKENS, stop_token_ids=(4,), **fields)
        mac.run()
    return {request_id: answer.tokens for request_id, answer in answers.items()}
