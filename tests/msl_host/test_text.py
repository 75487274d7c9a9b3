"""The generated text is MLX's own, which MLX prints on Linux too when a call is traced for export."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.msl_host.host import MslHost


def _mlx_text(kernel: dict[str, Any], call: dict[str, Any]) -> str:
    """What MLX hands to Metal's compiler."""
    made = mx.fast.metal_kernel(**kernel)
    given = {key: value for key, value in call.items() if key != "inputs"}

    def launch(*arrays: mx.array) -> list[mx.array]:
        return made(inputs=list(arrays), verbose=True, **given)

    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        with _stdout_to(printed):
            mx.export_function(str(Path(folder) / "kernel.mlxfn"), launch, *call["inputs"])
        return printed.read_text().split("```\n", 1)[1].rsplit("\n```", 1)[0]


@contextlib.contextmanager
def _stdout_to(path: Path):
    """The process's own standard output: MLX prints from C++."""
    sys.stdout.flush()
    saved = os.dup(1)
    with path.open("w") as file:
        os.dup2(file.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(saved, 1)
            os.close(saved)


_ATTRIBUTES = """
  uint3 p = thread_position_in_grid + thread_position_in_threadgroup + threadgroup_position_in_grid;
  uint3 q = threads_per_threadgroup + dispatch_threads_per_threadgroup + threadgroups_per_grid + threads_per_grid;
  uint r = thread_index_in_threadgroup + thread_index_in_simdgroup + simdgroup_index_in_threadgroup;
  uint s = simdgroups_per_threadgroup + thread_execution_width + dispatch_simdgroups_per_threadgroup;
  uint t = thread_index_in_quadgroup + quadgroup_index_in_threadgroup + quadgroups_per_threadgroup;
  uint u = threads_per_simdgroup + dispatch_quadgroups_per_threadgroup;
  uint3 v = grid_origin + grid_size;
  o[0] = p.x + q.y + r + s + t + u + v.z;
"""


def _kernel(source: str, inputs: list[str], outputs: list[str], **more: Any) -> dict[str, Any]:
    return {"name": "sample", "input_names": inputs, "output_names": outputs, "source": source, **more}


def _call(inputs: list[mx.array], outputs: list[tuple[tuple[int, ...], mx.Dtype]], **more: Any) -> dict[str, Any]:
    return {
        "inputs": inputs,
        "output_shapes": [shape for shape, _ in outputs],
        "output_dtypes": [dtype for _, dtype in outputs],
        "grid": (64, 1, 1),
        "threadgroup": (32, 1, 1),
        **more,
    }


_COPY = "uint i = thread_position_in_grid.x;\n  o[i] = a[i];"
_F32 = ((64,), mx.float32)
_CASES = {
    "plain": (_kernel(_COPY, ["a"], ["o"]), _call([mx.zeros(64)], [_F32])),
    "attributes": (_kernel(_ATTRIBUTES, ["a"], ["o"]), _call([mx.zeros(64)], [((1,), mx.uint32)])),
    "template": (
        _kernel("o[thread_position_in_grid.x] = T(N) + T(B);", ["a"], ["o"], header="// ours\ntypedef float F;\n"),
        _call([mx.zeros(64)], [((64,), mx.bfloat16)], template=[("T", mx.bfloat16), ("N", 3), ("B", True)]),
    ),
    "shapes": (
        _kernel(
            "uint i = thread_position_in_grid.x; o[i] = a[i * a_strides[0] % a_shape[0]] + b_shape[0] + a_ndim + s;",
            ["a", "b", "s"],
            ["o"],
        ),
        _call([mx.zeros((8, 8)), mx.zeros(3, mx.int32), mx.array(2.0)], [_F32]),
    ),
    "small and scalar": (
        _kernel(_COPY + " // b s", ["a", "b", "s"], ["o"]),
        _call([mx.zeros(8), mx.zeros(7, mx.int64), mx.array(2, mx.uint8)], [_F32], init_value=0),
    ),
    "atomic outputs": (
        _kernel(
            "atomic_fetch_add_explicit(&o[0], a[thread_position_in_grid.x], memory_order_relaxed); p[0];",
            ["a"],
            ["o", "p"],
            atomic_outputs=True,
        ),
        _call([mx.zeros(64)], [((1,), mx.float32), ((1,), mx.uint32)], init_value=0),
    ),
    "no attribute": (_kernel("o[0] = a[0];", ["a"], ["o"]), _call([mx.zeros(64)], [((1,), mx.float32)])),
    "all dtypes": (
        _kernel(_COPY, ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"], ["o"]),
        _call(
            [
                mx.zeros(64, dtype)
                for dtype in (
                    *(mx.bool_, mx.uint8, mx.uint16, mx.uint32, mx.uint64, mx.int8, mx.int16, mx.int32, mx.int64),
                    *(mx.float16, mx.bfloat16, mx.float32),
                )
            ],
            [_F32],
        ),
    ),
}


@pytest.mark.parametrize("name", _CASES)
def test_text_is_the_one_that_mlx_compiles(name):
    kernel, call = _CASES[name]
    ours = MslHost()(**kernel).mlx_text(**call)
    assert ours.strip() == _mlx_text(kernel, call).strip()


def test_text_of_the_worker_s_kernels_is_the_one_that_mlx_compiles():
    """By their own dispatch code: what it asks of MLX is recorded, and both texts compared."""
    from worker.batch import Batch, Span
    from worker.metal.paged_decode import PagedDecode
    from worker.metal.write_kv import WriteKV

    recorder = _Recorder()
    pool, other = mx.zeros((8, 16, 64), mx.float16), mx.zeros((8, 16, 64), mx.float16)
    rows = mx.zeros((2, 2, 64), mx.float16)
    WriteKV(recorder)(rows, rows, mx.array([1, -1], mx.int32), pool, other)
    (group,) = Batch([Span([0], 20, [1, 2], True)], block_size=16, decodes_together=True).decode_groups
    PagedDecode(recorder)(mx.zeros((1, 4, 1, 64), mx.float16), pool, other, group, 2, 1.0)
    assert len(recorder.calls) == 3
    for kernel, call in recorder.calls:
        assert MslHost()(**kernel).mlx_text(**call).strip() == _mlx_text(kernel, call).strip()


class _Recorder:
    """A metal_kernel that keeps what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def __call__(self, **kernel: Any) -> Any:
        def launch(**call: Any) -> list[mx.array]:
            self.calls.append((kernel, call))
            return [mx.zeros(s, d) for s, d in zip(call["output_shapes"], call["output_dtypes"], strict=True)]

        return launch


def test_wrong_number_of_arrays_is_refused_as_by_mlx():
    kernel = MslHost()(**_kernel(_COPY, ["a"], ["o"]))
    with pytest.raises(ValueError, match="Expected `inputs` to have size 1 but got size 2"):
        kernel(**_call([mx.zeros(64), mx.zeros(64)], [_F32]))
    with pytest.raises(ValueError, match="Must specify at least one output"):
        MslHost()(**_kernel(_COPY, ["a"], []))
    with pytest.raises(ValueError, match="math mode safe only"):
        MslHost()(**_kernel(_COPY, ["a"], ["o"]), compile_options={"math_mode": "fast"})


def test_bfloat_outputs_can_be_asked_for_by_mlx_s_dtype_only():
    kernel = MslHost()(**_kernel(_COPY, ["a"], ["o"]))
    with pytest.raises((ValueError, TypeError)):
        kernel(**_call([np.zeros(64, np.float32)], [((64,), np.float64)]))
