"""Tiny configurations of the families that attend through windows, chunks or latents, or share keys.

Windows and chunks are shorter than the prompts of the sweep and no multiple of a block, so that blocks fall behind.
"""

from typing import Any

from tests.golden.family_parts import BASE, LATENT, LONGCAT, MOE, ROUTED, SLIDE, WINDOW
from tests.worker.families import VOCAB_SIZE

_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
_MIXED_WINDOW = {**SLIDE, "layer_types": _MIXED}
_V3 = {**LATENT, **ROUTED}
_INDEXER = {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 24}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_GEMMA4_LAYERS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": _GEMMA4_LAYERS,
    "num_kv_shared_layers": 0,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "use_double_wide_mlp": False,
    "rope_parameters": {
        "full_attention": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True,
    **SLIDE,
}
_GEMMA3N = {
    **BASE,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "rope_local_base_freq": 10000.0,
    "final_logit_softcapping": 30.0,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "activation_sparsity_pattern": [0.5, 0.0] * 3,
    "hidden_size_per_layer_input": 8,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
    "intermediate_size": [48] * 6,
    "model_type": "gemma3n_text",
    **SLIDE,
}
_LLAMA4_TEXT = {
    **BASE,
    "attention_bias": False,
    "attention_chunk_size": 24,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 48,
    "num_experts_per_tok": 1,
    "num_local_experts": 4,
    "rope_scaling": None,
    "use_qk_norm": True,
    "attn_temperature_tuning": 4,
    "floor_scale": 8,
    "model_type": "llama4_text",
}
_VL_TEXT = {**BASE, "model_type": "qwen3"}

