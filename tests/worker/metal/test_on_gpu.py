"""Every kernel against its twin on a real GPU; nothing here needs the harness."""

import mlx.core as mx
import pytest

from worker.metal.decode_checks import LatentNeeds
from worker.metal.self_test import AttentionNeeds, RopeNeeds, run
from worker.metal.self_test_cases import FAMILIES

pytestmark = [
    pytest.mark.metal,
    pytest.mark.skipif(not mx.metal.is_available(), reason="needs an Apple GPU"),
]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256, 512])
def test_kernels_agree_with_their_twins(head_dim, dtype):
    assert run(FAMILIES, [AttentionNeeds(8, 2, head_dim, dtype)], mx.fast.metal_kernel).failures == {}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("value_dim", [64, 128])
def test_heads_of_uneven_widths_agree_with_their_twins(value_dim, dtype):
    need = AttentionNeeds(8, 2, 192, dtype, window=40, has_sinks=True, value_dim=value_dim)
    assert run(FAMILIES, [need], mx.fast.metal_kernel).failures == {}


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_latents_and_rotary_embeddings_agree_with_their_twins(dtype):
    needs = [LatentNeeds(16, 512, 64, dtype), LatentNeeds(128, 512, 64, dtype, 32)]
    needs += [
        RopeNeeds(8, 2, 128, dtype, dims, is_traditional=is_traditional, has_freqs=has_freqs)
        for dims in (128, 64)
        for is_traditional in (False, True)
        for has_freqs in (False, True)
    ]
    assert run(FAMILIES, needs, mx.fast.metal_kernel).failures == {}


@pytest.mark.parametrize(
    "options", [{"window": 40}, {"chunk": 24}, {"softcap": 2.0}, {"has_sinks": True}, {"bits": 4}, {"bits": 8}], ids=str
)
@pytest.mark.parametrize("head_dim", [128, 256])
def test_variants_agree_with_their_twins(head_dim, options):
    need = AttentionNeeds(14, 2, head_dim, mx.bfloat16, 32, **options)
    assert run(FAMILIES, [need], mx.fast.metal_kernel).failures == {}
