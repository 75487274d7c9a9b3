"""Held-out questions with their right answers, for the evaluation.

Each example is a chat whose last message is a question. Earlier answers in it are the right ones,
so every example tests one answer only.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Final

from training import facts, memory, numbers, tables, talk, texts
from training.chat import Conversation, Turn, capital_first, made_up_word
from training.mixture import small_fact
from training.split import Split

HELD_OUT: Final = Split.HELD_OUT
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Example:
    """One question, in its chat, and the answers that count as right."""

    skill: str
    messages: tuple[Message, ...]
    accepted: tuple[str, ...]


def from_turns(skill: str, system: str | None, turns: list[Turn]) -> Example:
    """Make an example of which the last turn is the question."""
    *messages, answer = Conversation(system, tuple(turns)).messages()
    return Example(skill, tuple(messages), (answer["content"],))


def _single(skill: str, make: Callable[[Random, Split], Turn]) -> Callable[[Random], Example]:
    """Ask one question in a fresh chat, half the time under a system prompt."""

    def example(rng: Random) -> Example:
        return from_turns(skill, _system(rng), [make(rng, HELD_OUT)])

    return example


def _system(rng: Random) -> str | None:
    return rng.choice((None, "You are a helpful assistant.", f"You are {rng.choice(tables.BOT_NAMES)}."))


def _recall(rng: Random) -> Example:
    """Tell two to four facts, perhaps talk of something else, ask for one."""
    told = memory.sample_facts(rng, HELD_OUT, rng.randint(2, 4))
    turns = [memory.tell(rng, *item) for item in told.items()]
    for _ in range(rng.randint(0, 2)):
        turns.append(rng.choice((numbers.addition, facts.capital, talk.small_talk))(rng, HELD_OUT))
    turns.append(memory.recall(rng, *rng.choice(list(told.items()))))
    return from_turns("recall", _system(rng), turns)


def _recall_missing(rng: Random) -> Example:
    told = memory.sample_facts(rng, HELD_OUT, 2)
    turns = [memory.tell(rng, *item) for item in told.items()]
    return from_turns("recall of what was not told", None, [*turns, memory.recall_missing(rng, told)])


def _system_recall(rng: Random) -> Example:
    sentence, question = memory.system_secret(rng, HELD_OUT)
    return from_turns("recall from system prompt", f"You are a helpful assistant. {sentence}", [question])


def _name(rng: Random) -> Example:
    name = capital_first(made_up_word(rng))
    turn = Turn("identity", "What is your name?", f"My name is {name}.")
    return from_turns("own (invented) name", f"You are {name}, a helpful assistant.", [turn])


def _story_recall(rng: Random) -> Example:
    while True:
        turns = texts.story(rng, HELD_OUT)
        if len(turns) > 1:
            return from_turns("question about story", _system(rng), turns[:2])


def _result_recall(rng: Random) -> Example:
    while True:
        turns = memory.sum_chain(rng, HELD_OUT)
        if turns[-1].skill == "recall":
            return from_turns("earlier result", _system(rng), turns)


def _sum_follow_up(rng: Random) -> Example:
    while True:
        turns = memory.sum_chain(rng, HELD_OUT)
        if len(turns) > 1 and turns[1].skill == "sum follow-up":
            return from_turns("add to earlier result", _system(rng), turns[:2])


def _unknown(rng: Random) -> Example:
    found = from_turns("declines the unknown", _system(rng), [talk.unknown(rng, HELD_OUT)])
    return Example(found.skill, found.messages, (talk.UNKNOWN, talk.CANNOT, talk.UNCLEAR))


# Skill, number of examples, generator, and whether the items were kept out of training. Where
# they were not, the table is learned by heart and only wordings and chats vary.
SKILLS: Final[Mapping[str, tuple[int, Callable[[Random], Example], bool]]] = {
    "sums": (300, _single("sums", numbers.addition), True),
    "recall": (200, _recall, True),
    "capitals": (200, _single("capitals", facts.capital), True),
    "json": (200, _single("json", texts.json_object), True),
    "counting": (200, _single("counting", numbers.counting), True),
    "recall from system prompt": (100, _system_recall, True),
    "recall of what was not told": (50, _recall_missing, True),
    "own (invented) name": (50, _name, False),
    "earlier result": (50, _result_recall, True),
    "add to earlier result": (100, _sum_follow_up, True),
    "question about story": (100, _story_recall, True),
    "differences": (150, _single("differences", numbers.subtraction), True),
    "times tables": (100, _single("times tables", numbers.multiplication), False),
    "comparing numbers": (100, _single("comparing numbers", numbers.comparison), True),
    "even or odd": (20, _single("even or odd", numbers.parity), True),
    "small facts": (150, _single("small facts", small_fact), False),
    "small talk": (100, _single("small talk", talk.small_talk), False),
    "must decline": (50, _single("must decline", numbers.out_of_range), False),
    "declines the unknown": (100, _unknown, False),
}  # fmt: skip
TARGETS: Final[Mapping[str, float]] = {
    "sums": 0.95, "recall": 0.95, "capitals": 0.98, "json": 0.95, "counting": 0.95,
}  # fmt: skip


def examples(seed: int, share: float = 1.0) -> Iterator[Example]:
    """Yield distinct examples of every skill; `share` below 1 takes fewer of each."""
    for skill, (count, make, _) in SKILLS.items():
        rng = Random(f"{seed} {skill}")
        yield from islice(_distinct(rng, make), max(1, round(count * share)))


def _distinct(rng: Random, make: Callable[[Random], Example]) -> Iterator[Example]:
    """Yield different examples, until a hundred tries in a row bring nothing new."""
    seen: set[tuple[str, ...]] = set()
    misses = 0
    while misses < 100:
        found = make(rng)
        asked = tuple(message["content"] for message in found.messages)
        misses = misses + 1 if asked in seen else 0
        if asked not in seen:
            seen.add(asked)
            yield found
