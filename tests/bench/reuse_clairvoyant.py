"""The most that any cache could reuse within a budget of bytes, even one that knows every request to come.

Requests run one at a time; request j is slot j. Whoever resumes request i at length p needs, in every slot between the
last request that had a token and i, that token's full-attention KV, for each token before p, and likewise the window KV
of the last `window - 1` tokens before p and the recurrent state after p. What was there at the last request that had it
is assumed free: it may have been computed anew then. Nothing is counted twice, because the times between consecutive
uses of a token don't overlap. In slot j the running request holds its own KV besides, so what is kept for others has
the budget less that.

Choosing one p for each request, to get the most tokens, is then a knapsack with one capacity a slot. Its Lagrangian
dual, with a price a byte in every slot, bounds it from above whatever the prices are:

    sum over slots of price * capacity + sum over requests of max(0, max over p of (p - price of what p needs))

Between two ends of stretches that the same requests had, that price is concave in p (full attention is linear there,
the state's is constant, a window takes in tokens at one price and drops tokens at rising ones), so ends suffice for p.
Prices are found by subgradient steps towards a target level; stopping early only leaves the bound looser.

The bound is for reuse at any token; blocks, chunks, in-flight windows and fragmentation cost a real cache more.

With full attention alone it is tight but for parts of a token: tokens nearer the start were last had no earlier, so the
gain is concave in p, the dual's value is that of the best fractional choice, and a cache may keep any number of tokens.
With windows and states it is looser, in two ways. Its best choice may be half of two lengths, where a window or a state
is there or is not; and it takes these to be there at the last request that had the token, also if that one resumed
further on and did not compute them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.bench.reuse_prefixes import Reusable
from tests.bench.reuse_shapes import Costs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Infeasible(Exception):
    """A request does not fit into the budget even alone."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Hit tokens of all requests at most; `num_steps` is how many prices were tried."""

    num_tokens: float
    num_steps: int


class _Choices:
    """All (request, p) in flat arrays, grouped by request; p is the end of stretch k of the request's path."""

    def __init__(self, paths: Sequence[Sequence[Reusable]], costs: Costs) -> None:
        request, first, end, start, last_use, window_from = [], [], [], [], [], []
        for i, path in enumerate(paths):
            for k, stretch in enumerate(path):
                request.append(i)
                first.append(len(request) - 1 - k)
                start.append(path[k - 1].end if k else 0)
                end.append(stretch.end)
                last_use.append(stretch.last_use)
                window_from.append(max(0, stretch.end - costs.num_window_tokens))
        as_ints = [np.array(values, np.int64) for values in (request, first, start, end, last_use, window_from)]
        self.request, self.first, self.start, self.end, self.last_use, self.window_from = as_ints
        # The stretch in which the window begins.
        at = [
            f + int(np.searchsorted(self.end[f : n + 1], w, side="right"))
            for n, (f, w) in enumerate(zip(first, window_from, strict=True))
        ]
        self.window_at: Ints = np.minimum(np.array(at, np.int64), np.arange(len(at)))
        self.groups: Ints = np.flatnonzero(np.arange(len(first)) == self.first)
        self.costs = costs

    def prices(self, price_before: Floats) -> Floats:
        """Of what each choice needs; `price_before[j]` is the price of one byte in all slots before j."""
        # Of one byte in the slots strictly between.
        per_byte = price_before[self.request] - price_before[self.last_use + 1]
        return self._token_sums(per_byte) + self.costs.state_bytes * per_byte

    def _token_sums(self, per_byte: Floats) -> Floats:
        """Price of full attention up to the end and of the window before it, a token's bytes at `per_byte` each."""
        running = np.cumsum((self.end - self.start) * per_byte)
        before = running - (self.end - self.start) * per_byte
        upto = running - before[self.first]
        result: Floats = self.costs.full_token_bytes * upto
        if self.costs.window:
            at = self.window_at
            left_out = before[at] - before[self.first] + (self.window_from - self.start[at]) * per_byte[at]
            result = result + self.costs.window_token_bytes * (upto - left_out)
        return result

    def best(self, prices: Floats) -> tuple[float, Ints]:
        """The gain of the best choices, and which they are; requests that gain by none have none."""
        if not len(self.groups):
            return 0.0, np.empty(0, np.int64)
        gain = self.end - prices
        most = np.maximum.reduceat(gain, self.groups)
        group = np.cumsum(np.arange(len(gain)) == self.first) - 1
        is_best = (gain == most[group]) & (gain > 0)
        chosen = np.flatnonzero(is_best)
        # One of each request, should two be equal.
        _, index = np.unique(group[chosen], return_index=True)
        return float(most[most > 0].sum()), chosen[index]

    def use(self, chosen: Ints, num_slots: int) -> Floats:
        """Bytes in each slot that the chosen ones need."""
        ends = np.zeros(num_slots + 1)
        for n in chosen:
            first, length = int(self.first[n]), self.end - self.start
            stretches = np.arange(first, n + 1)
            num_bytes = length[stretches] * float(self.costs.full_token_bytes)
            if self.costs.window:
                in_window = self.end[stretches] - np.maximum(self.start[stretches], self.window_from[n])
                num_bytes += np.maximum(in_window, 0) * self.costs.window_token_bytes
            num_bytes[-1] += self.costs.state_bytes
            np.add.at(ends, self.last_use[stretches] + 1, num_bytes)
            ends[self.request[n]] -= num_bytes.sum()
        return np.cumsum(ends[:-1])


def upper_bound(
    paths: Sequence[Sequence[Reusable]],
    num_tokens: Sequence[int],
    costs: Costs,
    budget_bytes: float,
    *,
    num_steps: int = 1500,
) -> Bound:
    """Of the hit tokens; `paths` from `reusable_prefixes`, `num_tokens` of each request with its answer.

    Raises Infeasible if a request needs more than the budget. The last token of an answer never runs.
    """
    own = np.array([costs.sequence_bytes(n - 1) for n in num_tokens], np.float64)
    # In parts of the budget, so that steps have one scale whatever the shape.
    capacity = 1.0 - own / budget_bytes
    if capacity.min() < 0:
        raise Infeasible(f"a request needs {own.max():.0f} bytes, the budget is {budget_bytes:.0f}")
    choices = _Choices(paths, costs)
    price = np.zeros(len(num_tokens))
    best, best_price, margin, num_failed = np.inf, price, 0.2, 0
    for step in range(num_steps):
        before = np.concatenate(([0.0], np.cumsum(price))) / budget_bytes
        gain, chosen = choices.best(choices.prices(before))
        value = float(price @ capacity) + gain
        if value < best * (1 - 1e-5):
            num_failed = 0
        else:
            num_failed += 1
        if value < best:
            best, best_price = value, price
        slope = capacity - choices.use(chosen, len(price)) / budget_bytes
        # Slots that are free and have room can only stay free.
        slope[(price <= 0) & (slope > 0)] = 0.0
        norm = float(slope @ slope)
        if norm == 0.0 or margin < 1e-5:
            return Bound(best, step + 1)
        if num_failed >= 20:
            margin, num_failed, price = margin / 2, 0, best_price
            continue
        # Towards a level a little below the best known, as if it were the optimum.
        price = np.maximum(0.0, price - (value - best * (1 - margin)) / norm * slope)
    return Bound(best, num_steps)
