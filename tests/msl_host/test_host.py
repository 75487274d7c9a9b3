"""The harness as a user meets it: arrays, schedules, counters, texts."""

import re

import mlx.core as mx
import numpy as np
import pytest

from tests.msl_host.arrays import SparsePool
from tests.msl_host.errors import KernelError
from tests.msl_host.host import MslHost

_COPY = "uint i = thread_position_in_grid.x; o[i] = a[i];"


def _copy(host, value, dtype, *, source=_COPY, size=64, threads=32, template=(), **kernel):
    made = host(name="copy", input_names=["a"], output_names=["o"], source=source, **kernel)
    (out,) = made(
        inputs=[value],
        output_shapes=[(size,)],
        output_dtypes=[dtype],
        grid=(size, 1, 1),
        threadgroup=(threads, 1, 1),
        template=list(template),
    )
    return out


@pytest.mark.parametrize(
    "dtype",
    [
        *(mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64),
        *(mx.float16, mx.bfloat16, mx.float32),
    ],
)
def test_every_dtype_goes_in_and_out(dtype):
    value = (mx.arange(64) % 2 if dtype == mx.bool_ else mx.arange(64)).astype(dtype)
    out = _copy(MslHost(), value, dtype)
    assert out.dtype == dtype
    assert mx.array_equal(out, value)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_rounds_as_mlx_does(dtype):
    values = mx.random.normal((4096,), key=mx.random.key(0)) * 100
    special = mx.array([float("inf"), float("-inf"), 0.0, -0.0, 1e-40, 3.3e38, 65519.0, 65520.0])
    values = mx.concatenate([values, special, mx.array([1.00390625, 1.01171875] * 4)])
    source = "uint i = thread_position_in_grid.x; o[i] = T(a[i]);"
    out = _copy(MslHost(), values, dtype, source=source, size=values.size, threads=8, template=[("T", dtype)])
    assert mx.array_equal(out.view(mx.uint16), values.astype(dtype).view(mx.uint16))


@pytest.mark.parametrize(("dtype", "eps"), [(mx.float16, 2**-10), (mx.bfloat16, 2**-7)])
def test_each_operation_in_half_precision_rounds(dtype, eps):
    """(1 + eps)^2 is 1 + 2 eps there: nothing is kept in float in between."""
    source = "uint i = thread_position_in_grid.x; o[i] = float(a[i] * a[i] - (T(1.0f) + T(2.0f) * (a[i] - T(1.0f))));"
    value = mx.full((32,), 1 + eps, dtype)
    out = _copy(MslHost(), value, mx.float32, source=source, size=32, template=[("T", dtype)])
    assert mx.array_equal(out, mx.zeros(32))


def test_numpy_arrays_give_numpy_arrays():
    value = np.arange(64, dtype=np.int16)
    out = _copy(MslHost(), value, np.int16)
    assert isinstance(out, np.ndarray)
    assert np.array_equal(out, value)


def test_arrays_that_are_not_contiguous_are_copied_or_come_with_strides():
    value = mx.arange(128).astype(mx.float32).reshape(64, 2)[:, 1]
    assert mx.array_equal(_copy(MslHost(), value, mx.float32), value)
    strided = "uint i = thread_position_in_grid.x; o[i] = a[i * uint(a_strides[0])];"
    assert mx.array_equal(_copy(MslHost(), value, mx.float32, source=strided, ensure_row_contiguous=False), value)
    past = "uint i = thread_position_in_grid.x; o[i] = a[i * uint(a_strides[0]) + 1];"
    with pytest.raises(KernelError, match="out-of-bounds"):
        _copy(MslHost(), value, mx.float32, source=past, ensure_row_contiguous=False)
    broadcast = mx.broadcast_to(mx.array([3.0]), (64,))
    assert mx.array_equal(
        _copy(MslHost(), broadcast, mx.float32, source=strided, ensure_row_contiguous=False), broadcast
    )


def test_lazy_inputs_are_evaluated():
    value = mx.ones(64) * 2 + mx.arange(64)
    assert mx.array_equal(_copy(MslHost(), value, mx.float32), mx.arange(64) + 2.0)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("seeds", [(0,), (0, 3)])
