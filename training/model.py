"""The shape of the bundled model and the folder format that mlx-lm loads."""

import json
from pathlib import Path
from typing import Final, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from training.tokenizer import CONTEXT_TOKENS, END, PAD, VOCAB_SIZE

# Five narrow layers: recalling earlier turns needs depth more than width. 4 query heads share 2
# key/value heads of 32, a size that all paged kernels support.
CONFIG: Final[dict[str, object]] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "intermediate_size": 352,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT_TOKENS,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
}


def build_model() -> qwen3.Model:
    """Make the model with fresh weights, drawn from MLX's global random state."""
    args: qwen3.ModelArgs = qwen3.ModelArgs.from_dict(CONFIG)  # type: ignore[no-untyped-call]
    model = qwen3.Model(args)
    mx.eval(model.parameters())
    return model


def count_parameters(model: qwen3.Model) -> int:
    """Count weights; the tied output head counts once."""
    return sum(weight.size for weight in named_arrays(model.parameters()).values())


def named_arrays(tree: object) -> dict[str, mx.array]:
    """Flatten a tree of arrays to dotted names."""
    return dict(cast(list[tuple[str, mx.array]], tree_flatten(tree)))


def save_model(model: qwen3.Model, folder: Path, token_ids: dict[str, int]) -> None:
    """Write the weights in bfloat16 and both configs."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.astype(mx.bfloat16) for name, weight in named_arrays(model.parameters()).items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    ids = {"eos_token_id": token_ids[END], "pad_token_id": token_ids[PAD]}
    (folder / "config.json").write_text(json.dumps({**CONFIG, **ids}, indent=2) + "\n")
    generation = {"temperature": 0.0, "do_sample": False, **ids}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
