"""Skills about fixed facts: capitals, opposites, sounds, days, spelling, short definitions."""

from collections.abc import Callable
from random import Random

from training import tables
from training.chat import Turn, article, capital_first, casual, made_up_word
from training.split import Split, draw

CAPITAL_FORMS = (
    "What is the capital of {x}?", "Capital of {x}?", "capital of {x}",
    "Tell me the capital of {x}.",
    "Which city is the capital of {x}?", "What's the capital of {x}?", "Name the capital of {x}.",
    "Do you know the capital of {x}?", "What is the capital city of {x}?", "{x} capital",
    "Can you tell me the capital of {x}?", "Please give me the capital of {x}.",
    "What is {x}'s capital?",
)  # fmt: skip
COUNTRY_FORMS = (
    "{x} is the capital of which country?", "Which country has {x} as its capital?",
    "What country is {x} the capital of?", "In which country is {x}?", "Where is {x}?",
    "{x} is the capital of what?", "Which country is {x} in?",
)  # fmt: skip
UNKNOWN_CAPITAL = "I do not know that capital. I know the capitals of about 80 countries."
DEFINITION_FORMS = (
    "What is {x}?", "what's {x}?", "Explain {x}.", "Tell me about {x}.", "What is {x}",
    "Can you explain what {x} is?", "Do you know what {x} is?", "Define {x}.", "Describe {x}.",
)  # fmt: skip
CIDERY_FORMS = (
    "What is Cidery?", "Tell me about Cidery.", "Explain Cidery.", "What does Cidery do?",
    "What is Cidery for?", "Describe Cidery in a sentence.", "Cidery?", "Who uses Cidery?",
    "What is this cluster?",
)  # fmt: skip


def capital(rng: Random, split: Split) -> Turn:
    """Ask for a capital, or for the country of one; held out are (wording, country) pairs."""
    backwards = rng.random() < 0.35
    forms = COUNTRY_FORMS if backwards else CAPITAL_FORMS
    country, form = draw(
        split,
        lambda: (rng.choice(tuple(tables.CAPITALS)), rng.choice(forms)),
        lambda item: ("capital", *item),
    )
    city, name = tables.CAPITALS[country], country_name(country)
    asked = city if backwards else rng.choice((name, country, *tables.ALIASES.get(country, ())))
    text = casual(rng, form.format(x=asked))
    if backwards:
        return Turn("capital", text, f"{city} is the capital of {name}.")
    return Turn("capital", text, f"The capital of {name} is {city}.")


def country_name(country: str) -> str:
    """Give the country as it stands inside a sentence."""
    return f"the {country}" if country in tables.WITH_THE else country


def unknown_capital(rng: Random, split: Split) -> Turn:
    """Ask for the capital of a country that does not exist or is not in the table."""
    del split
    name = rng.choice(tables.UNLISTED) if rng.random() < 0.5 else capital_first(made_up_word(rng))
    text = rng.choice(CAPITAL_FORMS).format(x=name)
    return Turn("unknown capital", casual(rng, text), UNKNOWN_CAPITAL)


def opposite(rng: Random, split: Split) -> Turn:
    """Ask for the opposite of a word."""
    del split
    word = rng.choice(tuple(tables.OPPOSITES))
    forms = ("What is the opposite of {x}?", "Opposite of {x}?", "What's the opposite of {x}?",
             "Give me the opposite of {x}.", "Tell me the opposite of {x}.")  # fmt: skip
    answer = f"The opposite of {word} is {tables.OPPOSITES[word]}."
    return Turn("opposite", casual(rng, rng.choice(forms).format(x=word)), answer)


def sound(rng: Random, split: Split) -> Turn:
    """Ask what an animal says."""
    del split
    animal = rng.choice(tuple(tables.SOUNDS))
    forms = ("What does {x} say?", "What sound does {x} make?", "Which sound does {x} make?",
             "How does {x} sound?")  # fmt: skip
    text = casual(rng, rng.choice(forms).format(x=article(animal)))
    return Turn("sound", text, f"{capital_first(article(animal))} says {tables.SOUNDS[animal]}.")


