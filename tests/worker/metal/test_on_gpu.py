"""Every kernel against its twin on a real GPU; nothing here needs the harness."""

import mlx.core as mx
import pytest

from worker.metal.self_test import AttentionNeeds, run
from worker.metal.self_test_cases import FAMILIES

pytestmark = [
    pytest.mark.metal,
    pytest.mark.skipif(not mx.metal.is_available(), reason="needs an Apple GPU"),
]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256, 512])
def test_kernels_agree_with_their_twins(head_dim, dtype):
    assert run(FAMILIES, [AttentionNeeds(8, 2, head_dim, dtype)], mx.fast.metal_kernel).failures == {}


@pytest.mark.parametrize(
    "options", [{"window": 40}, {"chunk": 24}, {"softcap": 2.0}, {"has_sinks": True}, {"bits": 4}, {"bits": 8}], ids=str
)
def test_variants_agree_with_their_twins(options):
    need = AttentionNeeds(14, 2, 128, mx.bfloat16, 32, **options)
    assert run(FAMILIES, [need], mx.fast.metal_kernel).failures == {}
