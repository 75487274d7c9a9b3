"""The training data is repeatable, free of held-out items, and right."""

import json
import re
from collections import Counter
from itertools import combinations, islice, pairwise
from random import Random

import pytest

from training import facts, memory, numbers, tables, texts
from training.chat import Conversation, Turn
from training.data import conversation, stream
from training.examples import SKILLS, examples
from training.mixture import EARLY, LATE
from training.split import Split, draw, is_held_out

NUM_CONVERSATIONS = 1500
SUM = re.compile(r"(\d+) ([+x-]) (\d+) = (\d+)")


@pytest.fixture(scope="module")
def sample() -> list[Conversation]:
    return [*islice(stream(7, EARLY), NUM_CONVERSATIONS), *islice(stream(8, LATE), NUM_CONVERSATIONS)]


def turns_of(found: list[Conversation], skill: str) -> list[Turn]:
    turns = [turn for one in found for turn in one.turns if turn.skill == skill]
    assert len(turns) > 20, f"too few turns to judge {skill}"
    return turns


def test_same_seed_gives_same_data() -> None:
    """The stream is a function of its seed."""
    assert list(islice(stream(3), 200)) == list(islice(stream(3), 200))
    assert list(islice(stream(3), 200)) != list(islice(stream(4), 200))


def test_every_equation_is_right_and_none_is_held_out(sample: list[Conversation]) -> None:
    """Each `a op b = c` in an answer is true, and its sum or difference is a training item."""
    compute = {"+": int.__add__, "-": int.__sub__, "x": int.__mul__}
    counts: Counter[str] = Counter()
    for one in sample:
        for turn in one.turns:
            for a, sign, b, result in SUM.findall(turn.assistant):
                pair = int(a), int(b)
                counts[sign] += 1
                assert compute[sign](*pair) == int(result), turn
                assert sign != "+" or not is_held_out(*numbers.addition_key(pair)), turn
                assert sign != "-" or not is_held_out(*numbers.subtraction_key(pair)), turn
    assert min(counts.values()) > 100


def test_answers_restate_the_numbers_asked(sample: list[Conversation]) -> None:
    """A sum is answered for the numbers in the question, not for others."""
    for turn in turns_of(sample, "addition"):
        asked = re.findall(r"\d+", turn.user)
        answered = re.findall(r"\d+", turn.assistant)[:2]
        assert not asked or Counter(asked) == Counter(answered), turn


def test_capitals_are_right_and_wordings_held_out(sample: list[Conversation]) -> None:
    """Capital answers agree with the table; held-out (country, wording) pairs do not occur."""
    asked = set()
    for turn in turns_of(sample, "capital"):
        country = next(c for c, city in tables.CAPITALS.items() if city in turn.assistant)
        city, name = tables.CAPITALS[country], facts.country_name(country)
        right = (f"The capital of {name} is {city}.", f"{city} is the capital of {name}.")
        assert any(answer in turn.assistant for answer in right), turn
        asked.add(turn.user.lower().rstrip("?."))
    for country, city in tables.CAPITALS.items():
        for form in (*facts.CAPITAL_FORMS, *facts.COUNTRY_FORMS):
            shown = city if form in facts.COUNTRY_FORMS else country
            if is_held_out("capital", country, form):
                same_text = [
                    other
                    for other in (*facts.CAPITAL_FORMS, *facts.COUNTRY_FORMS)
                    if other.lower().rstrip("?.") == form.lower().rstrip("?.") and other != form
                ]
                assert same_text or form.format(x=shown).lower().rstrip("?.") not in asked


def test_json_answers_parse_and_repeat_the_question(sample: list[Conversation]) -> None:
    """Each JSON answer holds exactly values from the question and is not a held-out item."""
    for turn in turns_of(sample, "json"):
        found = json.loads(turn.assistant[turn.assistant.index("{") : turn.assistant.index("}") + 1])
        assert all(str(value) in turn.user for value in found.values()), turn
        assert not is_held_out("json", *found.values()), turn


def test_counts_run_evenly_between_their_ends(sample: list[Conversation]) -> None:
    """A count has one constant step and ends where the question says."""
    for turn in turns_of(sample, "counting"):
        found = [int(n) for n in re.findall(r"\d+", turn.assistant)]
        assert len({b - a for a, b in pairwise(found)}) == 1, turn
        assert int(re.findall(r"\d+", turn.user)[-1]) == found[-1], turn
        assert not is_held_out("count", found[0], found[-1], found[1] - found[0]), turn


