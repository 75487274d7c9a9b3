import importlib
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from cluster.config import KV_BITS
from cluster.kv.spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVFormat,
    MLASpec,
    RecurrentStateSpec,
    SharedKVSpec,
    SlidingWindowSpec,
    StateTensor,
)
from cluster.mac_memory import layer_specs
from cluster.model_kv import ATTEND_FULLY, specs_from_config
from protos.cidery.worker.v1 import worker_pb2
from tests.worker import families
from worker import description, models

CONFIGS = Path(__file__).parents[1] / "configs"
PLAIN = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}
SLIDING = PLAIN | {"sliding_window": 32}
FULL = FullAttentionSpec(8, 64)
WINDOW = SlidingWindowSpec(8, 64, 32)


def mamba2(heads, head_dim, state, groups):
    conv = StateTensor((3, heads * head_dim + 2 * groups * state), 2)
    return RecurrentStateSpec("mamba2", (conv, StateTensor((heads, head_dim, state), 4)))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("qwen3-8b", {FullAttentionSpec(8, 128): 36}),
        ("gemma-3-27b", {SlidingWindowSpec(16, 128, 1024): 52, FullAttentionSpec(16, 128): 10}),
        ("gpt-oss-20b", {SlidingWindowSpec(8, 64, 128): 12, FullAttentionSpec(8, 64): 12}),
        ("llama-4-scout", {ChunkedLocalSpec(8, 128, 8192): 36, FullAttentionSpec(8, 128): 12}),
        (
            "qwen3-next-80b",
            {
                RecurrentStateSpec("gated_delta_net", (StateTensor((3, 8192), 2), StateTensor((32, 128, 128), 4))): 36,
                FullAttentionSpec(2, 256): 12,
            },
        ),
        (
            "lfm2-1.2b",
            {RecurrentStateSpec("short_conv", (StateTensor((2, 2048), 2),)): 10, FullAttentionSpec(8, 64): 6},
        ),
        ("granite-4-h-tiny", {mamba2(48, 64, 128, 1): 36, FullAttentionSpec(4, 128): 4}),
        ("nemotron-h-8b", {mamba2(128, 64, 128, 8): 24, FullAttentionSpec(8, 128): 4}),
        ("mamba2-2.7b", {mamba2(80, 64, 128, 1): 64}),
        ("deepseek-v3", {MLASpec(512, 64): 61}),
        ("mistral-7b-v0.1", {FullAttentionSpec(8, 128): 32}),
    ],
)
def test_published_configs_are_understood(name, layers):
    assert Counter(specs_from_config(json.loads((CONFIGS / f"{name}.json").read_text()))) == layers


COMMON = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "num_experts_per_tok": 1,
}
MAMBA = {"conv_kernel": 4, "n_groups": 2, "use_bias": False, "use_conv_bias": True, "time_step_limit": [0.0, 10.0]}
MODELS = {
    "qwen3_next": {
        "num_hidden_layers": 4,
        "full_attention_interval": 2,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "num_experts": 2,
        "decoder_sparse_step": 1,
        "shared_expert_intermediate_size": 32,
        "mlp_only_layers": [],
        "partial_rotary_factor": 0.5,
    },
    "lfm2": {
        "head_dim": None,
        "num_hidden_layers": 3,
        "conv_L_cache": 3,
        "conv_bias": False,
        "block_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "granitemoehybrid": {
        "head_dim": None,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "embedding_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 2,
        "mamba_proj_bias": False,
        "mamba_conv_bias": True,
    },
    "nemotron_h": MAMBA
    | {
        "num_hidden_layers": 5,
        "hybrid_override_pattern": "M-*-M",
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "mlp_bias": False,
    },
    "mamba2": MAMBA | {"num_hidden_layers": 2, "num_heads": 4, "state_size": 16, "time_step_rank": 8},
    "deepseek_v3": {
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "kv_lora_rank": 48,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 24,
        "v_head_dim": 24,
    },
    "deepseek_v2": {
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "kv_lora_rank": 48,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 24,
        "v_head_dim": 20,
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "mscale_all_dim": 1.0},
    },
    "gpt_oss": {
        "num_hidden_layers": 2,
        "num_local_experts": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 8, "query_pre_attn_scalar": 32},
}
LLAMA4 = {
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "attention_chunk_size": 8,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 64,
    "num_local_experts": 2,
    "rope_scaling": None,
    "use_qk_norm": False,
}


def tiny_configs():
    for model_type, fields in MODELS.items():
        config = COMMON | {"model_type": model_type} | fields
        yield pytest.param({k: v for k, v in config.items() if v is not None}, id=model_type)
    yield pytest.param({"model_type": "llama4", "text_config": COMMON | LLAMA4}, id="llama4")


