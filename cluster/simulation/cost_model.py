"""How long a step takes on a Mac: what the simulation has in place of a model."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

from cluster.scheduling.plan import Slice


@dataclass(frozen=True, slots=True)
class CostModel:
    """One class of Macs with one model. Raises ValueError for a number that is out of range.

    A step reads the weights once (`step_s`) while it computes its prefill tokens, whichever takes longer; then every
    decoding sequence adds `row_s` and the time to read its context. A prefill token costs twice as much at a context of
    `context_doubling_tokens` as at the start, and grows on like that. The defaults are arithmetic for a dense 8B model
    at 4 bit with 800 GB/s and 36 TFLOP/s of use; nobody measured them.
    """

    prefill_tokens_per_s: float = 2000.0
    context_doubling_tokens: float = 65_536.0
    step_s: float = 0.012
    row_s: float = 0.0005
    context_token_s: float = 2e-7
    # Beside 1.0, all times are divided by it.
    speed: float = 1.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value, may_be_zero = getattr(self, each.name), each.name in ("step_s", "row_s", "context_token_s")
            if not (value > 0 or (value == 0 and may_be_zero)) or value == float("inf"):
                bound = "at least 0" if may_be_zero else "positive"
                raise ValueError(f"{each.name} must be {bound} and finite, got {value}")

    def step_time_s(self, slices: Iterable[Slice]) -> float:
        """Of all rows of one plan."""
        prefill, num_rows, num_context = 0.0, 0, 0
        for part in slices:
            if part.num_tokens == 1:
                num_rows += 1
                num_context += part.start
            else:
                middle = part.start + part.num_tokens / 2
                prefill += part.num_tokens * (1 + middle / self.context_doubling_tokens)
        body_s = max(self.step_s, prefill / self.prefill_tokens_per_s)
        return (body_s + num_rows * self.row_s + num_context * self.context_token_s) / self.speed