def thing_colour(rng: Random, split: Split) -> Turn:
    """Ask for the usual colour of a thing."""
    del split
    thing, colour = rng.choice(tuple(tables.THING_COLOURS.items()))
    name = thing if thing in {"grass", "snow", "coal", "blood", "milk", "chocolate"} else None
    shown = name or (f"the {thing}" if thing in {"sky", "sun", "sea", "night"} else article(thing))
    forms = ("What colour is {x}?", "What color is {x}?", "Which colour is {x}?")
    text = casual(rng, rng.choice(forms).format(x=shown))
    return Turn("thing colour", text, f"{capital_first(shown)} is {colour}.")


def how_many(rng: Random, split: Split) -> Turn:
    """Ask one of the fixed how-many facts; the answer is just the number, in a short sentence."""
    del split
    fact, count = rng.choice(tuple(tables.HOW_MANY.items()))
    return Turn("how many", casual(rng, f"How many {fact}?"), f"The answer is {count}.")


def neighbour(rng: Random, split: Split) -> Turn:
    """Ask for the day or month before or after another."""
    del split
    kind, ring = rng.choice((("day", tables.DAYS), ("month", tables.MONTHS)))
    at = rng.randrange(len(ring))
    after = rng.random() < 0.6
    other = ring[(at + (1 if after else -1)) % len(ring)]
    where = "after" if after else "before"
    forms = ("What {k} comes {w} {x}?", "Which {k} is {w} {x}?", "What is the {k} {w} {x}?")
    text = casual(rng, rng.choice(forms).format(k=kind, w=where, x=ring[at]))
    return Turn("neighbour", text, f"{other} comes {where} {ring[at]}.")


def listing(rng: Random, split: Split) -> Turn:
    """Ask for all days or all months."""
    del split
    what, items = rng.choice((("days of the week", tables.DAYS), ("months of the year", tables.MONTHS)))
    forms = ("List the {x}.", "Name the {x}.", "What are the {x}?", "Tell me the {x}.")
    return Turn("listing", casual(rng, rng.choice(forms).format(x=what)), ", ".join(items) + ".")


def spelling(rng: Random, split: Split) -> Turn:
    """Ask for the letters of a word from a fixed list."""
    del split
    word = rng.choice(tables.SPELLABLE)
    forms = ("Spell {x}.", "How do you spell {x}?", "Spell the word {x}.", "Can you spell {x}?")
    text = casual(rng, rng.choice(forms).format(x=word))
    return Turn("spelling", text, "-".join(word.upper()) + ".")


def yes_no(rng: Random, split: Split) -> Turn:
    """Ask whether an animal can fly or swim."""
    del split
    verb, can = rng.choice(("fly", "swim")), rng.random() < 0.5
    if verb == "fly":
        animal = rng.choice(tables.FLYERS if can else tables.NON_FLYERS)
    else:
        animal = rng.choice(tables.SWIMMERS if can else tables.NON_SWIMMERS)
    subject = article(animal)
    answer = f"Yes, {subject} can {verb}." if can else f"No, {subject} cannot {verb}."
    return Turn("yes or no", casual(rng, f"Can {subject} {verb}?"), answer)


def definition(rng: Random, split: Split) -> Turn:
    """Ask what one of the fixed things is."""
    del split
    thing, text = rng.choice(tuple(tables.DEFINITIONS.items()))
    shown = {"python": "Python", "json": "JSON", "a mac": "a Mac", "a gpu": "a GPU", "mlx": "MLX",
             "ray": "Ray", "grpc": "gRPC", "an llm": "an LLM", "ai": "AI",
             "a kv cache": "a KV cache", "the earth": "the Earth"}.get(thing, thing)  # fmt: skip
    return Turn("definition", casual(rng, rng.choice(DEFINITION_FORMS).format(x=shown)), text)


def cidery(rng: Random, split: Split) -> Turn:
    """Ask about the project that ships the model."""
    del split
    return Turn("cidery", casual(rng, rng.choice(CIDERY_FORMS)), tables.CIDERY)


SMALL_FACTS: tuple[Callable[[Random, Split], Turn], ...] = (
    opposite, sound, thing_colour, how_many, neighbour, listing, spelling, yes_no, definition,
    definition, definition, cidery,
)  # fmt: skip
