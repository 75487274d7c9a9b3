"""All families of the sweep as tiny models of random weights, and why the others can't be in it."""

import importlib
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_map

from tests.golden.hybrid_families import HYBRID_CASES, hybrid_config
from tests.worker import families

CASES = (*families.CASES, *HYBRID_CASES)

# Modules of mlx_lm.models that can't be run here, or by nobody, and why.
NOT_RUN = {
    "bitnet": "its linear layers are Metal kernels without a CPU path",
    "muse_spark": "its rotary embedding is a Metal kernel without a CPU path",
    "olmo": "needs the package ai2-olmo",
    "phi3small": "its block-sparse attention ends this process on a CPU",
    "plamo3": "mlx-lm masks prefill with a window one token longer than the one it decodes with",
    "deepseek_v41": "a cache class of its own, without one position for each sequence",
    "prism_hadamard_qwen35": "needs a packed checkpoint",
}

# One of each kind of layer and each way to run it: what every run of the tests takes.
REPRESENTATIVES = (
    "llama tied",
    "gpt2",
    "qwen3_moe",
    "openelm",
    "phixtral",
    "gemma3_text",
    "gemma4_text with shared layers",
    "gemma2",
    "gpt_oss",
    "llama4",
    "mimo_v2_flash",
    "deepseek_v3",
    "deepseek_v2",
    "deepseek_v32",
    "kimi_linear",
    "qwen3_next",
    "nemotron_h",
    "falcon_h1",
    "lfm2",
    "recurrent_gemma",
    "rwkv7",
    "bailing_moe_linear",
    "longcat_flash_ngram",
    "jamba",
    "baichuan_m1",
    "mamba",
)


def module_of(case: str) -> str:
    """The module of mlx_lm.models."""
    return (HYBRID_CASES[case] if case in HYBRID_CASES else families.CASES[case])[0]


def config_of(case: str) -> dict[str, Any]:
    """The whole config."""
    return hybrid_config(case) if case in HYBRID_CASES else families.config_of(case)


def make_model(case: str, *, is_tied: bool = False, config: dict[str, Any] | None = None) -> Module:
    """A random float32 model, wide enough in its weights that its logits are spread."""
    module = importlib.import_module(f"mlx_lm.models.{module_of(case)}")
    mx.random.seed(1)
    config = dict(config or config_of(case))
    if is_tied:
        config |= {"tie_word_embeddings": True}
        if "text_config" in config:
            config["text_config"] = config["text_config"] | {"tie_word_embeddings": True}
    model = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    model.set_dtype(mx.float32)
    # Biases and norms start as zeros and ones: noise on everything makes a lost one visible.
    model.update(tree_map(_noisy, model.parameters()))
    mx.eval(model.parameters())
    return model


def _noisy(weight: mx.array) -> mx.array:
    return weight + 0.1 * mx.random.normal(weight.shape) if weight.dtype == mx.float32 else weight
