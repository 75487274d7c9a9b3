"""A shared prefix read once gives what reading it for every row gives."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.batch import Batch, Span
from worker.cascade import cascade_attention
from worker.group_rows import Seen
from worker.metal import twins
from worker.shared_prefix import find_shared_prefix

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 8, 16
NUM_BLOCKS = 400
SCALE = DIM**-0.5


def spans_of(rng: np.random.Generator, num_shared: int, num_sharers: int, num_others: int) -> list[Span]:
    """Sharers of `num_shared` blocks and others, decodes and prefills mixed, with blocks from all over the pool."""
    free = list(rng.permutation(np.arange(1, NUM_BLOCKS)))
    shared = [int(free.pop()) for _ in range(num_shared)]
    spans = []
    for index in range(num_sharers + num_others):
        head = list(shared) if index < num_sharers else [int(free.pop()) for _ in range(int(rng.integers(1, 6)))]
        start = len(head) * SIZE + int(rng.integers(0, 40))
        length = 1 if rng.random() < 0.6 else int(rng.integers(2, 30))
        table = head + [int(free.pop()) for _ in range(-(-(start + length) // SIZE) - len(head))]
        spans.append(Span([0] * length, start, table, True))
    return [spans[i] for i in rng.permutation(len(spans))]


def brute_force(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, batch: Batch) -> np.ndarray:
    """Each row over its own context in float64. Pools `[blocks, kv_heads, size, dim]`."""
    outputs, row = np.zeros(queries.shape), 0
    for span in batch.spans:
        for position in range(span.start, span.end):
            for head in range(HEADS):
                kv_head = head // (HEADS // KV_HEADS)
                slots = [(span.block_table[at // SIZE], kv_head, at % SIZE) for at in range(position + 1)]
                own_keys, own_values = (np.array([pool[slot] for slot in slots]) for pool in (keys, values))
                scores = own_keys @ queries[row, head, 0] * SCALE
                weights = np.exp(scores - scores.max())
                outputs[row, head, 0] = weights @ own_values / weights.sum()
            row += 1
    return outputs


@pytest.mark.parametrize(("num_shared", "num_sharers", "num_others"), [(64, 3, 0), (43, 4, 3), (130, 2, 1), (26, 6, 4)])
@pytest.mark.parametrize("seed", [0, 1])
def test_merged_halves_equal_the_whole(num_shared, num_sharers, num_others, seed):
    rng = np.random.default_rng(seed)
    batch = Batch(spans_of(rng, num_shared, num_sharers, num_others), block_size=SIZE)
    assert batch.shared is not None
    assert len(batch.shared.members) == num_sharers
    keys, values = (rng.normal(size=(NUM_BLOCKS, KV_HEADS, SIZE, DIM)) for _ in range(2))
    queries = rng.normal(size=(batch.num_tokens, HEADS, 1, DIM)) * 3
    pools = [mx.array(pool.reshape(-1, SIZE, DIM).astype(np.float32)) for pool in (keys, values)]

    def see(group):
        return Seen(tuple(twins.gather(pool, group.gather_index(KV_HEADS)) for pool in pools), group.mask)

    output = cascade_attention(mx.array(queries.astype(np.float32)), *pools, batch.rows, KV_HEADS, SCALE, see)
    np.testing.assert_allclose(np.array(output), brute_force(queries, keys, values, batch), atol=2e-5)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 80), st.integers(0, 6), st.integers(0, 4))
def test_what_is_shared_is_shared_by_all_members_and_seen_by_all_their_rows(seed, num_shared, num_sharers, num_others):
    rng = np.random.default_rng(seed)
    spans = spans_of(rng, num_shared, num_sharers, num_others)
    shared = find_shared_prefix([span.start for span in spans], [span.block_table for span in spans], SIZE)
    if shared is None:
        assert (num_sharers - 1) * num_shared * SIZE < 2_048
        return
    for index in shared.members:
        assert tuple(spans[index].block_table[: shared.num_blocks]) == shared.block_table
        assert spans[index].start >= shared.num_blocks * SIZE
    assert len(shared.members) >= 2


def test_a_prompt_still_being_computed_shares_only_what_is_behind_it():
    """Two identical prompts in lockstep: the shared part ends where the earlier one's rows begin."""
    table = list(range(1, 301))
    shared = find_shared_prefix([4_000, 2_500], [table, table], SIZE)
    assert shared is not None
    assert shared.num_blocks == 2_500 // SIZE


def test_a_batch_for_ragged_kernels_looks_for_nothing():
    spans = spans_of(np.random.default_rng(0), 64, 4, 0)
    assert Batch(spans, block_size=SIZE, decodes_together=True).shared is None
