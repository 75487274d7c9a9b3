"""Decode attention on the machine's own GPU, without the harness."""

import mlx.core as mx
import numpy as np
import pytest

from tests.worker.metal.decode_cases import CASES, VERIFY_CASES
from tests.worker.metal.decode_data import TOLERANCE, attend, bits_of, error_of, make
from worker.metal.paged_decode import PagedDecode

pytestmark = [
    pytest.mark.metal,
    pytest.mark.skipif(not mx.metal.is_available(), reason="needs an Apple GPU"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_row_attends_to_exactly_what_it_sees(case):
    data = make(case)
    ours = attend(PagedDecode(mx.fast.metal_kernel), data)
    assert error_of(ours, data, rounds_elements=True) < 2 * TOLERANCE[case.dtype]


@pytest.mark.parametrize("case", VERIFY_CASES, ids=str)
def test_rows_that_share_loads_equal_rows_on_their_own_bit_for_bit(case):
    data, decode = make(case), PagedDecode(mx.fast.metal_kernel)
    expanded = attend(decode, data)
    assert error_of(expanded, data) < 2 * TOLERANCE[case.dtype]
    assert np.array_equal(bits_of(expanded), bits_of(attend(decode, data, shares_loads=True)))