def found(config):
    """What the worker finds in mlx-lm's own model, unevaluated: not all of it runs in bfloat16 on a CPU."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    caches = models.adapt(model, config).caches
    return layer_specs(worker_pb2.Description(layers=[description.of_cache(cache) for cache in caches]))


def unnamed(spec):
    return replace(spec, kind="state") if isinstance(spec, RecurrentStateSpec) else spec


@pytest.mark.parametrize("config", list(tiny_configs()))
def test_specs_are_what_the_worker_finds(config):
    assert list(map(unnamed, specs_from_config(config))) == list(map(unnamed, found(config)))


@pytest.mark.parametrize("model_type", sorted(ATTEND_FULLY & families.CASES.keys()))
def test_families_that_attend_fully_do_so_whatever_their_config_says(model_type):
    config = families.config_of(model_type) | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
    assert {type(spec) for spec in found(config)} == {FullAttentionSpec}
    assert {type(spec) for spec in specs_from_config(config)} == {FullAttentionSpec}


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"use_sliding_window": False}, "FFFF"),
        ({"use_sliding_window": True, "max_window_layers": 3}, "FFFW"),
        ({"max_window_layers": 0}, "WWWW"),
        ({"sliding_window_pattern": 2}, "WFWF"),
        ({"sliding_window_pattern": "LLLG"}, "WWWF"),
        ({"model_type": "gemma2"}, "FFFF"),
        ({"model_type": "cohere2"}, "WWWF"),
        ({"model_type": "mistral"}, "FFFF"),
        ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"] * 2}, "FFFF"),
        ({"sliding_window": None, "model_type": "olmo3"}, "FFFF"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "FWFW"),
    ],
)
def test_windows_are_where_the_fields_say(fields, kinds):
    assert specs_from_config(SLIDING | fields) == [WINDOW if kind == "W" else FULL for kind in kinds]


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"no_rope_layers": [0, 1, 1, 0]}, "FCCF"),
        ({"no_rope_layers": []}, "CCCF"),
        ({"no_rope_layer_interval": 2}, "CFCF"),
        ({"attention_chunk_size": None, "no_rope_layers": [1, 1, 1, 0]}, "FFFF"),
    ],
)
def test_chunks_are_where_positions_are_rotary(fields, kinds):
    config = PLAIN | {"model_type": "llama4_text", "attention_chunk_size": 32} | fields
    assert specs_from_config(config) == [ChunkedLocalSpec(8, 64, 32) if kind == "C" else FULL for kind in kinds]


def test_nemotrons_linear_attention_is_mamba_2():
    config = COMMON | MODELS["nemotron_h"] | {"model_type": "nemotron_h"}
    old = specs_from_config(config)
    del config["hybrid_override_pattern"]
    layers = ["linear_attention", "mlp", "full_attention", "mlp", "linear_attention"]
    assert specs_from_config(config | {"layer_types": layers}) == old
    assert specs_from_config(config | {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"]}) == old


def test_last_layers_share_with_the_last_of_their_kind():
    layers = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = SLIDING | {"num_hidden_layers": 5, "layer_types": layers, "num_kv_shared_layers": 2}
    assert specs_from_config(config) == [WINDOW, FULL, WINDOW, SharedKVSpec(1), SharedKVSpec(2)]


def test_gemma_4s_full_layers_are_wider_and_have_heads_of_their_own():
    config = SLIDING | {"model_type": "gemma4_text", "global_head_dim": 128, "num_hidden_layers": 5}
    assert specs_from_config(config) == [WINDOW] * 4 + [FullAttentionSpec(8, 128)]
    config |= {"attention_k_eq_v": True, "num_global_key_value_heads": 2}
    assert specs_from_config(config) == [WINDOW] * 4 + [FullAttentionSpec(2, 128)]


def test_values_may_have_a_width_of_their_own():
    assert specs_from_config(PLAIN | {"v_head_dim": 32})[0] == FullAttentionSpec(8, 64, value_head_dim=32)


def test_a_sparse_indexer_keeps_a_key_beside_the_latent():
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    assert specs_from_config(PLAIN | latent)[0] == MLASpec(512, 64, index_dim=128)


def test_element_types_are_the_models():
    config = json.loads((CONFIGS / "qwen3-next-80b.json").read_text())
    state, attention = specs_from_config(config, dtype_bytes=4)[2:4]
    assert attention == FullAttentionSpec(2, 256, KVFormat(32))
    assert [tensor.dtype_bytes for tensor in state.tensors] == [4, 4]


@pytest.mark.parametrize("kv_bits", KV_BITS)
@pytest.mark.parametrize(("head_dim", "group_size"), [(128, 64), (96, 32)])
def test_kv_bits_quantise_as_mlx_does(kv_bits, head_dim, group_size):
    (spec, *_) = specs_from_config(PLAIN | {"head_dim": head_dim}, kv_bits=kv_bits)
    packed = mx.quantize(mx.zeros((2 * 8, head_dim), dtype=mx.bfloat16), group_size=group_size, bits=kv_bits)
    assert spec.token_bytes == sum(x.nbytes for x in packed)


def test_a_group_size_can_be_asked_for():
    formats = [specs_from_config(PLAIN, kv_bits=8, kv_group_size=size)[0].format for size in (32, 64)]
    assert formats == [KVFormat(8, 32, 4), KVFormat(8, 64, 4)]


def test_kv_bits_leave_states_alone():
    config = json.loads((CONFIGS / "qwen3-next-80b.json").read_text())
    assert specs_from_config(config, kv_bits=4)[0] == specs_from_config(config)[0]


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (without(PLAIN, "num_hidden_layers"), "llama: config.json lacks num_hidden_layers"),
        (without(PLAIN, "num_attention_heads"), "llama: .* lacks num_key_value_heads or num_attention_heads"),
        (without(PLAIN, "hidden_size"), "llama: .* lacks hidden_size"),
        (without(PLAIN, "hidden_size", "model_type"), "a model without model_type: .* lacks hidden_size"),
        (PLAIN | {"num_attention_heads": 0}, "has num_attention_heads 0, where a whole number of at least 1"),
        (PLAIN | {"num_key_value_heads": [1, 2]}, r"has num_key_value_heads \[1, 2\], where a whole number"),
        (PLAIN | {"head_dim": True}, "has head_dim True, where a whole number"),
        (SLIDING, "has a sliding_window and lacks layer_types or sliding_window_pattern, which say where"),
        (PLAIN | {"layer_types": ["sliding_attention"] * 4}, "llama: .* lacks sliding_window"),
        (PLAIN | {"layer_types": ["chunked_attention"] * 4}, "llama: .* lacks attention_chunk_size"),
        (PLAIN | {"layer_types": ["mamba"] * 4}, "lacks mamba_n_heads or mamba_num_heads or num_heads"),
        (PLAIN | {"layer_types": ["conv"] * 4}, "llama: .* lacks conv_L_cache"),
        (PLAIN | {"layer_types": ["linear_attention"] * 4}, "llama: .* lacks linear_num_key_heads"),
        (PLAIN | {"layer_types": ["hyena"] * 4}, "has 'hyena' in layer_types; known are full_attention, "),
        (PLAIN | {"layer_types": 4}, "has layer_types 4, where a list is expected"),
        (PLAIN | {"layer_types": ["full_attention"]}, "tells 1 layers, and has num_hidden_layers 4"),
        (PLAIN | {"hybrid_override_pattern": "M*X-"}, r"has 'X' in hybrid_override_pattern; known are M, \*, -, E"),
        (PLAIN | {"attn_layer_period": 8}, "tells its layers by attn_layer_period, which is not understood"),
        (PLAIN | {"mamba_d_state": 64}, "has a recurrence and lacks layer_types, which says where"),
        (PLAIN | {"full_attention_interval": 0}, "has full_attention_interval 0"),
        (PLAIN | {"attention_chunk_size": 8}, "llama: .* lacks no_rope_layer_interval"),
        (PLAIN | {"kv_lora_rank": 8}, "llama: .* lacks qk_rope_head_dim"),
        (PLAIN | {"num_kv_shared_layers": 4}, "layer 0 shares the KV of a full layer, and there is none before it"),
        (PLAIN | {"num_kv_shared_layers": 5}, "shares the KV of 5 layers, and has 4"),
        ({"text_config": without(PLAIN, "num_hidden_layers", "model_type"), "model_type": "outer"}, "outer: .* lacks"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused_by_model_and_field(config, message):
    with pytest.raises(ValueError, match=message):
        specs_from_config(config)


def test_kv_bits_that_the_engine_lacks_are_refused():
    with pytest.raises(ValueError, match="kv_bits must be one of 4, 8, got 6"):
        specs_from_config(PLAIN, kv_bits=6)
    with pytest.raises(ValueError, match="kv_group_size must be one of 32, 64, got 128"):
        specs_from_config(PLAIN, kv_bits=8, kv_group_size=128)
    with pytest.raises(ValueError, match=r"kv_group_size 32 says how .* it needs kv_bits"):
        specs_from_config(PLAIN, kv_group_size=32)
    with pytest.raises(ValueError, match="keys or values of 96 elements; kv_bits needs a multiple of 64"):
        specs_from_config(PLAIN | {"head_dim": 96}, kv_bits=4, kv_group_size=64)
    with pytest.raises(ValueError, match="keys or values of 80 elements; kv_bits needs a multiple of 32"):
        specs_from_config(PLAIN | {"head_dim": 80}, kv_bits=4)
