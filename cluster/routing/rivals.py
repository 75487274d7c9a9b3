"""Other ways to choose a Mac, as the field's routers do it: baselines for ours, chosen by config.

Restated from what those routers publish, with their default figures. They see bookings and the exact index, which is
more than most of them have; none sees speeds, seconds or prompts under way.
"""

from collections.abc import Callable

from cluster.routing.policy import Policy, PredictedSeconds, View


class RoundRobin:
    """The Mac booked least recently."""

    counts_pending = False

    def choose(self, view: View) -> int:
        """See the class."""
        return min(view.open_slots, key=lambda slot: view.last_booking[slot])


class LeastLoaded:
    """The fewest requests."""

    counts_pending = False

    def choose(self, view: View) -> int:
        """See the class."""
        return _least_loaded(view)


class PrefixAffinity:
    """The longest match if it is long enough, unless loads are too uneven; else the fewest requests.

    SGLang's cache_aware with its command line's thresholds; Ray's prefix router is the same with a lower ratio and no
    limit of imbalance.
    """

    counts_pending = False
    # Share of the prompt that must match, and the imbalance that breaks affinity: absolute and relative, both.
    _MATCH = 0.3
    _MAX_DIFFERENCE = 64
    _MAX_RATIO = 1.5

    def choose(self, view: View) -> int:
        """See the class."""
        loads = [view.standings[slot].num_requests for slot in view.open_slots]
        if max(loads) - min(loads) > self._MAX_DIFFERENCE and max(loads) > self._MAX_RATIO * min(loads):
            return _least_loaded(view)
        best = max(view.num_held[slot] for slot in view.open_slots)
        if best <= self._MATCH * view.num_tokens:
            return _least_loaded(view)
        holders = [slot for slot in view.open_slots if view.num_held[slot] == best]
        return min(holders, key=lambda slot: (view.standings[slot].num_requests, view.last_booking[slot]))


class LinearBlockCost:
    """Blocks to prefill, booked ones included, plus blocks that decode: Dynamo's cost with its default weights."""

    counts_pending = False

    def choose(self, view: View) -> int:
        """See the class."""

        def cost(slot: int) -> float:
            standing = view.standings[slot]
            prefill = standing.num_prefill_tokens + view.num_tokens - view.num_held[slot]
            return (prefill + standing.context_tokens + view.num_tokens) / view.block_size

        return min(view.open_slots, key=lambda slot: (cost(slot), view.last_booking[slot]))


class WeightedScores:
    """3 prefix + 2 queue + 2 free KV memory, each from 0 to 1: llm-d's default weights."""

    counts_pending = False

    def choose(self, view: View) -> int:
        """See the class."""
        queues = [view.standings[slot].num_requests - view.standings[slot].num_decoding for slot in view.open_slots]
        least, most = min(queues), max(queues)

        def score(slot: int) -> float:
            standing = view.standings[slot]
            queue = standing.num_requests - standing.num_decoding
            prefix = view.num_held[slot] / view.num_tokens
            short = (most - queue) / (most - least) if most > least else 1.0
            free = max(0.0, 1.0 - standing.context_tokens / standing.token_capacity)
            return 3 * prefix + 2 * short + 2 * free

        return max(view.open_slots, key=lambda slot: (score(slot), -view.last_booking[slot]))


_POLICIES: dict[str, Callable[[], Policy]] = {
    "predicted_seconds": PredictedSeconds,
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_affinity": PrefixAffinity,
    "linear_block_cost": LinearBlockCost,
    "weighted_scores": WeightedScores,
}


def make_policy(name: str) -> Policy:
    """One of `cluster.routing.config.POLICIES`."""
    return _POLICIES[name]()


def _least_loaded(view: View) -> int:
    return min(view.open_slots, key=lambda slot: (view.standings[slot].num_requests, view.last_booking[slot]))
