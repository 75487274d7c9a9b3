"""The two models of the serving benchmark, made on the spot in float32: the bundled one, and a random larger one.

Both must generate exactly `max_tokens` on every server without any server's own option. Therefore the copies name no
end-of-sequence token, and the output projection is a matrix of its own, in which the rows of tokens that must not
appear are zero: special tokens, and in the random model everything that is no
plain word. Plain words tokenise back to themselves, so a random answer that is fed back is found in a prefix cache,
as a real model's would be.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

# 39 M parameters with the bundled tokenizer.
LARGE = {
    "hidden_size": 512,
    "num_hidden_layers": 12,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
}


def make_tiny(bundled: Path, folder: Path) -> int:
    """A float32 copy of the bundled model; returns its number of parameters."""
    import mlx.core as mx

    weights = {name: array.astype(mx.float32) for name, array in mx.load(str(bundled / "model.safetensors")).items()}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    tokenizer = Tokenizer.from_file(str(bundled / "tokenizer.json"))
    special = {id_ for id_, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    allowed = set(range(tokenizer.get_vocab_size())) - special
    return _write(bundled, folder, _config(bundled), weights, allowed)


def make_large(bundled: Path, folder: Path, seed: int) -> int:
    """A random Qwen3 with the bundled model's tokenizer; returns its number of parameters."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.qwen3 import Model, ModelArgs

    config = _config(bundled) | LARGE
    mx.random.seed(seed)
    # The layers' own initial values: normal with 1/sqrt(width), uniform within 1/sqrt(inputs).
    weights = dict(tree_flatten(Model(ModelArgs.from_dict(config)).parameters()))
    words = word_tokens(Tokenizer.from_file(str(bundled / "tokenizer.json")))
    return _write(bundled, folder, config, weights, set(words.values()))


def word_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Tokens that are a space and a plain word; text made of them has as many tokens as words."""
    vocabulary = tokenizer.get_vocab().items()
    return {token[1:]: id_ for token, id_ in sorted(vocabulary) if re.fullmatch("Ġ[A-Za-z]{2,}", token)}


def _config(bundled: Path) -> dict[str, Any]:
    config = json.loads((bundled / "config.json").read_text())
    for unwanted in ("quantization", "quantization_config"):
        config.pop(unwanted, None)
    config.pop("eos_token_id", None)
    return dict(config) | {"torch_dtype": "float32", "tie_word_embeddings": False}


def _write(bundled: Path, folder: Path, config: dict[str, Any], weights: dict[str, Any], allowed: set[int]) -> int:
    import mlx.core as mx

    folder.mkdir(parents=True)
    rows = mx.array([[float(row in allowed)] for row in range(config["vocab_size"])])
    weights = weights | {"lm_head.weight": weights["lm_head.weight"] * rows}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "do_sample": False}))
    shutil.copy(bundled / "tokenizer.json", folder)
    tokenizer_config = json.loads((bundled / "tokenizer_config.json").read_text())
    # mlx-lm ends at the tokenizer's end token too.
    tokenizer_config.pop("eos_token", None)
    tokenizer_config["model_max_length"] = config["max_position_embeddings"]
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    return sum(array.size for array in weights.values())
