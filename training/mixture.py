"""How often each skill is practised, in the two parts of a run.

Sums, copying and recall come first, as they take longest to appear. When the learning rate begins
to fall, the weight moves to what is learned by heart, and to differences and facts never told.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from training import facts, numbers, talk, texts
from training.chat import Turn
from training.split import Split

Skill = Callable[[Random, Split], Turn]


def small_fact(rng: Random, split: Split) -> Turn:
    """Ask one of the small facts."""
    return rng.choice(facts.SMALL_FACTS)(rng, split)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Weights of the single turns, and shares (0 to 1) of conversations or stretches of them.

    `with_recall`: the user tells facts and asks for them. `asks_missing`: asks there for a fact
    never told. `asks_untold`: asks for a fact where none was told. `secret`: the system prompt
    holds one. `story`: a stretch is a story.
    """

    skills: tuple[tuple[Skill, float], ...]
    with_recall: float
    asks_missing: float
    asks_untold: float
    secret: float
    story: float


EARLY: Final = Mixture(
    skills=(
        (numbers.addition, 14),
        (numbers.addition_drill, 7),
        (numbers.subtraction, 6),
        (numbers.multiplication, 4),
        (numbers.out_of_range, 3),
        (numbers.counting, 7),
        (numbers.comparison, 3),
        (numbers.parity, 1.5),
        (facts.capital, 15),
        (facts.unknown_capital, 1),
        (texts.json_object, 10),
        (talk.small_talk, 9),
        (talk.fun, 2),
        (talk.unknown, 11),
        (small_fact, 24.0),
    ),
    with_recall=0.26,
    asks_missing=0.2,
    asks_untold=0.0,
    secret=0.3,
    story=0.075,
)
LATE: Final = Mixture(
    skills=(
        (numbers.addition, 14),
        (numbers.addition_drill, 4),
        (numbers.subtraction, 9),
        (numbers.subtraction_drill, 4),
        (numbers.multiplication, 6),
        (numbers.out_of_range, 4),
        (numbers.counting, 8),
        (numbers.comparison, 4),
        (numbers.parity, 2),
        (facts.capital, 20),
        (facts.unknown_capital, 2),
        (texts.json_object, 11),
        (talk.small_talk, 11),
        (talk.fun, 1.5),
        (talk.unknown, 9),
        (small_fact, 36),
    ),
    with_recall=0.2,
    asks_missing=0.5,
    asks_untold=0.04,
    secret=0.2,
    story=0.05,
)
