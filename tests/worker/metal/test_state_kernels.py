"""Which of kernel and twin runs recurrent layers, that a bad kernel never does, and the rows that they all share."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from tests.worker.metal.state_data import bits, normal, pool_for, rows_of
from worker.metal import gated_delta, mamba2, short_conv, state_twins
from worker.metal.dispatch import choose_kernels
from worker.metal.gated_delta import GatedDelta
from worker.metal.mamba2 import Mamba2
from worker.metal.short_conv import ShortConv
from worker.metal.state_rows import StateRows
from worker.metal.state_self_test import GatedDeltaShape, Mamba2Shape, ShortConvShape

_SHAPES = [
    GatedDeltaShape(1, 2, 64, 32, mx.bfloat16),
    GatedDeltaShape(2, 2, 32, 32, mx.float32, is_by_channel=True),
    Mamba2Shape(2, 1, 32, 64, mx.float16, (0.001, float("inf"))),
    ShortConvShape(24, 4, mx.bfloat16, mx.bfloat16, has_bias=True, has_silu=True),
    ShortConvShape(16, 3, mx.float32, mx.float32, has_bias=False, has_silu=False),
]


@pytest.fixture(scope="module")
def compiled():
    require_toolchain()
    host = MslHost()
    with host.compiling_ahead():
        choose_kernels(_SHAPES, host)


@pytest.mark.usefixtures("compiled")
def test_kernels_that_agree_with_their_twins_run(caplog):
    """A whole chain of launches for each shape of layer."""
    host = MslHost()
    kernels = choose_kernels(_SHAPES, host)
    assert kernels.name == "metal gated_delta, mamba2, short_conv"
    assert kernels.updates_states_in_place
    assert kernels.states.on_metal == {"gated_delta", "mamba2", "short_conv"}
    assert len(host.records) == 8 * len(_SHAPES)
    assert caplog.text == ""


@pytest.mark.usefixtures("compiled")
def test_states_are_updated_in_place_by_kernels_alone(caplog):
    """Two of them write what they may not, here. Twins are no help: they would copy pools and take prefills by tokens.

    A model without such layers needs none of them.
    """
    kernels = choose_kernels(_SHAPES, MslHost(in_place={"cidery_mamba2": ("pool",)}))
    assert kernels.failed == ("gated_delta", "short_conv")
    assert (kernels.name, kernels.updates_states_in_place) == ("mlx", False)
    assert "metal kernel gated_delta is off, plain MLX runs in its place" in caplog.text
    assert "metal kernel short_conv is off, plain MLX runs in its place" in caplog.text
    assert choose_kernels(_SHAPES[-1:], MslHost()).name == "metal short_conv"
    assert choose_kernels([], MslHost()).name == "mlx"


@pytest.mark.parametrize(
    ("module", "source", "defect", "found"),
    [
        (gated_delta, "STEP_SOURCE", ("fresh ? Vec(0.0f) : ", ""), "differs from its twin"),
        (gated_delta, "STEP_SOURCE", ("+ change * product", ""), "differs from its twin"),
        (gated_delta, "CHUNK_SOURCE", ("states[n * LPR] = state[n]", "0"), "from its twin"),
        (gated_delta, "CHUNK_SOURCE", ("lanes *= 2", "lanes *= 4"), "differs from its twin"),
        (mamba2, "STEP_SOURCE", ("+ skip * x", ""), "differs from its twin"),
        (mamba2, "CHUNK_SOURCE", ("begin += TILE", "begin += TILE + 1"), "unwritten-output"),
        (short_conv, "SOURCE", ("end < num_rows", "end <= num_rows"), "out-of-bounds"),
        (short_conv, "SOURCE", ("if (begin == 0)", "if (begin < num_rows)"), "race-device"),
    ],
)
def test_wrong_kernel_is_found_by_the_self_test(monkeypatch, caplog, module, source, defect, found):
    require_toolchain()
    text = getattr(module, source)
    assert defect[0] in text
    monkeypatch.setattr(module, source, text.replace(*defect))
    choose_kernels(_SHAPES, MslHost())
    assert found in caplog.text


def test_dimensions_beyond_a_kernel_run_on_the_twin(caplog):
    shapes = [GatedDeltaShape(1, 1, 48, 32, mx.float32), ShortConvShape(8, 9, mx.float32, mx.float32, False, False)]
    caplog.set_level("INFO")
    assert choose_kernels(shapes, MslHost()).name == "mlx"
    assert "key_dim=48" in caplog.text
    assert "kernel_width=9" in caplog.text


def test_switch_forces_the_twins(monkeypatch):
    monkeypatch.setenv("CIDERY_GDN_LAZY_KERNELS", "0")
    host = MslHost()
    assert choose_kernels(_SHAPES, host).name == "mlx"
    assert host.records == []
    monkeypatch.setenv("CIDERY_GDN_LAZY_KERNELS", "off")
    with pytest.raises(ValueError, match="CIDERY_GDN_LAZY_KERNELS is 'off'; allowed are 0 and 1"):
        choose_kernels(_SHAPES, host)


@pytest.mark.metal
@pytest.mark.skipif(not mx.metal.is_available(), reason="needs an Apple GPU")
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_kernels_agree_with_their_twins_on_this_gpu(dtype):
    """Qwen3-Next, Kimi Linear, Nemotron-H, Falcon-H1 and LFM2, fewer heads."""
    shapes = [
        GatedDeltaShape(2, 4, 128, 128, dtype),
        GatedDeltaShape(4, 4, 128, 128, dtype, is_by_channel=True),
        GatedDeltaShape(2, 2, 256, 64, dtype),
        Mamba2Shape(8, 2, 64, 128, dtype, (0.0, float("inf"))),
        Mamba2Shape(4, 1, 64, 256, dtype, (0.0, float("inf"))),
        ShortConvShape(8192, 4, dtype, dtype, has_bias=False, has_silu=True),
        ShortConvShape(2048, 3, dtype, dtype, has_bias=False, has_silu=False),
    ]
    assert choose_kernels(shapes, mx.fast.metal_kernel).name == "metal gated_delta, mamba2, short_conv"


def test_rows_know_their_tiles():
    rows = rows_of([5, 0, 1, 4])
    assert rows.num_rows == 10
    assert not rows.is_decode
    assert rows.tile_array(4).tolist() == [[0, 0], [0, 4], [2, 0], [3, 0]]
    assert rows.tile_array(4) is rows.tile_array(4)
    assert rows_of([1, 1]).is_decode
    expected = [[0, 5, int(rows.slots[0]), 0], [5, 0, int(rows.slots[1]), 0]]
    assert rows.sequence_array.tolist()[:2] == expected


_CHAIN = st.lists(
    st.lists(
        st.tuples(st.integers(-1, 4), st.sampled_from([0, 1, 1, 2, 9, 33, 40]), st.booleans()),
        min_size=1,
        max_size=4,
        unique_by=lambda sequence: sequence[0],
    ).filter(lambda sequences: any(length for _, length, _ in sequences)),
    min_size=1,
    max_size=5,
)
_SMALL = {
    GatedDelta: GatedDeltaShape(1, 2, 64, 8, mx.float32),
    Mamba2: Mamba2Shape(2, 1, 8, 64, mx.float32, (0.0, 10.0)),
    ShortConv: ShortConvShape(5, 3, mx.float32, mx.float32, has_bias=True, has_silu=True),
}
_TWINS = {GatedDelta: state_twins.gated_delta, Mamba2: state_twins.mamba2, ShortConv: state_twins.short_conv}


@pytest.mark.parametrize("kernel", _SMALL, ids=lambda kernel: kernel.__name__)
@given(chain=_CHAIN)
@settings(max_examples=12, deadline=None)
def test_any_chain_of_launches_is_what_the_twin_makes_of_it(kernel, chain):
    """Slots that begin, go on, rest, are skipped and begin again, in steps of any raggedness, over one pool."""
    require_toolchain()
    shape = _SMALL[kernel]
    launch, twin = kernel(MslHost()), _TWINS[kernel]
    ours, theirs = (normal(1, 5, *shape.pool[0]) for _ in range(2))
    mx.eval(ours, theirs)
    token = None
    for number, sequences in enumerate(chain):
        slots, lengths, fresh = zip(*sequences, strict=True)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        rows = StateRows(offsets, np.array(slots, np.int32), np.array(fresh))
        inputs = shape.inputs(rows.num_rows, number)
        y, token = launch(*inputs, ours, rows, token, **shape.keywords)
        expected, _ = twin(*inputs, theirs, rows, **shape.keywords)
        assert mx.allclose(y, expected, rtol=1e-4, atol=1e-4)
        assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("offsets", "slots", "message"),
    [
        ([0, 1, 2], [3, 3], "each must be there once"),
        ([0, 1, 2], [3, -2], "each must be there once, or be -1"),
        ([1, 2, 3], [0, 1], "begin with 0"),
        ([0, 3, 2], [0, 1], "never fall"),
        ([0, 3], [0, 1], "are needed"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(offsets, slots, message):
    with pytest.raises(ValueError, match=message):
        StateRows(np.array(offsets, np.int32), np.array(slots, np.int32), np.zeros(len(slots), np.bool_))


def _gated_delta(changes):
    rows = rows_of([2])
    arguments = {
        "queries": normal(1, 2, 1, 32),
        "keys": normal(2, 2, 1, 32),
        "values": normal(3, 2, 2, 8),
        "gates": normal(4, 2, 2),
        "betas": normal(5, 2, 2),
        "pool": pool_for(rows, (2, 8, 32)),
    }
    return {**arguments, "rows": rows, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": normal(1, 2, 3, 32)}, "2 value heads can't be shared evenly by 3 key heads"),
        ({"gates": normal(1, 2, 1)}, r"gates have shape \(2, 1\); allowed: \(2, 2\) or \(2, 2, 32\)"),
        ({"pool": mx.zeros((4, 2, 8, 32), mx.float16)}, "states are float32"),
        ({"pool": mx.zeros((4, 2, 32, 8))}, "has states of shape"),
        ({"pool": mx.zeros((1, 2, 8, 32))}, "outside of a pool of 1 states"),
        ({"rows": rows_of([3])}, "there are 2 rows; offsets are for 3"),
    ],
)
@pytest.mark.parametrize("launch", [GatedDelta(MslHost()), state_twins.gated_delta], ids=["kernel", "twin"])
def test_gated_delta_refuses_what_does_not_fit(launch, changes, message):
    with pytest.raises(ValueError, match=message):
        launch(**_gated_delta(changes))


@pytest.mark.parametrize("launch", [Mamba2(MslHost()), state_twins.mamba2], ids=["kernel", "twin"])
def test_mamba2_refuses_what_does_not_fit(launch):
    rows = rows_of([2])
    x, per_head, mix, dt = normal(1, 2, 4, 8), normal(2, 4), normal(3, 2, 2, 32), normal(4, 2, 4)
    pool = pool_for(rows, (4, 8, 32))
    with pytest.raises(ValueError, match="4 heads can't be shared evenly by 3 groups"):
        launch(x, per_head, normal(3, 2, 3, 32), mix, per_head, dt, per_head, pool, rows, time_step_limit=(0, 1))
    with pytest.raises(ValueError, match=r"dt_bias has shape \(3,\); \(4,\) is needed"):
        launch(x, per_head, mix, mix, per_head, dt, normal(2, 3), pool, rows, time_step_limit=(0, 1))
    with pytest.raises(ValueError, match="states are float32"):
        launch(x, per_head, mix, mix, per_head, dt, per_head, pool.astype(mx.bfloat16), rows, time_step_limit=(0, 1))


@pytest.mark.parametrize("launch", [ShortConv(MslHost()), state_twins.short_conv], ids=["kernel", "twin"])
def test_short_conv_refuses_what_does_not_fit(launch):
    rows = rows_of([2])
    inputs, pool = normal(1, 2, 8), pool_for(rows, (3, 8))
    with pytest.raises(ValueError, match=r"weights have shape \(8, 4\); \(8, kernel_width, 1\) is needed"):
        launch(inputs, normal(2, 8, 4), None, pool, rows, silu=True)
    with pytest.raises(ValueError, match=r"bias has shape \(7,\)"):
        launch(inputs, normal(2, 8, 4, 1), normal(3, 7), pool, rows, silu=True)
    with pytest.raises(ValueError, match="has states of shape"):
        launch(inputs, normal(2, 8, 3, 1), None, pool, rows, silu=True)
    with pytest.raises(ValueError, match="float32 is needed"):
        launch(inputs, normal(2, 8, 4, 1), None, pool.astype(mx.float16), rows, silu=True)


def test_view_of_a_pool_is_written_where_the_pool_lies_and_the_token_is_one_zero():
    """Caches of other shapes share a pool's array, and a reader adds the token to its index."""
    arguments = _gated_delta({})
    kept = mx.contiguous(arguments["pool"].reshape(4, -1))
    mx.eval(kept)
    _, token = GatedDelta(MslHost())(**{**arguments, "pool": kept.reshape(4, 2, 8, 32)})
    assert token.tolist() == [0]
    assert token.dtype == mx.int32
    GatedDelta(MslHost())(**arguments)
    assert np.array_equal(bits(kept).reshape(-1), bits(arguments["pool"]).reshape(-1))


def test_dimensions_that_a_kernel_can_not_run_are_refused():
    changes = {name: normal(1, 2, 1, 40) for name in ("queries", "keys")}
    arguments = _gated_delta({**changes, "pool": mx.zeros((4, 2, 8, 40))})
    with pytest.raises(ValueError, match="key_dim 32 to 256 by 32"):
        GatedDelta(MslHost())(**arguments)
    rows = rows_of([2])
    pool = pool_for(rows, (8, 8))
    with pytest.raises(ValueError, match="kernel widths from 2 to 8, not 9"):
        ShortConv(MslHost())(normal(1, 2, 8), normal(2, 8, 9, 1), None, pool, rows, silu=False)
