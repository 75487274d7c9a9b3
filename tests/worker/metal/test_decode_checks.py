"""The self-test's checks of decode attention on the harness: right kernels pass, each kind of broken one is found."""

import mlx.core as mx
import pytest

from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from tests.worker.metal.test_self_test import Broken
from worker.metal.decode_checks import LatentNeeds
from worker.metal.self_test import AttentionNeeds, run
from worker.metal.self_test_cases import FAMILIES

_FAMILIES = [family for family in FAMILIES if family.name in ("paged_decode", "verify_window", "latent_decode")]
_PLAIN = AttentionNeeds(4, 2, 64, mx.float16, window=40, has_sinks=True)
_PACKED = AttentionNeeds(4, 1, 64, mx.float16, softcap=2.0, chunk=24, bits=8)
_LATENT = LatentNeeds(3, 64, 32, mx.float32)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    require_toolchain()
    host = MslHost()
    with host.compiling_ahead():
        run(_FAMILIES, [_PLAIN, _PACKED, _LATENT], host)


def test_right_kernels_pass():
    host = MslHost()
    assert run(_FAMILIES, [_PLAIN, _PACKED, _LATENT], host).failures == {}
    ran = {record.kernel.rsplit("_", 1)[0] for record in host.records}
    assert ran >= {
        "cidery_paged_decode",
        "cidery_paged_decode_packed",
        "cidery_paged_decode_staged_packed",
        "cidery_paged_decode_staged_latent",
        "cidery_paged_decode_merge_sinks",
    }


@pytest.mark.parametrize(
    ("family", "need", "old", "new"),
    [
        ("paged_decode", _PLAIN, "t + own_token >= own_begin", "t + own_token > own_begin"),
        ("paged_decode", _PACKED, "biases[element / GROUP]", "biases[0]"),
        ("verify_window", _PLAIN, "* scale[0];", "* scale[0] * (R > 1 ? 1.001f : 1.0f);"),
        ("latent_decode", _LATENT, "VALUE_STRIDE = SAME ? D : DV", "VALUE_STRIDE = DV"),
    ],
)
def test_broken_kernels_are_found(family, need, old, new):
    broken = Broken("cidery_paged_decode", old, new)
    families = [one for one in _FAMILIES if one.name == family]
    failures = run(families, [need], broken).failures
    assert broken.has_edited
    assert set(failures) == {family}
    assert "differ" in failures[family]


def test_shapes_that_no_kernel_takes_are_no_failure():
    needs = [AttentionNeeds(2, 1, 66, mx.float16), AttentionNeeds(2, 1, 1024, mx.float16)]
    host = MslHost()
    assert run(_FAMILIES, needs, host).failures == {}
    assert host.records == []
