"""Decode attention, kernels and twins: every variant against float64, under two schedules of the harness."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.msl_host.arrays import SparsePool
from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from tests.worker.metal import decode_data
from tests.worker.metal.decode_cases import CASES
from tests.worker.metal.decode_data import TOLERANCE, Case, attend, bits_of, error_of, make, reference
from worker.metal import decode_twins
from worker.metal.decode_plan import plan_decode, seen_ranges
from worker.metal.paged_decode import PagedDecode
from worker.metal.quantized import zero_pool

_SEEDS = (0, 20261)
F32, F16 = mx.float32, mx.float16


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    require_toolchain()
    host = MslHost()
    with host.compiling_ahead():
        for case in CASES:
            attend(PagedDecode(host), make(case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_row_attends_to_exactly_what_it_sees(case):
    data = make(case)
    host = MslHost(seeds=_SEEDS)
    assert error_of(attend(PagedDecode(host), data), data, rounds_elements=True) < TOLERANCE[case.dtype]
    assert max(record.threadgroup_memory for record in host.records) <= 16 * 1024
    assert max(np.prod(record.threadgroup) for record in host.records) <= 256


@pytest.mark.parametrize("case", CASES, ids=str)
def test_twin_attends_to_exactly_what_a_row_sees(case):
    data = make(case)
    assert error_of(attend(decode_twins, data), data) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", [case for case in CASES if case.bits], ids=str)
def test_rounded_elements_cost_no_more_than_the_type_where_scores_are_those_of_models(monkeypatch, case):
    """Whose scores have a deviation of 1. Those of `SCALE` have 7 over latents of 576, and weights follow them."""
    monkeypatch.setattr(decode_data, "SCALE", case.head_dim**-0.5)
    data = make(case)
    assert error_of(attend(PagedDecode(MslHost()), data), data) < TOLERANCE[case.dtype]


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=4),
    st.integers(0, 160),
    st.integers(0, 160),
    st.sampled_from([(4, 64), (6, 192)]),
    st.integers(0, 1000),
)
def test_any_lengths_windows_and_chunks(lens, window, chunk, shape, seed):
    """On kernels that are compiled already; shape 192 is a staged one."""
    shared, head_dim = shape
    case = Case("any", tuple(lens), 1, shared, head_dim, window=window, chunk=chunk, dtype=F32)
    data = make(case, seed)
    for decode in (PagedDecode(MslHost(seeds=(seed,))), decode_twins):
        assert error_of(attend(decode, data), data) < TOLERANCE[F32]


def test_a_row_has_the_same_bits_beside_any_other():
    """As long as partitions are as long: here they are."""
    case = Case("beside", (130, 20, 1), 2, 4, 64)
    data = make(case)
    together = attend(PagedDecode(MslHost()), data)
    for row in range(3):
        plan = plan_decode(data.table[row : row + 1], data.ranges[row : row + 1], 2)
        decode = PagedDecode(MslHost())
        alone = decode.attend(data.queries[row : row + 1], data.keys, data.values, plan, 2, 0.3)
        assert np.array_equal(bits_of(alone), bits_of(together[row : row + 1]))


@pytest.mark.parametrize(("shared", "has_sinks"), [(8, False), (8, True), (16, False)])
def test_scores_may_be_far_below_zero(shared, has_sinks):
    """Only their differences count: every score is near -1200 here, and in several partitions."""
    data = make(Case("low", (150, 9, 1), 1, shared, 64, has_sinks=has_sinks))
    queries, keys = np.array(data.queries), np.array(data.keys)
    queries[..., 0], keys[..., 0] = -40, 100
    data.held[0][..., 0] = 100
    data = replace(data, queries=mx.array(queries), keys=mx.array(keys))
    if has_sinks:
        data = replace(data, sinks=data.sinks - 1200)
    assert error_of(attend(PagedDecode(MslHost()), data), data) < TOLERANCE[F16]


def test_the_highest_score_may_be_behind_partitions_for_all_lanes():
    """The first 1056 tokens, 33 partitions, have scores near -1200, the others near 0."""
    data = make(Case("late", (1100,), 1, 2, 128))
    assert data.plan().partition_tokens == 32
    queries, keys = np.array(data.queries), np.array(data.keys)
    blocks = data.table[0, : 1056 // data.case.block_size]
    queries[..., 0], keys[blocks, ..., 0] = -40, 100
    data.held[0][blocks, ..., 0] = 100
    data = replace(data, queries=mx.array(queries), keys=mx.array(keys))
    assert error_of(attend(PagedDecode(MslHost()), data), data) < TOLERANCE[F16]


def test_a_row_that_sees_nothing_gives_zeros():
    data = make(Case("nothing", (20, 20), 1, 2, 64, dtype=F32))
    ranges = np.array([[0, 20], [0, 0]], np.int32)
    for decode in (PagedDecode(MslHost()), decode_twins):
        plan = plan_decode(data.table, ranges, 1)
        out = np.array(decode.attend(data.queries, data.keys, data.values, plan, 1, 0.3))
        assert np.abs(out[:1] - reference(data)[:1]).max() < 4e-6
        assert not out[1].any()
    plan = plan_decode(data.table, np.zeros((2, 2), np.int32), 1)
    assert not np.array(PagedDecode(MslHost()).attend(data.queries, data.keys, data.values, plan, 1, 0.3)).any()


class _FarPools:
    """The harness with the pools moved to far block ids: `shift` blocks on, in arrays of more than 2^31 elements."""

    def __init__(self, host, shift):
        self._host, self._shift = host, shift

    def __call__(self, **kernel):
        launch, names = self._host(**kernel), kernel["input_names"]

        def call(*, inputs, **rest):
            return launch(inputs=[self._far(*pair) for pair in zip(names, inputs, strict=True)], **rest)

        return call

    def _far(self, name, value):
        if not name.startswith(("key_", "value_")):
            return value
        rows = {self._shift + block: value[block] for block in range(value.shape[0])}
        return SparsePool((self._shift + value.shape[0] + 1, *value.shape[1:]), value.dtype, rows)


@pytest.mark.parametrize("bits", [0, 8])
@pytest.mark.parametrize("shared", [2, 8])
def test_offsets_of_large_pools(shared, bits):
    case = Case("far", (40,), 2, shared, 256, bits=bits, group=64)
    data = make(case)
    shift = 2**31 // (2 * 16 * 256) * 5
    data.table[data.table < 1 << 30] += shift
    ours = attend(PagedDecode(_FarPools(MslHost(), shift)), data)
    data.table[data.table < 1 << 30] -= shift
    assert error_of(ours, data) < TOLERANCE[F16]


def test_called_with_a_group_it_plans_once_for_alike_layers(monkeypatch):
    from worker.batch import DecodeGroup
    from worker.metal import paged_decode

    planned = []
    monkeypatch.setattr(paged_decode, "plan_decode", lambda *a, **k: planned.append(1) or plan_decode(*a, **k))
    case = Case("group", (40, 20), 2, 2, 64, window=16, dtype=F32)
    data = make(case)
    decode = PagedDecode(MslHost())
    lens = np.array(data.lens, np.int32)
    group = DecodeGroup(0, 2, data.table, lens, 16, num_hidden=lens - 16)
    for _ in range(2):
        ours = decode(data.queries, data.keys, data.values, group, 2, 0.3)
        assert error_of(ours, data) < TOLERANCE[F32]
    other = DecodeGroup(0, 2, data.table, lens, 16, num_hidden=np.maximum(lens - 20, 0))
    full = decode(data.queries, data.keys, data.values, other, 2, 0.3)
    assert len(planned) == 2
    twin = decode_twins.paged_decode(data.queries, data.keys, data.values, group, 2, 0.3)
    assert error_of(twin, data) < TOLERANCE[F32]
    assert full.shape == data.queries.shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"queries": (2, 4, 1, 32)}, "of 32 do not fit keys"),
        ({"queries": (1, 4, 1, 64)}, "a multiple of 2"),
        ({"queries": (2, 3, 1, 64)}, "a multiple of 2"),
        ({"values": (4, 2, 32, 64)}, "more than the last axis"),
        ({"keys": (4, 1, 16, 64), "values": (4, 1, 16, 64)}, "1 KV heads, not 2"),
        ({"keys": (4, 2, 8, 64), "values": (4, 2, 8, 64)}, "blocks of 8 tokens"),
        ({"values": (4, 2, 16, 66)}, "multiples of 4"),
        ({"sinks": (3,)}, "sinks"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    shapes = {"queries": (2, 4, 1, 64), "keys": (4, 2, 16, 64), "values": (4, 2, 16, 64), "sinks": (4,)} | change
    arrays = {name: mx.zeros(shape) for name, shape in shapes.items()}
    plan = plan_decode(np.zeros((2, 1), np.int32), seen_ranges([3, 4]), 2)
    with pytest.raises(ValueError, match=message):
        PagedDecode(MslHost()).attend(
            arrays["queries"], arrays["keys"], arrays["values"], plan, 2, 0.3, sinks=arrays["sinks"]
        )


def test_other_formats_are_refused():
    plan = plan_decode(np.zeros((1, 1), np.int32), seen_ranges([3]), 2)
    zeros, queries = mx.zeros((4, 2, 16, 64)), mx.zeros((1, 4, 1, 64))
    packed = [zero_pool(zeros.shape, F32, bits, 32) for bits in (4, 8)]
    decode = PagedDecode(MslHost())
    for keys, values in (packed, (zeros, packed[0])):
        with pytest.raises(ValueError, match="more than the last axis"):
            decode.attend(queries, keys, values, plan, 2, 0.3)
    with pytest.raises(ValueError, match="float16"):
        decode.attend(queries.astype(F16), zeros, zeros, plan, 2, 0.3)
