"""Skills about numbers: sums, differences, products, counting, comparing, even and odd."""

from collections.abc import Callable
from random import Random

from training.chat import Turn, casual, words
from training.split import Split, draw

LIMIT = 99  # two digits: what about a million parameters learn reliably in an hour on one core
WORDS = words("zero one two three four five six seven eight nine ten eleven twelve")
ADD_FORMS = (
    "What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} = ?", "{a}+{b}=?", "{a} + {b} =",
    "What's {a} + {b}?", "What is {a} plus {b}?", "{a} plus {b}", "Add {a} and {b}.",
    "Add {b} to {a}.", "What is the sum of {a} and {b}?", "Compute {a} + {b}.",
    "How much is {a} + {b}?",
    "Calculate {a} + {b}", "Can you add {a} and {b}?", "Please compute {a}+{b}.",
    "I have {a} apples and get {b} more. How many apples do I have?", "What does {a} + {b} make?",
    "Solve {a} + {b}", "Tell me {a} + {b}.", "what is {a}+{b}", "What is {a}+{b}?", "sum {a} {b}",
)  # fmt: skip
SUB_FORMS = (
    "What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} = ?", "What is {a} minus {b}?",
    "{a} minus {b}", "Subtract {b} from {a}.", "Compute {a} - {b}.", "How much is {a} - {b}?",
    "I have {a} apples and give away {b}. How many are left?", "What's {a}-{b}?",
    "Take {b} from {a}.",
)  # fmt: skip
MUL_FORMS = (
    "What is {a} x {b}?", "{a} x {b}", "{a} * {b}", "{a}*{b}", "What is {a} times {b}?",
    "{a} times {b}", "Multiply {a} by {b}.", "How much is {a} * {b}?", "What's {a} x {b}?",
)  # fmt: skip
DIVISION_FORMS = ("What is {a} / {b}?", "{a} divided by {b}", "Divide {a} by {b}.", "{a}/{b}")
TOO_BIG = "That is too big for me. I can add and subtract numbers from 0 to 99."
NO_DIVISION = "I cannot divide. I can add, subtract and multiply small numbers."
BELOW_ZERO = "The result is below zero, and I only know numbers from zero up."
Pair = tuple[int, int]


def addition_key(pair: Pair) -> tuple[object, ...]:
    """Name a sum for the split; a + b and b + a are one item."""
    return ("add", min(pair), max(pair))


def subtraction_key(pair: Pair) -> tuple[object, ...]:
    """Name a difference for the split."""
    return ("sub", *pair)


def addition_pair(rng: Random, split: Split) -> Pair:
    """Draw two addends; a quarter of them small, since people ask small sums most."""

    def sample() -> Pair:
        top = 12 if rng.random() < 0.25 else LIMIT
        return rng.randint(0, top), rng.randint(0, top)

    return draw(split, sample, addition_key)


def subtraction_pair(rng: Random, split: Split) -> Pair:
    """Draw a difference that is not below zero."""

    def sample() -> Pair:
        a, b = sorted((rng.randint(0, LIMIT), rng.randint(0, LIMIT)), reverse=True)
        return (a, b) if rng.random() < 0.8 else (a % 21, b % (a % 21 + 1))

    return draw(split, sample, subtraction_key)


def addition(rng: Random, split: Split) -> Turn:
    """Ask for one sum; the answer restates it, which lines the digits up for the model."""
    a, b = addition_pair(rng, split)
    form = rng.choice(ADD_FORMS)
    shown: tuple[object, object] = (a, b)
    if max(a, b) < len(WORDS) and rng.random() < 0.2:
        shown = WORDS[a], WORDS[b]
        form = "What is {a} plus {b}?"
    text = casual(rng, form.format(a=shown[0], b=shown[1]))
    return Turn("addition", text, f"{a} + {b} = {a + b}.")


def addition_drill(rng: Random, split: Split) -> Turn:
    """Ask for several sums at once: the densest way to practise."""
    pairs = [addition_pair(rng, split) for _ in range(rng.randint(3, 9))]
    listed = ", ".join(f"{a} + {b}" for a, b in pairs)
    form = rng.choice(("Work out: {}", "Solve these sums: {}", "Add: {}", "{}"))
    return Turn("drill", form.format(listed), "\n".join(f"{a} + {b} = {a + b}" for a, b in pairs))


def subtraction(rng: Random, split: Split) -> Turn:
    """Ask for one difference."""
    a, b = subtraction_pair(rng, split)
    text = casual(rng, rng.choice(SUB_FORMS).format(a=a, b=b))
    return Turn("subtraction", text, f"{a} - {b} = {a - b}.")


def subtraction_drill(rng: Random, split: Split) -> Turn:
    """Ask for several differences at once."""
    pairs = [subtraction_pair(rng, split) for _ in range(rng.randint(3, 9))]
    listed = ", ".join(f"{a} - {b}" for a, b in pairs)
    form = rng.choice(("Work out: {}", "Solve these: {}", "{}"))
    return Turn("drill", form.format(listed), "\n".join(f"{a} - {b} = {a - b}" for a, b in pairs))


