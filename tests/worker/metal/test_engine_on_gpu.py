"""The whole engine on the machine's own GPU, a tiny model of each kind of layer: the tokens of plain MLX there."""

import mlx.core as mx
import numpy as np
import pytest

from tests.worker.metal.engine_kinds import KINDS, answers, load
from worker import kernel_needs
from worker.metal.dispatch import choose_kernels, twin_kernels

pytestmark = [
    pytest.mark.metal,
    pytest.mark.skipif(not mx.metal.is_available(), reason="needs an Apple GPU"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_engine_with_kernels_gives_the_tokens_of_plain_mlx(kind):
    loaded = load(kind)
    tokens, logprobs = answers(loaded, twin_kernels())
    kernels = choose_kernels(kernel_needs.needs_of(loaded, 16), mx.fast.metal_kernel)
    assert kernels.failed == ()
    assert kernels.name != "mlx"
    our_tokens, our_logprobs = answers(loaded, kernels)
    assert our_tokens == tokens
    # MLX's own kernels take fast exponentials and sines.
    assert np.abs(our_logprobs - logprobs).max() < 5e-3
