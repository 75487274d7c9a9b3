"""The start of a worker with the harness in the GPU's place: what its own dispatch makes of the self-test's verdict."""

import mlx.core as mx
import pytest

from tests.msl_host.host import MslHost, engine_on_host
from worker.metal import dispatch, self_test, self_test_cases
from worker.metal.self_test import AttentionNeeds

_NEEDS = [AttentionNeeds(4, 2, 64, mx.float32)]


@pytest.fixture(autouse=True)
def _short_chain(monkeypatch):
    monkeypatch.setattr(self_test_cases, "_CHAIN_STEPS", 4)
    monkeypatch.setattr(self_test_cases, "_CHAIN_LAYERS", 2)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_dispatch_finds_a_gpu_whose_kernels_agree_with_their_twins(monkeypatch, dtype):
    """The start of a worker, self-test included, and only the dispatch sees Metal."""
    host = MslHost()
    engine_on_host(monkeypatch, host)
    kernels = dispatch.choose_kernels([AttentionNeeds(4, 2, 64, dtype)])
    assert kernels.name == "metal paged_decode, paged_prefill, writes in place"
    assert len(host.records) > 2
    assert not mx.metal.is_available()


def test_a_home_that_can_not_be_written_costs_the_memory_only(monkeypatch, caplog):
    engine_on_host(monkeypatch, MslHost())

    def refuse(needs):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(self_test, "ResultMemory", refuse)
    assert dispatch.choose_kernels(_NEEDS).name == "metal paged_decode, paged_prefill, writes in place"
    assert "each start will test again: read-only file system" in caplog.text


def test_kernel_with_a_defect_gives_way_to_its_twin(monkeypatch, caplog):
    """Writes that are not declared, here: the log says what, where, and who; what only reads still runs."""
    engine_on_host(monkeypatch, MslHost(in_place={}))
    kernels = dispatch.choose_kernels(_NEEDS)
    assert kernels.name == "metal paged_decode, paged_prefill"
    assert kernels.failed == ("write_kv", "put_blocks", "in_place")
    assert "write-to-input, source line" in caplog.text
    assert "target[i] = keys[" in caplog.text
