"""How long every prefix has waited for its next use: counts by class and age, kept true at every request.

Ages count requests started since the last use. They fall into buckets that grow with age, so that a prefix changes its
bucket ever more rarely. A calendar says when (a timing wheel as of Varghese and Lauck, SOSP 1987): a request costs
O(log ages) moves on the average instead of a walk over all prefixes.
"""

# Where the gap between two uses is not known yet.
NO_GAP = -1
# Buckets of a quarter octave.
PER_OCTAVE = 4
_NUM_OCTAVES = 16
NUM_BUCKETS = PER_OCTAVE * _NUM_OCTAVES
# One class for unknown gaps, one an octave for the rest.
NUM_CLASSES = _NUM_OCTAVES + 1
# A bin is a bucket of a class.
NUM_BINS = NUM_CLASSES * NUM_BUCKETS
_NO_BIN = -1


def bucket_of(age: int) -> int:
    """The bucket of an age. The first ages have one each, as integer arithmetic has it."""
    octave = (age + 1).bit_length() - 1
    if octave >= _NUM_OCTAVES:
        return NUM_BUCKETS - 1
    return octave * PER_OCTAVE + ((age + 1 - (1 << octave)) * PER_OCTAVE >> octave)


def bin_of(gap: int, age: int) -> int:
    """Of a prefix whose last two uses were `gap` apart, last used `age` ago."""
    kind = 0 if gap == NO_GAP else min((gap + 1).bit_length(), NUM_CLASSES - 1)
    return kind * NUM_BUCKETS + bucket_of(age)


def _next_age(bucket: int) -> int:
    """The first age beyond a bucket."""
    age = max(0, (1 << bucket // PER_OCTAVE) * (PER_OCTAVE + bucket % PER_OCTAVE) // PER_OCTAVE - 2)
    while bucket_of(age) <= bucket:
        age += 1
    return age


_NEXT_AGE = [_next_age(bucket) for bucket in range(NUM_BUCKETS - 1)]


class Prefix:
    """Something that may be wanted again."""

    __slots__ = ("bin", "due", "gap", "last_use")

    def __init__(self, gap: int = NO_GAP, last_use: int = 0) -> None:
        # In requests started: between its last two uses, and when the last was.
        self.gap = gap
        self.last_use = last_use
        # Owned by `Ages`.
        self.bin = _NO_BIN
        self.due = 0


class Ages:
    """Owns the clock and the prefixes' bins."""

    def __init__(self) -> None:
        # Requests started.
        self.clock = 0
        self.counts = [0] * NUM_BINS
        self._calendar: dict[int, list[Prefix]] = {}

    def tick(self) -> list[Prefix]:
        """Another request has started. Returns the prefixes that are in other bins now."""
        self.clock += 1
        moved: list[Prefix] = []
        for prefix in self._calendar.pop(self.clock, ()):
            # Otherwise it has been used or has gone meanwhile.
            if prefix.due == self.clock and prefix.bin != _NO_BIN:
                self._place(prefix)
                moved.append(prefix)
        return moved

    def track(self, prefix: Prefix) -> None:
        """From now on, or again after its gap or last use has changed. O(1)."""
        self._place(prefix)

    def forget(self, prefix: Prefix) -> None:
        """It is not waited for any more; nothing if it never was. O(1)."""
        if prefix.bin != _NO_BIN:
            self.counts[prefix.bin] -= 1
            prefix.bin = _NO_BIN

    def reset(self) -> None:
        """Nothing is waited for; the clock goes on."""
        self.counts = [0] * NUM_BINS
        self._calendar.clear()

    def _place(self, prefix: Prefix) -> None:
        counts = self.counts
        if prefix.bin != _NO_BIN:
            counts[prefix.bin] -= 1
        prefix.bin = bin_of(prefix.gap, self.clock - prefix.last_use)
        counts[prefix.bin] += 1
        bucket = prefix.bin % NUM_BUCKETS
        if bucket < NUM_BUCKETS - 1:
            due = prefix.last_use + _NEXT_AGE[bucket]
            if due != prefix.due:
                prefix.due = due
                self._calendar.setdefault(due, []).append(prefix)
