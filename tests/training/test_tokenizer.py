"""The bundled tokenizer keeps any text, splits digits and renders the chat template."""

from pathlib import Path

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from training.chat import Conversation, Turn
from training.data import stream
from training.tokenizer import CHAT_TEMPLATE, VOCAB_SIZE, Encoder, train_tokenizer

FOLDER = Path(__file__).parents[2] / "cluster" / "bundled" / "cidery-tiny"


@pytest.fixture(scope="module")
def raw() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(FOLDER))


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(raw: Tokenizer, text: str) -> None:
    """Encoding and decoding gives back exactly the text."""
    assert raw.decode(raw.encode(text).ids, skip_special_tokens=False) == text


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_transformers(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """The tokenizer as mlx-lm loads it gives the text back too."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_single_tokens(raw: Tokenizer) -> None:
    """No token holds two digits: sums depend on it."""
    assert raw.encode("1234567890").tokens == list("1234567890")
    assert raw.get_vocab_size() == VOCAB_SIZE


def test_template_renders_chatml(tokenizer: PreTrainedTokenizerBase) -> None:
    """Several turns and the generation prompt render as ChatML."""
    messages = [
        {"role": "system", "content": "You are Pip."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "1 + 1"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are Pip.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\n1 + 1<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_template_refuses_unknown_roles(tokenizer: PreTrainedTokenizerBase) -> None:
    """An unknown role is named in the error."""
    with pytest.raises(jinja2.TemplateError, match="unknown role 'tool'"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_training_encodes_as_the_template_does(raw: Tokenizer, tokenizer: PreTrainedTokenizerBase) -> None:
    """The model is trained on the very ids that a served chat gives."""
    encoder, source = Encoder(raw), stream(11)
    for _ in range(100):
        found = next(source)
        ids, is_answer = encoder.encode(found)
        rendered = tokenizer.apply_chat_template(found.messages(), tokenize=False)
        assert ids == raw.encode(rendered).ids
        assert len(ids) == len(is_answer)


def test_only_answers_and_their_ends_are_predicted(raw: Tokenizer) -> None:
    """The marked tokens are exactly the answers, each with its end token."""
    ids, is_answer = Encoder(raw).encode(
        Conversation("Be kind.", (Turn("a", "Hi", "Hello!"), Turn("b", "1 + 1", "1 + 1 = 2.")))
    )
    marked = [token for token, keep in zip(ids, is_answer, strict=True) if keep]
    text = raw.decode(marked, skip_special_tokens=False)
    assert text == "Hello!<|im_end|>1 + 1 = 2.<|im_end|>"


def test_tokenizer_training_is_repeatable() -> None:
    """The same seed gives the same merges."""
    assert train_tokenizer(0, 300).to_str() == train_tokenizer(0, 300).to_str()
