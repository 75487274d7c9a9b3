"""How many bytes of a Mac the KV cache may take."""

from cluster.config import KVConfig
from cluster.kv.layout import KVLayout
from cluster.kv.planner import KVBudgetTooSmall, plan_layout
from cluster.kv.spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVFormat,
    LayerSpec,
    MLASpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    StateTensor,
)
from protos.cidery.worker.v1 import worker_pb2

# A CPU serves for trying things out beside other programs: take a gigabyte unless told otherwise.
CPU_KV_BYTES = 1024 * 1024 * 1024

_DTYPE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}


def kv_budget_bytes(described: worker_pb2.Description, config: KVConfig) -> int:
    """What is told, or the allowed share of the working set less weights, adapters and activations; may be negative.

    MLX's buffers of freed arrays don't count: it gives them back before it exceeds its limit. Raises ValueError for a
    size that the machine does not have.
    """
    taken = described.weights_bytes + described.activation_bytes + config.adapter_memory_bytes
    if config.cache_memory_bytes is not None:
        room = described.memory_limit_bytes - taken
        if config.cache_memory_bytes > room:
            asked = f"a KV cache of {config.cache_memory_bytes} bytes"
            raise ValueError(f"{asked} does not fit: beside {_taken(described, config)} {room} are left")
        return config.cache_memory_bytes
    budget = int(described.memory_limit_bytes * config.memory_utilization) - taken
    return budget if described.is_gpu else min(budget, CPU_KV_BYTES)


def layer_specs(described: worker_pb2.Description) -> list[LayerSpec]:
    """One spec for each KV cache of the model, as the worker found it."""
    return [_spec(layer) for layer in described.layers]


def plan_kv(
    described: worker_pb2.Description, config: KVConfig, *, max_model_len: int, max_in_flight_tokens: int
) -> KVLayout:
    """The layout of a Mac's KV memory. Raises what the planner raises."""
    try:
        return plan_layout(
            layer_specs(described),
            kv_budget_bytes=kv_budget_bytes(described, config),
            max_model_len=max_model_len,
            block_size=config.block_size_tokens,
            max_in_flight_tokens=max_in_flight_tokens,
            hybrid=config.enable_hybrid,
        )
    except KVBudgetTooSmall as error:
        if config.cache_memory_bytes is not None:
            raise
        of = f"{config.memory_utilization:.0%} of {described.memory_limit_bytes} bytes"
        raise KVBudgetTooSmall(
            f"{error}. The budget is what {_taken(described, config)} leave of {of}: a smaller "
            "max_num_batched_tokens or max_num_seqs makes steps smaller"
        ) from error


def _taken(described: worker_pb2.Description, config: KVConfig) -> str:
    others = f"weights of {described.weights_bytes}, steps of {described.activation_bytes}"
    return f"{others} and adapters of {config.adapter_memory_bytes} bytes"


def kv_format(described: worker_pb2.Description) -> str:
    """Names the type of what is cached: Macs that store it otherwise have other blocks."""
    return "+".join(sorted({_stored_as(layer) for layer in described.layers if layer.dtype})) or "states"


def _stored_as(layer: worker_pb2.Layer) -> str:
    return f"{layer.dtype} in {layer.kv_bits} bits by {layer.kv_group_size}" if layer.kv_bits else layer.dtype


def _spec(layer: worker_pb2.Layer) -> LayerSpec:
    if layer.kind == worker_pb2.LAYER_KIND_RECURRENT_STATE:
        tensors = tuple(StateTensor(tuple(tensor.shape), tensor.dtype_bytes) for tensor in layer.states)
        return RecurrentStateSpec("recurrent_state", tensors)
    heads, dim, value_dim = layer.num_kv_heads, layer.head_dim, layer.value_head_dim
    stored = KVFormat(_DTYPE_BITS[layer.dtype])
    if layer.kv_bits:
        stored = KVFormat(layer.kv_bits, layer.kv_group_size, 2 * _DTYPE_BITS[layer.dtype] // 8)
    if layer.kind == worker_pb2.LAYER_KIND_LATENT_ATTENTION:
        return MLASpec(heads * dim, heads * value_dim, stored)
    value_head_dim = None if value_dim == dim else value_dim
    if layer.kind == worker_pb2.LAYER_KIND_SLIDING_WINDOW:
        return SlidingWindowSpec(heads, dim, layer.num_window_tokens, stored, value_head_dim)
    if layer.kind == worker_pb2.LAYER_KIND_CHUNKED_LOCAL:
        return ChunkedLocalSpec(heads, dim, layer.num_window_tokens, stored, value_head_dim)
    if layer.kind == worker_pb2.LAYER_KIND_FULL_ATTENTION:
        return FullAttentionSpec(heads, dim, stored, value_head_dim)
    raise ValueError(f"the worker describes a cache of kind {layer.kind}, which this version does not know")
