"""The case lists have what they say they have: each head size in each type, and with each block size."""

from itertools import product

import mlx.core as mx
import pytest

from tests.worker.metal.decode_cases import CASES, HEAD_DIMS
from tests.worker.metal.test_paged_prefill import CASES as PREFILL_CASES
from tests.worker.metal.test_rope import CASES as ROPE_CASES
from tests.worker.metal.test_write_kernels import WRITES

_TYPES = (mx.float32, mx.float16, mx.bfloat16)
_BLOCK_SIZES = (16, 32)
# (type, head size, block size) of plain pools.
_LISTED = {
    "decode": {(case.dtype, case.head_dim, case.block_size) for case in CASES if not case.bits},
    "prefill": {(case.dtype, case.head_dim, case.block_size) for case in PREFILL_CASES},
    "write_kv": {(dtype, head_dim, block_size) for dtype, _, head_dim, _, block_size in WRITES},
}


@pytest.mark.parametrize("kernel", _LISTED)
def test_each_head_size_comes_in_each_type_and_block_size(kernel):
    listed = _LISTED[kernel]
    assert {(dtype, head_dim) for dtype, head_dim, _ in listed} >= set(product(_TYPES, HEAD_DIMS))
    assert {(head_dim, size) for _, head_dim, size in listed} >= set(product(HEAD_DIMS, _BLOCK_SIZES))
    assert {(dtype, size) for dtype, _, size in listed} >= set(product(_TYPES, _BLOCK_SIZES))


def test_rope_turns_each_head_size_in_each_type():
    assert {(dtype, head_dim) for dtype, head_dim, *_ in ROPE_CASES} >= set(product(_TYPES, HEAD_DIMS))


def test_options_of_attention_come_in_each_type():
    """Windows, chunks, sinks and soft caps, in decode and prefill."""
    for dtype in _TYPES:
        decode = [case for case in CASES if case.dtype == dtype]
        prefill = [case for case in PREFILL_CASES if case.dtype == dtype]
        for name in ("window", "chunk", "softcap"):
            assert any(getattr(case, name) for case in decode), (dtype, name)
            assert any(name in case.options for case in prefill), (dtype, name)
        assert any(case.has_sinks for case in decode)
        assert any(case.has_sinks for case in prefill)
