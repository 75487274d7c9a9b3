"""What is right is not reported, and computes what Metal would: one small kernel a feature, under two schedules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.msl_host.host import MslHost

_SEEDS = (0, 20261)
_A = np.arange(64, dtype=np.float32) * 0.25 - 3.0
_LANES = _A.reshape(2, 32)
_M = np.arange(64, dtype=np.float32).reshape(8, 8) * 0.125 - 2.0
_THREAD = "uint i = thread_position_in_grid.x; "


def _by_simdgroup(function: Callable[[np.ndarray], Any]) -> np.ndarray:
    return np.stack([np.broadcast_to(function(lanes), 32) for lanes in _LANES]).reshape(-1)


@dataclass(frozen=True)
class Clean:
    """A kernel of input `a` (64 floats) and output `o` (64 floats), and what it must give."""

    name: str
    source: str
    expected: np.ndarray
    header: str = ""
    threadgroup: tuple[int, int, int] = (64, 1, 1)
    tolerance: float = 0.0


_CASES = [
    Clean("threadgroup exchange", _THREAD + """
        threadgroup float s[64];
        s[i] = a[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = s[63 - i];""", _A[::-1]),
    Clean("tile reused behind barriers", _THREAD + """
        threadgroup float s[64];
        float sum = 0.0f;
        for (int k = 0; k < 3; k++) {
          s[i] = a[i] * float(k);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          sum += s[63 - i];
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        o[i] = sum;""", _A[::-1] * 3),
    Clean("simdgroup barrier between lanes", _THREAD + """
        threadgroup float s[64];
        s[i] = a[i];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        float x = s[i ^ 1];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        s[i] = x;
        o[i] = s[i];""", _A.reshape(-1, 2)[:, ::-1].reshape(-1)),
    Clean("many readers of one scalar", _THREAD + """
        threadgroup float top;
        if (i == 7) top = a[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = top;""", np.full(64, _A[7])),
    Clean("own element needs no barrier", _THREAD + """
        threadgroup float s[64];
        s[i] = a[i];
        s[i] += 1.0f;
        o[i] = s[i];""", _A + 1),
    Clean("reduction tree", _THREAD + """
        threadgroup float s[64];
        s[i] = a[i];
        for (uint step = 32; step > 0; step /= 2) {
          threadgroup_barrier(mem_flags::mem_threadgroup);
          if (i < step) s[i] += s[i + step];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = s[0];""", np.full(64, _A.sum())),
    Clean("bytes in threadgroup memory", _THREAD + """
        threadgroup uchar s[64];
        s[i] = uchar(i);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = float(s[63 - i]);""", np.arange(63, -1, -1, dtype=np.float32)),
    Clean("device memory within a threadgroup", _THREAD + """
        o[i] = a[i];
        threadgroup_barrier(mem_flags::mem_device);
        float x = o[63 - i];
        threadgroup_barrier(mem_flags::mem_device);
        o[i] = x;""", _A[::-1]),
    Clean("simd_sum", _THREAD + "o[i] = simd_sum(a[i]);", _by_simdgroup(np.sum)),
    Clean("simd_max and simd_min", _THREAD + "o[i] = simd_max(a[i]) - simd_min(a[i]);", _by_simdgroup(np.ptp)),
    Clean("simd_sum of half", _THREAD + "o[i] = float(simd_sum(half(a[i])));", _by_simdgroup(np.sum)),
    Clean("simd_sum of bfloat", _THREAD + "o[i] = float(simd_sum(bfloat(a[i])));", _by_simdgroup(np.sum)),
    Clean("simd_sum of int and uint", _THREAD + "o[i] = float(simd_sum(int(i) - 40)) + float(simd_max(i));",
          np.repeat([sum(range(-40, -8)) + 31, sum(range(-8, 24)) + 63], 32).astype(np.float32)),
    Clean("simd_product", _THREAD + "o[i] = simd_product(i % 32 < 3 ? a[i] : 1.0f);",
          _by_simdgroup(lambda lanes: np.prod(lanes[:3]))),
    Clean("simd_sum of live lanes", _THREAD + """
        o[i] = 0.0f;
        if (i % 32 >= 20) return;
        o[i] = simd_sum(a[i]);""",
          np.stack([np.where(np.arange(32) < 20, lanes[:20].sum(), 0) for lanes in _LANES]).reshape(-1)),
    Clean("simd prefix sums", _THREAD + """
        o[i] = simd_prefix_inclusive_sum(a[i]) - simd_prefix_exclusive_sum(a[i]);""", _A),
    Clean("simd prefix inclusive", _THREAD + "o[i] = simd_prefix_inclusive_sum(a[i]);",
          np.cumsum(_LANES, 1).reshape(-1)),
    Clean("simd_shuffle", _THREAD + "o[i] = simd_shuffle(a[i], ushort(31 - i % 32));", _LANES[:, ::-1].reshape(-1)),
    Clean("simd_shuffle_xor", _THREAD + "o[i] = simd_shuffle_xor(a[i], ushort(8));",
          _LANES[:, np.arange(32) ^ 8].reshape(-1)),
    Clean("simd_shuffle_down", _THREAD + "o[i] = simd_shuffle_down(a[i], ushort(3));",
          _LANES[:, [*range(3, 32), 29, 30, 31]].reshape(-1)),
    Clean("simd_shuffle_up", _THREAD + "o[i] = simd_shuffle_up(a[i], ushort(2));",
          _LANES[:, [0, 1, *range(30)]].reshape(-1)),
    Clean("simd_shuffle of half and bfloat", _THREAD + """
        o[i] = float(simd_shuffle_xor(half(a[i]), ushort(1))) + float(simd_shuffle_xor(bfloat(a[i]), ushort(1)));""",
          2 * _LANES[:, np.arange(32) ^ 1].reshape(-1)),
    Clean("simd_shuffle of a vector", _THREAD + """
        float4 v = simd_shuffle_xor(float4(a[i], 1.0f, 2.0f, a[i]), ushort(1));
        o[i] = v.x + v.y + v.z + v.w;""", 2 * _LANES[:, np.arange(32) ^ 1].reshape(-1) + 3),
    Clean("simd_broadcast", _THREAD + "o[i] = simd_broadcast(a[i], ushort(5)) + simd_broadcast_first(a[i]);",
          _by_simdgroup(lambda lanes: lanes[5] + lanes[0])),
    Clean("simd_ballot, any, all", _THREAD + """
        o[i] = float(popcount(uint(ulong(simd_ballot(i % 3 == 0))))) + (simd_any(i == 40) ? 100.0f : 0.0f)
             + (simd_all(i < 32) ? 1000.0f : 0.0f);""",
          np.repeat([1011.0, 111.0], 32).astype(np.float32)),
    Clean("matrix product", _THREAD + """
        threadgroup float s[64];
        s[i] = a[i] + 1.0f;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (i < 32) {
          simdgroup_float8x8 x, y, z = simdgroup_float8x8(0.5f);
          simdgroup_load(x, a, 8);
          simdgroup_load(y, s, 8, ulong2(0), true);
          simdgroup_multiply_accumulate(z, x, y, z);
          simdgroup_store(z, o, 8);
        }""", (_A.reshape(8, 8) @ (_A.reshape(8, 8) + 1).T + 0.5).reshape(-1), tolerance=1e-5),
    Clean("matrix of half and bfloat", _THREAD + """
        threadgroup half h[64];
        threadgroup bfloat b[64];
        h[i] = half(a[i]);
        b[i] = bfloat(a[i]);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (i < 32) {
          simdgroup_half8x8 x;
          simdgroup_bfloat8x8 y;
          simdgroup_matrix<float, 8, 8> z, w = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
          simdgroup_load(x, h, 8);
          simdgroup_load(y, b, 8);
          simdgroup_multiply(z, x, x);
          simdgroup_multiply_accumulate(w, y, y, z);
          simdgroup_store(w, o, 8);
        }""", (2 * _A.reshape(8, 8) @ _A.reshape(8, 8)).reshape(-1), tolerance=1e-5),
    Clean("elements of a matrix by lane", _THREAD + """
        simdgroup_float8x8 m = simdgroup_float8x8(0.0f);
        uint lane = thread_index_in_simdgroup;
        uint row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
        m.thread_elements()[0] = a[row * 8 + column];
        m.thread_elements()[1] = a[row * 8 + column + 1];
        if (i < 32) simdgroup_store(m, o, 8, ulong2(0), true);""", _A.reshape(8, 8).T.reshape(-1)),
    Clean("atomic counters", _THREAD + """
        threadgroup atomic_uint count;
        threadgroup atomic_int most;
        if (i == 0) {
          atomic_store_explicit(&count, 0u, memory_order_relaxed);
          atomic_store_explicit(&most, -1000, memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&count, i, memory_order_relaxed);
        atomic_fetch_max_explicit(&most, int(i) - 100, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = float(atomic_load_explicit(&count, memory_order_relaxed)) +
               float(atomic_load_explicit(&most, memory_order_relaxed));""", np.full(64, 2016 - 37, np.float32)),
    Clean("vectors of four", _THREAD + """
        if (i < 16) {
          float4 v = *(const device float4*)(a + i * 4);
          half4 h = half4(v);
          bfloat4 b = bfloat4(v);
          v = float4(h) + float4(b) + float4(1.0f, 2.0f, 3.0f, 4.0f);
          *(device float4*)(o + i * 4) = v.wzyx;
        }""", (2 * _A.reshape(16, 4) + [1, 2, 3, 4])[:, ::-1].reshape(-1)),
    Clean("bits of a float", _THREAD + "o[i] = as_type<float>(as_type<uint>(a[i]) ^ 0x80000000u);", -_A),
    Clean("packed bytes", _THREAD + """
        uchar4 q = uchar4(1, 2, 3, 255);
        uint w = as_type<uint>(q);
        o[i] = float(w >> 24) + float(w & 0xffu) + float(extract_bits(w, 8u, 8u));""", np.full(64, 258, np.float32)),
    Clean("fast exponentials", _THREAD + "o[i] = fast::exp2(a[i]) + metal::fast::exp(a[i]) - exp(a[i]);",
          np.exp2(_A), tolerance=1e-4),
    Clean("infinity and NaN", _THREAD + """
        float x = i % 2 == 0 ? -INFINITY : NAN;
        o[i] = max(x, a[i]) + (isinf(x) ? 1.0f : 0.0f) + (isnan(x) ? 2.0f : 0.0f) + exp(-INFINITY);""",
          _A + np.where(np.arange(64) % 2 == 0, 1, 2)),
    Clean("integers", _THREAD + """
        int k = int(i) - 32;
        o[i] = float(clamp(k, -5, 5) + abs(k) + int(clz(i | 1u)) + min(k, 0) + select(1, 2, k > 0));""",
          np.array([np.clip(k, -5, 5) + abs(k) + 32 - int(i | 1).bit_length() + min(k, 0) + 1 + (k > 0)
                    for i in range(64) for k in [i - 32]], np.float32)),
    Clean("functions, templates, address spaces", _THREAD + """
        threadgroup float s[64];
        stage<32>(a, s, i);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        Sum<float> sum;
        for (uint k = 0; k < 64; k++) sum.add(s[k]);
        float twice;
        result(sum, twice);
        o[i] = twice * weights[1];""", np.full(64, 2 * _A.sum() * 0.5, np.float32), header="""
        #include <metal_stdlib>
        #include <metal_simdgroup_matrix>
        using namespace metal;
        constant float weights[2] = {1.0f, 0.5f};
        static constexpr constant int kSteps = 2;
        struct Limit { static constexpr int constant value = kSteps; };
        static_assert(Limit::value == 2, "a constant of a struct");
        template <int STEP>
        inline void stage(const device float* from, threadgroup float* to, uint i) {
          if (i < STEP) { to[i] = from[i]; to[i + STEP] = from[i + STEP]; }
        }
        template <class T>
        struct Sum {
          T value;
          Sum() : value(0) {}
          void add(T x) { value += x; }
        };
        inline void result(Sum<float> sum, thread float& out) { out = 2.0f * sum.value; }
        """),
    Clean("ragged last threadgroup", """
        uint i = thread_position_in_grid.x;
        threadgroup float s[48];
        s[thread_index_in_threadgroup] = a[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = s[threads_per_threadgroup.x - 1 - thread_position_in_threadgroup.x]
             + float(threadgroup_position_in_grid.x * 100 + dispatch_threads_per_threadgroup.x);""",
          np.concatenate([_A[47::-1] + 48, _A[63:47:-1] + 148]), threadgroup=(48, 1, 1)),
]  # fmt: skip


def _run(case: Clean, host: MslHost) -> np.ndarray:
    kernel = host(name="clean", input_names=["a"], output_names=["o"], source=case.source, header=case.header)
    (out,) = kernel(
        inputs=[_A],
        output_shapes=[(64,)],
        output_dtypes=[np.float32],
        grid=(64, 1, 1),
        threadgroup=case.threadgroup,
    )
    return out


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    host = MslHost()
    with host.compiling_ahead():
        for case in _CASES:
            _run(case, host)


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_clean_kernel_gives_its_result_and_no_report(case):
    out = _run(case, MslHost(seeds=_SEEDS))
    np.testing.assert_allclose(out, case.expected, rtol=case.tolerance, atol=case.tolerance)


def test_sum_of_atomic_floats_over_threadgroups():
    kernel = MslHost(seeds=_SEEDS)(
        name="total",
        input_names=["a"],
        output_names=["o"],
        source="atomic_fetch_add_explicit(&o[0], a[thread_position_in_grid.x], memory_order_relaxed);",
        atomic_outputs=True,
    )
    (total,) = kernel(
        inputs=[mx.array(_A)],
        output_shapes=[(1,)],
        output_dtypes=[mx.float32],
        grid=(64, 1, 1),
        threadgroup=(8, 1, 1),
        init_value=0,
    )
    assert total.item() == _A.sum()
