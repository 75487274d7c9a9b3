"""MLX's own decode attention, whose source the wheel has: right on GPUs, so it must be right and unreported here."""

import importlib.util
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.msl_host.errors import KernelError
from tests.msl_host.host import MslHost

_CONSTANTS = ("has_mask", "query_transposed", "do_causal", "bool_mask", "float_mask", "has_sinks")
_ALIASES = """
  uint3 tid = threadgroup_position_in_grid, tpg = threadgroups_per_grid;
  uint simd_gid = simdgroup_index_in_threadgroup, simd_lid = thread_index_in_simdgroup;
  const device bool* bmask = (const device bool*)queries;
  const device T* fmask = queries;
  const device T* sinks = queries;
  int mask_kv_seq_stride = 0, mask_q_seq_stride = 0, mask_head_stride = 0, num_q_heads = 1;
"""
_SCALARS = ("gqa_factor", "N", "k_head_stride", "k_seq_stride", "v_head_stride", "v_seq_stride", "scale")


def _body() -> str:
    """Of the kernel `sdpa_vector`; what its signature and function constants bring comes by name."""
    mlx = importlib.util.find_spec("mlx")
    folder = Path(next(iter(mlx.submodule_search_locations)))
    text = (folder / "include/mlx/backend/metal/kernels/sdpa_vector.h").read_text()
    return re.search(r"\[\[kernel\]\] void sdpa_vector\(.*?\) \{\n(.*?)\n\}\n", text, re.DOTALL)[1]


def _attend(host, dtype, head_dim, num_keys, source):
    heads, kv_heads = 4, 2
    rng = np.random.RandomState(0)
    shapes = (heads, 1, head_dim), (kv_heads, num_keys, head_dim), (kv_heads, num_keys, head_dim)
    arrays = [mx.array(rng.randn(*shape).astype(np.float32)).astype(dtype) for shape in shapes]
    strides = [mx.array(value, mx.uint64) for value in (num_keys * head_dim, head_dim)]
    scale = head_dim**-0.5
    kernel = host(
        name="sdpa_vector",
        input_names=["queries", "keys", "values", *_SCALARS],
        output_names=["out"],
        source=_ALIASES + source,
    )
    (out,) = kernel(
        inputs=[*arrays, mx.array(heads // kv_heads), mx.array(num_keys), *strides, *strides, mx.array(scale)],
        output_shapes=[(heads, 1, head_dim)],
        output_dtypes=[dtype],
        grid=(1024 * heads, 1, 1),
        threadgroup=(1024, 1, 1),
        template=[("T", dtype), ("D", head_dim), ("V", head_dim), *((name, False) for name in _CONSTANTS)],
    )
    q, k, v = (np.array(array.astype(mx.float32)).astype(np.float64) for array in arrays)
    k, v = np.repeat(k, heads // kv_heads, 0), np.repeat(v, heads // kv_heads, 0)
    scores = q @ k.transpose(0, 2, 1) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = weights / weights.sum(-1, keepdims=True) @ v
    return np.abs(np.array(out.astype(mx.float32)) - expected).max()


@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_keys", "tolerance"),
    [(mx.float32, 64, 77, 1e-6), (mx.float16, 128, 200, 1e-3), (mx.bfloat16, 96, 31, 8e-3)],
)
def test_attention_of_mlx_is_right_and_clean(dtype, head_dim, num_keys, tolerance):
    assert _attend(MslHost(seeds=(0, 5)), dtype, head_dim, num_keys, _body()) < tolerance


def test_attention_of_mlx_without_one_of_its_barriers_is_not():
    """Each of its barriers is needed, and taking any away is found."""
    pieces = _body().split("threadgroup_barrier(mem_flags::mem_threadgroup);")
    assert len(pieces) == 4
    for index in range(1, len(pieces)):
        parts = [";" if at == index else "threadgroup_barrier(mem_flags::mem_threadgroup);" for at in range(1, 4)]
        source = pieces[0] + "".join(part + piece for part, piece in zip(parts, pieces[1:], strict=True))
        with pytest.raises(KernelError) as caught:
            _attend(MslHost(), mx.float32, 64, 40, source)
        assert "race-threadgroup" in {finding.kind for finding in caught.value.findings}