def test_recalled_facts_were_told_before(sample: list[Conversation]) -> None:
    """What a recall answer claims stands in the system prompt or in an earlier turn."""
    patterns = [kind.recalled.replace("{v}", r"(\w[\w ]*)") for kind in memory.KINDS.values()]
    patterns += [r"The result was (\d+)\.", r"You asked about (?:the )?(.+?)\."]
    num_checked = 0
    for one in sample:
        past = one.system or ""
        for turn in one.turns:
            if turn.skill == "recall":
                match = next(m for p in patterns if (m := re.search(p, turn.assistant)))
                assert match[1].lower() in past.lower(), (past, turn)
                num_checked += 1
            past += f"\n{turn.user}\n{turn.assistant}"
    assert num_checked > 500


def test_missing_facts_were_not_told(sample: list[Conversation]) -> None:
    """The model only says it was not told a fact when neither the prompt nor a turn told it."""
    for one in sample:
        past = one.system or ""
        for turn in one.turns:
            if turn.skill == "recall missing":
                kind = next(k for k in memory.KINDS.values() if k.missing in turn.assistant)
                noted = re.escape(kind.noted).replace(r"\{v\}", ".+").replace(r"\{c\}", ".+")
                told = re.escape(kind.in_system).replace(r"\{v\}", ".+")
                assert not re.search(told, past), (past, turn)
                assert noted == r"\.+" or not re.search(rf"^{noted}$", past, re.M), (past, turn)
            past += f"\n{turn.assistant}"


def test_training_people_have_no_held_out_pair_of_facts() -> None:
    """Training never tells two facts that form a held-out pair; evaluation always does."""
    rng = Random(0)
    for split in Split:
        for _ in range(300):
            pairs = combinations(sorted(memory.sample_facts(rng, split, 3).items()), 2)
            held_out = [is_held_out("facts", *pair) for pair in pairs]
            assert any(held_out) == (split is Split.HELD_OUT)


def test_system_prompt_secrets_are_answered_from_the_prompt(sample: list[Conversation]) -> None:
    """The answer to a question about the system prompt is a sentence of that prompt."""
    for one in sample:
        for turn in one.turns:
            if turn.skill == "system recall":
                assert one.system is not None
                sentence = re.search(r"The [a-z ]+ is \w+\.", turn.assistant)
                assert sentence is not None
                assert sentence[0] in one.system


def test_story_questions_are_answered_from_the_story() -> None:
    """The thing that a story answer names stands in the story."""
    rng = Random(1)
    for _ in range(300):
        tale, *questions = texts.story(rng, Split.TRAIN)
        for turn in questions:
            answer = turn.assistant.rstrip(".").split()[-1]
            if turn.assistant.endswith("were in the story."):
                answer = turn.assistant.split()[0]
            assert answer in tale.assistant, (tale, turn)


def test_split_sides_are_disjoint() -> None:
    """An item drawn for one side is never drawn for the other."""
    rng = Random(2)

    def item() -> int:
        return rng.randint(0, 500)

    def key(value: int) -> tuple[object, ...]:
        return ("item", value)

    sides = [{draw(split, item, key) for _ in range(300)} for split in Split]
    assert not sides[0] & sides[1]


def test_evaluation_sums_are_all_held_out() -> None:
    """Each sum of the evaluation is one that training cannot draw."""
    found = [example for example in examples(0, 0.2) if example.skill == "sums"]
    for example in found:
        a, _, b, _ = SUM.search(example.accepted[0]).groups()  # type: ignore[union-attr]
        assert is_held_out(*numbers.addition_key((int(a), int(b))))


def test_evaluation_covers_every_skill_and_repeats_itself() -> None:
    """The examples are a function of the seed and reach all skills."""
    assert list(examples(0, 0.1)) == list(examples(0, 0.1))
    assert {example.skill for example in examples(0, 0.1)} == set(SKILLS)


def test_conversations_of_the_held_out_side_are_valid() -> None:
    """The same mixture can be drawn from held-out items."""
    assert all(conversation(Random(n), split=Split.HELD_OUT).turns for n in range(100))