def multiplication(rng: Random, split: Split) -> Turn:
    """Ask for a product from the times tables up to ten; a table is learned by heart, not split."""
    del split
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    text = casual(rng, rng.choice(MUL_FORMS).format(a=a, b=b))
    return Turn("multiplication", text, f"{a} x {b} = {a * b}.")


def out_of_range(rng: Random, split: Split) -> Turn:
    """Ask for arithmetic the model must decline."""
    del split
    small, big = (
        rng.randint(0, LIMIT),
        rng.choice((rng.randint(100, 999), rng.randint(1000, 99999))),
    )
    roll = rng.random()
    if roll < 0.25:
        a, b = rng.randint(1, LIMIT), rng.randint(1, 12)
        text = rng.choice(DIVISION_FORMS).format(a=a, b=b)
        return Turn("limit", casual(rng, text), NO_DIVISION)
    if roll < 0.4:
        a, b = sorted(rng.sample(range(LIMIT + 1), 2))
        return Turn("limit", casual(rng, rng.choice(SUB_FORMS[:7]).format(a=a, b=b)), BELOW_ZERO)
    pair = [small if rng.random() < 0.5 else rng.randint(100, 999), big]
    rng.shuffle(pair)
    forms = ADD_FORMS if rng.random() < 0.6 else (*SUB_FORMS, *MUL_FORMS)
    return Turn("limit", casual(rng, rng.choice(forms).format(a=pair[0], b=pair[1])), TOO_BIG)


def counting(rng: Random, split: Split) -> Turn:
    """Count up, down or by twos between two numbers."""

    def sample() -> tuple[int, int, int]:
        step = rng.choice((1, 1, 1, -1, -1, 2))
        start, length = rng.randint(0, 80), rng.randint(3, 12)
        if rng.random() < 0.4:
            start = rng.choice((1, 1, 0, 2, 3, 4, 5))
        end = start + step * (length - 1)
        return (end, start, -1) if end < 0 and step == -1 else (start, end, step)

    def key(item: tuple[int, int, int]) -> tuple[object, ...]:
        return ("count", *item)

    start, end, step = draw(split, lambda: _non_negative(sample), key)
    forms = {
        1: ("Count from {a} to {b}.", "count {a} to {b}", "Can you count from {a} to {b}?",
            "Please count up from {a} to {b}.", "List the numbers from {a} to {b}."),
        -1: ("Count down from {a} to {b}.", "Count backwards from {a} to {b}.",
             "Count from {a} down to {b}.", "Count from {a} to {b}."),
        2: ("Count from {a} to {b} by twos.", "Count by twos from {a} to {b}.",
            "Count in steps of two from {a} to {b}."),
    }[step]  # fmt: skip
    if start == 1 and step == 1 and rng.random() < 0.5:
        forms = ("Count to {b}.", "count to {b}", "Can you count to {b}?", "Count up to {b}.")
    text = casual(rng, rng.choice(forms).format(a=start, b=end))
    numbers = range(start, end + (1 if step > 0 else -1), step)
    return Turn("counting", text, ", ".join(map(str, numbers)) + ".")


def _non_negative(sample: Callable[[], tuple[int, int, int]]) -> tuple[int, int, int]:
    """Resample until both ends of a count are zero or more."""
    while True:
        item = sample()
        if min(item[0], item[1]) >= 0:
            return item


def comparison(rng: Random, split: Split) -> Turn:
    """Ask which of two different numbers is larger or smaller."""
    a, b = draw(split, lambda: tuple(rng.sample(range(LIMIT + 1), 2)), lambda pair: ("compare", *pair))
    if rng.random() < 0.6:
        forms = ("Which is larger, {a} or {b}?", "Which number is bigger: {a} or {b}?",
                 "What is the larger of {a} and {b}?", "Is {a} or {b} greater?")  # fmt: skip
        answer = f"{max(a, b)} is larger than {min(a, b)}."
    else:
        forms = ("Which is smaller, {a} or {b}?", "Which number is less: {a} or {b}?",
                 "What is the smaller of {a} and {b}?", "Is {a} or {b} smaller?")  # fmt: skip
        answer = f"{min(a, b)} is smaller than {max(a, b)}."
    return Turn("comparison", casual(rng, rng.choice(forms).format(a=a, b=b)), answer)


def parity(rng: Random, split: Split) -> Turn:
    """Ask whether a number is even or odd."""
    n = draw(split, lambda: rng.randint(0, LIMIT), lambda value: ("parity", value))
    forms = ("Is {n} even or odd?", "Is {n} odd or even?", "Even or odd: {n}?")
    answer = f"{n} is {'odd' if n % 2 else 'even'}."
    return Turn("parity", casual(rng, rng.choice(forms).format(n=n)), answer)
