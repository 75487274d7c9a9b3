"""The race detector against brute force: it keeps a few accesses per place, and must decide every program exactly."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.msl_host.errors import KernelError
from tests.msl_host.host import MslHost

_SIMDGROUPS, _CELLS, _STEPS, _GROUPS = 3, 2, 12, 2
_THREADS = 32 * _SIMDGROUPS
_NONE, _ACCESS, _GROUP_BARRIER, _SIMD_BARRIER = range(4)

# A program is data: at each step either one thread accesses a cell, or all threads or one simdgroup meet at a barrier.
_STEP_SOURCE = """
  const uint t = thread_index_in_threadgroup;
  const int group = int(threadgroup_position_in_grid.x);
  SPACE
  float sum = 0.0f;
  for (int s = 0; s < STEPS; s++) {
    const int kind = program[s * 5], who = program[s * 5 + 1], at = program[s * 5 + 2];
    const bool writes = program[s * 5 + 3] != 0, is_here = program[s * 5 + 4] == group;
    if (kind == 2) threadgroup_barrier(FLAG);
    if (kind == 3 && int(simdgroup_index_in_threadgroup) == who) simdgroup_barrier(FLAG);
    if (kind == 1 && is_here && int(t) == who) {
      if (writes) cells[at] = sum; else sum += cells[at];
    }
  }
  o[thread_position_in_grid.x] = sum;
"""
_SOURCES = {
    "threadgroup": _STEP_SOURCE.replace(
        "SPACE", "threadgroup float cells[2];\nif (t < 2) cells[t] = 0.0f;\nthreadgroup_barrier(FLAG);"
    ).replace("FLAG", "mem_flags::mem_threadgroup"),
    "device": _STEP_SOURCE.replace("SPACE", "device float* cells = (device float*)pool;").replace(
        "FLAG", "mem_flags::mem_device"
    ),
}

Step = tuple[int, int, int, bool, int]


@st.composite
def _programs(draw: Any) -> list[Step]:
    threads = draw(st.lists(st.integers(0, _THREADS - 1), min_size=1, max_size=4))
    groups = draw(st.sampled_from([(0,), (0, 1)]))
    access = st.tuples(
        st.just(_ACCESS), st.sampled_from(threads), st.integers(0, _CELLS - 1), st.booleans(), st.sampled_from(groups)
    )
    group_barrier = st.just((_GROUP_BARRIER, 0, 0, False, 0))
    simd_barrier = st.tuples(
        st.just(_SIMD_BARRIER), st.integers(0, _SIMDGROUPS - 1), st.just(0), st.just(False), st.just(0)
    )
    return draw(st.lists(st.one_of(access, access, group_barrier, simd_barrier), max_size=_STEPS))


def _has_race(program: list[Step], is_device: bool) -> bool:
    """Whether two accesses of a cell, one a write, have nothing between them that orders their threads."""
    accesses = [(at, step) for at, step in enumerate(program) if step[0] == _ACCESS]
    for first, (start, (_, thread, cell, writes, group)) in enumerate(accesses):
        for end, (_, other, other_cell, other_writes, other_group) in accesses[first + 1 :]:
            if cell != other_cell or not (writes or other_writes) or (thread, group) == (other, other_group):
                continue
            if group != other_group:
                if is_device:
                    return True
                continue
            between = program[start:end]
            is_ordered = any(step[0] == _GROUP_BARRIER for step in between) or (
                thread // 32 == other // 32
                and any(step[0] == _SIMD_BARRIER and step[1] == thread // 32 for step in between)
            )
            if not is_ordered:
                return True
    return False


def _finds_race(program: list[Step], space: str, seed: int) -> bool:
    table = np.zeros((_STEPS, 5), np.int32)
    for at, step in enumerate(program):
        table[at] = step
    kernel = MslHost(seeds=(seed,), in_place={"steps": ["pool"]})(
        name="steps",
        input_names=["program", "pool"],
        output_names=["o"],
        source=_SOURCES[space],
        ensure_row_contiguous=False,
    )
    try:
        kernel(
            inputs=[table, np.zeros(8, np.float32)],
            output_shapes=[(_THREADS * _GROUPS,)],
            output_dtypes=[np.float32],
            grid=(_THREADS * _GROUPS, 1, 1),
            threadgroup=(_THREADS, 1, 1),
            template=[("STEPS", _STEPS)],
        )
    except KernelError as error:
        assert {finding.kind for finding in error.findings} == {f"race-{space}"}
        return True
    return False


@pytest.mark.parametrize("space", _SOURCES)
@settings(max_examples=150, deadline=None)
@given(program=_programs(), seed=st.sampled_from([0, 7, 20261]))
def test_races_are_found_exactly(space: str, program: list[Step], seed: int):
    assert _finds_race(program, space, seed) == _has_race(program, space == "device")
