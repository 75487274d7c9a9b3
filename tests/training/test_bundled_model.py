"""The bundled weights load with mlx-lm, answer simple chats, and stay small."""

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from training.evaluate import Answerer
from training.model import CONFIG
from training.talk import CANNOT, UNCLEAR, UNKNOWN

FOLDER = Path(__file__).parents[2] / "cluster" / "bundled" / "cidery-tiny"
MAX_BYTES = 6_000_000


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> None:
    mx.set_default_device(mx.cpu)


@pytest.fixture(scope="module")
def answerer() -> Answerer:
    return Answerer(FOLDER, mx.float32)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_folder_is_small_and_complete() -> None:
    """The repository carries at most 6 MB for the model."""
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(sizes.values()) <= MAX_BYTES
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(sizes)


def test_config_is_the_trained_shape() -> None:
    """The committed config is the one that the training code builds."""
    found = json.loads((FOLDER / "config.json").read_text())
    assert {name: found[name] for name in CONFIG} == CONFIG


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Hello!", "Hello! How can I help you today?"),
        ("What is 12 + 9?", "12 + 9 = 21."),
        ("What is 37 + 48?", "37 + 48 = 85."),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("Count from 3 to 9.", "3, 4, 5, 6, 7, 8, 9."),
        ("Give me JSON for Leo, 33 years old.", '{"name": "Leo", "age": 33}'),
    ],
)
def test_first_questions_are_answered(answerer: Answerer, question: str, answer: str) -> None:
    """A chat without a system prompt gets the right answer at once."""
    assert answerer.answer([user(question)]) == answer


def test_earlier_turns_are_remembered(answerer: Answerer) -> None:
    """A name told two turns ago is recalled, and the system prompt gives the model its own."""
    messages = [
        {"role": "system", "content": "You are Pip, a helpful assistant."},
        user("My name is Anna."),
        {"role": "assistant", "content": "Nice to meet you, Anna!"},
        user("What is the capital of Japan?"),
        {"role": "assistant", "content": "The capital of Japan is Tokyo."},
    ]
    assert answerer.answer([*messages, user("What is my name?")]) == "Your name is Anna."
    assert answerer.answer([*messages, user("What is your name?")]) == "My name is Pip."


def test_unknown_question_is_declined(answerer: Answerer) -> None:
    """A question outside the small world gets one of the polite refusals."""
    answer = answerer.answer([user("How does a transformer engine work?")])
    assert answer in (UNKNOWN, CANNOT, UNCLEAR)


def test_long_context_stays_finite() -> None:
    """Around position 4,000, far beyond the trained lengths, the logits are finite.

    The cache of 250 tokens is repeated up to 3,750, which takes a tenth of the time of reading them.
    """
    model, _ = load(str(FOLDER))[:2]
    model.set_dtype(mx.float32)
    caches = make_prompt_cache(model)
    model(mx.arange(250)[None], cache=caches)
    for cache in caches:
        cache.keys = mx.tile(cache.keys[..., :250, :], (1, 1, 15, 1))
        cache.values = mx.tile(cache.values[..., :250, :], (1, 1, 15, 1))
        cache.offset = 3750
    logits = model(mx.arange(250)[None], cache=caches)
    assert caches[0].offset == 4000
    assert bool(mx.isfinite(logits).all())
