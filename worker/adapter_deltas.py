"""What an adapter's tensors do to a layer, by kind of layer: shapes checked, and turned for the layer that runs."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from worker.adapter_files import AdapterFiles
from worker.errors import AdapterRefused
from worker.inspection import qualified_name
from worker.registry import TREATMENTS, Treatment

LINEAR = (Linear, QuantizedLinear)
SWITCH = (SwitchLinear, QuantizedSwitchLinear)
EMBEDDING = (Embedding, QuantizedEmbedding)
# The product that `worker.latent` has folded into query and output.
FOLDED_NAME = "kv_b_proj"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one adapter does to one layer. `factor` of DoRA: learned magnitude over the adapted weights' norm."""

    lora_a: mx.array
    lora_b: mx.array
    scale: float
    m: mx.array | None = None
    factor: mx.array | None = None

    @property
    def arrays(self) -> list[mx.array]:
        """All of them."""
        return [array for array in (self.lora_a, self.lora_b, self.m, self.factor) if array is not None]


def delta_of(path: str, module: Any, tensors: dict[str, mx.array], files: AdapterFiles) -> Delta:
    """Shapes are mlx-lm's, by kind of layer. Raises AdapterRefused."""
    rank, name = files.rank, type(module).__name__
    if isinstance(module, SWITCH):
        if files.is_dora:
            raise AdapterRefused(f"{path} is a {name}, for which there is no DoRA")
        experts, outputs, inputs = module.num_experts, module.output_dims, module.input_dims
        wanted: dict[str, tuple[int, ...]] = {"lora_a": (experts, rank, inputs), "lora_b": (experts, outputs, rank)}
    elif isinstance(module, LINEAR):
        outputs, inputs = _dims(module)
        wanted = {"lora_a": (inputs, rank), "lora_b": (rank, outputs), "m": (outputs,)}
    elif isinstance(module, EMBEDDING):
        if files.is_dora and isinstance(module, QuantizedEmbedding):
            raise AdapterRefused(f"{path} is a {name}, for which there is no DoRA")
        num_embeddings, dims = _dims(module)
        wanted = {"lora_a": (num_embeddings, rank), "lora_b": (rank, dims), "m": (num_embeddings,)}
    else:
        raise AdapterRefused(f"{path} is a {name}; adapters are for linear, switch and embedding layers")
    _check(path, tensors, wanted, rank)
    lora_a, lora_b = tensors["lora_a"], tensors["lora_b"]
    if not files.is_dora:
        return Delta(lora_a, lora_b, files.scale)
    weight = _weight(module)
    if isinstance(module, EMBEDDING):
        adapted = weight + (files.scale * lora_a) @ lora_b
    else:
        adapted = weight + (files.scale * lora_b.T) @ lora_a.T
    return Delta(lora_a, lora_b, files.scale, tensors["m"], tensors["m"] / mx.linalg.norm(adapted, axis=1))


def _dims(module: Any) -> tuple[int, int]:
    rows, columns = module.weight.shape
    if isinstance(module, QuantizedLinear | QuantizedEmbedding):
        columns = columns * 32 // module.bits
    return rows, columns


def _weight(module: Any) -> mx.array:
    weight: mx.array = module.weight
    if isinstance(module, QuantizedLinear):
        weight = mx.dequantize(
            weight,
            module.scales,
            module.get("biases"),
            group_size=module.group_size,
            bits=module.bits,
            mode=module.mode,
        )
    return weight


def is_folded(attention: Any) -> bool:
    """Whether `worker.latent` has folded an attention's expanding product away."""
    folded = isinstance(attention, Module) and TREATMENTS.get(qualified_name(type(attention))) is Treatment.FOLDED
    return folded and FOLDED_NAME not in attention


def folded_deltas(
    path: str, attention: Any, tensors: dict[str, mx.array], files: AdapterFiles
) -> list[tuple[Any, Delta]]:
    """Of an expanding product that is folded: what is added to the query's product and to the output's, by head."""
    if files.is_dora:
        raise AdapterRefused(f"{path} is folded into query and output here, for which there is no DoRA")
    num_heads, num_nope, rank = attention.num_heads, attention.qk_nope_head_dim, files.rank
    latent, value = attention.embed_q.weight.shape[1], attention.unembed_out.weight.shape[1]
    _check(path, tensors, {"lora_a": (latent, rank), "lora_b": (rank, num_heads * (num_nope + value))}, rank)
    lora_a = tensors["lora_a"]
    by_head = tensors["lora_b"].reshape(rank, num_heads, num_nope + value).transpose(1, 0, 2)
    into_query = Delta(by_head[..., :num_nope].swapaxes(-1, -2), lora_a.T, files.scale)
    out_of_latent = Delta(lora_a, by_head[..., num_nope:], files.scale)
    return [(attention.embed_q, into_query), (attention.unembed_out, out_of_latent)]


def _check(path: str, tensors: dict[str, mx.array], wanted: dict[str, tuple[int, ...]], rank: int) -> None:
    for leaf in sorted(tensors):
        if tensors[leaf].shape != wanted[leaf]:
            got = f"{path}.{leaf} has shape {tensors[leaf].shape}"
            raise AdapterRefused(f"{got}; with rank {rank} it must be {wanted[leaf]}")
