"""Planted defects: one tiny kernel each, with the kind of finding that must name it.

A defect stays here for good: it is how the harness shows that a kernel which runs clean does not have it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from tests.msl_host.arrays import SparsePool
from tests.msl_host.host import MslHost

_THREAD = "uint i = thread_position_in_grid.x; "


@dataclass(frozen=True)
class Defect:
    """`kind` must be among the findings, and one of that kind must be at `line` of `part`, if one is given.

    By default 64 threads, one threadgroup, input `a` and output `o` of 64 floats.
    """

    name: str
    kind: str
    source: str
    line: int | None = None
    part: str = "source"
    header: str = ""
    inputs: Callable[[], dict[str, Any]] = field(default=lambda: {"a": np.arange(64, dtype=np.float32)})
    outputs: tuple[tuple[str, tuple[int, ...], Any], ...] = (("o", (64,), np.float32),)
    grid: tuple[int, int, int] = (64, 1, 1)
    threadgroup: tuple[int, int, int] = (64, 1, 1)
    template: tuple[tuple[str, Any], ...] = ()
    init_value: float | None = None
    in_place: tuple[str, ...] = ()
    atomic_outputs: bool = False
    ensure_row_contiguous: bool = False
    seeds: tuple[int, ...] = (0,)
    says: str = ""

    def run(self) -> list[Any]:
        """Launches it."""
        return self._launch(MslHost(seeds=self.seeds, in_place={"defect": self.in_place}, cpu_seconds=0.5))

    def compile_in(self, host: MslHost) -> None:
        """The same launch on a host that only compiles."""
        self._launch(host)

    def _launch(self, host: MslHost) -> list[Any]:
        inputs = self.inputs()
        kernel = host(
            name="defect",
            input_names=list(inputs),
            output_names=[name for name, _, _ in self.outputs],
            source=self.source,
            header=self.header,
            ensure_row_contiguous=self.ensure_row_contiguous,
            atomic_outputs=self.atomic_outputs,
        )
        return kernel(
            inputs=list(inputs.values()),
            output_shapes=[shape for _, shape, _ in self.outputs],
            output_dtypes=[dtype for _, _, dtype in self.outputs],
            grid=self.grid,
            threadgroup=self.threadgroup,
            template=list(self.template),
            init_value=self.init_value,
        )


def _pool() -> dict[str, Any]:
    """A pool of 2^32 elements with a row at its far end, and a table that points there."""
    row = np.arange(64, dtype=np.float16)
    table = np.full(8, (1 << 26) - 1, np.int32)
    return {"pool": SparsePool((1 << 26, 64), np.float16, {(1 << 26) - 1: row, 0: row}), "table": table}


def _table() -> dict[str, Any]:
    """Two rows of a block table of four, the unused entries far outside of the pool."""
    table = np.full((2, 4), 1 << 30, np.int32)
    table[:, :2] = [[0, 1], [2, 3]]
    return {"pool": np.ones((4, 32), np.float32), "table": table}


def _slots() -> dict[str, Any]:
    return {"pool": np.zeros((4, 32), np.float32), "slots": np.array([1, 3, 1, 0, 2, 2, 2, 2], np.int32)}


def _many() -> dict[str, Any]:
    return {f"a{index}": np.zeros(8, np.float32) for index in range(32)}


_PAIR = (("o", (64,), np.float32), ("p", (64,), np.float32))

RACES = [
    Defect(
        "no barrier before other simdgroups read",
        "race-threadgroup",
        _THREAD
        + """
        threadgroup float s[64];
        s[i] = a[i];
        o[i] = s[i ^ 32];""",
        line=4,
    ),
    Defect(
        "no barrier before the tile is written again",
        "race-threadgroup",
        _THREAD
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
        _THREAD
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
        _THREAD
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
        _THREAD
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
        _THREAD
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
        _THREAD
        + """
        threadgroup float s[64];
        s[i] = a[i];
        o[i] = s[i ^ 1];""",
        line=4,
    ),
    Defect(
        "simd_sum taken for a barrier",
        "race-threadgroup",
        _THREAD
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
        _THREAD
        + """
        threadgroup float m;
        m = a[i];
        o[i] = m;""",
        line=3,
    ),
    Defect(
        "counter without an atomic",
        "race-threadgroup",
        _THREAD
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
        _THREAD
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
        _THREAD
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
        _THREAD
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
        _THREAD
        + """
        o[i % 32] = a[i];""",
        line=2,
        threadgroup=(32, 1, 1),
        outputs=(("o", (32,), np.float32),),
    ),
    Defect(
        "all threads write one element",
        "race-device",
        _THREAD
        + """
        o[0] = a[i];""",
        line=2,
        outputs=(("o", (1,), np.float32),),
    ),
    Defect(
        "neighbour's output read without a barrier",
        "race-device",
        _THREAD
        + """
        o[i] = a[i];
        p[i] = o[i ^ 1];""",
        line=3,
        outputs=_PAIR,
    ),
    Defect(
        "device memory behind a threadgroup-memory barrier",
        "race-device",
        _THREAD
        + """
        o[i] = a[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        p[i] = o[63 - i];""",
        line=4,
        outputs=_PAIR,
    ),
    Defect(
        "threadgroup waits for another's output",
        "race-device",
        _THREAD
        + """
        o[i] = a[i];
        threadgroup_barrier(mem_flags::mem_device);
        p[i] = i >= 32 ? o[i - 32] : 0.0f;""",
        line=4,
        outputs=_PAIR,
        threadgroup=(32, 1, 1),
    ),
    Defect(
        "reader and later writer in different threadgroups",
        "race-device",
        _THREAD
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
        _THREAD
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
        _THREAD
        + """
        threadgroup atomic_uint next;
        if (i == 0) atomic_store_explicit(&next, 0u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = float(atomic_fetch_add_explicit(&next, 1u, memory_order_relaxed));""",
        seeds=(0, 11),
    ),
]

MEMORY = [
    Defect(
        "read past the end",
        "out-of-bounds",
        _THREAD
        + """
        o[i] = a[i + 1];""",
        line=2,
        says="byte 256 of buffer 'a', which has 256",
    ),
    Defect(
        "read before the beginning",
        "out-of-bounds",
        _THREAD
        + """
        o[i] = a[int(i) - 1];""",
        line=2,
        says="byte -4 of buffer 'a'",
    ),
    Defect(
        "write past the end",
        "out-of-bounds",
        _THREAD
        + """
        o[i] = a[i];
        if (i == 63) o[64] = 0.0f;""",
        line=3,
    ),
    Defect(
        "grid larger than the data",
        "out-of-bounds",
        _THREAD
        + """
        o[i] = a[i];""",
        line=2,
        grid=(70, 1, 1),
    ),
    Defect(
        "unused table entry followed",
        "out-of-bounds",
        """
        uint d = thread_position_in_threadgroup.x, row = threadgroup_position_in_grid.x;
        float sum = 0.0f;
        for (int b = 0; b < 3; b++) sum += pool[int64_t(table[row * 4 + uint(b)]) * 32 + d];
        o[row * 32 + d] = sum;""",
        line=4,
        inputs=_table,
        threadgroup=(32, 1, 1),
    ),
    Defect(
        "wrong stride of the block table",
        "out-of-bounds",
        """
        uint d = thread_position_in_threadgroup.x, row = threadgroup_position_in_grid.x;
        o[row * 32 + d] = pool[int64_t(table[row * 2]) * 32 + d];""",
        line=3,
        inputs=_table,
        threadgroup=(32, 1, 1),
    ),
    Defect(
        "K tail is not cut",
        "out-of-bounds",
        _THREAD
        + """
        for (uint t = 0; t < 96; t += 32) {
          float x = a[t + i % 32];
          o[i] = x;
        }""",
        line=3,
    ),
    Defect(
        "threadgroup array index",
        "out-of-bounds",
        _THREAD
        + """
        threadgroup float s[64];
        s[i + 1] = a[i];
        o[i] = a[i];""",
        line=3,
    ),
    Defect(
        "threadgroup array overrun by pointer",
        "out-of-bounds",
        _THREAD
        + """
        threadgroup float s[64];
        threadgroup float r[64];
        threadgroup float* p = s;
        p[i + 1] = a[i];
        r[i] = 0.0f;
        o[i] = r[i];""",
        line=5,
        says="threadgroup variable 's'",
    ),
    Defect(
        "private array index",
        "out-of-bounds",
        _THREAD
        + """
        float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        x[i % 5] = a[i];
        o[i] = x[0];""",
        line=3,
    ),
    Defect(
        "pointer made of a number",
        "out-of-bounds",
        _THREAD
        + """
        o[i] = *(const device float*)(uint64_t(i) + 4096);""",
    ),
    Defect(
        "half of the tile staged",
        "uninitialised-read",
        _THREAD
        + """
        threadgroup float s[64];
        if (i < 32) s[i] = a[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = s[63 - i];""",
        line=5,
    ),
    Defect(
        "tile of the last threadgroup",
        "uninitialised-read",
        """
        uint i = thread_position_in_grid.x, t = thread_position_in_threadgroup.x;
        threadgroup float s[32];
        if (i < 32) s[t] = a[i];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = s[t];""",
        line=6,
        threadgroup=(32, 1, 1),
    ),
    Defect(
        "output read before it is written",
        "uninitialised-read",
        _THREAD
        + """
        o[i] += a[i];""",
        line=2,
    ),
    Defect(
        "row that nobody owns",
        "uninitialised-read",
        _THREAD
        + """
        o[i] = float(pool[int64_t(table[0] - 1) * 64 + i]);""",
        line=2,
        inputs=_pool,
    ),
    Defect(
        "private variable never set",
        "compile",
        _THREAD
        + """
        float sum;
        sum += a[i];
        o[i] = sum;""",
        line=3,
    ),
    Defect(
        "private variable set on one path",
        "compile",
        _THREAD
        + """
        float x;
        if (i < 32) x = a[i];
        o[i] = x;""",
        line=3,
    ),
    Defect(
        "tail not written",
        "unwritten-output",
        _THREAD
        + """
        if (i < 60) o[i] = a[i];""",
        says="16 of 256 bytes of output 'o'",
    ),
    Defect(
        "second output forgotten",
        "unwritten-output",
        _THREAD
        + """
        o[i] = a[i];""",
        outputs=_PAIR,
        says="output 'p'",
    ),
    Defect(
        "every second element",
        "unwritten-output",
        _THREAD
        + """
        o[i / 2 * 2] = a[i / 2 * 2];""",
        threadgroup=(1, 1, 1),
        grid=(1, 1, 1),
    ),
    Defect(
        "input written undeclared",
        "write-to-input",
        _THREAD
        + """
        ((device float*)a)[i] = 0.0f;
        o[i] = 0.0f;""",
        line=2,
    ),
    Defect(
        "store through a const pointer",
        "compile",
        _THREAD
        + """
        a[i] = 0.0f;
        o[i] = 0.0f;""",
        line=2,
    ),
    Defect(
        "vector at an odd element",
        "misaligned",
        _THREAD
        + """
        float4 v = *(const device float4*)(a + i % 16 + 1);
        o[i] = v.x;""",
        line=2,
    ),
    Defect(
        "word made of bytes",
        "misaligned",
        _THREAD
        + """
        const device uchar* p = (const device uchar*)a;
        o[i] = float(*(const device uint*)(p + i));""",
        line=3,
    ),
    Defect(
        "too much threadgroup memory",
        "threadgroup-memory",
        _THREAD
        + """
        threadgroup float s[8193];
        s[i] = a[i];
        o[i] = s[i];""",
        says="Metal has 32768",
    ),
    Defect(
        "too many private variables",
        "stack-overflow",
        _THREAD
        + """
        volatile float x[20000];
        for (int k = 0; k < 20000; k++) x[k] = a[i];
        o[i] = x[i];""",
    ),
    Defect(
        "32-bit offset into a large pool",
        "integer-overflow",
        _THREAD
        + """
        int at = table[0] * 64 + int(i);
        o[i] = float(pool[at]);""",
        line=2,
        inputs=_pool,
    ),
    Defect(
        "64-bit offset kept in 32 bits",
        "integer-overflow",
        _THREAD
        + """
        int at = int64_t(table[0]) * 64 + int64_t(i);
        o[i] = float(pool[at]);""",
        line=2,
        inputs=_pool,
    ),
    Defect(
        "unsigned offset wraps",
        "uninitialised-read",
        _THREAD
        + """
        uint at = (uint(table[0]) + 2u) * 64u + i;
        o[i] = float(pool[at + 64u]);""",
        line=3,
        inputs=_pool,
    ),
]

CONTROL = [
    Defect(
        "barrier in a branch",
        "divergent-barrier",
        _THREAD
        + """
        if (i < 32) threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = a[i];""",
        says="ended without reaching it",
    ),
    Defect(
        "early return before a barrier",
        "divergent-barrier",
        _THREAD
        + """
        if (i >= 60) { o[i] = 0.0f; return; }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        o[i] = a[i];""",
        says="source line 3",
    ),
    Defect(
        "two barriers in two branches",
        "divergent-barrier",
        _THREAD
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
        _THREAD
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
        _THREAD
        + """
        float x = a[i];
        if (i % 2 == 0) x = simd_sum(x);
        o[i] = simd_max(x);""",
        says="simd_sum",
    ),
    Defect(
        "simd_sum while others wait at a barrier",
        "divergent-simd-op",
        _THREAD
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
        _THREAD
        + """
        o[i] = i % 2 == 0 ? simd_sum(a[i]) : simd_max(a[i]);""",
        says="source line 2",
    ),
    Defect(
        "one reduction at two places",
        "divergent-simd-op",
        _THREAD
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
        _THREAD
        + """
        o[i] = i % 2 == 0 ? total(a[i]) : 0.0f;
        simdgroup_barrier(mem_flags::mem_none);""",
        header="inline float total(float x) { return simd_sum(x); }",
        says="header line 1",
    ),
    Defect(
        "matrix loaded by half of the lanes",
        "divergent-simd-op",
        _THREAD
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
        _THREAD
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
        _THREAD
        + """
        o[i] = a[i];
        if (i == 5) return;
        o[i] = simd_shuffle_xor(a[i], ushort(1));""",
        says="reads lane 5",
    ),
    Defect(
        "broadcast from lane 32",
        "inactive-lane",
        _THREAD
        + """
        o[i] = simd_broadcast(a[i], ushort(32));""",
        says="source line 2",
    ),
    Defect(
        "loop without end",
        "endless-loop",
        _THREAD
        + """
        uint x = i;
        while (x < 100u) { x = x * 3u % 64u; }
        o[i] = a[x % 64u];""",
        says="thread (0,0,0)",
    ),
    Defect(
        "spinning on a flag",
        "endless-loop",
        _THREAD
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
        _THREAD
        + """
        o[i] = float(100 / int(a[i]));""",
        line=2,
    ),
    Defect(
        "NaN as an index",
        "undefined-behaviour",
        _THREAD
        + """
        o[i] = a[int(a[i] * NAN)];""",
        line=2,
    ),
    Defect(
        "float to a short that is too short",
        "undefined-behaviour",
        _THREAD
        + """
        o[i] = float(short(a[i] * 1000.0f));""",
        line=2,
    ),
]

LEGALITY = [
    Defect(
        "pointer without address space",
        "legality",
        _THREAD
        + """
        const device float* p = a;
        o[i] = first(p);""",
        part="header",
        line=1,
        header="inline float first(const float* p) { return p[0]; }",
        says="'p' has no address space",
    ),
    Defect(
        "local pointer without address space",
        "legality",
        _THREAD
        + """
        float x = a[i];
        float* p = &x;
        o[i] = *p;""",
        line=3,
        says="'p'",
    ),
    Defect(
        "reference without address space",
        "legality",
        _THREAD
        + """
        float x = a[i];
        add(x);
        o[i] = x;""",
        part="header",
        line=2,
        header="\ninline void add(float& x) { x += 1.0f; }",
    ),
    Defect(
        "double",
        "compile",
        _THREAD
        + """
        double x = a[i];
        o[i] = float(x);""",
        line=2,
    ),
    Defect(
        "recursion",
        "legality",
        _THREAD
        + """
        o[i] = deep(i);""",
        header="float deep(uint n) { return n == 0 ? 0.0f : 1.0f + deep(n - 1); }",
        says="recursion",
    ),
    Defect(
        "goto",
        "legality",
        _THREAD
        + """
        if (i > 3) goto end;
        o[i] = 0.0f;
        end: o[i] = a[i];""",
        line=2,
    ),
    Defect(
        "lambda",
        "legality",
        _THREAD
        + """
        auto twice = [](float x) { return x * 2.0f; };
        o[i] = twice(a[i]);""",
        line=2,
    ),
    Defect(
        "static variable",
        "legality",
        _THREAD
        + """
        static int calls = 0;
        o[i] = a[i];""",
        line=2,
    ),
    Defect(
        "program-scope variable",
        "legality",
        _THREAD
        + """
        o[i] = a[i] + bias;""",
        part="header",
        line=1,
        header="float bias = 1.0f;",
    ),
    Defect(
        "program-scope constant not in constant",
        "legality",
        _THREAD
        + """
        o[i] = a[i] + bias;""",
        part="header",
        line=1,
        header="static constexpr float bias = 1.0f;",
    ),
    Defect(
        "function pointer",
        "compile",
        _THREAD
        + """
        float (*f)(float) = twice;
        o[i] = f(a[i]);""",
        line=2,
        header="inline float twice(float x) { return x * 2.0f; }",
    ),
    Defect(
        "virtual function",
        "compile",
        _THREAD
        + """
        o[i] = a[i];""",
        part="header",
        line=1,
        header="struct V { virtual float f() { return 1.0f; } };",
    ),
    Defect(
        "threadgroup variable in a nested scope",
        "compile",
        _THREAD
        + """
        {
          threadgroup float s[4];
          s[0] = a[i];
        }
        o[i] = a[i];""",
        line=3,
    ),
    Defect(
        "threadgroup variable in a helper",
        "compile",
        _THREAD
        + """
        o[i] = helper(a[i]);""",
        part="header",
        line=1,
        header="inline float helper(float x) { threadgroup float s[4]; s[0] = x; return s[0]; }",
    ),
    Defect(
        "threadgroup variable with a value",
        "compile",
        _THREAD
        + """
        threadgroup float s[2] = {1.0f, 2.0f};
        o[i] = s[0];""",
        line=2,
    ),
    Defect(
        "device pointer into threadgroup memory",
        "compile",
        _THREAD
        + """
        threadgroup float s[64];
        device float* p = s;
        o[i] = p[0];""",
        line=3,
    ),
    Defect(
        "small input handed to a device pointer",
        "compile",
        _THREAD
        + """
        o[i] = first(a);""",
        line=2,
        inputs=lambda: {"a": np.ones(7, np.float32)},
        header="inline float first(const device float* p) { return p[0]; }",
    ),
    Defect(
        "float to bfloat without a cast",
        "compile",
        _THREAD
        + """
        bfloat b = a[i];
        o[i] = float(b);""",
        line=2,
    ),
    Defect(
        "bfloat to half without a cast",
        "compile",
        _THREAD
        + """
        half h = bfloat(a[i]);
        o[i] = float(h);""",
        line=2,
    ),
    Defect(
        "max of float and int",
        "compile",
        _THREAD
        + """
        o[i] = max(a[i], 1);""",
        line=2,
    ),
    Defect(
        "min of uint and int",
        "compile",
        _THREAD
        + """
        o[i] = a[min(i, 3)];""",
        line=2,
    ),
    Defect(
        "std::",
        "compile",
        _THREAD
        + """
        o[i] = std::max(a[i], 1.0f);""",
        line=2,
    ),
    Defect(
        "new",
        "compile",
        _THREAD
        + """
        device float* p = new float[4];
        o[i] = a[i];""",
        line=2,
    ),
    Defect(
        "array of variable length",
        "compile",
        _THREAD
        + """
        float x[i + 1];
        o[i] = a[i];""",
        line=2,
    ),
    Defect(
        "no result",
        "compile",
        _THREAD
        + """
        o[i] = none(a[i]);""",
        part="header",
        line=1,
        header="inline float none(float x) { }",
    ),
    Defect(
        "forgotten typename",
        "compile",
        _THREAD
        + """
        Traits<T>::type x = a[i];
        o[i] = x;""",
        line=2,
        header="template <class T> struct Traits { typedef T type; };",
        template=(("T", mx.float32),),
    ),
    Defect(
        "forgotten template",
        "compile",
        _THREAD
        + """
        o[i] = a[i] + T(Traits<T>::get<N>());""",
        line=2,
        header="template <class T> struct Traits { template <int K> static T get() { return T(K); } };",
        template=(("T", mx.float32), ("N", 3)),
    ),
    Defect(
        "printf",
        "compile",
        _THREAD
        + """
        printf("%d", i);
        o[i] = a[i];""",
        line=2,
    ),
    Defect(
        "long vector",
        "legality",
        _THREAD
        + """
        const device ulong4* p = (const device ulong4*)a;
        o[i] = float(p[i % 8].x);""",
        says="over 16 bytes",
    ),
    Defect("2048 threads", "launch", _THREAD + "o[i] = a[i];", grid=(2048, 1, 1), threadgroup=(2048, 1, 1)),
    Defect("empty grid", "launch", _THREAD + "o[i] = a[i];", grid=(0, 1, 1)),
    Defect("too many buffers", "launch", _THREAD + "o[i] = a0[0];", inputs=_many, says="33 buffers"),
    Defect("negative template argument", "launch", _THREAD + "o[i] = a[i] + float(N);", template=(("N", -1),)),
    Defect(
        "written in place but maybe copied",
        "launch",
        _THREAD + "o[i] = a[i];",
        in_place=("a",),
        ensure_row_contiguous=True,
    ),
    Defect(
        "written in place in constant",
        "launch",
        _THREAD + "o[i] = 0.0f;",
        in_place=("a",),
        inputs=lambda: {"a": np.ones(7, np.float32)},
    ),
    Defect("several outputs, a shape, no attribute", "launch", "o[0] = a[a_shape[0] - 1]; p[0] = 0.0f;", outputs=_PAIR),
]

ALL = [*RACES, *MEMORY, *CONTROL, *LEGALITY]
