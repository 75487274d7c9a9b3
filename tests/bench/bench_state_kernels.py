"""What the kernels for recurrent layers read, write and launch for reference shapes, counted by the harness.

    python -m tests.bench.bench_state_kernels

Prints one JSON line. These are exact counts, the same on every machine, and no times: nothing here ran on a GPU.
`read_amplification` is bytes read per byte of the buffer that is read at all; `lines` is 64-byte lines that the loads
of a simdgroup touch, per line that their bytes would fill.
"""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.bench import serve_report
from tests.msl_host.host import MslHost
from tests.msl_host.launch import LaunchRecord
from worker.metal.gated_delta import GatedDelta
from worker.metal.mamba2 import Mamba2
from worker.metal.short_conv import ShortConv
from worker.metal.state_rows import StateRows
from worker.metal.state_self_test import GatedDeltaShape, Mamba2Shape, ShortConvShape, StateLayerShape

_REPOSITORY = Path(__file__).resolve().parents[2]
_QWEN = GatedDeltaShape(16, 32, 128, 128, mx.bfloat16)
_QWEN_QUARTER = GatedDeltaShape(4, 8, 128, 128, mx.bfloat16)
_KIMI_QUARTER = GatedDeltaShape(8, 8, 128, 128, mx.bfloat16, is_by_channel=True)
_NEMOTRON = Mamba2Shape(128, 8, 64, 128, mx.bfloat16, (0.0, float("inf")))
_FALCON_QUARTER = Mamba2Shape(8, 1, 64, 256, mx.bfloat16, (0.0, float("inf")))
_QWEN_CONV = ShortConvShape(8192, 4, mx.bfloat16, mx.bfloat16, has_bias=False, has_silu=True)
_CASES: dict[str, tuple[StateLayerShape, tuple[int, ...]]] = {
    "Qwen3-Next, 1 decode row": (_QWEN, (1,)),
    "Qwen3-Next, 4 decode rows": (_QWEN, (1, 1, 1, 1)),
    "Qwen3-Next, a quarter of the heads, prefills of 64 and 61 tokens": (_QWEN_QUARTER, (64, 61)),
    "Kimi Linear, a quarter of the heads, prefills of 64 and 61 tokens": (_KIMI_QUARTER, (64, 61)),
    "Nemotron-H, 1 decode row": (_NEMOTRON, (1,)),
    "Falcon-H1, a quarter of the heads, prefill of 64 tokens": (_FALCON_QUARTER, (64,)),
    "Qwen3-Next convolution, 4 decode rows": (_QWEN_CONV, (1, 1, 1, 1)),
    "Qwen3-Next convolution, prefills of 256 and 31 tokens": (_QWEN_CONV, (256, 31)),
}


def _launch(shape: StateLayerShape, lengths: tuple[int, ...]) -> LaunchRecord:
    host = MslHost(count_lines=True)
    kernel: Any = {GatedDeltaShape: GatedDelta, Mamba2Shape: Mamba2, ShortConvShape: ShortConv}[type(shape)](host)
    num = len(lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    rows = StateRows(offsets, np.arange(num, dtype=np.int32), np.zeros(num, np.bool_))
    size, dtype = shape.pool
    pool = mx.zeros((num, *size), dtype)
    mx.eval(pool)
    kernel(*shape.inputs(rows.num_rows, 1), pool, rows, **shape.keywords)
    return host.records[0]


def _report(record: LaunchRecord) -> dict[str, Any]:
    state = record.buffers["pool"]
    # The large inputs: those that are read with every token.
    read = {name: counts for name, counts in record.buffers.items() if counts.unique_bytes_read >= 64}
    return {
        "kernel": record.kernel,
        "threadgroups": record.threadgroups,
        "threads": record.threads,
        "threadgroup_memory_bytes": record.threadgroup_memory,
        "barriers_a_threadgroup": record.threadgroup_barriers / record.threadgroups,
        "simd_operations": record.simd_operations,
        "state_bytes_read": state.bytes_read,
        "state_bytes_written": state.bytes_written,
        "read_amplification": {name: round(c.bytes_read / c.unique_bytes_read, 2) for name, c in read.items()},
        "lines": {name: round(c.load_lines / c.least_load_lines, 2) for name, c in read.items() if c.least_load_lines},
    }


def main() -> None:
    """Count, and print."""
    commit, is_dirty = serve_report.commit(_REPOSITORY)
    cases = {name: _report(_launch(*case)) for name, case in _CASES.items()}
    print(json.dumps({"commit": commit, "dirty": is_dirty, "machine": serve_report.machine(), "counts": cases}))


if __name__ == "__main__":
    main()
