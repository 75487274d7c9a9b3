"""Tiny configurations of the families that attend through windows, chunks or latents, or keep recurrent states.

Windows and chunks are shorter than the prompts of the sweep and no multiple of a block, so that blocks fall behind.
"""

from typing import Any

from tests.worker.families import VOCAB_SIZE

_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB_SIZE,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
_WINDOW = 22
_SLIDE = {"sliding_window": _WINDOW}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
_MIXED_WINDOW = {**_SLIDE, "layer_types": _MIXED}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_V3 = {**_LATENT, **_ROUTED}
_INDEXER = {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 24}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
_CONV = {"conv_bias": False, "conv_L_cache": 3, "norm_eps": 1e-5}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}
_BAILING = {
    "num_experts": 4,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "layer_group_size": 2,
    "group_norm_size": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
_LONGCAT = {
    "ffn_hidden_size": 48,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 24,
    "n_routed_experts": 4,
    "zero_expert_num": 1,
    "zero_expert_type": "identity",
    "num_layers": 2,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
    "attention_bias": False,
    "attention_method": "MLA",
    **_LATENT,
}
_KDA = {
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 3],
        "full_attn_layers": [2, 4],
    },
    "model_max_length": 512,
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "mla_use_nope": False,
    **_LATENT,
    "head_dim": 12,
}
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
_QWEN35 = {**_BASE, **_DELTA, "full_attention_interval": 2, "partial_rotary_factor": 0.5}
_QWEN35["rope_parameters"] = {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
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
    **_SLIDE,
}
_GEMMA3N = {
    **_BASE,
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
    **_SLIDE,
}
_LLAMA4_TEXT = {
    **_BASE,
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
_VL_TEXT = {**_BASE, "model_type": "qwen3"}

# Name of the case -> module of mlx_lm.models, and what differs from the base.
HYBRID_CASES: dict[str, tuple[str, dict[str, Any]]] = {
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
    "afmoe": ("afmoe", {**_MIXED_WINDOW, **_MOE, "num_dense_layers": 1}),
    "baichuan_m1": ("baichuan_m1", {**_SLIDE, "sliding_window_layers": [0, 2], "conv_window": 2}),
    "bailing_hybrid": ("bailing_hybrid", {**_BAILING, **_LATENT}),
    "bailing_moe_linear": ("bailing_moe_linear", {**_BAILING, "use_qk_norm": True}),
    "bailing_moe_v3": (
        "bailing_moe_v3",
        {**_BAILING, **_LATENT, "moe_shared_expert_intermediate_size": 24, "short_conv_kernel_size": 4},
    ),
    "cohere2": ("cohere2", {**_SLIDE, "sliding_window_pattern": 2, "layer_norm_eps": 1e-5}),
    "deepseek_v2": ("deepseek_v2", {**_V3, "topk_method": "greedy", "rope_scaling": _YARN}),
    "deepseek_v3": ("deepseek_v3", {**_V3, "rope_scaling": _YARN}),
    "deepseek_v3 without q_lora": ("deepseek_v3", {**_V3, "q_lora_rank": None}),
    "deepseek_v32": ("deepseek_v32", {**_V3, **_INDEXER}),
    "exaone4": ("exaone4", {**_SLIDE, "sliding_window_pattern": "LLLG", "rope_scaling": None}),
    "exaone_moe": (
        "exaone_moe",
        {**_MIXED_WINDOW, **_MOE, "num_shared_experts": 1, "is_moe_layer": [False, True, True, True]},
    ),
    "falcon_h1": (
        "falcon_h1",
        {**_MAMBA2, "mamba_d_ssm": 32, "mamba_expand": 1, "mamba_chunk_size": 16, "mlp_expansion_factor": 2},
    ),
    "gear": (
        "gear",
        {
            **_SLIDE,
            "layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"],
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0}),
    "gemma3": (
        "gemma3",
        {"text_config": {**_BASE, **_SLIDE, "sliding_window_pattern": 2, "model_type": "gemma3_text"}},
    ),
    "gemma3_text": ("gemma3_text", {**_SLIDE, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8}),
    "gemma3n": ("gemma3n", {"text_config": _GEMMA3N}),
    "gemma4": ("gemma4", {"text_config": {**_BASE, **_GEMMA4, "model_type": "gemma4_text"}}),
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
    "granitemoehybrid": (
        "granitemoehybrid",
        {
            **_MAMBA2,
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "attention_bias": False,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.4,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.6,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
    ),
    "iquestloopcoder": ("iquestloopcoder", {"loop_window_size": _WINDOW}),
    "jamba": (
        "jamba",
        {
            "attn_layer_offset": 1,
            "attn_layer_period": 2,
            "expert_layer_offset": 1,
            "expert_layer_period": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 8,
            "mamba_expand": 2,
            "num_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "kimi_k25": ("kimi_k25", {"text_config": {**_BASE, **_V3, "model_type": "deepseek_v3"}}),
    "kimi_k3": (
        "kimi_k3",
        {
            "text_config": {
                **_BASE,
                **_KDA,
                "mla_use_nope": True,
                "attn_res_block_size": 2,
                "activation_situ_beta": 1.0,
                "activation_situ_linear_beta": 1.0,
            }
        },
    ),
    "kimi_linear": ("kimi_linear", _KDA),
    "kimi_vl": ("kimi_vl", {"text_config": {**_BASE, **_V3, "model_type": "deepseek_v3"}}),
    "laguna": (
        "laguna",
        {
            **_MIXED_WINDOW,
            **_MOE,
            "shared_expert_intermediate_size": 24,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "lfm2": (
        "lfm2",
        {
            **_CONV,
            "full_attn_idxs": [1, 3],
            "block_dim": 32,
            "block_ff_dim": 48,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
        },
    ),
    "lfm2_moe": (
        "lfm2_moe",
        {
            **_CONV,
            **_MOE,
            "full_attn_idxs": [1, 3],
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "num_dense_layers": 1,
        },
    ),
    "llama with windows": ("llama", _MIXED_WINDOW),
    "llama4": ("llama4", {"text_config": _LLAMA4_TEXT}),
    "llama4_text": ("llama4_text", {"intermediate_size_mlp": 48, "no_rope_layers": [1, 1, 0, 1], "use_qk_norm": True}),
    "longcat_flash": ("longcat_flash", _LONGCAT),
    "longcat_flash_ngram": (
        "longcat_flash_ngram",
        {**_LONGCAT, "ngram_vocab_size_ratio": 3, "emb_neighbor_num": 4, "emb_split_num": 2, "hidden_size": 48},
    ),
    "mamba": (
        "mamba",
        {
            "intermediate_size": 64,
            "state_size": 8,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": 2,
        },
    ),
    "mamba2": (
        "mamba2",
        {
            "num_heads": 8,
            "head_dim": 8,
            "intermediate_size": 64,
            "state_size": 8,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 2,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_limit": [0.01, 10.0],
            "time_step_rank": "auto",
        },
    ),
    "mellum": (
        "mellum",
        {
            **_MIXED_WINDOW,
            **_MOE,
            "norm_topk_prob": True,
            "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        },
    ),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        {
            **_ROUTED,
            "n_shared_experts": None,
            "hybrid_layer_pattern": [1, 0, 1, 1],
            "moe_layer_freq": [0, 1, 1, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": _WINDOW,
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
            **_LATENT,
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
                **_BASE,
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
                **_BASE,
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
    "nemotron_h": (
        "nemotron_h",
        {
            **_ROUTED,
            "hybrid_override_pattern": "M*-ME",
            "num_hidden_layers": 5,
            "attention_bias": False,
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "mamba_proj_bias": False,
            "ssm_state_size": 8,
            "conv_kernel": 4,
            "n_groups": 2,
            "mlp_bias": False,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
            "moe_shared_expert_intermediate_size": 24,
            "time_step_limit": [0.0, 100.0],
        },
    ),
    "olmo3": ("olmo3", _MIXED_WINDOW),
    "olmo_hybrid": (
        "olmo_hybrid",
        {
            **_DELTA,
            "linear_num_key_heads": 4,
            "linear_allow_neg_eigval": True,
            "attention_bias": False,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
    "pixtral": ("pixtral", {"text_config": {**_BASE, "model_type": "llama"}}),
    "plamo": ("plamo", {"n_shared_head": 2}),
    "plamo2": (
        "plamo2",
        {
            "hidden_size_per_head": 8,
            "mamba_d_state": 8,
            "mamba_num_heads": 4,
            "mamba_step": 2,
            "attention_window_size": 512,
            "tie_word_embeddings": True,
        },
    ),
    "qwen": ("qwen", {"kv_channels": 8, "layer_norm_epsilon": 1e-6}),
    "qwen2_vl": ("qwen2_vl", {"text_config": {**_BASE, "model_type": "qwen2"}}),
    "qwen3_5": ("qwen3_5", {"text_config": _QWEN35}),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {"text_config": {**_QWEN35, **_MOE, "shared_expert_intermediate_size": 24}},
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_DELTA,
            **_MOE,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [0],
            "partial_rotary_factor": 0.5,
            "full_attention_interval": 2,
        },
    ),
    "qwen3_vl": ("qwen3_vl", {"text_config": _VL_TEXT}),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        {
            "text_config": {
                **_VL_TEXT,
                **_MOE,
                "model_type": "qwen3_moe",
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
                "norm_topk_prob": True,
            }
        },
    ),
    "lfm2-vl": (
        "lfm2-vl",
        {
            "text_config": {
                **_BASE,
                **_CONV,
                "model_type": "lfm2",
                "full_attn_idxs": [1, 3],
                "block_dim": 32,
                "block_ff_dim": 48,
                "block_multiple_of": 8,
                "block_ffn_dim_multiplier": 1.0,
                "block_auto_adjust_ff_dim": True,
            }
        },
    ),
    "recurrent_gemma": (
        "recurrent_gemma",
        {
            "attention_bias": False,
            "conv1d_width": 4,
            "logits_soft_cap": 30.0,
            "attention_window_size": _WINDOW,
            "block_types": ["recurrent", "recurrent", "attention"],
            "num_key_value_heads": 1,
        },
    ),
    "rwkv7": (
        "rwkv7",
        {"norm_eps": 1e-5, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
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
    "youtu_llm": ("youtu_llm", _LATENT),
}


def hybrid_config(case: str) -> dict[str, Any]:
    """The whole config of a case."""
    module, changes = HYBRID_CASES[case]
    return {**_BASE, "model_type": module, **changes}
