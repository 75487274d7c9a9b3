import random
from array import array
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.bench.reuse_clairvoyant import Infeasible, upper_bound
from tests.bench.reuse_prefixes import num_common, reusable_prefixes, unbounded_hits
from tests.bench.reuse_shapes import SHAPES, Costs
from tests.bench.reuse_workloads import BLOCK_SIZE, Cyclic, cyclic

FULL = Costs(full_token_bytes=1, window_token_bytes=0, window=0, state_bytes=0)
WINDOW = Costs(full_token_bytes=1, window_token_bytes=2, window=3, state_bytes=0)
STATE = Costs(full_token_bytes=1, window_token_bytes=0, window=0, state_bytes=2)
ALL = Costs(full_token_bytes=2, window_token_bytes=1, window=2, state_bytes=1)

requests_strategy = st.lists(
    st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=4), st.lists(st.integers(0, 1), min_size=1, max_size=1)),
    min_size=1,
    max_size=5,
)


def optimum(requests, costs, budget):
    """Most hit tokens of any cache, by trying what to keep during each request. Items are (kind, prefix)."""
    wholes = [tuple(prompt + answer) for prompt, answer in requests]
    limits = [len(prompt) - 1 for prompt, _ in requests]
    size = {"full": costs.full_token_bytes, "window": costs.window_token_bytes, "state": costs.state_bytes}
    kinds = [kind for kind, num_bytes in size.items() if num_bytes]

    def prefixes(i, length):
        return [wholes[i][:n] for n in range(1, length + 1)]

    def needed(i, length):
        paths = prefixes(i, length)
        tail = paths[max(0, length - costs.num_window_tokens) :]
        by_kind = {"full": paths, "window": tail, "state": paths[-1:]}
        return {(kind, path) for kind in kinds for path in by_kind[kind]}

    @cache
    def most(i, stored):
        if i == len(wholes):
            return 0
        hit = max(n for n in range(limits[i] + 1) if needed(i, n) <= stored)
        own = {(kind, path) for kind in kinds for path in prefixes(i, len(wholes[i]))}
        later = {(kind, p) for j in range(i + 1, len(wholes)) for kind in kinds for p in prefixes(j, limits[j])}
        others = sorted((stored - own) & later)
        room = budget - costs.sequence_bytes(len(wholes[i]) - 1)
        kept = (
            kept
            for n in range(len(others) + 1)
            for kept in combinations(others, n)
            if sum(size[kind] for kind, _ in kept) <= room
        )
        return hit + max(most(i + 1, frozenset(own & later) | frozenset(k)) for k in kept)

    return most(0, frozenset())


def bound_of(requests, costs, budget):
    wholes = [array("I", prompt + answer) for prompt, answer in requests]
    paths = reusable_prefixes(wholes, [len(prompt) for prompt, _ in requests])
    return upper_bound(paths, list(map(len, wholes)), costs, budget).num_tokens


@pytest.mark.parametrize("costs", [FULL, WINDOW, STATE, ALL])
@settings(max_examples=60, deadline=None)
@given(requests=requests_strategy, spare=st.integers(0, 8))
def test_no_choice_of_what_to_keep_beats_the_bound(costs, requests, spare):
    budget = max(costs.sequence_bytes(len(prompt)) for prompt, _ in requests) + spare
    assert bound_of(requests, costs, budget) >= optimum(requests, costs, budget) - 1e-6


@pytest.mark.parametrize("costs", [FULL, WINDOW, STATE, ALL])
@given(requests=requests_strategy)
def test_with_room_for_everything_the_bound_is_the_unbounded_cache(costs, requests):
    expected = 0
    wholes = [prompt + answer for prompt, answer in requests]
    for i, (prompt, _) in enumerate(requests):
        common = [num_common(array("I", prompt), array("I", other)) for other in wholes[:i]]
        expected += min(max(common, default=0), len(prompt) - 1)
    assert bound_of(requests, costs, 1e6) == pytest.approx(expected)


def test_the_bound_is_met_where_keeping_is_simple():
    # Two prompts by turns; the second one of each finds it only if it was kept during the other's.
    a, b = ([0, 0, 0, 0], [2]), ([1, 1, 1, 1], [2])
    assert bound_of([a, b, a, b], FULL, 8) == pytest.approx(6)
    assert bound_of([a, b, a, b], FULL, 4) == pytest.approx(0, abs=1e-3)
    # Slots 1 and 2 have room for two tokens more.
    assert bound_of([a, b, a, b], FULL, 6) == pytest.approx(4, abs=1e-2)
    assert optimum([a, b, a, b], FULL, 6) == 4


def test_a_request_larger_than_the_budget_is_refused():
    with pytest.raises(Infeasible, match="needs 4 bytes"):
        bound_of([([0, 0, 0, 0], [1])], FULL, 3)


def test_cyclic_turns_extend_each_other_and_have_the_stated_size():
    workload = cyclic(Cyclic(), seed=3)
    assert workload.about["live_tokens"] == pytest.approx(131_040, rel=0.03)
    assert workload.about["distinct_tokens"] == pytest.approx(96_540, rel=0.03)
    hits = unbounded_hits(
        reusable_prefixes([t.token_ids for t in workload.turns], [t.num_prompt_tokens for t in workload.turns])
    )
    assert hits[:24] == [0] + [1500] * 23
    assert hits[24:] == [len(turn.token_ids) for turn in workload.turns[:-24]]
    for turn in random.Random(0).sample(workload.turns, 10):
        assert len(turn.block_hashes) == len(turn.token_ids) // BLOCK_SIZE
        assert turn.boundaries == tuple(sorted(turn.boundaries))
        assert turn.boundaries[-1] < turn.num_prompt_tokens


def test_shapes_cost_what_their_layers_do():
    assert SHAPES["dense-8B"].costs() == Costs(144 * 1024, 0, 0, 0)
    assert SHAPES["gemma-like"].costs() == Costs(80 * 1024, 400 * 1024, 1024, 0)
    assert SHAPES["qwen3-next-like"].costs().state_bytes == 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
