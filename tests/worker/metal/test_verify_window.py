"""Speculative verify: rows of one sequence that share loads of K and V equal rows on their own, bit for bit."""

import mlx.core as mx
import numpy as np
import pytest

from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from tests.worker.metal.decode_data import TOLERANCE, Case, attend, bits_of, error_of, make
from worker.metal import decode_twins
from worker.metal.decode_plan import plan_verify, seen_ranges, verify_shares_loads
from worker.metal.paged_decode import PagedDecode

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
_CASES = [
    Case("verify", (61, 130), 2, 4, 64, rows=4, dtype=F16),
    Case("verify, staged", (30,), 1, 8, 128, rows=5, dtype=BF16),
    Case("verify, window across partitions", (127, 64, 66), 1, 2, 128, rows=3, window=64, block_size=32, dtype=F32),
    Case("verify, sinks, chunk", (62,), 1, 8, 64, rows=3, chunk=64, has_sinks=True, softcap=2.0, dtype=F16),
    Case("verify, 8 bits", (60,), 1, 4, 128, rows=2, bits=8, group=64, dtype=F16),
    Case("verify, more rows than a threadgroup", (20,), 1, 12, 256, rows=6, dtype=F16),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    require_toolchain()
    host = MslHost()
    with host.compiling_ahead():
        for case in _CASES:
            for shares_loads in (False, True):
                attend(PagedDecode(host), make(case), shares_loads)


@pytest.mark.parametrize("case", _CASES, ids=str)
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


@pytest.mark.parametrize("case", _CASES, ids=str)
def test_twin_takes_both_layouts(case):
    data = make(case)
    for shares_loads in (False, True):
        assert error_of(attend(decode_twins, data, shares_loads), data) < TOLERANCE[case.dtype]


def test_both_layouts_are_cut_alike():
    ranges = seen_ranges([700, 701, 702, 90, 91, 92], window=200)
    table = np.zeros((2, 44), np.int32)
    apart, together = (
        plan_verify(table, ranges, 4, rows_per_sequence=3, shares_loads=shares_loads) for shares_loads in (False, True)
    )
    assert apart.partition_tokens == together.partition_tokens
    assert (apart.num_sequences, together.num_sequences) == (6, 2)
    assert together.num_items < apart.num_items


@pytest.mark.parametrize(
    ("value", "arguments", "expected"),
    [
        (None, {}, False),
        ("0", {}, False),
        ("1", {}, True),
        ("1", {"head_dim": 256}, True),
        ("1", {"head_dim": 512}, False),
        ("1", {"is_latent": True}, False),
        ("1", {"has_recurrent_layers": True}, False),
    ],
)
def test_the_switch_and_what_never_shares(monkeypatch, value, arguments, expected):
    monkeypatch.delenv("CIDERY_SPEC_VERIFY_WINDOW", raising=False)
    if value is not None:
        monkeypatch.setenv("CIDERY_SPEC_VERIFY_WINDOW", value)
    assert verify_shares_loads(**({"head_dim": 128} | arguments)) is expected


def test_another_value_of_the_switch_is_refused(monkeypatch):
    monkeypatch.setenv("CIDERY_SPEC_VERIFY_WINDOW", "yes")
    with pytest.raises(ValueError, match="'yes'"):
        verify_shares_loads(128)