def test_input_written_in_place_is_the_caller_s_array(dtype, seeds):
    """Its own memory, as on a GPU: views of it see the change."""
    pool = mx.zeros((4, 16), dtype)
    mx.eval(pool)
    host = MslHost(in_place={"fill": ["pool"]}, seeds=seeds)
    kernel = host(
        name="fill_f",
        input_names=["pool"],
        output_names=["token"],
        source="uint i = thread_position_in_grid.x; ((device T*)pool)[i + 16] = T(i); token[i] = 1;",
        ensure_row_contiguous=False,
    )
    kernel(
        inputs=[pool],
        output_shapes=[(16,)],
        output_dtypes=[mx.uint32],
        grid=(16, 1, 1),
        threadgroup=(16, 1, 1),
        template=[("T", dtype)],
    )
    expected = mx.concatenate([mx.zeros((1, 16)), mx.arange(16.0)[None], mx.zeros((2, 16))]).astype(dtype)
    assert mx.array_equal(pool, expected)


def test_sparse_pool_beyond_32_bits_is_read_and_written():
    far = (1 << 26) - 1
    pool = SparsePool((1 << 26, 64), mx.float16, {far: mx.arange(64).astype(mx.float16)})
    host = MslHost(in_place={"move": ["pool"]})
    kernel = host(
        name="move",
        input_names=["pool", "block"],
        output_names=["o"],
        source="""
          uint i = thread_position_in_grid.x;
          int64_t at = int64_t(block[0]) * 64 + int64_t(i);
          o[i] = pool[at];
          ((device half*)pool)[at - 64] = half(pool[at] + 1.0h);
        """,
        ensure_row_contiguous=False,
    )
    (out,) = kernel(
        inputs=[pool, mx.array([far], mx.int32)],
        output_shapes=[(64,)],
        output_dtypes=[mx.float16],
        grid=(64, 1, 1),
        threadgroup=(64, 1, 1),
    )
    assert mx.array_equal(out, mx.arange(64).astype(mx.float16))
    assert sorted(pool.rows) == [far - 1, far]
    assert mx.array_equal(pool.rows[far - 1], mx.arange(1, 65).astype(mx.float16))


def test_counters_are_exact():
    """Two threadgroups of two simdgroups: each reads a row of 64 halves twice, and one shared scalar."""
    host = MslHost(count_lines=True)
    kernel = host(
        name="count",
        input_names=["a", "s"],
        output_names=["o"],
        source="""
          uint i = thread_position_in_grid.x, t = thread_position_in_threadgroup.x;
          threadgroup float tile[64];
          tile[t] = float(a[i]);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          float x = tile[63 - t] + simd_sum(s[0]);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          o[i] = x + float(a[i]);
        """,
    )
    kernel(
        inputs=[np.ones(128, np.float16), np.ones(8, np.float32)],
        output_shapes=[(128,)],
        output_dtypes=[np.float32],
        grid=(128, 1, 1),
        threadgroup=(64, 1, 1),
    )
    (record,) = host.records
    assert (record.threadgroups, record.threads, record.threadgroup_barriers) == (2, 128, 4)
    assert (record.threadgroup_memory, record.simd_operations) == (256, 4)
    assert (record.threadgroup_bytes_read, record.threadgroup_bytes_written) == (512, 512)
    halves, scalar, out = record.buffers["a"], record.buffers["s"], record.buffers["o"]
    assert (halves.bytes_read, halves.unique_bytes_read) == (2 * 256, 256)
    assert (halves.load_requests, halves.load_lines, halves.least_load_lines) == (8, 8, 8)
    assert (scalar.bytes_read, scalar.unique_bytes_read) == (128 * 4, 4)
    assert (scalar.load_requests, scalar.load_lines) == (4, 4)
    assert (out.bytes_written, out.unique_bytes_written, out.bytes_read) == (512, 512, 0)


