"""Pools and rows for kernels over recurrent states. Slots of nobody hold NaN, and those of fresh sequences too."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from worker.metal.state_rows import StateRows

SEEDS = (0, 20261)
# Relative to outputs of order 1: the result is rounded once.
TOLERANCE = {mx.float32: 2e-5, mx.float16: 3e-3, mx.bfloat16: 2e-2}


def rows_of(lengths: Sequence[int], *, fresh: Sequence[int] = (), skipped: Sequence[int] = ()) -> StateRows:
    """Sequences of such lengths, in slots that neither begin with 0 nor come in order."""
    num = len(lengths)
    slots = np.random.RandomState(num).permutation(np.arange(1, num + 2))[:num].astype(np.int32)
    slots[list(skipped)] = -1
    is_fresh = np.zeros(num, np.bool_)
    is_fresh[list(fresh)] = True
    return StateRows(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), slots, is_fresh)


def case_id(case: dict[str, Any]) -> str:
    """Readable: `4,2-64,64-float32-rows16,1,37`."""

    def text(value: Any) -> str:
        if isinstance(value, StateRows):
            return f"rows{text(tuple(value.lengths.tolist()))}"
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).removeprefix("mlx.core.")

    return "-".join(map(text, case.values()))


def pool_for(rows: StateRows, state_shape: Sequence[int], dtype: mx.Dtype = mx.float32) -> mx.array:
    """NaN but for the slots of sequences that go on."""
    rng = np.random.RandomState(7)
    pool = np.full((rows.num_sequences + 3, *state_shape), np.nan, np.float32)
    for slot, is_fresh in zip(rows.slots, rows.is_fresh, strict=True):
        if slot >= 0 and not is_fresh:
            pool[slot] = rng.randn(*state_shape) * 0.5
    array = mx.array(pool).astype(dtype)
    mx.eval(array)
    return array


def normal(seed: int, *shape: int, dtype: mx.Dtype = mx.float32, scale: float = 1.0) -> mx.array:
    """Seeded, and exactly what the kernel gets."""
    return mx.array((np.random.RandomState(seed).randn(*shape) * scale).astype(np.float32)).astype(dtype)


def sliced(array: mx.array) -> mx.array:
    """The same content with gaps on every axis, as slices and splits of wider arrays leave them."""
    gaps = mx.full(array.shape, float("nan"), array.dtype)
    wide = mx.stack([mx.concatenate([gaps, array], axis=-1)] * 2, axis=-1)
    mx.eval(wide)
    return wide[..., array.shape[-1] :, 1]


def f64(array: mx.array) -> np.ndarray:
    """For references."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def bits(array: mx.array) -> np.ndarray:
    """To compare exactly, NaN included."""
    return np.array(array.view({4: mx.uint32, 2: mx.uint16}[array.dtype.size]))


def copy(array: mx.array) -> mx.array:
    """With memory of its own."""
    fresh = mx.array(np.array(array.astype(mx.float32))).astype(array.dtype)
    mx.eval(fresh)
    return fresh


def check_states(pool: mx.array, before: mx.array, rows: StateRows, expected: dict[int, np.ndarray], tolerance: float):
    """The slots of `expected` hold it; every other one has the bits that it had."""
    ours, old = bits(pool), bits(before)
    for slot in range(pool.shape[0]):
        if slot in expected:
            assert np.abs(f64(pool[slot]) - expected[slot]).max() < tolerance, f"state in slot {slot}"
        else:
            assert np.array_equal(ours[slot], old[slot]), f"slot {slot} was touched"
