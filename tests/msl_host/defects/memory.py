"""Wrong places, missing values, forbidden writes, offsets that overflow."""

from typing import Any

import numpy as np

from tests.msl_host.arrays import SparsePool
from tests.msl_host.defects.defect import PAIR, THREAD, Defect


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


MEMORY = [
    Defect(
        "read past the end",
        "out-of-bounds",
        THREAD
        + """
        o[i] = a[i + 1];""",
        line=2,
        says="byte 256 of buffer 'a' (element 64), which has 256",
    ),
    Defect(
        "read before the beginning",
        "out-of-bounds",
        THREAD
        + """
        o[i] = a[int(i) - 1];""",
        line=2,
        says="byte -4 of buffer 'a' (element -1)",
    ),
    Defect(
        "write past the end",
        "out-of-bounds",
        THREAD
        + """
        o[i] = a[i];
        if (i == 63) o[64] = 0.0f;""",
        line=3,
    ),
    Defect(
        "grid larger than the data",
        "out-of-bounds",
        THREAD
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
        THREAD
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
        THREAD
        + """
        threadgroup float s[64];
        s[i + 1] = a[i];
        o[i] = a[i];""",
        line=3,
    ),
    Defect(
        "threadgroup array overrun by pointer",
        "out-of-bounds",
        THREAD
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
        THREAD
        + """
        float x[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        x[i % 5] = a[i];
        o[i] = x[0];""",
        line=3,
    ),
    Defect(
        "pointer made of a number",
        "out-of-bounds",
        THREAD
        + """
        o[i] = *(const device float*)(uint64_t(i) + 4096);""",
    ),
    Defect(
        "half of the tile staged",
        "uninitialised-read",
        THREAD
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
        THREAD
        + """
        o[i] += a[i];""",
        line=2,
    ),
    Defect(
        "row that nobody owns",
        "uninitialised-read",
        THREAD
        + """
        o[i] = float(pool[int64_t(table[0] - 1) * 64 + i]);""",
        line=2,
        inputs=_pool,
    ),
    Defect(
        "private variable never set",
        "compile",
        THREAD
        + """
        float sum;
        sum += a[i];
        o[i] = sum;""",
        line=3,
    ),
    Defect(
        "private variable set on one path",
        "compile",
        THREAD
        + """
        float x;
        if (i < 32) x = a[i];
        o[i] = x;""",
        line=3,
    ),
    Defect(
        "tail not written",
        "unwritten-output",
        THREAD
        + """
        if (i < 60) o[i] = a[i];""",
        says="16 of 256 bytes of output 'o' were never written, the first is byte 240 (element [60])",
    ),
    Defect(
        "second output forgotten",
        "unwritten-output",
        THREAD
        + """
        o[i] = a[i];""",
        outputs=PAIR,
        says="output 'p'",
    ),
    Defect(
        "every second element",
        "unwritten-output",
        THREAD
        + """
        o[i / 2 * 2] = a[i / 2 * 2];""",
        threadgroup=(1, 1, 1),
        grid=(1, 1, 1),
    ),
    Defect(
        "input written undeclared",
        "write-to-input",
        THREAD
        + """
        ((device float*)a)[i] = 0.0f;
        o[i] = 0.0f;""",
        line=2,
    ),
    Defect(
        "store through a const pointer",
        "compile",
        THREAD
        + """
        a[i] = 0.0f;
        o[i] = 0.0f;""",
        line=2,
    ),
    Defect(
        "vector at an odd element",
        "misaligned",
        THREAD
        + """
        float4 v = *(const device float4*)(a + i % 16 + 1);
        o[i] = v.x;""",
        line=2,
    ),
    Defect(
        "word made of bytes",
        "misaligned",
        THREAD
        + """
        const device uchar* p = (const device uchar*)a;
        o[i] = float(*(const device uint*)(p + i));""",
        line=3,
    ),
    Defect(
        "too much threadgroup memory",
        "threadgroup-memory",
        THREAD
        + """
        threadgroup float s[8193];
        s[i] = a[i];
        o[i] = s[i];""",
        says="Metal has 32768",
    ),
    Defect(
        "too many private variables",
        "stack-overflow",
        THREAD
        + """
        volatile float x[20000];
        for (int k = 0; k < 20000; k++) x[k] = a[i];
        o[i] = x[i];""",
    ),
    Defect(
        "32-bit offset into a large pool",
        "integer-overflow",
        THREAD
        + """
        int at = table[0] * 64 + int(i);
        o[i] = float(pool[at]);""",
        line=2,
        inputs=_pool,
    ),
    Defect(
        "64-bit offset kept in 32 bits",
        "integer-overflow",
        THREAD
        + """
        int at = int64_t(table[0]) * 64 + int64_t(i);
        o[i] = float(pool[at]);""",
        line=2,
        inputs=_pool,
    ),
    Defect(
        "unsigned offset wraps",
        "uninitialised-read",
        THREAD
        + """
        uint at = (uint(table[0]) + 2u) * 64u + i;
        o[i] = float(pool[at + 64u]);""",
        line=3,
        inputs=_pool,
    ),
]
