"""How many bytes of a Mac the KV cache may take."""

from cluster.config import KVConfig
from cluster.kv.spec import FullAttentionSpec, KVFormat, LayerSpec
from protos.cidery.worker.v1 import worker_pb2

# Activations of the largest step and MLX's buffer cache, until they are measured by a dry run.
ACTIVATION_BYTES = 512 * 1024 * 1024
# A CPU serves for trying things out beside other programs: take a gigabyte unless told otherwise.
CPU_KV_BYTES = 1024 * 1024 * 1024

_DTYPE_BITS = {"float32": 32, "float16": 16, "bfloat16": 16}


def kv_budget_bytes(described: worker_pb2.Description, config: KVConfig) -> int:
    """What is told, or the allowed share of the working set less weights and activations; may come out negative.

    Raises ValueError for a size that the machine does not have.
    """
    if config.cache_memory_bytes is not None:
        room = described.memory_limit_bytes - described.weights_bytes
        if config.cache_memory_bytes > room:
            raise ValueError(
                f"a KV cache of {config.cache_memory_bytes} bytes does not fit: beside the weights {room} are left"
            )
        return config.cache_memory_bytes
    share = int(described.memory_limit_bytes * config.memory_utilization)
    budget = share - described.weights_bytes - ACTIVATION_BYTES
    return budget if described.is_gpu else min(budget, CPU_KV_BYTES)


def layer_specs(described: worker_pb2.Description) -> list[LayerSpec]:
    """One spec for each KV cache of the model."""
    return [
        FullAttentionSpec(layer.num_kv_heads, layer.head_dim, KVFormat(_DTYPE_BITS[layer.dtype]))
        for layer in described.layers
    ]
