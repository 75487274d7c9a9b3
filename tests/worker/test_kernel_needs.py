"""What models ask of kernels, found by running them: every kind of layer, and what stays with mlx-lm."""

import mlx.core as mx
import pytest

from tests.golden.cases import CASES, REPRESENTATIVES, config_of, make_model
from worker import kv_quantization, models
from worker.kernel_needs import needs_of
from worker.metal.decode_checks import LatentNeeds
from worker.metal.self_test import AttentionNeeds, RopeNeeds
from worker.metal.state_self_test import GatedDeltaShape, Mamba2Shape, ShortConvShape
from worker.models import Layout

_F32 = mx.float32


pytestmark = pytest.mark.usefixtures("no_compile")


def _loaded(case, bits=None, **changes):
    config = config_of(case) | changes
    return kv_quantization.quantise(models.adapt(make_model(case, config=config), config), bits)


def _attention(**options):
    return AttentionNeeds(4, 2, 8, _F32, **options)


def _rope(dims=8, has_freqs=False):
    return RopeNeeds(4, 2, 8, _F32, dims, is_traditional=False, has_freqs=has_freqs)


_EXPECTED = {
    "qwen3": {AttentionNeeds(4, 2, 16, _F32), RopeNeeds(4, 2, 16, _F32, 16, is_traditional=False, has_freqs=False)},
    "llama with llama3 rope": {_attention(), _rope(has_freqs=True)},
    "gemma3_text": {_attention(), _attention(window=22), _rope()},
    "gpt_oss": {_attention(has_sinks=True), _attention(has_sinks=True, window=22)},
    "llama4": {_attention(), _attention(chunk=24)},
    "gemma2": {_attention(softcap=3.0)},
    "deepseek_v3": {LatentNeeds(4, 16, 4, _F32)},
    "deepseek_v2": {LatentNeeds(4, 16, 4, _F32)},
    # One forward for each sequence, in mlx-lm's own layout.
    "deepseek_v32": set(),
    "qwen3_next": {
        _attention(),
        _rope(dims=4),
        GatedDeltaShape(2, 4, 8, 8, _F32),
        ShortConvShape(64, 4, _F32, _F32, has_bias=False, has_silu=True),
    },
    "granitemoehybrid": {
        _attention(),
        Mamba2Shape(4, 1, 8, 8, _F32, (0.001, 100.0)),
        ShortConvShape(48, 4, _F32, _F32, has_bias=True, has_silu=True),
    },
    "lfm2": {_attention(), _rope(), ShortConvShape(32, 3, _F32, _F32, has_bias=False, has_silu=False)},
    # Their states are not for kernels, or not all of them.
    "jamba": {_attention()},
    "rwkv7": set(),
    "recurrent_gemma": {AttentionNeeds(4, 1, 8, _F32, window=22)},
}


@pytest.mark.parametrize("case", _EXPECTED)
def test_needs_are_what_the_layers_do(case):
    assert set(needs_of(_loaded(case), 16)) == _EXPECTED[case]


def test_blocks_and_formats_are_part_of_them():
    rope, need = needs_of(_loaded("qwen3", bits=4, head_dim=64), 32)
    assert isinstance(rope, RopeNeeds)
    assert need == AttentionNeeds(4, 2, 64, _F32, 32, bits=4, group_size=64)
    (need,) = needs_of(_loaded("deepseek_v3", bits=8, kv_lora_rank=64, qk_rope_head_dim=32), 16)
    assert need == LatentNeeds(4, 64, 32, _F32, bits=8)


@pytest.mark.parametrize(
    "case",
    [*REPRESENTATIVES, *(pytest.param(c, marks=pytest.mark.matrix) for c in CASES if c not in REPRESENTATIVES)],
)
def test_every_family_can_be_asked(case):
    """And serves requests afterwards as before: the sweep shows it, on models that were never asked."""
    loaded = _loaded(case)
    needs = needs_of(loaded, 16)
    shapes = [need for need in needs if isinstance(need, (GatedDeltaShape, Mamba2Shape, ShortConvShape))]
    assert bool(shapes) <= loaded.runs_over_slots
    assert bool(needs) <= (loaded.layout is not Layout.DENSE)
