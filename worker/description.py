"""What the worker tells of its model's caches, and the check of the layout that the manager makes of it."""

from collections.abc import Sequence

import mlx.core as mx

from cluster.kv.hashing import HASH_BYTES
from protos.cidery.worker.v1 import worker_pb2 as pb
from worker.errors import ProtocolError
from worker.kv_shapes import FULL_REACH, CacheGroup, CacheShape, LayerShape, Quantization, ReachKind, StateShape
from worker.sequences import TableLayout

_DTYPE_NAMES = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}
_KINDS = {
    ReachKind.FULL: pb.LAYER_KIND_FULL_ATTENTION,
    ReachKind.WINDOW: pb.LAYER_KIND_SLIDING_WINDOW,
    ReachKind.CHUNK: pb.LAYER_KIND_CHUNKED_LOCAL,
}


def of_cache(shape: CacheShape) -> pb.Layer:
    """One cache as the manager plans with it."""
    if isinstance(shape, StateShape):
        return pb.Layer(
            kind=pb.LAYER_KIND_RECURRENT_STATE,
            states=[
                pb.StateTensor(shape=tensor, dtype_bytes=dtype.size)
                for tensor, dtype in zip(shape.shapes, shape.dtypes, strict=True)
            ],
        )
    is_latent = shape.is_latent or not shape.value_head_dim
    stored = shape.quantization or Quantization(0, 0)
    return pb.Layer(
        kind=pb.LAYER_KIND_LATENT_ATTENTION if is_latent else _KINDS[shape.reach.kind],
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        value_head_dim=shape.value_head_dim,
        dtype=_DTYPE_NAMES[shape.dtype],
        num_window_tokens=shape.reach.size,
        kv_bits=stored.bits,
        kv_group_size=stored.group_size,
    )


def checked_groups(message: pb.Configure, caches: Sequence[CacheShape]) -> list[CacheGroup]:
    """The manager's groups. Raises ProtocolError for a layout that these caches can't have."""
    if message.block_size < 1:
        raise ProtocolError(f"block_size is {message.block_size}; at least 1 is needed")
    if len(message.root_hash) != HASH_BYTES:
        raise ProtocolError(f"root_hash has {len(message.root_hash)} bytes; {HASH_BYTES} are needed")
    for pool, num_blocks in enumerate(message.num_blocks):
        if num_blocks < 1:
            raise ProtocolError(f"num_blocks of pool {pool} is {num_blocks}; at least 1 is needed: the null block")
    placed = sorted(cache for group in message.groups for cache in group.layers)
    if placed != list(range(len(caches))):
        raise ProtocolError(f"the groups have the caches {placed}; each of the model's {len(caches)} belongs in one")
    for number, group in enumerate(message.groups):
        if group.pool >= len(message.num_blocks):
            raise ProtocolError(f"group {number} is in pool {group.pool}; there are {len(message.num_blocks)}")
        kinds = {type(caches[cache]) for cache in group.layers}
        if len(kinds) != 1:
            raise ProtocolError(f"group {number} mixes recurrent states and attention, or is empty")
    return [CacheGroup(group.pool, tuple(group.layers)) for group in message.groups]


def table_layout(caches: Sequence[CacheShape], groups: Sequence[CacheGroup], block_size: int) -> TableLayout:
    """What a sequence's block tables are like."""
    firsts = [caches[group.caches[0]] for group in groups]
    full = [n for n, shape in enumerate(firsts) if isinstance(shape, LayerShape) and shape.reach == FULL_REACH]
    return TableLayout(block_size, tuple(isinstance(shape, StateShape) for shape in firsts), full[0] if full else None)
