"""How decode work is cut: every token that a row sees in exactly one work item, and launches within their limits."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.metal.decode_plan import Cut, plan_decode, seen_ranges
from worker.metal.paged_decode import choose_launch, cut_for, lane_elements

_DIMS = (32, 64, 80, 96, 112, 128, 192, 256, 512)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=9), st.integers(0, 300), st.integers(0, 300))
def test_ranges_are_those_of_the_masks(lens, window, chunk):
    for (begin, end), length in zip(seen_ranges(lens, window=window, chunk=chunk), lens, strict=True):
        position = length - 1
        seen = [
            at
            for at in range(max(0, length - 700), length)
            if (not window or at > position - window) and (not chunk or at // chunk == position // chunk)
        ]
        assert end == length
        assert begin == (min(seen) if window or chunk else 0)


@given(
    st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 9000)), min_size=1, max_size=12),
    st.sampled_from([1, 8, 64]),
    st.sampled_from([1, 2, 3]),
)
def test_every_seen_token_is_in_one_item(pairs, num_kv_heads, rows):
    ranges = np.array([[min(pair), max(pair)] for pair in pairs[: len(pairs) // rows * rows]], np.int32)
    if not len(ranges):
        return
    plan = plan_decode(np.zeros((len(ranges) // rows, 600), np.int32), ranges, num_kv_heads, rows_per_sequence=rows)
    size, starts = plan.partition_tokens, np.array(plan.item_starts)
    assert size % 32 == 0
    items = np.array(plan.items)[: plan.num_items].tolist()
    assert len(items) == len({tuple(item) for item in items})
    for sequence in range(plan.num_sequences):
        own = [number for owner, number in items[starts[sequence] : starts[sequence + 1]] if owner == sequence]
        assert len(own) == starts[sequence + 1] - starts[sequence]
        assert own == sorted(own)
        begin, end = ranges[sequence * rows : (sequence + 1) * rows].T
        begin, end = begin.min(), end.max()
        assert [number * size <= end and (number + 1) * size > begin for number in own] == [True] * len(own)
        if begin < end:
            assert own[0] * size <= begin
            assert (own[-1] + 1) * size >= end


def test_more_work_makes_longer_partitions_up_to_a_limit():
    sizes = []
    for rows, length in ((1, 64), (1, 32768), (4, 32768), (64, 131072)):
        table, ranges = np.zeros((rows, 1), np.int32), seen_ranges([length] * rows)
        plan = plan_decode(table, ranges, 8)
        sizes.append(plan.partition_tokens)
        assert plan.num_items == rows * math.ceil(length / plan.partition_tokens)
    assert sizes == [32, 256, 1024, 1024]


def test_items_that_take_several_simdgroups_are_longer():
    table, ranges = np.zeros((1, 1), np.int32), seen_ranges([32768])
    sizes = [plan_decode(table, ranges, 1, cut=Cut(simdgroups)).partition_tokens for simdgroups in (1, 8, 64, 5000)]
    assert sizes == [32, 256, 1024, 1024]


def test_partial_results_are_half_of_what_is_read_at_most():
    shapes = {
        (8, 128, 512): Cut(1, 32),  # half precision
        (8, 256, 1024): Cut(2, 32),
        (8, 256, 288): Cut(2, 114),  # 4 bits
        (16, 512, 1152): Cut(8, 114),  # latent
        (128, 512, 1152): Cut(64, 114),  # latents are read 8 times
        (1, 80, 640): Cut(1, 2),
    }
    assert {shape: cut_for(*shape) for shape in shapes} == shapes
    table, ranges = np.zeros((1, 1), np.int32), seen_ranges([100])
    assert plan_decode(table, ranges, 1, cut=Cut(1, 114)).partition_tokens == 128
    assert plan_decode(table, ranges, 1, cut=Cut(1, 2)).partition_tokens == 32


def test_arrays_are_never_so_small_that_a_kernel_must_be_compiled_anew():
    plan = plan_decode(np.zeros((1, 1), np.int32), seen_ranges([1]), 1)
    for array in (plan.block_tables, plan.ranges, plan.items, plan.item_starts):
        assert array.size >= 8


@pytest.mark.parametrize(("tables", "rows"), [(1, 3), (3, 1), (2, 3), (0, 1)])
def test_ranges_that_do_not_fit_the_tables_are_refused(tables, rows):
    with pytest.raises(ValueError, match="block tables"):
        plan_decode(np.zeros((tables, 4), np.int32), seen_ranges([5] * (2 if tables else 0)), 1, rows_per_sequence=rows)


@pytest.mark.parametrize("head_dim", _DIMS)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_launches_serve_all_heads_within_registers_threads_and_memory(head_dim, itemsize):
    per_load, held = lane_elements(head_dim)
    assert held % per_load == 0
    assert head_dim <= held * 32 < head_dim + per_load * 32
    for heads in range(1, 80):
        launch = choose_launch(heads, head_dim, head_dim, itemsize, is_latent=False)
        assert launch.num_heads <= 8
        assert launch.num_heads * held <= 32
        assert launch.num_simdgroups <= 8
        if launch.staged_tokens:
            assert launch.num_heads * launch.num_simdgroups * launch.num_splits >= heads
            assert launch.staged_tokens in (4, 8, 16)
            assert launch.staged_tokens * 2 * head_dim * itemsize <= 16 * 1024
        else:
            assert (launch.num_heads, launch.num_splits) == (heads, 1)
        # What the kernels promise: K and V are read once, unless there are more heads than a threadgroup holds.
        assert launch.num_splits == math.ceil(heads / (8 * min(8, 32 // held)))
