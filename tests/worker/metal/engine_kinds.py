"""A tiny model of each kind of layer, and requests that take the engine through all that kernels meet."""

from typing import Any

import numpy as np

from protos.cidery.v1.sampling_pb2 import SamplingParams
from protos.cidery.worker.v1 import worker_pb2 as pb
from tests.golden.cases import config_of, make_model
from tests.worker.driver import ROOT, Driver, Request
from worker import kv_quantization, models
from worker.engine import Engine
from worker.metal.dispatch import Kernels
from worker.models import LoadedModel

_BLOCKS = 64
_DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
_DELTA_BY_CHANNEL = {
    "linear_attn_config": {
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
    }
}
_MAMBA2 = {"mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 64}
_FEW = {"num_hidden_layers": 2}
_KV8 = {"head_dim": 32, **_FEW}

# Kind of layer -> case of the sweep, what differs from its config, bits of KV, and the kernels that must have run.
KINDS: dict[str, tuple[str, dict[str, Any], int | None, set[str]]] = {
    "full": ("qwen3", _FEW, None, {"paged_decode", "paged_prefill", "write_kv", "rope"}),
    "window": ("gemma3_text", _FEW, None, {"paged_decode", "paged_prefill", "write_kv", "rope"}),
    "window and sinks": ("gpt_oss", {}, None, {"paged_decode", "paged_decode_merge_sinks", "paged_prefill"}),
    "chunk": ("llama4", {}, None, {"paged_decode", "paged_prefill", "write_kv"}),
    "soft cap": ("gemma2", _FEW, None, {"paged_decode", "paged_prefill", "write_kv"}),
    "latent": ("deepseek_v3", _FEW, None, {"paged_decode_staged_latent", "paged_prefill_wide_latent"}),
    "latent, 8 bits": (
        "deepseek_v3",
        {**_FEW, "kv_lora_rank": 64, "qk_rope_head_dim": 32},
        8,
        {"paged_decode_staged_packed_latent", "paged_prefill_wide_latent_quantized", "write_quantized"},
    ),
    "uneven widths": ("mimo_v2_flash", {}, None, {"paged_decode", "paged_prefill_wide", "write_kv"}),
    "delta net": ("qwen3_next", _DELTA, None, {"gated_delta_step", "gated_delta_chunk", "short_conv", "paged_decode"}),
    "delta net and latents": (
        "kimi_linear",
        _DELTA_BY_CHANNEL,
        None,
        {"gated_delta_chunk", "short_conv", "paged_decode_staged_latent", "paged_prefill_wide_latent"},
    ),
    "mamba-2": ("granitemoehybrid", _MAMBA2, None, {"mamba2_step", "mamba2_chunk", "short_conv", "paged_decode"}),
    "short conv": ("lfm2", {}, None, {"short_conv", "paged_decode", "paged_prefill", "rope"}),
    "8 bits": ("qwen3", _KV8, 8, {"paged_decode_packed", "paged_prefill_quantized", "write_quantized"}),
}


def load(kind: str) -> LoadedModel:
    case, changes, bits, _ = KINDS[kind]
    config = config_of(case) | changes
    return kv_quantization.quantise(models.adapt(make_model(case, config=config), config), bits)


def answers(loaded: LoadedModel, kernels: Kernels) -> tuple[list[list[int]], np.ndarray]:
    """Tokens and all their log-probabilities.

    A token, a block and more together, in chunks, some steps mixing prefill and decode; blocks come again. What nobody
    wrote is no number.
    """
    engine = Engine(loaded, kernels, memory_limit_bytes=1 << 30)
    layers = engine.describe().layers
    by_kind = [[index for index, layer in enumerate(layers) if bool(layer.states) is kind] for kind in (False, True)]
    groups = [pb.Group(pool=0, layers=members) for members in by_kind if members]
    groups[-1].pool = len(groups) - 1
    engine.configure(pb.Configure(block_size=16, num_blocks=[_BLOCKS] * len(groups), root_hash=ROOT, groups=groups))
    for group in range(len(groups)):
        engine._tensors.fill_blocks(group, range(1, _BLOCKS), float("nan"))
    engine._tensors.evaluate()
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
