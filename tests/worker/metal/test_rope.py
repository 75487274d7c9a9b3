"""Rotary embedding of packed rows: the kernel on the harness and its twin, against float64."""

import mlx.core as mx
import numpy as np
import pytest

from tests.msl_host.host import MslHost
from tests.msl_host.require import require_toolchain
from tests.worker.metal.decode_cases import HEAD_DIMS
from worker.metal.rope import Rope, RopeOptions, twin

_SEEDS = (0, 20261)
_F32, _F16, _BF16 = mx.float32, mx.float16, mx.bfloat16
_TOLERANCE = {_F32: 2e-6, _F16: 2e-3, _BF16: 1.6e-2}
_FREQS = np.array([1.0, 3.5, 17.0, 400.0, 9000.0, 1e5, 3.0, 2.0], np.float32)
_POSITIONS = (0, 1, 77, 5, 5, 1000, 32768)

# Type, head_dim, heads, KV heads, options; at the end each head size in each type.
CASES = [
    (_F32, 64, 3, 1, {"dims": 64}),
    (_F16, 80, 4, 4, {"dims": 32, "traditional": True}),
    (_BF16, 128, 8, 2, {"dims": 128, "base": 1e6, "scale": 0.25}),
    (_F32, 64, 2, 2, {"dims": 16, "base": None, "freqs": _FREQS}),
    (_F16, 112, 7, 1, {"dims": 16, "base": None, "freqs": _FREQS, "traditional": True, "scale": 2.0}),
    (_BF16, 512, 2, 1, {"dims": 2, "traditional": True}),
    *((dtype, head_dim, 2, 1, {"dims": head_dim}) for head_dim in HEAD_DIMS for dtype in (_F32, _F16, _BF16)),
]


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    require_toolchain()
    host = MslHost()
    with host.compiling_ahead():
        for case in CASES:
            for positions in (_POSITIONS, (4095,)):
                _run(Rope(host), positions, *case)


def _options(options) -> RopeOptions:
    return RopeOptions(**{key: mx.array(x) if isinstance(x, np.ndarray) else x for key, x in options.items()})


def _run(rope, positions, dtype, head_dim, heads, kv_heads, options):
    """What came out, and what should have: queries and keys."""
    shapes = (heads, len(positions), head_dim), (len(positions), kv_heads, head_dim)
    queries, keys = (
        mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype) for seed, shape in enumerate(shapes)
    )
    queries = queries.swapaxes(0, 1)
    ours = rope(queries, keys, mx.array(positions, mx.int32), _options(options))
    return ours, [_reference(rows, positions, **options) for rows in (queries, keys)]


def _reference(rows, positions, dims, traditional=False, base=10000.0, scale=1.0, freqs=None):
    x = np.array(rows.astype(mx.float32)).astype(np.float64)
    periods = base ** (np.arange(dims // 2) * 2 / dims) if freqs is None else freqs.astype(np.float64)
    out = x.copy()
    for row, position in enumerate(positions):
        for pair, period in enumerate(periods):
            at = [2 * pair, 2 * pair + 1] if traditional else [pair, pair + dims // 2]
            turn = np.exp(1j * position * scale / period) * (x[row, :, at[0]] + 1j * x[row, :, at[1]])
            out[row, :, at[0]], out[row, :, at[1]] = turn.real, turn.imag
    return out


@pytest.mark.parametrize("positions", [_POSITIONS, (4095,)], ids=["many", "one"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}".removeprefix("mlx.core."))
def test_kernel_and_twin_turn_each_row_by_its_position(case, positions):
    ours, expected = _run(Rope(MslHost(seeds=_SEEDS)), positions, *case)
    twins, _ = _run(twin, positions, *case)
    # An angle is a float32, so it is off by up to 2^-24 of itself, by three roundings.
    slack = np.array(positions)[:, None, None] * case[4].get("scale", 1.0) * 3 * 2**-24 * 4
    for result in (ours, twins):
        for got, want in zip(result, expected, strict=True):
            error = np.abs(np.array(got.astype(mx.float32)) - want)
            assert got.shape == want.shape
            assert got.dtype == case[0]
            assert (error <= _TOLERANCE[case[0]] * 4 + slack).all()


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("strided", [0, 1], ids=["queries", "keys"])
def test_rows_are_read_by_each_of_their_strides(strided, axis):
    """NaN lies in the gaps along one axis."""
    inputs = [mx.random.normal((3, heads, 64), key=mx.random.key(heads)) for heads in (4, 2)]
    positions, options = mx.array([3, 8, 900], mx.int32), RopeOptions(64)
    expected = Rope(MslHost())(*inputs, positions, options)
    wide = mx.stack([inputs[strided], mx.full(inputs[strided].shape, float("nan"))], axis=axis + 1)
    mx.eval(wide)
    inputs[strided] = wide[(slice(None),) * (axis + 1) + (0,)]
    for ours, want in zip(Rope(MslHost())(*inputs, positions, options), expected, strict=True):
        assert mx.array_equal(ours, want)


def test_elements_beyond_dims_stay_as_they_are():
    rows = mx.random.normal((2, 3, 64), key=mx.random.key(0))
    ours, _ = Rope(MslHost())(rows, rows, mx.array([7, 9], mx.int32), RopeOptions(16))
    assert mx.array_equal(ours[..., 16:], rows[..., 16:])
    assert not mx.array_equal(ours[..., :16], rows[..., :16])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dims": 7}, "dims 7"),
        ({"dims": 0}, "dims 0"),
        ({"dims": 8, "base": None}, "one of base and freqs"),
        ({"dims": 8, "base": None, "freqs": mx.zeros(3)}, "4 pairs"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RopeOptions(**options)


def test_inputs_that_do_not_go_together_are_refused():
    queries, positions = mx.zeros((2, 4, 64)), mx.array([0, 1], mx.int32)
    for run in (Rope(MslHost()), twin):
        with pytest.raises(ValueError, match="do not go with queries"):
            run(queries, mx.zeros((2, 4, 32)), positions, RopeOptions(32))
        with pytest.raises(ValueError, match="positions"):
            run(queries, queries, positions[:1], RopeOptions(32))
        with pytest.raises(ValueError, match="dims 128"):
            run(queries, queries, positions, RopeOptions(128))
