"""The self-test's judgement in half precision: right kernels pass whatever they round, small defects are found."""

import mlx.core as mx
import numpy as np
import pytest

from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from tests.worker.metal.test_self_test import Broken
from worker.metal.decode_checks import LatentNeeds
from worker.metal.self_test import AttentionNeeds, RopeNeeds, run
from worker.metal.self_test_cases import FAMILIES
from worker.metal.self_test_judge import differs, exact

_BF16 = mx.bfloat16
_READERS = ("paged_decode", "paged_prefill", "latent_decode", "latent_prefill", "write_quantized", "rope")
_PACKED = AttentionNeeds(8, 2, 128, _BF16, bits=8)
_PLAIN = AttentionNeeds(8, 2, 64, _BF16, window=40)
_LATENT = LatentNeeds(16, 512, 64, _BF16)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    require_toolchain()


def _run(need, metal_kernel, names=_READERS):
    return run([family for family in FAMILIES if family.name in names], [need], metal_kernel).failures


@pytest.mark.parametrize(
    "need",
    [
        _PACKED,
        _PLAIN,
        AttentionNeeds(14, 2, 64, _BF16, bits=8, group_size=64),
        AttentionNeeds(8, 1, 512, _BF16, bits=8, group_size=64),
        LatentNeeds(16, 512, 64, _BF16, bits=8, group_size=64),
        LatentNeeds(16, 512, 64, _BF16, bits=4, group_size=64),
        LatentNeeds(128, 512, 64, _BF16),
        LatentNeeds(40, 256, 32, _BF16, bits=8, group_size=32),
        AttentionNeeds(8, 2, 128, mx.float16, bits=4),
        RopeNeeds(8, 2, 64, _BF16, 32, is_traditional=True, has_freqs=True),
    ],
    ids=str,
)
def test_what_a_right_kernel_rounds_is_no_difference(need):
    """Outputs of 2 to 4 have neighbours 1/64 apart, and a packed element is rounded as well as the output."""
    assert _run(need, MslHost()) == {}


@pytest.mark.parametrize(
    ("need", "kernel", "old", "new"),
    [
        pytest.param(need, "cidery_paged_decode", old, new, id=f"decode, {name}, {need}")
        for need in (_PLAIN, _PACKED)
        for name, old, new in [
            ("no scale", "* scale[0];", "* 1.4426950408889634f;"),
            ("scale 5 % off", "* scale[0];", "* scale[0] * 1.05f;"),
            ("first key not seen", "t + own_token >= own_begin", "t + own_token > own_begin"),
            ("last key not seen", "t + own_token < own_end;", "t + own_token < own_end - (own_end > 1 ? 1 : 0);"),
            (
                "block after next",
                "block_tables[table + t / BS]",
                "block_tables[table + (t + 16 < end ? t + 16 : t) / BS]",
            ),
        ]
    ]
    + [
        pytest.param(_PLAIN, "cidery_paged_prefill", "position - window + 1", "position - window + 2", id="window"),
        pytest.param(_PLAIN, "cidery_paged_prefill", "position - window + 1", "position - window", id="wide window"),
        pytest.param(_PACKED, "cidery_paged_prefill", "at >= first && at <= last", "at >= first", id="future"),
        pytest.param(_LATENT, "cidery_paged_prefill_wide", "acc[s][d], key[g][d]", "acc[s][d], key[0][d]", id="key"),
        pytest.param(_PACKED, "cidery_paged", "biases[element / GROUP]", "biases[element / GROUP / 2 * 2]", id="bias"),
        pytest.param(_PACKED, "cidery_paged", "scales[element / GROUP]", "scales[element / GROUP / 2 * 2]", id="scale"),
        pytest.param(
            _PACKED, "cidery_write_quantized", "edge / level;", "edge / (level * 1.02f);", id="a level 2 % too low"
        ),
        pytest.param(
            RopeNeeds(8, 2, 64, _BF16, 64, is_traditional=False, has_freqs=False),
            *("cidery_rope", "float(positions[row])", "(float(positions[row]) + 0.1f)"),
            id="position a tenth off",
        ),
    ],
)
def test_a_small_defect_is_found_in_bfloat16(need, kernel, old, new):
    broken = Broken(kernel, old, new)
    failures = _run(need, broken)
    assert broken.has_edited
    assert failures
    assert all("differ" in failure for failure in failures.values())


def test_each_row_is_measured_by_itself():
    """A row of small elements is not hidden by one of large ones; zeros must be zeros, and nothing is no number."""
    truth = mx.array([[4.0, -2.0], [0.01, 0.02], [0.0, 0.0]])
    for row, error, is_wrong in [
        (0, 0.06, False),
        (0, 0.07, True),
        (1, 0.0003, False),
        (1, 0.0005, True),
        (2, 1e-6, True),
    ]:
        ours = np.array(truth)
        ours[row, 1] += error
        # Of type bfloat16 as far as the judge is concerned.
        assert (_judged(ours, truth) is not None) == is_wrong
    for value in (float("nan"), float("inf")):
        ours = np.array(truth)
        ours[1, 0] = value
        assert _judged(ours, truth) is not None
    assert _judged(np.array(truth), truth) is None


def _judged(ours, truth):
    return differs(mx.array(ours).astype(_BF16), truth)


def test_a_difference_says_how_much_and_what_is_allowed():
    ours = mx.array([[1.0, 1.5]], _BF16)
    assert differs(ours, mx.array([[1.0, 1.0]])) == "it differs from its twin by 0.5 where 0.016 is allowed"


def test_exact_values_of_a_packed_pool_are_not_rounded():
    from worker.metal.quantized import QuantizedPool

    content = mx.random.normal((2, 1, 16, 64), key=mx.random.key(0)).astype(_BF16)
    pool = QuantizedPool(*mx.quantize(content, group_size=32, bits=8), 8, 32)
    got = exact(pool).dequantize(mx.arange(2))
    codes = np.array(pool.packed).view(np.uint8).reshape(2, 1, 16, 2, 32).astype(np.float64)
    scales, biases = (np.array(a.astype(mx.float32)).astype(np.float64)[..., None] for a in (pool.scales, pool.biases))
    assert got.dtype == mx.float32
    assert np.abs(np.array(got) - (codes * scales + biases).reshape(got.shape)).max() < 1e-6
