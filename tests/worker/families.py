"""One tiny configuration of each supported family, and the models made of them.

A few families come twice where they branch (tied or not, rope scaling, a shared expert).
"""

import importlib
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map

VOCAB_SIZE = 320

_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_TIED = {"tie_word_embeddings": True}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_GPT = {"n_embd": 32, "n_head": 4, "n_layer": 3, "layer_norm_epsilon": 1e-5, "n_positions": 512}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED_MOE = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
_GRANITE = {
    "logits_scaling": 2.0,
    "attention_multiplier": 0.4,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_bias": False,
    "mlp_bias": False,
}

# Name of the case -> module of mlx_lm.models, and what differs from the base.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Klear": (
        "Klear",
        {
            "attention_bias": False,
            "mlp_only_layers": [],
            "decoder_sparse_step": 1,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            **_MOE,
        },
    ),
    "apertus": ("apertus", {"mlp_bias": False, "attention_bias": False, "post_norm": False, "qk_norm": True}),
    "bailing_moe": (
        "bailing_moe",
        {"num_shared_experts": 1, "norm_topk_prob": True, "first_k_dense_replace": 1, **_MOE},
    ),
    "cohere": ("cohere", {"layer_norm_eps": 1e-5, "logit_scale": 0.5, "use_qk_norm": True}),
    "dbrx": (
        "dbrx",
        {
            "d_model": 32,
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "n_layers": 3,
            "n_heads": 4,
        },
    ),
    "deepseek": ("deepseek", _SHARED_MOE),
    "dots1": ("dots1", {**_SHARED_MOE, "scoring_func": "noaux_tc"}),
    "ernie4_5": ("ernie4_5", {"head_dim": 8, "use_bias": False}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {
            "use_bias": False,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
        },
    ),
    "exaone": ("exaone", {"num_layers": 3, "layer_norm_epsilon": 1e-5}),
    "gemma": ("gemma", {"head_dim": 8}),
    "glm": ("glm", {"head_dim": 8}),
    "glm4": ("glm4", {"head_dim": 8, "attention_bias": True, "partial_rotary_factor": 0.5}),
    "glm4_moe": (
        "glm4_moe",
        {
            "head_dim": 8,
            "rope_scaling": None,
            "use_qk_norm": True,
            "attention_bias": False,
            "partial_rotary_factor": 0.5,
            **_SHARED_MOE,
        },
    ),
    "gpt2": ("gpt2", {**_GPT, "n_ctx": 512}),
    "gpt_neox": ("gpt_neox", {"layer_norm_eps": 1e-5, "rotary_emb_base": 10000, "rotary_pct": 0.5}),
    "gptj": ("gptj", {**_GPT, "rotary_dim": 4}),
    "granite": ("granite", _GRANITE),
    "granite tied": ("granite", {**_GRANITE, **_TIED}),
    "granitemoe": ("granitemoe", {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "helium": ("helium", {"head_dim": 8, "attention_bias": False, "mlp_bias": False}),
    "hunyuan": (
        "hunyuan",
        {
            "attention_bias": False,
            "moe_topk": 2,
            "num_experts": 4,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "use_qk_norm": True,
            "use_cla": False,
            "cla_share_factor": 1,
            "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"},
        },
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}}),
    "internlm2": ("internlm2", {}),
    "internlm3": ("internlm3", {"bias": False, "qkv_bias": True}),
    "lille-130m": ("lille-130m", {**_GPT, "n_embd": 96, "block_size": 512, "layer_norm_eps": 1e-5, "n_kv_heads": 2}),
    "llama": ("llama", {}),
    "llama tied": ("llama", _TIED),
    "llama with llama3 rope": ("llama", {"rope_scaling": _LLAMA3_ROPE}),
    "llama with yarn rope": ("llama", {"rope_scaling": _YARN}),
    "mimo": ("mimo", {"num_nextn_predict_layers": 0}),
    "minicpm": ("minicpm", {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 3.0}),
    "minicpm tied": ("minicpm", {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 3.0, **_TIED}),
    "minimax": (
        "minimax",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 24, "rotary_dim": 4},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "nanochat": ("nanochat", {}),
    "nemotron": ("nemotron", {"hidden_act": "relu2", "norm_eps": 1e-5}),
    "olmo2": ("olmo2", {}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "openelm": (
        "openelm",
        {
            "head_dim": 8,
            "num_transformer_layers": 3,
            "model_dim": 32,
            "ffn_dim_divisor": 8,
            # Layers of different widths: every layer has its own number of KV heads.
            "num_query_heads": [4, 4, 8],
            "num_kv_heads": [2, 1, 4],
            "ffn_multipliers": [1.0, 1.5, 2.0],
        },
    ),
    "phi": ("phi", {"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {"original_max_position_embeddings": 512}),
    "phimoe": (
        "phimoe",
        {
            "num_local_experts": 4,
            "original_max_position_embeddings": 64,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [1.5] * 4,
                "short_mscale": 1.1,
                "long_mscale": 1.1,
            },
        },
    ),
    "phixtral": (
        "phixtral",
        {"num_vocab": VOCAB_SIZE, "model_dim": 32, "num_heads": 4, "num_layers": 3, "rotary_dim": 4},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", _TIED),
    "qwen2_moe": ("qwen2_moe", {"shared_expert_intermediate_size": 24, **_MOE}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 tied": ("qwen3", {"head_dim": 16, **_TIED}),
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 8, "decoder_sparse_step": 1, "mlp_only_layers": [0], "norm_topk_prob": True, **_MOE},
    ),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "solar_open": ("solar_open", {"head_dim": 8, "partial_rotary_factor": 0.5, **_SHARED_MOE}),
    "stablelm": (
        "stablelm",
        {"use_qkv_bias": True, "partial_rotary_factor": 0.5, "layer_norm_eps": 1e-5, "qk_layernorm": True},
    ),
    "starcoder2": ("starcoder2", {"norm_epsilon": 1e-5}),
    "telechat3": ("telechat3", {}),
}


def config_of(case: str) -> dict[str, Any]:
    module, changes = CASES[case]
    return {**_BASE, "model_type": module, **changes}


def make_model(case: str) -> Module:
    """A random float32 model, wide enough in its weights that its logits are spread."""
    module = importlib.import_module(f"mlx_lm.models.{CASES[case][0]}")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict(config_of(case)))
    model.eval()
    model.set_dtype(mx.float32)
    # Biases and norms start as zeros and ones: noise on everything makes a lost one visible.
    model.update(tree_map(lambda weight: weight + 0.1 * mx.random.normal(weight.shape), model.parameters()))
    mx.eval(model.parameters())
    return model
