"""What a worker describes becomes what the planner plans with."""

import pytest

from cluster.config import KVConfig
from cluster.kv.planner import KVBudgetTooSmall, kind_name
from cluster.kv.spec import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVFormat,
    MLASpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    StateTensor,
)
from cluster.mac_memory import CPU_KV_BYTES, kv_budget_bytes, kv_format, layer_specs, plan_kv
from protos.cidery.worker.v1 import worker_pb2 as pb

_HEADS = {"num_kv_heads": 2, "head_dim": 8, "value_head_dim": 8, "dtype": "bfloat16"}
_BITS16 = KVFormat(16)


@pytest.mark.parametrize(
    ("layer", "spec"),
    [
        (pb.Layer(kind=pb.LAYER_KIND_FULL_ATTENTION, **_HEADS), FullAttentionSpec(2, 8, _BITS16)),
        (
            pb.Layer(kind=pb.LAYER_KIND_FULL_ATTENTION, **_HEADS | {"value_head_dim": 4, "dtype": "float32"}),
            FullAttentionSpec(2, 8, KVFormat(32), 4),
        ),
        (
            pb.Layer(kind=pb.LAYER_KIND_SLIDING_WINDOW, num_window_tokens=22, **_HEADS),
            SlidingWindowSpec(2, 8, 22, _BITS16),
        ),
        (
            pb.Layer(kind=pb.LAYER_KIND_CHUNKED_LOCAL, num_window_tokens=24, **_HEADS),
            ChunkedLocalSpec(2, 8, 24, _BITS16),
        ),
        (
            pb.Layer(
                kind=pb.LAYER_KIND_LATENT_ATTENTION, num_kv_heads=1, head_dim=16, value_head_dim=4, dtype="float16"
            ),
            MLASpec(16, 4, _BITS16),
        ),
        (
            pb.Layer(
                kind=pb.LAYER_KIND_SLIDING_WINDOW,
                num_window_tokens=22,
                **_HEADS | {"head_dim": 64, "value_head_dim": 64, "kv_bits": 4, "kv_group_size": 32},
            ),
            SlidingWindowSpec(2, 64, 22, KVFormat(4, 32, 4)),
        ),
        (
            pb.Layer(
                kind=pb.LAYER_KIND_LATENT_ATTENTION,
                num_kv_heads=1,
                head_dim=512,
                value_head_dim=64,
                dtype="float32",
                kv_bits=8,
                kv_group_size=64,
            ),
            MLASpec(512, 64, KVFormat(8, 64, 8)),
        ),
        # Keys alone.
        (
            pb.Layer(kind=pb.LAYER_KIND_LATENT_ATTENTION, num_kv_heads=1, head_dim=8, dtype="float16"),
            MLASpec(8, 0, _BITS16),
        ),
        (
            pb.Layer(
                kind=pb.LAYER_KIND_RECURRENT_STATE,
                states=[pb.StateTensor(shape=[3, 5], dtype_bytes=2), pb.StateTensor(shape=[2], dtype_bytes=4)],
            ),
            RecurrentStateSpec("recurrent_state", (StateTensor((3, 5), 2), StateTensor((2,), 4))),
        ),
    ],
)
def test_every_kind_of_cache_is_planned_as_it_is_kept(layer, spec):
    assert layer_specs(pb.Description(layers=[layer])) == [spec]


def test_a_kind_of_a_newer_worker_is_refused():
    with pytest.raises(ValueError, match="kind 0, which this version does not know"):
        layer_specs(pb.Description(layers=[pb.Layer(**_HEADS)]))


def test_format_names_the_types_that_are_stored():
    layers = [pb.Layer(**_HEADS), pb.Layer(**_HEADS | {"dtype": "float32"}), pb.Layer(states=[])]
    assert kv_format(pb.Description(layers=layers)) == "bfloat16+float32"
    assert kv_format(pb.Description(layers=[pb.Layer()])) == "states"
    quantised = pb.Layer(**_HEADS | {"kv_bits": 8, "kv_group_size": 64})
    assert kv_format(pb.Description(layers=[quantised])) == "bfloat16 in 8 bits by 64"


def test_budget_is_what_is_told_or_what_the_machine_has_left():
    described = pb.Description(memory_limit_bytes=10 << 30, weights_bytes=4 << 30, is_gpu=True)
    assert kv_budget_bytes(described, KVConfig(cache_memory_bytes=5 << 30)) == 5 << 30
    described.activation_bytes = 1 << 30
    taken = f"weights of {4 << 30}, steps of {1 << 30} and adapters of {1 << 30} bytes"
    with pytest.raises(ValueError, match=f"{taken} {4 << 30} are left"):
        kv_budget_bytes(described, KVConfig(cache_memory_bytes=5 << 30, adapter_memory_bytes=1 << 30))
    without = KVConfig(memory_utilization=0.75, adapter_memory_bytes=0)
    assert kv_budget_bytes(described, without) == int(2.5 * 2**30)
    assert kv_budget_bytes(described, KVConfig(memory_utilization=0.75, adapter_memory_bytes=1 << 30)) == 3 << 29
    described.is_gpu = False
    assert kv_budget_bytes(described, KVConfig()) == CPU_KV_BYTES


@pytest.mark.parametrize(
    ("enable_hybrid", "names"), [(True, ["full-attention", "window"]), (False, ["full-attention"])]
)
def test_without_the_hybrid_manager_windows_keep_everything(enable_hybrid, names):
    window = pb.Layer(kind=pb.LAYER_KIND_SLIDING_WINDOW, num_window_tokens=64, **_HEADS)
    layers = [pb.Layer(kind=pb.LAYER_KIND_FULL_ATTENTION, **_HEADS), window]
    described = pb.Description(layers=layers, memory_limit_bytes=1 << 30)
    config = KVConfig(cache_memory_bytes=1 << 20, enable_hybrid=enable_hybrid)
    layout = plan_kv(described, config, max_model_len=128, max_in_flight_tokens=32)
    assert [kind_name(group.spec) for group in layout.groups] == names


def test_a_budget_without_room_says_what_took_it():
    layers = [pb.Layer(kind=pb.LAYER_KIND_FULL_ATTENTION, **_HEADS)]
    described = pb.Description(
        layers=layers, memory_limit_bytes=1 << 20, weights_bytes=1 << 19, activation_bytes=1 << 19, is_gpu=True
    )
    message = r"weights of 524288, steps of 524288 and adapters of 7 bytes leave of 92% of 1048576 bytes: a smaller"
    with pytest.raises(KVBudgetTooSmall, match=message):
        plan_kv(described, KVConfig(adapter_memory_bytes=7), max_model_len=128, max_in_flight_tokens=32)
    described.activation_bytes -= 16
    with pytest.raises(KVBudgetTooSmall) as told:
        plan_kv(
            described,
            KVConfig(cache_memory_bytes=16, adapter_memory_bytes=0),
            max_model_len=128,
            max_in_flight_tokens=32,
        )
    assert "steps of" not in str(told.value)
