"""Speculative verify: rows of one sequence that share loads of K and V equal rows on their own, bit for bit."""

import mlx.core as mx
import numpy as np
import pytest

from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from tests.worker.metal.decode_cases import VERIFY_CASES
from tests.worker.metal.decode_data import TOLERANCE, attend, bits_of, error_of, make
from worker import switches
from worker.metal import decode_twins
from worker.metal.decode_plan import may_share_loads, plan_verify, seen_ranges
from worker.metal.dispatch import assemble
from worker.metal.paged_decode import PagedDecode
from worker.metal.self_test import AttentionNeeds
from worker.metal.self_test_cases import FAMILIES

_NEEDS = [AttentionNeeds(4, 2, 64, mx.float32)]
_ALL = {family.name for family in FAMILIES}


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    require_toolchain()
    host = MslHost()
    with host.compiling_ahead():
        for case in VERIFY_CASES:
            for shares_loads in (False, True):
                attend(PagedDecode(host), make(case), shares_loads)


@pytest.mark.parametrize("case", VERIFY_CASES, ids=str)
def test_rows_that_share_loads_equal_rows_on_their_own_bit_for_bit(case):
    data = make(case)
    apart, together = MslHost(), MslHost(seeds=(0, 20261))
    expanded = attend(PagedDecode(apart), data)
    assert error_of(expanded, data) < TOLERANCE[case.dtype]
    assert np.array_equal(bits_of(expanded), bits_of(attend(PagedDecode(together), data, shares_loads=True)))
    assert together.records[0].threadgroup_memory <= 16 * 1024
    key = "key_packed" if case.bits else "key_pool"
    read = [host.records[0].buffers[key].bytes_read for host in (together, apart)]
    assert read[0] < read[1] * 0.75


@pytest.mark.parametrize("case", VERIFY_CASES, ids=str)
def test_twin_takes_both_layouts(case):
    data = make(case)
    for shares_loads in (False, True):
        assert error_of(attend(decode_twins, data, shares_loads), data) < TOLERANCE[case.dtype]


def test_rows_of_a_sequence_may_see_unlike_tokens_or_none():
    data = make(VERIFY_CASES[0])
    data.ranges[:] = [[20, 64], [0, 0], [0, 1], [3, 9], [0, 0], [100, 120], [0, 133], [64, 96]]
    expanded = attend(PagedDecode(MslHost()), data)
    together = attend(PagedDecode(MslHost()), data, shares_loads=True)
    assert np.array_equal(bits_of(expanded), bits_of(together))
    twin = attend(decode_twins, data, shares_loads=True)
    assert mx.abs(together - twin).max().item() < TOLERANCE[mx.float16]
    assert not np.array(together)[[1, 4]].any()
    assert np.array(together)[[0, 2, 3, 5, 6, 7]].any(axis=(1, 2, 3)).all()


def test_both_layouts_are_cut_alike():
    ranges = seen_ranges([700, 701, 702, 90, 91, 92], window=200)
    table = np.zeros((2, 44), np.int32)
    apart, together = (
        plan_verify(table, ranges, 4, rows_per_sequence=3, shares_loads=shares_loads) for shares_loads in (False, True)
    )
    assert apart.partition_tokens == together.partition_tokens
    assert (apart.num_sequences, together.num_sequences) == (6, 2)
    assert together.num_items < apart.num_items


@pytest.mark.parametrize(("value", "expected"), [(None, False), ("0", False), ("1", True)])
def test_the_switch(monkeypatch, value, expected):
    monkeypatch.delenv("CIDERY_SPEC_VERIFY_WINDOW", raising=False)
    if value is not None:
        monkeypatch.setenv("CIDERY_SPEC_VERIFY_WINDOW", value)
    assert switches.is_on(switches.SPEC_VERIFY_WINDOW) is expected
    assert assemble(MslHost(), _NEEDS, _ALL).shares_verify_loads is expected


@pytest.mark.parametrize("broken", ["verify_window", "paged_decode"])
def test_loads_are_not_shared_where_a_kernel_failed(monkeypatch, broken):
    monkeypatch.setenv("CIDERY_SPEC_VERIFY_WINDOW", "1")
    assert not assemble(MslHost(), _NEEDS, _ALL - {broken}).shares_verify_loads


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, True),
        ({"head_dim": 256}, True),
        ({"head_dim": 512}, False),
        ({"is_latent": True}, False),
        ({"has_recurrent_layers": True}, False),
    ],
)
def test_what_never_shares(arguments, expected):
    assert may_share_loads(**({"head_dim": 128} | arguments)) is expected


def test_another_value_of_the_switch_is_refused(monkeypatch):
    monkeypatch.setenv("CIDERY_SPEC_VERIFY_WINDOW", "yes")
    with pytest.raises(ValueError, match="'yes'"):
        assemble(MslHost(), _NEEDS, _ALL)
