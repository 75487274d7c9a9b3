"""Skills that reach back: facts told earlier by the user or the system prompt, earlier results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random

from training import tables
from training.chat import Turn, capital_first, casual, made_up_word
from training.numbers import LIMIT, addition_key
from training.split import Split, draw, is_held_out


@dataclass(frozen=True, slots=True)
class FactKind:
    """One thing a user may tell: how it is said, acknowledged, asked for and recalled."""

    said: tuple[str, ...]
    noted: str
    asked: tuple[str, ...]
    recalled: str
    missing: str
    in_system: str


KINDS: Mapping[str, FactKind] = {
    "name": FactKind(
        ("My name is {v}.", "I am {v}.", "I'm {v}", "Call me {v}.", "my name is {v}",
         "Hi, I am {v}.",
         "Hello, my name is {v}.", "Hi! My name is {v}.", "You can call me {v}."),
        "Nice to meet you, {v}!",
        ("What is my name?", "What's my name?", "Do you know my name?", "Who am I?",
         "what is my name",
         "Do you remember my name?", "Tell me my name.", "Can you remember my name?"),
        "Your name is {v}.", "You have not told me your name yet.", "The user's name is {v}."),
    "colour": FactKind(
        ("My favourite colour is {v}.", "I like the colour {v}.", "My favorite color is {v}.",
         "my favourite colour is {v}", "I love the color {v}."),
        "{c} is a lovely colour.",
        ("What is my favourite colour?", "Which colour do I like?", "What is my favorite color?",
         "What colour do I like?", "Do you remember my favourite colour?", "what color do I like"),
        "Your favourite colour is {v}.", "You have not told me your favourite colour yet.",
        "The user's favourite colour is {v}."),
    "animal": FactKind(
        ("My favourite animal is the {v}.", "My favorite animal is the {v}.",
         "I like the {v} best.",
         "The animal I love most is the {v}."),
        "The {v} is a fine animal.",
        ("What is my favourite animal?", "Which animal do I like?", "What's my favorite animal?",
         "Do you remember my favourite animal?", "What animal do I like best?"),
        "Your favourite animal is the {v}.", "You have not told me your favourite animal yet.",
        "The user's favourite animal is the {v}."),
    "city": FactKind(
        ("I live in {v}.", "I am from {v}.", "My home is in {v}.", "I come from {v}.",
         "I'm from {v}"),
        "{v} sounds like a nice place.",
        ("Where do I live?", "Where am I from?", "Which city do I live in?", "Where is my home?",
         "Do you remember where I live?"),
        "You live in {v}.", "You have not told me where you live yet.", "The user lives in {v}."),
    "food": FactKind(
        ("My favourite food is {v}.", "I love to eat {v}.", "I like {v}.",
         "My favorite food is {v}."),
        "{c}? That tastes good.",
        ("What is my favourite food?", "What do I like to eat?", "Which food do I like?",
         "What's my favorite food?"),
        "Your favourite food is {v}.", "You have not told me your favourite food yet.",
        "The user's favourite food is {v}."),
    "age": FactKind(
        ("I am {v} years old.", "My age is {v}.", "I'm {v} years old.", "I turned {v} today."),
        "{v} is a good age.",
        ("How old am I?", "What is my age?", "Do you remember my age?", "how old am I"),
        "You are {v} years old.", "You have not told me your age yet.",
        "The user is {v} years old."),
    "pet": FactKind(
        ("I have a pet called {v}.", "My pet is called {v}.", "My pet's name is {v}.",
         "I have a dog called {v}.", "My dog is called {v}.", "My cat's name is {v}.",
         "I have a cat named {v}."),
        "{v} is a nice name for a pet.",
        ("What is my pet called?", "What is the name of my pet?", "Do you remember my pet's name?",
         "What's my pet's name?", "Who is my pet?"),
        "Your pet is called {v}.", "You have not told me about a pet yet.",
        "The user has a pet called {v}."),
    "job": FactKind(
        ("I work as a {v}.", "My job is {v}.", "I am a {v}.", "I'm a {v}."),
        "That is an interesting job.",
        ("What is my job?", "What do I do for work?", "Do you remember my job?", "What's my job?"),
        "You work as a {v}.", "You have not told me your job yet.", "The user works as a {v}."),
    "sport": FactKind(
        ("My favourite sport is {v}.", "I play {v}.", "The sport I like is {v}."),
        "{c} is fun.",
        ("What is my favourite sport?", "Which sport do I like?", "What sport do I play?"),
        "Your favourite sport is {v}.", "You have not told me your favourite sport yet.",
        "The user's favourite sport is {v}."),
}  # fmt: skip

_VALUES: Mapping[str, Sequence[str]] = {
    "name": tables.NAMES, "colour": tables.COLOURS, "animal": tables.ANIMALS,
    "city": tables.CITIES, "food": tables.FOODS, "job": tables.JOBS, "sport": tables.SPORTS,
    "age": [str(n) for n in range(5, LIMIT)], "pet": tables.BOT_NAMES,
}  # fmt: skip
_INVENTABLE = frozenset({"name", "pet", "city"})
Facts = dict[str, str]


def sample_facts(rng: Random, split: Split, count: int, known: Facts | None = None) -> Facts:
    """Draw `count` facts about the person of whom the `known` facts stand in the system prompt.

    Held out are pairs of facts ("Anna" with "teal"): a training person has no held-out pair, a
    held-out person has at least one.
    """
    known = known or {}
    free = [kind for kind in sorted(KINDS) if kind not in known]
    while True:
        facts = {kind: _value(rng, kind) for kind in rng.sample(free, count)}
        person = sorted({**known, **facts}.items())
        has_held_out = any(is_held_out("facts", *pair) for pair in combinations(person, 2))
        if len(person) < 2 or has_held_out == (split is Split.HELD_OUT):
            return facts


def _value(rng: Random, kind: str) -> str:
    if kind in _INVENTABLE and rng.random() < 0.4:
        return capital_first(made_up_word(rng))
    return rng.choice(_VALUES[kind])


def fill(text: str, value: str) -> str:
    """Put a value into a wording; `{c}` is the value at the start of a sentence."""
    return text.format(v=value, c=capital_first(value))


def tell(rng: Random, kind: str, value: str) -> Turn:
    """Let the user state one fact, now and then without any capital letters."""
    said = fill(rng.choice(KINDS[kind].said), value)
    if value in tables.NAMES and rng.random() < 0.1:
        said = said.lower()
    return Turn("tell", said, fill(KINDS[kind].noted, value))


def tell_two(rng: Random, facts: Facts) -> Turn:
    """Let the user state two facts in one message; the acknowledgement is for the first."""
    (kind, value), second = tuple(facts.items())
    sentences = [fill(rng.choice(KINDS[k].said), v) for k, v in ((kind, value), second)]
    if rng.random() < 0.5:
        first, last = (sentence.rstrip(".") for sentence in sentences)
        starts_with_i = last.startswith(("I ", "I'm"))
        said = f"{first} and {last if starts_with_i else last[0].lower() + last[1:]}."
    else:
        said = " ".join(s if s[-1] in ".!" else f"{s}." for s in sentences)
    return Turn("tell", said, fill(KINDS[kind].noted, value))


def recall(rng: Random, kind: str, value: str) -> Turn:
    """Ask for a fact that was told."""
    return Turn("recall", _question(rng, kind), fill(KINDS[kind].recalled, value))


def recall_missing(rng: Random, told: Facts) -> Turn:
    """Ask for a fact that was never told."""
    kind = rng.choice([kind for kind in sorted(KINDS) if kind not in told])
    return Turn("recall missing", _question(rng, kind), KINDS[kind].missing)


def _question(rng: Random, kind: str) -> str:
    text = rng.choice(KINDS[kind].asked)
    return casual(rng, text)


MORE_FORMS = (
    "Add {} to that.", "Now add {}.", "Plus {}?", "And plus {}?", "Add {} more.", "And {} more?",
)  # fmt: skip
RESULT_FORMS = (
    "What was the result?", "What was the result again?", "Repeat the result.",
    "What was that again?", "Say the result again.",
)  # fmt: skip


def sum_chain(rng: Random, split: Split) -> list[Turn]:
    """Ask a sum, then go on from its result: repeat it, or add to it."""
    a, b = draw(
        split,
        lambda: (rng.randint(0, 60), rng.randint(0, LIMIT - 60)),
        addition_key,
    )
    asked = rng.choice(("What is {} + {}?", "{} + {}", "Add {} and {}.")).format(a, b)
    turns = [Turn("addition", asked, f"{a} + {b} = {a + b}.")]
    total = a + b
    if rng.random() < 0.7:
        more = draw(split, lambda: rng.randint(0, LIMIT), lambda c: addition_key((total, c)))
        answer = f"{total} + {more} = {total + more}."
        turns.append(Turn("sum follow-up", rng.choice(MORE_FORMS).format(more), answer))
        total += more
    if rng.random() < 0.6:
        turns.append(Turn("recall", rng.choice(RESULT_FORMS), f"The result was {total}."))
    return turns


_SECRET_THINGS = (
    "door code", "wifi password", "room number", "secret word", "project name", "safe code",
    "support number", "order number", "code word", "team name",
)  # fmt: skip


def system_secret(rng: Random, split: Split) -> tuple[str, Turn]:
    """Make a sentence for the system prompt and the question that it answers."""

    def sample() -> tuple[str, str]:
        thing = rng.choice(_SECRET_THINGS)
        if thing.endswith(("code", "number")):
            return thing, "".join(rng.choices("0123456789", k=rng.choice((2, 3, 4))))
        word = made_up_word(rng) if rng.random() < 0.5 else rng.choice(tables.SPELLABLE)
        return thing, capital_first(word) if thing.endswith("name") else word

    thing, value = draw(split, sample, lambda item: ("secret", *item))
    forms = ("What is the {}?", "Tell me the {}.", "Do you know the {}?", "What's the {}?",
             "Please tell me the {}.", "{}?")  # fmt: skip
    question = casual(rng, capital_first(rng.choice(forms).format(thing)))
    return f"The {thing} is {value}.", Turn("system recall", question, f"The {thing} is {value}.")


def asked_about(rng: Random, country: str) -> Turn:
    """Ask which country an earlier question was about."""
    forms = ("Which country did I ask about?", "What country did I ask about?",
             "Which country was that?")  # fmt: skip
    return Turn("recall", rng.choice(forms), f"You asked about {country}.")
