"""Planted defects: one tiny kernel each, with the kind of finding that must name it.

A defect stays here for good: it is how the harness shows that a kernel which runs clean does not have it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.msl_host.host import MslHost

THREAD = "uint i = thread_position_in_grid.x; "


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


# Two outputs of 64 floats.
PAIR = (("o", (64,), np.float32), ("p", (64,), np.float32))
