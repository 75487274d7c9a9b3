"""Skills that write longer text: JSON from a sentence, and short stories with questions on them."""

import json
from dataclasses import dataclass
from random import Random
from typing import Final

from training import tables
from training.chat import Turn, article, capital_first, made_up_word
from training.split import Split, draw

PERSON_FORMS = (
    "Give me JSON for {n}, {a} years old, who lives in {c}.",
    "Make JSON: name {n}, age {a}, city {c}.",
    "Turn this into JSON: {n} is {a} years old and lives in {c}.",
    "Write JSON with the name, age and city: {n} from {c} is {a}.",
    "Extract name, age and city as JSON: {n} is {a} and comes from {c}.",
    "JSON please: {n}, {a}, {c}.",
    "{n} is {a} years old and lives in {c}. Give me that as JSON.",
    "Convert to JSON: name={n}, age={a}, city={c}",
)
ITEM_FORMS = (
    "Give me JSON for a {k} {o} that costs {p}.",
    "Make JSON: item {o}, colour {k}, price {p}.",
    "Turn this into JSON: The {k} {o} costs {p} dollars.",
    "Write JSON with the item, colour and price: a {k} {o} for {p}.",
    "Extract item, colour and price as JSON: The {o} is {k} and costs {p}.",
    "The {k} {o} costs {p}. Give me that as JSON.",
)
SIMPLE_FORMS = (
    "Give me JSON for {n}, {a} years old.",
    "Write JSON with the name {n} and the age {a}.",
    "Make JSON: name {n}, age {a}.",
    "Write {n} and {a} as JSON with name and age.",
    "JSON for {n} who is {a}",
)


JSON_KINDS: Final[tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]] = (
    (PERSON_FORMS, ("name", "age", "city")),
    (ITEM_FORMS, ("item", "colour", "price")),
    (SIMPLE_FORMS, ("name", "age")),
)


def json_object(rng: Random, split: Split) -> Turn:
    """Ask for a person, a thing for sale, or a name with an age as JSON."""
    roll = rng.random()
    forms, keys = JSON_KINDS[0 if roll < 0.5 else 1 if roll < 0.8 else 2]

    def sample() -> dict[str, str | int]:
        made = _person(rng) if keys[0] == "name" else _item(rng)
        return {key: made[key] for key in keys}

    found = draw(split, sample, lambda item: ("json", *item.values()))
    letters = {"name": "n", "age": "a", "city": "c", "item": "o", "colour": "k", "price": "p"}
    text = rng.choice(forms).format(**{letters[key]: value for key, value in found.items()})
    return Turn("json", text, json.dumps(found))


def _person(rng: Random) -> dict[str, str | int]:
    name = rng.choice(tables.NAMES) if rng.random() < 0.7 else capital_first(made_up_word(rng))
    city = rng.choice(tables.CITIES) if rng.random() < 0.8 else capital_first(made_up_word(rng))
    return {"name": name, "age": rng.randint(1, 99), "city": city}


def _item(rng: Random) -> dict[str, str | int]:
    return {
        "item": rng.choice(tables.OBJECTS),
        "colour": rng.choice(tables.COLOURS),
        "price": rng.randint(1, 99),
    }


@dataclass(frozen=True, slots=True)
class Cast:
    """What varies in a story."""

    name: str
    animal: str
    thing: str
    colour: str
    place: str


PLOTS = (
    "One day {n} went to the {p} with a {c} {o}. There {n} met a little {a}. The {a} wanted to"
    " play with the {o}. {n} smiled and shared it. They played all day and became friends.",
    "{n} had a {c} {o}. One morning it was gone. {n} looked in the {p} and found a {a} asleep on"
    " the {o}. {n} laughed and took them both home.",
    "A small {a} lived near the {p}. It was always alone. Then {n} came by and gave it a {c} {o}."
    " The {a} was so happy that it danced. From that day on it was never alone again.",
    "{n} wanted to find a treasure. In the {p} a wise {a} showed the way. Under a stone {n} found"
    " a {c} {o}. It was old, but to {n} it was worth more than gold.",
    "It was raining, and {n} sat in the {p} with a {c} {o}. A wet {a} came in from the cold. {n}"
    " made room for it. When the sun came out, they walked home together.",
)
STORY_FORMS = (
    "Tell me a story about {n} and {aa}.", "Write a story with {n}, {aa} and {oo}.",
    "Tell me a short story about {n}.", "Write a short story about {aa}.",
    "Can you tell me a story about {aa} and {oo}?", "Tell me a story about {n} in the {p}.",
    "Write a story about {n} and {oo}.", "I want a story about {aa}.", "A story about {n}, please.",
    "Make up a story with {aa} in the {p}.",
)  # fmt: skip
OPEN_STORY_FORMS = (
    "Tell me a story.", "Write a story.", "Tell me a short story.", "tell me a story",
    "A story please!",
    "Can you tell me a story?", "Write a short story.", "Yes, tell me a story.",
    "I want to hear a story.",
    "story",
)  # fmt: skip


def story(rng: Random, split: Split) -> list[Turn]:
    """Ask for a story, and often a question or two about it."""

    def sample() -> Cast:
        name = rng.choice(tables.NAMES) if rng.random() < 0.8 else capital_first(made_up_word(rng))
        animal = rng.choice(tables.ANIMALS) if rng.random() < 0.8 else _creature(rng)
        thing = rng.choice(tables.OBJECTS) if rng.random() < 0.9 else made_up_word(rng)
        return Cast(name, animal, thing, rng.choice(tables.COLOURS), rng.choice(tables.PLACES))

    cast = draw(split, sample, lambda c: ("story", c.name, c.animal, c.thing, c.colour))
    forms = STORY_FORMS if rng.random() < 0.8 else OPEN_STORY_FORMS
    asked = rng.choice(forms).format(n=cast.name, aa=article(cast.animal), oo=article(cast.thing), p=cast.place)
    told = rng.choice(PLOTS).format(n=cast.name, a=cast.animal, o=cast.thing, c=cast.colour, p=cast.place)
    told = told.replace(" a owl", " an owl").replace(" a elephant", " an elephant")
    told = told.replace(" a orange", " an orange")
    turns = [Turn("story", asked, told)]
    for _ in range(rng.choice((0, 1, 1, 2))):
        turns.append(_about(rng, cast))
    return turns


def _creature(rng: Random) -> str:
    """Name an animal that is rare or does not exist, as strangers like to."""
    rare = (
        "dragon",
        "unicorn",
        "penguin",
        "whale",
        "elephant",
        "monkey",
        "snake",
        "robot",
        "ghost",
    )
    return rng.choice(rare) if rng.random() < 0.5 else made_up_word(rng)


def _about(rng: Random, cast: Cast) -> Turn:
    """Ask one thing about the story just told."""
    asked, answer = rng.choice((
        (f"What colour was the {cast.thing}?", f"The {cast.thing} was {cast.colour}."),
        (f"What color was the {cast.thing}?", f"The {cast.thing} was {cast.colour}."),
        ("Who was in the story?", f"{cast.name} and the {cast.animal} were in the story."),
        ("What was the name in the story?", f"The name was {cast.name}."),
        ("Which animal was in the story?", f"The animal was {article(cast.animal)}."),
        ("What animal was it?", f"The animal was {article(cast.animal)}."),
        ("Where did it happen?", f"It happened in the {cast.place}."),
        ("Where was the story?", f"It happened in the {cast.place}."),
    ))  # fmt: skip
    return Turn("story recall", asked, answer)
