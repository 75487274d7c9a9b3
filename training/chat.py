"""The nouns of the data set, turns and conversations, and the helpers all skills share."""

from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Turn:
    """One question and its right answer. `skill` names the generator, for counting and tests."""

    skill: str
    user: str
    assistant: str


@dataclass(frozen=True, slots=True)
class Conversation:
    """What one training sequence holds; it always starts at position 0 of the model."""

    system: str | None
    turns: tuple[Turn, ...]

    def messages(self) -> list[dict[str, str]]:
        """Give the conversation as chat messages, in order."""
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            found.append({"role": "user", "content": turn.user})
            found.append({"role": "assistant", "content": turn.assistant})
        return found


def words(text: str) -> tuple[str, ...]:
    """Split a readable list of words."""
    return tuple(text.split())


_ONSETS = words("b br c d dr f g gr h j k l m n p qu r s st t tr v w z sh th")
_VOWELS = words("a e i o u ai ee oo ia")
_CODAS = (*words("n r l s x m k th nd rt"), *[""] * 6)


def made_up_word(rng: Random) -> str:
    """Invent a pronounceable lower-case word, so that copying cannot be learned by heart."""
    count = rng.choice((1, 2, 2, 3))
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(count)]
    return "".join(parts) + rng.choice(_CODAS)


def casual(rng: Random, text: str) -> str:
    """Sometimes type like a person in a hurry: no capitals, no final mark, doubled marks."""
    roll = rng.random()
    if roll < 0.15:
        text = text.lower()
    if rng.random() < 0.2:
        text = text.rstrip("?.!")
    elif roll > 0.96:
        text = text + "?" if text.endswith("?") else text.upper()
    return text


def article(noun: str) -> str:
    """Put `a` or `an` before a noun."""
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def capital_first(text: str) -> str:
    """Make the first letter upper case and leave the others (unlike `str.capitalize`)."""
    return text[:1].upper() + text[1:]
