"""What a loaded model asks of kernels: found by running a few tokens through it, watched, not from names or configs.

The tokens go through the engine in plain MLX, but for recurrent layers that may run over slots: those run on the
kernels' twins, so that their shapes are seen too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx

from cluster.kv.hashing import HASH_BYTES
from protos.cidery.worker.v1 import worker_pb2 as pb
from worker.attention import PagedCache
from worker.engine import Engine
from worker.kv_shapes import LayerShape, Quantization, Reach, ReachKind, StateShape
from worker.metal import rope, state_twins
from worker.metal.decode_checks import LatentNeeds
from worker.metal.dispatch import Turn, twin_kernels
from worker.metal.rope import RopeOptions
from worker.metal.self_test import AttentionNeeds, RopeNeeds
from worker.metal.state_kernels import SHAPES, StateKernels
from worker.metal.state_rows import StateRows
from worker.metal.state_self_test import GatedDeltaShape, Mamba2Shape, ShortConvShape, StateLayerShape
from worker.models import Layout, LoadedModel
from worker.odd_attention import PLAIN, Extras

_NUM_TOKENS = 4


@dataclass
class _Seen:
    """Needs in the order in which they were found, each once; and how many state tensors kernels were given."""

    needs: dict[object, None] = field(default_factory=dict)
    num_states: int = 0

    def add_state(self, shape: StateLayerShape) -> None:
        """One launch over one state tensor."""
        self.needs[shape] = None
        self.num_states += 1


def needs_of(loaded: LoadedModel, block_size: int) -> list[object]:
    """Needs of all layers that kernels could serve, each kind once; none of a model that runs densely."""
    if loaded.layout is Layout.DENSE:
        return []
    seen = _Seen()
    states = [shape for shape in loaded.caches if isinstance(shape, StateShape)]
    kernels = twin_kernels()
    if states and loaded.runs_over_slots:
        kernels = replace(kernels, states=_watched_twins(seen), updates_states_in_place=True)
    if loaded.fuses_rope:
        kernels = replace(kernels, rope=_watched_rope(seen))
    engine = Engine(loaded, kernels, memory_limit_bytes=0)
    for leaf in engine.caches.leaves:
        if isinstance(leaf, PagedCache):
            _watch(leaf, seen, block_size)
    _run(engine, block_size)
    if seen.num_states == sum(len(shape.shapes) for shape in states):
        return list(seen.needs)
    # Some state stays with mlx-lm, and so must all of the model's.
    return [need for need in seen.needs if not isinstance(need, tuple(SHAPES.values()))]


def _run(engine: Engine, block_size: int) -> None:
    """A step of two sequences that begin: in token rows, and with a state each."""
    layers = engine.describe().layers
    kinds = [[n for n, layer in enumerate(layers) if bool(layer.states) is has_states] for has_states in (False, True)]
    configure = pb.Configure(block_size=block_size, root_hash=bytes(HASH_BYTES))
    for pool, members in enumerate(filter(None, kinds)):
        configure.groups.add(pool=pool, layers=members)
        configure.num_blocks.append(3)
    engine.configure(configure)
    plan = pb.StepPlan()
    for seq_id in (1, 2):
        plan.new_sequences.add(seq_id=seq_id, token_ids=[0] * _NUM_TOKENS)
        tables = [pb.GroupBlocks(group=group, block_ids=[seq_id]) for group in range(len(configure.groups))]
        plan.slices.add(seq_id=seq_id, num_tokens=_NUM_TOKENS, new_blocks=tables)
    engine.execute(plan)
    engine.reset()


def _watched_rope(seen: _Seen) -> Turn:
    """The twin of the fused rotary embedding, which notes what it is given."""

    def turn(queries: mx.array, keys: mx.array, positions: mx.array, options: RopeOptions) -> tuple[mx.array, mx.array]:
        (_, num_heads, head_dim), num_kv_heads = queries.shape, keys.shape[1]
        has_freqs = options.freqs is not None
        need = RopeNeeds(
            *(num_heads, num_kv_heads, head_dim, queries.dtype),
            *(options.dims, options.traditional, has_freqs),
        )
        seen.needs[need] = None
        return rope.twin(queries, keys, positions, options)

    return turn


def _watch(cache: PagedCache, seen: _Seen, block_size: int) -> None:
    """Note what an attention cache is asked for."""
    shape, attend, attend_latent = cache.shape, cache.attend, cache.attend_latent

    def noted(queries: mx.array, keys: Any, values: Any, scale: float, extras: Extras = PLAIN) -> mx.array:
        seen.needs[_attention_needs(shape, queries.shape[1], extras, block_size)] = None
        return attend(queries, keys, values, scale, extras)

    def noted_latent(queries: mx.array, rotary_queries: mx.array, scale: float) -> mx.array:
        stored = shape.quantization or Quantization(0, 32)
        seen.needs[
            LatentNeeds(
                *(queries.shape[1], shape.head_dim, shape.value_head_dim, shape.dtype),
                *(block_size, stored.bits, stored.group_size),
            )
        ] = None
        return attend_latent(queries, rotary_queries, scale)

    cache.attend = noted  # type: ignore[method-assign]
    cache.attend_latent = noted_latent  # type: ignore[method-assign]


def _attention_needs(shape: LayerShape, num_heads: int, extras: Extras, block_size: int) -> AttentionNeeds:
    stored = shape.quantization or Quantization(0, 32)
    return AttentionNeeds(
        num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.dtype,
        block_size,
        window=_size(shape.reach, ReachKind.WINDOW),
        chunk=_size(shape.reach, ReachKind.CHUNK),
        softcap=extras.soft_cap or 0.0,
        has_sinks=extras.sinks is not None,
        bits=stored.bits,
        group_size=stored.group_size,
        value_dim=shape.value_head_dim,
    )


def _size(reach: Reach, kind: ReachKind) -> int:
    return reach.size if reach.kind is kind else 0


def _watched_twins(seen: _Seen) -> StateKernels:
    """The twins of the kernels over states, which note what they are given."""

    def gated_delta(queries: mx.array, keys: mx.array, values: mx.array, gates: mx.array, *rest: Any) -> Any:
        (_, key_heads, key_dim), (_, value_heads, value_dim) = queries.shape, values.shape
        seen.add_state(
            GatedDeltaShape(key_heads, value_heads, key_dim, value_dim, queries.dtype, is_by_channel=gates.ndim == 3)
        )
        return state_twins.gated_delta(queries, keys, values, gates, *rest)

    def mamba2(x: mx.array, a_log: mx.array, b: mx.array, *rest: Any, time_step_limit: tuple[float, float]) -> Any:
        (_, heads, head_dim), (_, groups, state_dim) = x.shape, b.shape
        seen.add_state(Mamba2Shape(heads, groups, head_dim, state_dim, x.dtype, time_step_limit))
        return state_twins.mamba2(x, a_log, b, *rest, time_step_limit=time_step_limit)

    def short_conv(
        inputs: mx.array,
        weights: mx.array,
        bias: mx.array | None,
        pool: mx.array,
        rows: StateRows,
        after: mx.array | None,
        *,
        silu: bool,
    ) -> Any:
        channels, width, _ = weights.shape
        seen.add_state(ShortConvShape(channels, width, inputs.dtype, pool.dtype, bias is not None, silu))
        return state_twins.short_conv(inputs, weights, bias, pool, rows, after, silu=silu)

    launches: list[Callable[..., Any]] = [gated_delta, mamba2, short_conv]
    return StateKernels(frozenset(SHAPES), *launches)
