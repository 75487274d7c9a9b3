"""Rows of quantised pools, bit for bit: what is stored is what `mx.quantize` makes, what is read `mx.dequantize`."""

import mlx.core as mx
import numpy as np
import pytest

from tests.golden.cases import config_of, make_model
from worker import kv_quantization, models
from worker.attention import PagedCache, Step
from worker.batch import Batch, Span
from worker.errors import UnsupportedModelError
from worker.kv_shapes import CacheGroup, LayerShape, Quantization, StateShape
from worker.kv_tensors import KVTensors
from worker.metal import twins
from worker.metal.dispatch import twin_kernels
from worker.metal.kv_pools import arrays_of

_HEADS = 2
_SIZE = 16


def _shape(dtype, bits, group_size, dim=64) -> LayerShape:
    return LayerShape(_HEADS, dim, dtype, value_head_dim=2 * dim, quantization=Quantization(bits, group_size))


def _span(start: int, num_tokens: int, table: list[int]) -> Span:
    return Span([1] * num_tokens, start, table, True, (table,))


# One row alone, a flat prefill that begins and ends within blocks, and token rows of decodes and prefills.
_BATCHES = {
    "one token": [_span(21, 1, [3, 5])],
    "flat": [_span(9, 30, [7, 2, 4])],
    "rows": [_span(16, 1, [3, 5]), _span(0, 1, [9]), _span(30, 20, [6, 1, 8, 10]), _span(0, 16, [11])],
}


def _new(batch: Batch, heads: int, dim: int, dtype) -> mx.array:
    """New rows `[num_tokens, heads, dim]`, some of them all zero or of one sign."""
    rows = mx.random.normal((batch.num_tokens, heads, dim), key=mx.random.key(dim))
    rows[::3] = mx.abs(rows[::3])
    rows[0, 0] = 0.0
    return rows.astype(dtype)


def _as_model_has_it(rows: mx.array, batch: Batch) -> mx.array:
    return rows.swapaxes(0, 1)[None] if batch.is_flat else rows[:, :, None]


def _parts(rows: mx.array, bits: int, group_size: int) -> list[np.ndarray]:
    return [
        np.array(part.astype(mx.float32) if part.dtype != mx.uint32 else part)
        for part in mx.quantize(rows, group_size=group_size, bits=bits)
    ]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(("bits", "group_size"), [(8, 64), (8, 32), (4, 64), (4, 32)])
@pytest.mark.parametrize("name", _BATCHES)
def test_rows_are_stored_and_read_bit_for_bit(name, bits, group_size, dtype):
    shape = _shape(dtype, bits, group_size)
    tensors = KVTensors([shape], groups=[CacheGroup(0, (0,))], num_blocks=[16], block_size=_SIZE)
    batch = Batch(_BATCHES[name], block_size=_SIZE)
    keys, values = _new(batch, _HEADS, 64, dtype), _new(batch, _HEADS, 128, dtype)
    seen = tensors.write(0, _as_model_has_it(keys, batch), _as_model_has_it(values, batch), batch)
    places = [
        (int(block), int(offset)) for block, offset in zip(batch.rows.block_ids, batch.rows.block_offsets, strict=True)
    ]
    index = mx.array([[block * _HEADS + head for head in range(_HEADS)] for block, _ in places])
    stored = tensors.read(0, lambda *pools, after: tuple(array + 0 for pool in pools for array in arrays_of(pool)))
    gathers = tensors.read(0, lambda *pools, after: tuple(twins.gather(pool, index[:, :, None]) for pool in pools))
    for number, (rows, gathered, again) in enumerate(zip((keys, values), gathers, seen, strict=True)):
        expected = _parts(rows, bits, group_size)
        arrays = stored[3 * number : 3 * number + 3]
        for array, part in zip(arrays, expected, strict=True):
            array = np.array(array.astype(mx.float32) if array.dtype != mx.uint32 else array)
            assert np.array_equal(np.stack([array[block, :, offset] for block, offset in places]), part)
            # Nothing else was touched.
            assert np.count_nonzero(array) == np.count_nonzero(part)
        read = mx.dequantize(*mx.quantize(rows, group_size=group_size, bits=bits), group_size=group_size, bits=bits)
        assert read.dtype == dtype
        assert mx.array_equal(again, _as_model_has_it(read, batch))
        assert mx.array_equal(mx.stack([gathered[row, :, offset] for row, (_, offset) in enumerate(places)]), read)


def test_a_first_chunk_attends_to_what_later_ones_will_find():
    """Flat and from the prompt's start, attention doesn't gather: it must see rounded keys all the same."""
    shape = LayerShape(_HEADS, 64, mx.float32, quantization=Quantization(4, 64))
    tensors = KVTensors([shape], groups=[CacheGroup(0, (0,))], num_blocks=[16], block_size=_SIZE)
    step = Step(twin_kernels())
    batch = Batch([_span(0, 20, [3, 4])], block_size=_SIZE)
    assert batch.is_flat
    step.begin(batch, tensors)
    keys, values, queries = (mx.random.normal((1, _HEADS, 20, 64), key=mx.random.key(seed)) for seed in range(3))
    cache = PagedCache(step, 0, shape)
    output = cache.attend(queries, *cache.update_and_fetch(keys, values), 0.125)
    rounded = [
        mx.dequantize(*mx.quantize(each, group_size=64, bits=4), group_size=64, bits=4) for each in (keys, values)
    ]
    expected = mx.fast.scaled_dot_product_attention(queries, *rounded, scale=0.125, mask="causal")
    assert mx.allclose(output, expected, atol=1e-5)
    plain = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.125, mask="causal")
    assert not mx.allclose(output, plain, atol=1e-2)


def test_each_cache_has_the_largest_group_that_its_heads_allow():
    loaded = models.adapt(make_model("qwen3_next"), config_of("qwen3_next"))
    shapes = (LayerShape(2, 128, mx.float32), LayerShape(2, 96, mx.float32, value_head_dim=64), loaded.caches[0])
    assert isinstance(shapes[2], StateShape)
    loaded = models.LoadedModel(**{name: getattr(loaded, name) for name in loaded.__slots__} | {"caches": shapes})
    formats = [getattr(shape, "quantization", None) for shape in kv_quantization.quantise(loaded, 4).caches]
    assert formats == [Quantization(4, 64), Quantization(4, 32), None]
    assert kv_quantization.quantise(loaded, None) is loaded
    with pytest.raises(UnsupportedModelError, match=r"cache 1 has keys of 96 and values of 64 .* groups of 64 do not"):
        kv_quantization.quantise(loaded, 4, 64)
    with pytest.raises(ValueError, match="KV in 5 bits by None"):
        kv_quantization.quantise(loaded, 5)


def test_heads_that_no_group_divides_are_refused_by_name():
    case = "gemma3_text"
    loaded = models.adapt(make_model(case), config_of(case))
    with pytest.raises(UnsupportedModelError, match=r"gemma3_text: cache 0 has keys of 8 .* groups of 64 or 32 do not"):
        kv_quantization.quantise(loaded, 8)
