"""What a resume point is worth: the seam between how memory is freed and what is freed first."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from cluster.kv.reuse_model import ReuseModel


class RetentionPolicy(ABC):
    """Ranks resume points; the lowest goes first."""

    # Whether it tells points that are rarely stopped at from others: only then windows are kept on the way.
    weighs_costs = True

    @abstractmethod
    def refresh(self, waiting: Sequence[int]) -> None:
        """A request has started, given how many prefixes wait in each bin of `Ages`."""

    @abstractmethod
    def observe(self, gap: int, age: int) -> None:
        """A prefix whose last two uses were `gap` apart was wanted again at that age."""

    @abstractmethod
    def factor(self, age_bin: int) -> float:
        """Of the rank of all points in a bin."""

    @abstractmethod
    def value(self, last_use: int, priority: int, lost_tokens: float, freed_bytes: int) -> float:
        """The other factor: of a point that would cost so many tokens if it were wanted, and frees so many bytes."""


class LruPolicy(RetentionPolicy):
    """Least recently used first, whatever it costs: the reference's rule."""

    weighs_costs = False

    def refresh(self, waiting: Sequence[int]) -> None:
        """Nothing to learn."""

    def observe(self, gap: int, age: int) -> None:
        """Nothing to learn."""

    def factor(self, age_bin: int) -> float:
        """All alike."""
        return 1.0

    def value(self, last_use: int, priority: int, lost_tokens: float, freed_bytes: int) -> float:
        """See the base class."""
        return last_use


class ValuePolicy(RetentionPolicy):
    """Expected tokens saved, per request of waiting and per byte."""

    def __init__(self) -> None:
        self._model = ReuseModel()

    def refresh(self, waiting: Sequence[int]) -> None:
        """See the base class."""
        self._model.refresh(waiting)

    def observe(self, gap: int, age: int) -> None:
        """See the base class."""
        self._model.observe(gap, age)

    def factor(self, age_bin: int) -> float:
        """See the base class."""
        return self._model.index[age_bin]

    def value(self, last_use: int, priority: int, lost_tokens: float, freed_bytes: int) -> float:
        """See the base class. A step of priority counts as much as twice the tokens."""
        return lost_tokens / freed_bytes * 2.0**priority


POLICIES: dict[str, Callable[[], RetentionPolicy]] = {"lru": LruPolicy, "value": ValuePolicy}
