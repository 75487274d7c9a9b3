"""The whole engine with the harness as its GPU, a tiny model of each kind of layer: the tokens of the path without one.

Kernels are found, tested and put together as a worker does it; but for one model the self-test's verdict is taken as
given, since each kernel's own tests run it at length.
"""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from protos.cidery.v1.sampling_pb2 import SamplingParams
from protos.cidery.worker.v1 import worker_pb2 as pb
from tests.golden.cases import config_of, make_model
from tests.msl_host.host import MslHost, engine_on_host
from tests.worker.driver import ROOT, Driver, Request
from worker import kernel_needs, kv_quantization, models
from worker.engine import Engine
from worker.metal import dispatch, self_test_cases
from worker.metal.dispatch import Kernels, twin_kernels
from worker.metal.self_test_cases import FAMILIES
from worker.models import LoadedModel

_BLOCKS = 64
_DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
_MAMBA2 = {"mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 64}
_FEW = {"num_hidden_layers": 2}
_KV8 = {"head_dim": 32, **_FEW}

# Kind of layer -> case of the sweep, what differs from its config, bits of KV, and the kernels that must have run.
_KINDS: dict[str, tuple[str, dict[str, Any], int | None, set[str]]] = {
    "full": ("qwen3", _FEW, None, {"paged_decode", "paged_prefill", "write_kv"}),
    "window": ("gemma3_text", _FEW, None, {"paged_decode", "paged_prefill", "write_kv"}),
    "window and sinks": ("gpt_oss", {}, None, {"paged_decode", "paged_decode_merge_sinks", "paged_prefill"}),
    "chunk": ("llama4", {}, None, {"paged_decode", "paged_prefill", "write_kv"}),
    "soft cap": ("gemma2", _FEW, None, {"paged_decode", "paged_prefill", "write_kv"}),
    "latent": ("deepseek_v3", _FEW, None, {"paged_decode_staged_latent", "paged_decode_merge"}),
    "delta net": ("qwen3_next", _DELTA, None, {"gated_delta_step", "gated_delta_chunk", "short_conv", "paged_decode"}),
    "mamba-2": ("granitemoehybrid", _MAMBA2, None, {"mamba2_step", "mamba2_chunk", "short_conv", "paged_decode"}),
    "short conv": ("lfm2", {}, None, {"short_conv", "paged_decode", "paged_prefill"}),
    "8 bits": ("qwen3", _KV8, 8, {"paged_decode_packed", "paged_prefill_quantized", "write_quantized"}),
}


@pytest.fixture(autouse=True)
def _no_compile():
    """Fused CPU kernels cost seconds of compiler each."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def _loaded(kind: str) -> LoadedModel:
    case, changes, bits, _ = _KINDS[kind]
    config = config_of(case) | changes
    return kv_quantization.quantise(models.adapt(make_model(case, config=config), config), bits)


def _answers(loaded: LoadedModel, kernels: Kernels) -> tuple[list[list[int]], np.ndarray]:
    """Tokens and all their log-probabilities.

    A token, a block and more together, in chunks, some steps mixing prefill and decode; blocks come again.
    """
    engine = Engine(loaded, kernels, memory_limit_bytes=1 << 30)
    layers = engine.describe().layers
    by_kind = [[index for index, layer in enumerate(layers) if bool(layer.states) is kind] for kind in (False, True)]
    groups = [pb.Group(pool=0, layers=members) for members in by_kind if members]
    groups[-1].pool = len(groups) - 1
    engine.configure(pb.Configure(block_size=16, num_blocks=[_BLOCKS] * len(groups), root_hash=ROOT, groups=groups))
    mac = _Driver(engine, num_blocks=_BLOCKS)
    rng, sampling = np.random.RandomState(0), SamplingParams(temperature=0.0, num_top_logprobs=5)
    requests = [
        Request(rng.randint(0, loaded.vocab_size, size).tolist(), count, sampling)
        for size, count in ((1, 5), (16, 2), (37, 4), (20, 3))
    ]
    for request in requests[:3]:
        mac.add(request)
    for _ in range(3):
        mac.step()
    mac.add(requests[3])
    mac.run()
    logprobs = [token.logprob for request in requests for token in request.logprobs]
    return [request.generated for request in requests], np.array(logprobs)


class _Driver(Driver):
    """For a model with two groups, which has a state for each sequence as a block of its own."""

    def plan(self, only=None):
        plan = super().plan(only)
        groups = self.engine._tensors.groups
        states = [number for number in range(len(groups)) if self.engine._tensors.is_state_group(number)]
        attention = [number for number in range(len(groups)) if number not in states]
        for piece in plan.slices:
            for blocks in piece.new_blocks:
                if attention:
                    blocks.group = attention[0]
                else:
                    del piece.new_blocks[:]
            if piece.start == 0:
                for number in states:
                    piece.new_blocks.add(group=number, block_ids=[piece.seq_id])
        return plan


@pytest.mark.parametrize("kind", _KINDS)
def test_engine_on_the_harness_gives_the_tokens_of_plain_mlx(kind):
    loaded = _loaded(kind)
    tokens, logprobs = _answers(loaded, twin_kernels())
    needs = kernel_needs.needs_of(loaded, 16)
    host = MslHost()
    kernels = dispatch.assemble(host, needs, {family.name for family in FAMILIES})
    our_tokens, our_logprobs = _answers(loaded, kernels)
    assert our_tokens == tokens
    # In few bits, an element between two levels may become either.
    assert np.abs(our_logprobs - logprobs).max() < (1e-4 if _KINDS[kind][2] is None else 1e-3)
    ran = {record.kernel.removeprefix("cidery_") for record in host.records}
    for name in _KINDS[kind][3]:
        assert any(kernel.startswith(f"{name}_f32") for kernel in ran), f"{name} is not among {ran}"


def test_a_worker_starts_with_what_its_gpu_can_do(monkeypatch, caplog):
    """Self-test included; only the dispatch sees Metal."""
    monkeypatch.setattr(self_test_cases, "_CHAIN_STEPS", 4)
    host = MslHost()
    engine_on_host(monkeypatch, host)
    needs = kernel_needs.needs_of(_loaded("soft cap"), 16)
    with caplog.at_level("INFO"):
        kernels = dispatch.choose_kernels(needs)
    assert kernels.name == "metal paged_decode, paged_prefill, writes in place"
    assert (kernels.failed, kernels.takes_ragged_rows) == ((), True)
    assert "kernels: metal paged_decode, paged_prefill, writes in place (tested in" in caplog.text
    assert not mx.metal.is_available()
