"""How long a Mac's steps take, learnt from those that it reports.

One law for all of them: a step of P prefill tokens at a mean context of X beside D decode rows over C tokens

    seconds = max(step, token * P + context * P * X) + row * D + row_context * C

(weights are read while tokens are computed, whichever takes longer) is fitted by a Kalman filter on relative errors, so
that short and long steps count alike. The first few observations only scale the assumed law (their median ratio: one
stalled step must not make a Mac look dead); after that one counts at most as three times the usual error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

# Steps after which a Mac's speed is known.
NUM_SCALING = 5
_CLAMP = 3.0
# Relative error of one step: at first, at least, and the weight of the next one in its mean.
_FIRST_ERROR = 0.5
_LEAST_ERROR = 0.02
_ERROR_GAIN = 0.05
# Share of the first uncertainty that comes back with every step.
_FADE = 0.0005
# Share of the assumed cost below which none falls: no part of a step is free.
_LEAST = 0.001


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step: prefill tokens and their mean context, rows that decoded and the sum of their contexts."""

    num_prefill_tokens: int
    prefill_context_tokens: float
    num_decoding: int
    decode_context_tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step, of a prefill token, of it for each token of its context, of a row, and for each of its."""

    step_s: float
    token_s: float
    context_s: float
    row_s: float
    row_context_s: float

    @property
    def weights(self) -> tuple[float, float, float, float, float]:
        """In the order of the fields."""
        return (self.step_s, self.token_s, self.context_s, self.row_s, self.row_context_s)

    def times(self, factor: float) -> "StepCosts":
        """All of them so many times as long."""
        return self if factor == 1.0 else StepCosts(*(factor * weight for weight in self.weights))

    @property
    def prefill_tokens_per_s(self) -> float:
        """Of the first tokens of a prompt, in steps of 512."""
        return 512.0 / max(self.step_s, 512.0 * (self.token_s + 256.0 * self.context_s))

    @property
    def decode_step_s(self) -> float:
        """Of a step of one row with 1,024 tokens."""
        return self.step_s + self.row_s + 1024.0 * self.row_context_s


def assumed_costs(prefill_tokens_per_s: float) -> StepCosts:
    """The shape that Macs have before they have told: decoding a row takes as long as 20 prefill tokens.

    An 8B model at 4 bit on a Pro chip prefills about 500 tokens a second and decodes 25; attention doubles the cost of
    a token after some 32,000 tokens of context.
    """
    token_s = 1.0 / prefill_tokens_per_s
    return StepCosts(
        step_s=16.0 * token_s,
        token_s=token_s,
        context_s=token_s / 32_768.0,
        row_s=token_s,
        row_context_s=token_s / 2_048.0,
    )


class StepModel:
    """One Mac's line. `costs` is the present one."""

    def __init__(self, assumed: StepCosts) -> None:
        self.costs = assumed
        self.num_observed = 0
        self._assumed = assumed
        self._ratios: list[float] = []
        self._usual_error = _FIRST_ERROR
        self._weights: list[float] = []
        # Covariance of the weights, and the variance that each may have at most.
        self._spread: list[list[float]] = []
        self._most: list[float] = []
        self._start_from(assumed)

    def observe(self, sample: StepSample) -> None:
        """Learn from a step; one that took no time or did nothing is not counted."""
        if sample.seconds <= 0.0 or not sample.num_prefill_tokens + sample.num_decoding:
            return
        self.num_observed += 1
        if len(self._ratios) < NUM_SCALING:
            assumed = self._assumed.weights
            self._ratios.append(sample.seconds / _dot(assumed, _features(sample, assumed)))
            ratio = sorted(self._ratios)[len(self._ratios) // 2]
            self._start_from(self._assumed.times(ratio))
            return
        features = _features(sample, self._weights)
        predicted = _dot(self._weights, features)
        limit = _CLAMP * self._usual_error
        error = min(max(sample.seconds / predicted - 1.0, -limit), limit)
        self._usual_error += _ERROR_GAIN * (max(abs(error), _LEAST_ERROR) - self._usual_error)
        self._learn([feature / predicted for feature in features], error)

    @property
    def certainties(self) -> tuple[float, ...]:
        """How much of each weight has been learnt, from 0 to 1: no short prompt tells what long contexts cost."""
        return tuple(
            max(0.0, 1.0 - row[index] / most) if most else 1.0
            for index, (row, most) in enumerate(zip(self._spread, self._most, strict=True))
        )

    def costs_in(self, shape: Sequence[float]) -> StepCosts:
        """As learnt; what has not been learnt is in proportion to the prefill token, by the fleet's `shape`."""
        token_s = self.costs.token_s
        return StepCosts(
            *(
                certainty * weight + (1.0 - certainty) * share * token_s
                for certainty, weight, share in zip(self.certainties, self.costs.weights, shape, strict=True)
            )
        )

    def _start_from(self, costs: StepCosts) -> None:
        self.costs = costs
        self._weights = list(costs.weights)
        self._most = [weight * weight for weight in self._weights]
        self._spread = [[most if row == column else 0.0 for column in range(5)] for row, most in enumerate(self._most)]

    def _learn(self, features: Sequence[float], error: float) -> None:
        along = [_dot(row, features) for row in self._spread]
        scale = self._usual_error**2 + _dot(along, features)
        self._weights = [
            max(weight + value / scale * error, _LEAST * least)
            for weight, value, least in zip(self._weights, along, self._assumed.weights, strict=True)
        ]
        self.costs = StepCosts(*self._weights)
        for index, row in enumerate(self._spread):
            gain = along[index] / scale
            for column, value in enumerate(along):
                row[column] -= gain * value
            # Macs change (heat, other programs), so certainty fades; never beyond what it was at the start, or weights
            # that no step tells apart would run away.
            row[index] = min(row[index] + _FADE * self._most[index], self._most[index])


def shape_of(models: Sequence[StepModel]) -> tuple[float, ...]:
    """What each weight is to the prefill token's, by those Macs that know it. O(Macs). There must be some."""
    known = [(each.certainties, each.costs.weights, each.costs.token_s) for each in models]
    # As much as nothing: what nobody knows is as assumed.
    least = 1e-9
    return tuple(
        sum((certainties[i] + least) * weights[i] / token_s for certainties, weights, token_s in known)
        / sum(certainties[i] + least for certainties, _, _ in known)
        for i in range(5)
    )


def _features(sample: StepSample, weights: Sequence[float]) -> tuple[float, float, float, float, float]:
    """What the weights are multiplied by: of reading weights and computing tokens, what takes longer by them."""
    num_tokens = float(sample.num_prefill_tokens)
    num_pairs = num_tokens * sample.prefill_context_tokens
    rows = float(sample.num_decoding), float(sample.decode_context_tokens)
    if weights[1] * num_tokens + weights[2] * num_pairs > weights[0]:
        return (0.0, num_tokens, num_pairs, *rows)
    return (1.0, 0.0, 0.0, *rows)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
