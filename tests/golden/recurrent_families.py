"""Tiny configurations of the families that keep recurrent states, beside attention or without."""

from typing import Any

from tests.golden.family_parts import BASE, LATENT, LONGCAT, MOE, ROUTED, SLIDE, WINDOW

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
    **LATENT,
    "head_dim": 12,
}
_QWEN35 = {**BASE, **_DELTA, "full_attention_interval": 2, "partial_rotary_factor": 0.5}
_QWEN35["rope_parameters"] = {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}

# Name of the case -> module of mlx_lm.models, and what differs from the base.
RECURRENT_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "baichuan_m1": ("baichuan_m1", {**SLIDE, "sliding_window_layers": [0, 2], "conv_window": 2}),
    "bailing_hybrid": ("bailing_hybrid", {**_BAILING, **LATENT}),
    "bailing_moe_linear": ("bailing_moe_linear", {**_BAILING, "use_qk_norm": True}),
    "bailing_moe_v3": (
        "bailing_moe_v3",
        {**_BAILING, **LATENT, "moe_shared_expert_intermediate_size": 24, "short_conv_kernel_size": 4},
    ),
    "falcon_h1": (
        "falcon_h1",
        {**_MAMBA2, "mamba_d_ssm": 32, "mamba_expand": 1, "mamba_chunk_size": 16, "mlp_expansion_factor": 2},
    ),
    "gear": (
        "gear",
        {
            **SLIDE,
            "layer_types": ["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"],
            "query_pre_attn_scalar": 8,
        },
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
    "kimi_k3": (
        "kimi_k3",
        {
            "text_config": {
                **BASE,
                **_KDA,
                "mla_use_nope": True,
                "attn_res_block_size": 2,
                "activation_situ_beta": 1.0,
                "activation_situ_linear_beta": 1.0,
            }
        },
    ),
    "kimi_linear": ("kimi_linear", _KDA),
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
            **MOE,
            "full_attn_idxs": [1, 3],
            "norm_topk_prob": True,
            "use_expert_bias": True,
            "num_dense_layers": 1,
        },
    ),
    "longcat_flash_ngram": (
        "longcat_flash_ngram",
        {**LONGCAT, "ngram_vocab_size_ratio": 3, "emb_neighbor_num": 4, "emb_split_num": 2, "hidden_size": 48},
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
    "nemotron_h": (
        "nemotron_h",
        {
            **ROUTED,
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
    "qwen3_5": ("qwen3_5", {"text_config": _QWEN35}),
    "qwen3_5_moe": (
        "qwen3_5_moe",
        {"text_config": {**_QWEN35, **MOE, "shared_expert_intermediate_size": 24}},
    ),
    "qwen3_next": (
        "qwen3_next",
        {
            **_DELTA,
            **MOE,
            "decoder_sparse_step": 1,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [0],
            "partial_rotary_factor": 0.5,
            "full_attention_interval": 2,
        },
    ),
    "lfm2-vl": (
        "lfm2-vl",
        {
            "text_config": {
                **BASE,
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
            "attention_window_size": WINDOW,
            "block_types": ["recurrent", "recurrent", "attention"],
            "num_key_value_heads": 1,
        },
    ),
    "rwkv7": (
        "rwkv7",
        {"norm_eps": 1e-5, "a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    ),
}
