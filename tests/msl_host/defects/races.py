"""Accesses that nothing orders."""

from typing import Any

import numpy as np

from tests.msl_host.defects.defect import PAIR, THREAD, Defect


def _slots() -> dict[str, Any]:
    return {"pool": np.zeros((4, 32), np.float32), "slots": np.array([1, 3, 1, 0, 2, 2, 2, 2], np.int32)}


RACES = [
    Defect(
        "no barrier before other simdgroups read",
        "race-threadgroup",
        THREAD
        + """
        threadgroup float s[64];
        s[i] = a[i];
        o[i] = s[i ^ 32];""",
        line=4,
    ),
    Defect(
        "no barrier before the tile is written again",
        "race-threadgroup",
        THREAD
        + """
        threadgroup float s[64];
        float sum = 0.0f;
        for (int k = 0; k < 2; k++) {
          s[i] = a[i] + float(k);
          threadgroup_barrier(mem_flags::mem_threadgroup);
          sum += s[63 - i];
        }
        o[i] = sum;""",
        line=5,
    ),
    Defect(
        "no barrier between writing K and reading V in one buffer",
        "race-threadgroup",
        THREAD
        + """
        threadgroup float tile[64];
        tile[i] = a[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float k = tile[63 - i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        tile[i] = k;
        o[i] = tile[63 - i];""",
        line=8,
    ),
    Defect(
        "barrier orders device memory only",
        "race-threadgroup",
        THREAD
        + """
        threadgroup float s[64];
        s[i] = a[i];
        threadgroup_barrier(mem_flags::mem_device);
        o[i] = s[63 - i];""",
        line=5,
    ),
    Defect(
        "barrier orders no memory",
        "race-threadgroup",
        THREAD
        + """
        threadgroup float s[64];
        s[i] = a[i];
        threadgroup_barrier(mem_flags::mem_none);
        o[i] = s[63 - i];""",
        line=5,
    ),
    Defect(
        "simdgroup barrier between simdgroups",
        "race-threadgroup",
        THREAD
        + """
        threadgroup float s[64];
        s[i] = a[i];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = s[i ^ 32];""",
        line=5,
    ),
    Defect(
        "lanes exchange through memory without a barrier",
        "race-threadgroup",
        THREAD
        + """
        threadgroup float s[64];
        s[i] = a[i];
        o[i] = s[i ^ 1];""",
        line=4,
    ),
    Defect(
        "simd_sum taken for a barrier",
        "race-threadgroup",
        THREAD
        + """
        threadgroup float s[64];
        s[i] = a[i];
        float sum = simd_sum(a[i]);
        o[i] = s[i ^ 1] + sum;""",
        line=5,
    ),
    Defect(
        "all threads write one threadgroup scalar",
        "race-threadgroup",
        THREAD
        + """
        threadgroup float m;
        m = a[i];
        o[i] = m;""",
        line=3,
    ),
    Defect(
        "counter without an atomic",
        "race-threadgroup",
        THREAD
        + """
        threadgroup int count;
        if (i == 0) count = 0;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        count += 1;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = float(count);""",
        line=5,
    ),
    Defect(
        "atomic read plainly before the barrier",
        "race-threadgroup",
        THREAD
        + """
        threadgroup atomic_int count;
        if (i == 0) atomic_store_explicit(&count, 0, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        atomic_fetch_add_explicit(&count, 1, memory_order_relaxed);
        o[i] = float(count.value);""",
        line=6,
    ),
    Defect(
        "reduction tree without barriers",
        "race-threadgroup",
        THREAD
        + """
        threadgroup float s[64];
        s[i] = a[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint step = 32; step > 0; step /= 2) {
          if (i < step) s[i] += s[i + step];
        }
        o[i] = i == 0 ? s[0] : 0.0f;""",
        line=6,
    ),
    Defect(
        "matrix stored and loaded by another simdgroup",
        "race-threadgroup",
        THREAD
        + """
        threadgroup float s[64];
        simdgroup_float8x8 m = simdgroup_float8x8(float(i / 32));
        if (i < 32) simdgroup_store(m, s, 8);
        if (i >= 32) simdgroup_load(m, s, 8);
        o[i] = m.thread_elements()[0];""",
        line=5,
    ),
    Defect(
        "two threadgroups write one row",
        "race-device",
        THREAD
        + """
        o[i % 32] = a[i];""",
        line=2,
        threadgroup=(32, 1, 1),
        outputs=(("o", (32,), np.float32),),
    ),
    Defect(
        "all threads write one element",
        "race-device",
        THREAD
        + """
        o[0] = a[i];""",
        line=2,
        outputs=(("o", (1,), np.float32),),
    ),
    Defect(
        "neighbour's output read without a barrier",
        "race-device",
        THREAD
        + """
        o[i] = a[i];
        p[i] = o[i ^ 1];""",
        line=3,
        outputs=PAIR,
    ),
    Defect(
        "device memory behind a threadgroup-memory barrier",
        "race-device",
        THREAD
        + """
        o[i] = a[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        p[i] = o[63 - i];""",
        line=4,
        outputs=PAIR,
    ),
    Defect(
        "threadgroup waits for another's output",
        "race-device",
        THREAD
        + """
        o[i] = a[i];
        threadgroup_barrier(mem_flags::mem_device);
        p[i] = i >= 32 ? o[i - 32] : 0.0f;""",
        line=4,
        outputs=PAIR,
        threadgroup=(32, 1, 1),
    ),
    Defect(
        "reader and later writer in different threadgroups",
        "race-device",
        THREAD
        + """
        o[i] = i < 32 ? a[i + 32] : 0.0f;
        if (i >= 32) ((device float*)a)[i] = 1.0f;""",
        line=3,
        in_place=("a",),
        threadgroup=(32, 1, 1),
    ),
    Defect(
        "block moved to where another is still read",
        "race-device",
        """
        uint d = thread_position_in_threadgroup.x, b = threadgroup_position_in_grid.x;
        ((device float*)pool)[(b + 1) * 32 + d] = pool[b * 32 + d];
        o[b * 32 + d] = 0.0f;""",
        line=3,
        inputs=_slots,
        in_place=("pool",),
        threadgroup=(32, 1, 1),
    ),
    Defect(
        "one slot given to two rows",
        "race-device",
        """
        uint d = thread_position_in_threadgroup.x, row = threadgroup_position_in_grid.x;
        ((device float*)pool)[slots[row] * 32 + int(d)] = float(row);
        o[row * 32 + d] = 0.0f;""",
        line=3,
        inputs=_slots,
        in_place=("pool",),
        grid=(256, 1, 1),
        threadgroup=(32, 1, 1),
        outputs=(("o", (8, 32), np.float32),),
    ),
    Defect(
        "atomic and plain writes of one output",
        "race-device",
        THREAD
        + """
        if (i == 0) *(device float*)o = 0.0f;
        atomic_fetch_add_explicit(&o[0], a[i], memory_order_relaxed);""",
        line=3,
        atomic_outputs=True,
        outputs=(("o", (1,), np.float32),),
    ),
    Defect(
        "order of atomics decides the result",
        "schedule-dependent",
        THREAD
        + """
        threadgroup atomic_uint next;
        if (i == 0) atomic_store_explicit(&next, 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = float(atomic_fetch_add_explicit(&next, 1u, memory_order_relaxed));""",
        seeds=(0, 11),
    ),
]
