"""The rule of each kind, beside the plainest statement of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.kv.group_managers import locals_by_rule, make_manager
from cluster.kv.layout import KVGroup
from cluster.kv.spec import ChunkedLocalSpec, FullAttentionSpec, RecurrentStateSpec, SlidingWindowSpec, StateTensor

SIZE = 4
SPECS = {
    "full": FullAttentionSpec(1, 8),
    "window": SlidingWindowSpec(1, 8, window=10),
    "window of one": SlidingWindowSpec(1, 8, window=1),
    "window and sinks": SlidingWindowSpec(1, 8, window=9, num_sink_tokens=5),
    "chunk": ChunkedLocalSpec(1, 8, chunk=12),
    "state": RecurrentStateSpec("mamba2", (StateTensor((2, 2), 4),)),
}


def manager_of(spec, group_id=0):
    return make_manager(KVGroup(group_id, 0, spec, (0,), 64), SIZE)


def needed_blocks(spec, num_blocks):
    """Indices that must be there for the token after so many blocks."""
    position = num_blocks * SIZE
    if isinstance(spec, RecurrentStateSpec):
        return {num_blocks - 1}
    if isinstance(spec, SlidingWindowSpec):
        seen = {*range(max(0, position - spec.window + 1), position), *range(min(position, spec.num_sink_tokens))}
    elif isinstance(spec, ChunkedLocalSpec):
        seen = set(range(position // spec.chunk * spec.chunk, position))
    else:
        seen = set(range(position))
    return {token // SIZE for token in seen}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@given(data=st.data())
def test_the_longest_hit_is_the_longest_prefix_whose_needed_blocks_are_there(spec, data):
    present = data.draw(st.binary(max_size=24).map(lambda raw: bytes(byte & 1 for byte in raw)))
    if isinstance(spec, FullAttentionSpec):
        # Eviction goes tail first there: what the tree matches is all there.
        present = bytes([1]) * len(present)
    limit = data.draw(st.integers(0, len(present)))
    fits = [n for n in range(1, limit + 1) if all(present[i] for i in needed_blocks(spec, n))]
    assert manager_of(spec).longest_hit(present, limit) == max(fits, default=0)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_first_needed_block_never_falls(spec):
    manager = manager_of(spec)
    firsts = [manager.first_needed(num_blocks * SIZE) for num_blocks in range(20)]
    assert firsts == sorted(firsts)
    for num_blocks in range(1, 20):
        beyond_sinks = [i for i in needed_blocks(spec, num_blocks) if i >= manager.num_sink_blocks]
        assert all(i >= firsts[num_blocks] for i in beyond_sinks)


def test_windows_and_chunks_of_one_reach_are_looked_at_together():
    specs = [SPECS["window"], SPECS["full"], SPECS["chunk"], SPECS["window"], SPECS["state"], SPECS["window and sinks"]]
    found = locals_by_rule([manager_of(spec, i) for i, spec in enumerate(specs)])
    assert [[manager.group_id for manager in same] for same in found] == [[0, 3], [2], [5]]