# Name of the case -> module of mlx_lm.models, and what differs from the base.
ATTENTION_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "afm7": (
        "afm7",
        {
            "hidden_dim": 32,
            "num_layers": 4,
            "num_kv_reuse_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "afmoe": ("afmoe", {**_MIXED_WINDOW, **MOE, "num_dense_layers": 1}),
    "cohere2": ("cohere2", {**SLIDE, "sliding_window_pattern": 2, "layer_norm_eps": 1e-5}),
    "deepseek_v2": ("deepseek_v2", {**_V3, "topk_method": "greedy", "rope_scaling": _YARN}),
    "deepseek_v3": ("deepseek_v3", {**_V3, "rope_scaling": _YARN}),
    "deepseek_v3 without q_lora": ("deepseek_v3", {**_V3, "q_lora_rank": None}),
    "deepseek_v32": ("deepseek_v32", {**_V3, **_INDEXER}),
    "exaone4": ("exaone4", {**SLIDE, "sliding_window_pattern": "LLLG", "rope_scaling": None}),
    "exaone_moe": (
        "exaone_moe",
        {**_MIXED_WINDOW, **MOE, "num_shared_experts": 1, "is_moe_layer": [False, True, True, True]},
    ),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0}),
    "gemma3": (
        "gemma3",
        {"text_config": {**BASE, **SLIDE, "sliding_window_pattern": 2, "model_type": "gemma3_text"}},
    ),
    "gemma3_text": ("gemma3_text", {**SLIDE, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8}),
    "gemma3n": ("gemma3n", {"text_config": _GEMMA3N}),
    "gemma4": ("gemma4", {"text_config": {**BASE, **_GEMMA4, "model_type": "gemma4_text"}}),
    "gemma4_text": ("gemma4_text", _GEMMA4),
    "gemma4_text with shared layers": (
        "gemma4_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": [*_GEMMA4_LAYERS, *_GEMMA4_LAYERS[:2]],
        },
    ),
    "glm4_moe_lite": ("glm4_moe_lite", _V3),
    "glm_moe_dsa": (
        "glm_moe_dsa",
        {**_V3, **_INDEXER, "rope_parameters": _ROPE, "attention_bias": False},
    ),
    "gpt_bigcode": (
        "gpt_bigcode",
        {"n_embd": 32, "n_layer": 3, "n_inner": 48, "n_head": 4, "n_positions": 512, "layer_norm_epsilon": 1e-5},
    ),
    "gpt_oss": (
        "gpt_oss",
        {**_MIXED_WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    ),
    "iquestloopcoder": ("iquestloopcoder", {"loop_window_size": WINDOW}),
    "kimi_k25": ("kimi_k25", {"text_config": {**BASE, **_V3, "model_type": "deepseek_v3"}}),
    "kimi_vl": ("kimi_vl", {"text_config": {**BASE, **_V3, "model_type": "deepseek_v3"}}),
    "laguna": (
        "laguna",
        {
            **_MIXED_WINDOW,
            **MOE,
            "shared_expert_intermediate_size": 24,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "llama with windows": ("llama", _MIXED_WINDOW),
    "llama4": ("llama4", {"text_config": _LLAMA4_TEXT}),
    "llama4_text": ("llama4_text", {"intermediate_size_mlp": 48, "no_rope_layers": [1, 1, 0, 1], "use_qk_norm": True}),
    "longcat_flash": ("longcat_flash", LONGCAT),
    "mellum": (
        "mellum",
        {
            **_MIXED_WINDOW,
            **MOE,
            "norm_topk_prob": True,
            "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        },
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            **ROUTED,
            "n_shared_experts": None,
            "hybrid_layer_pattern": [1, 0, 1, 1],
            "moe_layer_freq": [0, 1, 1, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": WINDOW,
            "layernorm_epsilon": 1e-5,
            "swa_rope_theta": 10000.0,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "head_dim": 12,
            "v_head_dim": 8,
            "swa_head_dim": 12,
            "swa_v_head_dim": 8,
            "partial_rotary_factor": 0.5,
            "num_key_value_heads": 1,
        },
    ),
    "minicpm3": (
        "minicpm3",
        {
            **LATENT,
            "dim_model_base": 16,
            "scale_depth": 1.4,
            "scale_emb": 3.0,
            "rope_scaling": {
                "original_max_position_embeddings": 512,
                "short_factor": [1.0, 1.1],
                "long_factor": [1.5, 2.0],
            },
        },
    ),
    "minimax_m3_vl": (
        "minimax_m3_vl",
        {
            "text_config": {
                **BASE,
                "dense_intermediate_size": 48,
                "shared_intermediate_size": 24,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "rotary_dim": 4,
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
                "sparse_attention_freq": [0, 1, 1, 1],
                "index_n_heads": 2,
                "index_head_dim": 8,
                "index_block_size": 8,
                "index_topk_blocks": 2,
            }
        },
    ),
    "ministral3": (
        "ministral3",
        {
            **_MIXED_WINDOW,
            "rope_parameters": {
                "rope_type": "yarn",
                "type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "mistral3": (
        "mistral3",
        {
            "text_config": {
                **BASE,
                **_MIXED_WINDOW,
                "model_type": "ministral3",
                "rope_parameters": {
                    **_ROPE,
                    "type": "default",
                    "llama_4_scaling_beta": 0.1,
                    "original_max_position_embeddings": 32,
                },
            }
        },
    ),
    "mistral4": (
        "mistral4",
        {
            **_V3,
            "rope_parameters": {
                **_ROPE,
                "type": "default",
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "muse_glimmer": ("muse_glimmer", {**_MIXED_WINDOW, "rope_parameters": _ROPE}),
    "nanbeige": ("nanbeige", {"num_loops": 2}),
    "nemotron-nas": (
        "nemotron-nas",
        {
            "num_hidden_layers": 3,
            "block_configs": [
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
            ],
        },
    ),
    "olmo3": ("olmo3", _MIXED_WINDOW),
    "pixtral": ("pixtral", {"text_config": {**BASE, "model_type": "llama"}}),
    "plamo": ("plamo", {"n_shared_head": 2}),
    "qwen": ("qwen", {"kv_channels": 8, "layer_norm_epsilon": 1e-6}),
    "qwen2_vl": ("qwen2_vl", {"text_config": {**BASE, "model_type": "qwen2"}}),
    "qwen3_vl": ("qwen3_vl", {"text_config": _VL_TEXT}),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {
            "text_config": {
                **_VL_TEXT,
                **MOE,
                "model_type": "qwen3_moe",
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "norm_topk_prob": True,
            }
        },
    ),
    "spark2_5": (
        "spark2_5",
        {**_MIXED_WINDOW, "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    ),
    "step3p5": (
        "step3p5",
        {
            **_MIXED_WINDOW,
            "num_attention_groups": 2,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_intermediate_size": 24,
            "share_expert_dim": 24,
            "moe_layers_enum": "1,2,3",
            "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
        },
    ),
    "talkie": ("talkie", {}),
    "youtu_llm": ("youtu_llm", LATENT),
}