def test_strided_loads_take_more_lines_than_they_need():
    host = MslHost(count_lines=True)
    source = "uint i = thread_position_in_grid.x; o[i] = a[i * 16];"
    _copy(host, np.zeros(32 * 16, np.float32), np.float32, source=source, size=32)
    buffer = host.records[0].buffers["a"]
    assert (buffer.load_requests, buffer.load_lines, buffer.least_load_lines) == (1, 32, 2)


def test_schedules_differ_and_are_reproducible():
    """Tickets drawn from a counter show the order of the threads."""
    source = """
      uint i = thread_position_in_grid.x;
      threadgroup atomic_uint next;
      if (i == 0) atomic_store_explicit(&next, 0u, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      o[i] = float(atomic_fetch_add_explicit(&next, 1u, memory_order_relaxed)) + 0.0f * a[i];
    """
    value = np.zeros(64, np.float32)
    seeds = (0, 0, 5, 5, 6)
    orders = [_copy(MslHost(seeds=(seed,)), value, np.float32, source=source, threads=64) for seed in seeds]
    assert all(sorted(order) == list(range(64)) for order in orders)
    assert np.array_equal(orders[0], orders[1])
    assert np.array_equal(orders[2], orders[3])
    assert len({tuple(order) for order in orders}) == 3


def test_error_names_kernel_template_line_code_and_thread():
    source = "uint i = thread_position_in_grid.x;\n  o[i] = T(0);\n  if (i == 40) o[i] = a[N + i];"
    with pytest.raises(KernelError) as caught:
        _copy(MslHost(), np.zeros(64, np.float32), np.float32, source=source, template=[("T", mx.float32), ("N", 30)])
    text = str(caught.value)
    assert "kernel 'copy<T=float, N=30>'" in text
    assert "out-of-bounds, source line 3: `if (i == 40) o[i] = a[N + i];`" in text
    assert re.search(
        r"thread \(8,0,0\) of threadgroup \(1,0,0\) \[simdgroup 0, lane 8\] reads 4 bytes at byte 280", text
    )


def test_error_in_a_helper_names_it_and_its_caller():
    header = "\nMETAL_FUNC float get(const device float* p, uint i) {\n  return p[i];\n}\n"
    source = "uint i = thread_position_in_grid.x;\n  o[i] = get(a, i + 1);"
    with pytest.raises(KernelError) as caught:
        _copy(MslHost(), np.zeros(64, np.float32), np.float32, source=source, header=header)
    where = caught.value.findings[0].where
    assert where == "header line 3: `return p[i];`, called from source line 2: `o[i] = get(a, i + 1);`"


def test_kernel_error_is_what_mlx_raises_too():
    """So the worker's own fallback catches it."""
    assert issubclass(KernelError, RuntimeError)


def test_harness_goes_on_after_an_error():
    host = MslHost()
    for _ in range(3):
        with pytest.raises(KernelError):
            _copy(host, np.zeros(32, np.float32), np.float32)
        assert np.array_equal(_copy(host, np.arange(64, dtype=np.float32), np.float32), np.arange(64))


def test_same_kernel_is_compiled_once_and_kept(monkeypatch):
    from tests.msl_host import build

    _copy(MslHost(), np.zeros(64, np.float32), np.float32)
    monkeypatch.setattr(build, "_front_end", None)  # a second build would fail
    monkeypatch.setattr("tests.msl_host.host._BUILDER", build.Builder())
    assert np.array_equal(_copy(MslHost(), np.ones(64, np.float32), np.float32), np.ones(64))


def test_empty_output_and_launch_of_one_thread():
    host = MslHost()
    kernel = host(name="few", input_names=["a"], output_names=["o", "e"], source="o[thread_position_in_grid.x] = a[0];")
    out, empty = kernel(
        inputs=[mx.array([7.0])],
        output_shapes=[(1,), (0, 4)],
        output_dtypes=[mx.float32, mx.float16],
        grid=(1, 1, 1),
        threadgroup=(32, 1, 1),
    )
    assert out.item() == 7.0
    assert empty.shape == (0, 4)
    assert host.records[0].threads == 1
