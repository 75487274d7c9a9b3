"""Divergence, endless loops, undefined arithmetic."""

from tests.msl_host.defects.defect import THREAD, Defect

CONTROL = [
    Defect(
        "barrier in a branch",
        "divergent-barrier",
        THREAD
        + """
        if (i < 32) threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = a[i];""",
        says="ended without reaching it",
    ),
    Defect(
        "early return before a barrier",
        "divergent-barrier",
        THREAD
        + """
        if (i >= 60) { o[i] = 0.0f; return; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = a[i];""",
        says="source line 3",
    ),
    Defect(
        "two barriers in two branches",
        "divergent-barrier",
        THREAD
        + """
        if (i < 32) {
          threadgroup_barrier(mem_flags::mem_threadgroup);
        } else {
          threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        o[i] = a[i];""",
        says="source line 5",
    ),
    Defect(
        "unequal trip counts round a barrier",
        "divergent-barrier",
        THREAD
        + """
        float x = 0.0f;
        for (uint k = 0; k < 1 + i / 32; k++) {
          threadgroup_barrier(mem_flags::mem_threadgroup);
          x += a[i];
        }
        o[i] = x;""",
        says="source line 4",
    ),
    Defect(
        "simd_sum in a branch of some lanes",
        "divergent-simd-op",
        THREAD
        + """
        float x = a[i];
        if (i % 2 == 0) x = simd_sum(x);
        o[i] = simd_max(x);""",
        says="simd_sum",
    ),
    Defect(
        "simd_sum while others wait at a barrier",
        "divergent-simd-op",
        THREAD
        + """
        float x = a[i];
        if (i % 32 < 16) x = simd_sum(x);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (i % 32 >= 16) x = simd_sum(x);
        o[i] = x;""",
        says="threadgroup_barrier",
    ),
    Defect(
        "different reductions in two branches",
        "divergent-simd-op",
        THREAD
        + """
        o[i] = i % 2 == 0 ? simd_sum(a[i]) : simd_max(a[i]);""",
        says="source line 2",
    ),
    Defect(
        "one reduction at two places",
        "divergent-simd-op",
        THREAD
        + """
        float x;
        if (i % 2 == 0) {
          x = simd_sum(a[i]);
        } else {
          x = simd_sum(a[i]);
        }
        o[i] = x;""",
        says="source line 6",
    ),
    Defect(
        "reduction in a helper by half of the lanes",
        "divergent-simd-op",
        THREAD
        + """
        o[i] = i % 2 == 0 ? total(a[i]) : 0.0f;
        simdgroup_barrier(mem_flags::mem_none);""",
        header="inline float total(float x) { return simd_sum(x); }",
        says="header line 1",
    ),
    Defect(
        "matrix loaded by half of the lanes",
        "divergent-simd-op",
        THREAD
        + """
        simdgroup_float8x8 m = simdgroup_float8x8(0.0f);
        if (i % 2 == 0) simdgroup_load(m, a, 8);
        simdgroup_multiply(m, m, m);
        o[i] = m.thread_elements()[0];""",
        says="simdgroup_load",
    ),
    Defect(
        "matrix product of a partial simdgroup",
        "inactive-lane",
        THREAD
        + """
        simdgroup_float8x8 m = simdgroup_float8x8(1.0f);
        simdgroup_multiply(m, m, m);
        o[i] = m.thread_elements()[0];""",
        grid=(48, 1, 1),
        threadgroup=(48, 1, 1),
        says="source line 3",
    ),
    Defect(
        "shuffle from a lane that is gone",
        "inactive-lane",
        THREAD
        + """
        o[i] = a[i];
        if (i == 5) return;
        o[i] = simd_shuffle_xor(a[i], ushort(1));""",
        says="reads lane 5",
    ),
    Defect(
        "broadcast from lane 32",
        "inactive-lane",
        THREAD
        + """
        o[i] = simd_broadcast(a[i], ushort(32));""",
        says="source line 2",
    ),
    Defect(
        "loop without end",
        "endless-loop",
        THREAD
        + """
        uint x = i;
        while (x < 100u) { x = x * 3u % 64u; }
        o[i] = a[x % 64u];""",
        line=3,
    ),
    Defect(
        "spinning on a flag",
        "endless-loop",
        THREAD
        + """
        threadgroup atomic_int flag;
        if (i == 0) atomic_store_explicit(&flag, 0, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        if (i == 0) { while (atomic_load_explicit(&flag, memory_order_relaxed) == 0) {} }
        if (i == 1) atomic_store_explicit(&flag, 1, memory_order_relaxed);
        o[i] = a[i];""",
    ),
    Defect(
        "division by zero",
        "undefined-behaviour",
        THREAD
        + """
        o[i] = float(100 / int(a[i]));""",
        line=2,
    ),
    Defect(
        "NaN as an index",
        "undefined-behaviour",
        THREAD
        + """
        o[i] = a[int(a[i] * NAN)];""",
        line=2,
    ),
    Defect(
        "float to a short that is too short",
        "undefined-behaviour",
        THREAD
        + """
        o[i] = float(short(a[i] * 1000.0f));""",
        line=2,
    ),
]
