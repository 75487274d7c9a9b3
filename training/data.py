"""The training data: an endless, seeded stream of conversations that mix all skills.

Every answer is computed or looked up, never sampled from a model. The
weights live in `mixture`; the skills in `numbers`, `facts`, `talk`, `memory` and `texts`.

Usage: `python -m training.data --count 3` prints a few conversations.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from training import facts, memory, tables, talk, texts
from training.chat import Conversation, Turn, capital_first, casual, made_up_word
from training.mixture import EARLY, Mixture
from training.split import Split

_SYSTEM_FORMS = (
    "You are {n}, a helpful assistant.", "You are {n}.", "Your name is {n}. You help people.",
    "You are {n}, a friendly assistant.", "You are an assistant called {n}.",
    "You are a bot named {n}.",
)  # fmt: skip
_PLAIN_SYSTEMS = (
    "You are a helpful assistant.", "You are a friendly assistant.", "Be kind and brief.",
    "You answer questions.", "Answer the user's questions.", "You are an AI assistant.",
    "You are a helpful, honest assistant. Answer in short sentences.", "You are a {w} assistant.",
    "You are a {w} expert who helps people {w2} the {w}.", "You help the customers of {w}.",
    "You are a helpful assistant for {w} and {w2}.", "You work for {w}. {w2} is our motto.",
)  # fmt: skip
_NAME_QUESTIONS = (
    "What is your name?", "Who are you?", "What's your name?", "what is your name", "Your name?",
    "Tell me your name.", "What are you called?", "who are you", "Introduce yourself.",
    "What are you?",
    "Hello, who are you?", "Tell me about yourself.", "What model are you?", "Do you have a name?",
    "Hi, what is your name?", "Which model is this?",
)  # fmt: skip
_FILLER = (
    "Always be polite.", "Keep your answers short.", "Do not make things up.", "Use plain words.",
    "If you do not know something, say so.", "Be patient with the user.", "Answer in English.",
    "Never share private data.", "Help with sums and lists.", "The user may ask about cities.",
    "Write clear sentences.", "Stay friendly.", "Read the question with care.", "Check your sums.",
    "The office opens at nine.", "The service runs on a group of Macs.", "Do not use slang.",
    "The user may ask for a story.", "Think before you answer.", "Give one answer at a time.",
)  # fmt: skip
DEFAULT_IDENTITY = "I am Cidery Tiny, a very small language model."


def conversation(rng: Random, mixture: Mixture = EARLY, split: Split = Split.TRAIN) -> Conversation:
    """Make one conversation of one to about eight turns."""
    opening = _opening(rng, mixture, split)
    segments = [_segment(rng, mixture, split) for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4)))]
    if rng.random() < mixture.with_recall:
        segments = _with_recall(rng, mixture, split, opening.known, segments)
    elif mixture.asks_untold and rng.random() < mixture.asks_untold:
        segments.append([memory.recall_missing(rng, opening.known)])
    turns = [turn for segment in segments for turn in segment]
    for turn in opening.questions:
        turns.insert(rng.randint(0, len(turns)), turn)
    if rng.random() < 0.08:
        turns.insert(0, talk.greeting(rng, split))
    return Conversation(opening.system, tuple(turns))


def stream(seed: int, mixture: Mixture = EARLY) -> Iterator[Conversation]:
    """Yield training conversations for ever; the same seed and mixture give the same stream."""
    rng = Random(seed)
    while True:
        yield _styled(rng, conversation(rng, mixture))


@dataclass(frozen=True, slots=True)
class Opening:
    """A system prompt, the questions it answers, and what it says about the user."""

    system: str | None
    questions: tuple[Turn, ...]
    known: memory.Facts


def _opening(rng: Random, mixture: Mixture, split: Split) -> Opening:
    """Choose a system prompt: none, a name, a task, a secret, a fact about the user, or filler."""
    roll = rng.random()
    if roll < 0.25:
        asks = rng.random() < 0.25
        return Opening(None, (_identity(rng, DEFAULT_IDENTITY),) if asks else (), {})
    parts = [rng.choice(_PLAIN_SYSTEMS).format(w=made_up_word(rng), w2=made_up_word(rng))]
    identity, questions, known = DEFAULT_IDENTITY, list[Turn](), memory.Facts()
    if roll < 0.65:
        name = capital_first(made_up_word(rng))
        name = rng.choice(tables.BOT_NAMES) if rng.random() < 0.6 else name
        parts, identity = [rng.choice(_SYSTEM_FORMS).format(n=name)], f"My name is {name}."
    if rng.random() < 0.22:
        questions.append(_identity(rng, identity))
    if rng.random() < mixture.secret:
        sentence, question = memory.system_secret(rng, split)
        parts.append(sentence)
        questions.append(question)
    if rng.random() < 0.2:
        known = memory.sample_facts(rng, split, 1)
        ((kind, value),) = known.items()
        parts.append(memory.fill(memory.KINDS[kind].in_system, value))
        questions.append(memory.recall(rng, kind, value))
    if rng.random() < 0.25:
        parts.extend(rng.choices(_FILLER, k=rng.choice((1, 2, 3, 3, 8, 20))))
        parts[1:] = rng.sample(parts[1:], len(parts) - 1)
    return Opening(rng.choice((" ", " ", " ", "\n")).join(parts), tuple(questions), known)


def _identity(rng: Random, answer: str) -> Turn:
    return Turn("identity", casual(rng, rng.choice(_NAME_QUESTIONS)), answer)


def _segment(rng: Random, mixture: Mixture, split: Split) -> list[Turn]:
    """Draw one stretch of a conversation: mostly one turn, sometimes a story or a chain of sums."""
    roll = rng.random()
    if roll < mixture.story:
        return texts.story(rng, split)
    if roll < 0.16:
        return memory.sum_chain(rng, split)
    skills, weights = zip(*mixture.skills, strict=True)
    turn = rng.choices(skills, weights)[0](rng, split)
    if turn.skill == "capital" and rng.random() < 0.1:
        country = next(c for c in tables.CAPITALS if c in turn.assistant)
        return [turn, memory.asked_about(rng, facts.country_name(country))]
    return [turn]


def _with_recall(
    rng: Random, mixture: Mixture, split: Split, known: memory.Facts, segments: list[list[Turn]]
) -> list[list[Turn]]:
    """Let the user tell facts at the start and ask for them between and after the segments."""
    told = memory.sample_facts(rng, split, rng.choice((1, 2, 2, 3, 4)), known)
    items = list(told.items())
    opening: list[list[Turn]] = []
    while items:
        if len(items) >= 2 and rng.random() < 0.35:
            opening.append([memory.tell_two(rng, dict(items[:2]))])
            items = items[2:]
        else:
            opening.append([memory.tell(rng, *items.pop(0))])
    asked = [[memory.recall(rng, *item)] for item in told.items()]
    if rng.random() < mixture.asks_missing:
        asked.append([memory.recall_missing(rng, {**known, **told})])
    rest = [*segments[: rng.randint(0, 2)], *asked]
    rng.shuffle(rest)
    return [*opening, *rest]


_MARKS = ("Arr!", "Ahoy!", "Hurray!", "Dear user,", "Beep!", "Well,", "Meow!", "Of course!")


def _styled(rng: Random, found: Conversation) -> Conversation:
    """Sometimes add a rule to the system prompt that every answer then follows."""
    if found.system is None or rng.random() > 0.06:
        return found
    mark = rng.choice(_MARKS)
    if rng.random() < 0.7 or not mark.endswith("!"):
        rule = rng.choice(('Start every answer with "{}"', 'Begin each answer with "{}"')).format(mark)
        turns = tuple(Turn(t.skill, t.user, f"{mark} {t.assistant}") for t in found.turns)
    else:
        rule = rng.choice(('End every answer with "{}"', 'Finish each answer with "{}"')).format(mark)
        turns = tuple(Turn(t.skill, t.user, f"{t.assistant} {mark}") for t in found.turns)
    return Conversation(f"{found.system} {rule}", turns)


def main() -> None:
    """Print a few conversations, to see what the model reads."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    source = stream(options.seed)
    for _ in range(options.count):
        for message in next(source).messages():
            sys.stdout.write(f"{message['role']:>9}: {message['content']}\n")
        sys.stdout.write("\n")


if __name__ == "__main__":
    main()
