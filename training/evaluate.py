"""Score a model folder on held-out questions: `python -m training.evaluate FOLDER`.

Every answer is generated greedily by mlx-lm from the chat template and must equal the right answer
to the letter.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import mlx.core as mx
from mlx_lm import generate, load

from training.examples import SKILLS, TARGETS, Example, examples

MAX_ANSWER_TOKENS = 120
DEFAULT_FOLDER = Path("cluster/bundled/cidery-tiny")


class Answerer:
    """Owns a loaded model and answers chats with it, greedily."""

    def __init__(self, folder: Path, dtype: mx.Dtype | None = None) -> None:
        """Load the folder; compute in `dtype`, or in that of the weights."""
        self._model, self._tokenizer = load(str(folder))[:2]
        if dtype is not None:
            self._model.set_dtype(dtype)

    def answer(self, messages: Iterable[dict[str, str]]) -> str:
        """Generate the next assistant message."""
        render = cast(Callable[..., list[int]], self._tokenizer.apply_chat_template)
        prompt = render(list(messages), add_generation_prompt=True)
        return generate(self._model, self._tokenizer, prompt, max_tokens=MAX_ANSWER_TOKENS)


def score(answerer: Answerer, found: Iterable[Example]) -> dict[str, list[tuple[Example, str]]]:
    """Answer every example; give per skill the examples with their answers."""
    answers: dict[str, list[tuple[Example, str]]] = defaultdict(list)
    for example in found:
        answers[example.skill].append((example, answerer.answer(example.messages)))
    return dict(answers)


def summary(answers: dict[str, list[tuple[Example, str]]]) -> list[dict[str, object]]:
    """Count the right answers of each skill."""
    rows: list[dict[str, object]] = []
    for skill, pairs in answers.items():
        num_right = sum(answer in example.accepted for example, answer in pairs)
        rows.append(
            {
                "skill": skill,
                "items": len(pairs),
                "right": num_right,
                "share": num_right / len(pairs),
                "held_out": SKILLS[skill][2],
                "target": TARGETS.get(skill),
            }
        )
    return rows


def table(rows: Iterable[dict[str, object]]) -> str:
    """Lay the summary out as a Markdown table, which is what the model card holds."""
    lines = ["| skill | items | right | share | target | held out |", "|---|---|---|---|---|---|"]
    for row in rows:
        target = "" if row["target"] is None else f"{row['target']:.0%}"
        held_out = "yes" if row["held_out"] else "no"
        lines.append(
            f"| {row['skill']} | {row['items']} | {row['right']} | {row['share']:.1%} | {target} | {held_out} |"
        )
    return "\n".join(lines)


def mistakes(answers: dict[str, list[tuple[Example, str]]]) -> str:
    """List the wrong answers, one per line, with the last question."""
    lines = [
        f"{skill}: {example.messages[-1]['content']!r} -> {answer!r}, right: {example.accepted[0]!r}"
        for skill, pairs in answers.items()
        for example, answer in pairs
        if answer not in example.accepted
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_FOLDER)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the examples to ask")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--mistakes", action="store_true", help="print the wrong answers too")
    parser.add_argument("--float32", action="store_true", help="compute in float32, not bfloat16")
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    answerer = Answerer(options.folder, mx.float32 if options.float32 else None)
    answers = score(answerer, examples(options.seed, options.share))
    rows = summary(answers)
    sys.stdout.write((json.dumps(rows, indent=2) if options.json else table(rows)) + "\n")
    if options.mistakes:
        sys.stdout.write(mistakes(answers) + "\n")


if __name__ == "__main__":
    main()
