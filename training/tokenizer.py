"""Byte-level BPE tokenizer and chat template of the bundled model, trained on our own data.

Digits are always single tokens, which is what makes sums learnable; every byte has a token, so any
text survives encode and decode.

Usage: `python -m training.tokenizer --out FOLDER`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.chat import Conversation
from training.data import stream

VOCAB_SIZE: Final = 1536  # most words of the small world are one or two tokens
CONTEXT_TOKENS: Final = 4096
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS: Final = (PAD, START, END)

CHAT_TEMPLATE: Final = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception("unknown role '" ~ message['role'] ~ "': use system, user or assistant") -}}
{%- endif -%}
{{- '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] ~ '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def train_tokenizer(seed: int, count: int = 20_000) -> Tokenizer:
    """Train the merges on `count` conversations; the same seed gives the same vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (message["content"] for found in islice(stream(seed), count) for message in found.messages())
    tokenizer.train_from_iterator((*texts, "system", "user", "assistant"), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` as mlx-lm loads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: Mapping[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "model_max_length": CONTEXT_TOKENS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Look up a token. *Raises* ValueError if the vocabulary has none such."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the vocabulary has no token {token!r}")
    return found


class Encoder:
    """Turns conversations into token ids with a mark on every token the model must predict."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Look up the ids that frame each message."""
        self._tokenizer = tokenizer
        self._start = token_id(tokenizer, START)
        self._end = token_id(tokenizer, END)
        self._newline = tokenizer.encode("\n").ids
        self._roles = {
            role: [self._start, *tokenizer.encode(role).ids, *self._newline] for role in ("system", "user", "assistant")
        }

    def encode(self, found: Conversation) -> tuple[list[int], list[bool]]:
        """Give ids as the chat template would, and True where an answer token (or its end) stands.

        The pieces are encoded one by one: special tokens split the text anyway.
        """
        ids: list[int] = []
        is_answer: list[bool] = []
        messages = found.messages()
        texts = self._tokenizer.encode_batch([message["content"] for message in messages])
        for message, text in zip(messages, texts, strict=True):
            head = self._roles[message["role"]]
            answers = message["role"] == "assistant"
            # "\n" joins the role line, so a content that starts with a newline would merge with
            # it; no generated text does.
            ids += [*head, *text.ids, self._end, *self._newline]
            is_answer += [False] * len(head) + [answers] * (len(text.ids) + 1)
            is_answer += [False] * len(self._newline)
        return ids, is_answer

    def encode_all(self, conversations: Sequence[Conversation]) -> list[tuple[list[int], list[bool]]]:
        """Encode many conversations."""
        return [self.encode(found) for found in conversations]


def main() -> None:
    """Train the tokenizer and write its two files."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    save_tokenizer(train_tokenizer(options.seed), options.out)


if __name__ == "__main__":
    main()
