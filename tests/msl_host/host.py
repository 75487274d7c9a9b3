"""`MslHost`: `mx.fast.metal_kernel` on a Linux CPU, with every access and every barrier checked."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tests.msl_host import build, launch
from tests.msl_host.arrays import Input, from_bytes, itemsize, mlx_dtype
from tests.msl_host.errors import Finding
from tests.msl_host.in_place import IN_PLACE
from tests.msl_host.launch import Job, LaunchRecord
from tests.msl_host.places import Author
from tests.msl_host.signature import MAX_CONSTANT_ELEMENTS, write_signature

FIXED_SCHEDULE = 0
_MAX_THREADS = 1024
_BUILDER = build.Builder()


class MslHost:
    """A `metal_kernel` factory: call it as `mx.fast.metal_kernel`, and its result as MLX's.

    `seeds`: schedules to run each launch under, 0 for the fixed one; results must be the same bits in all. `in_place`:
    inputs that a kernel may write, by the kernel's name with or without its `_suffix`. `cpu_seconds`: what a launch may
    take before it counts as endless. `count_lines`: also count 64-byte lines of loads, which is slow.

    Launches are done when the call returns; `records` has one entry for each, of the first schedule.
    """

    def __init__(
        self,
        *,
        seeds: Sequence[int] = (FIXED_SCHEDULE,),
        in_place: Mapping[str, Sequence[str]] = IN_PLACE,
        cpu_seconds: float = 60.0,
        count_lines: bool = False,
    ) -> None:
        self.records: list[LaunchRecord] = []
        self._seeds = tuple(seeds)
        self._in_place = in_place
        self._cpu_seconds = cpu_seconds
        self._count_lines = count_lines
        self._ahead: list[Future[Path]] | None = None

    def __call__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str = "",
        ensure_row_contiguous: bool = True,
        atomic_outputs: bool = False,
        compile_options: Mapping[str, str] | None = None,
    ) -> "HostKernel":
        """The kernel, not compiled yet: types come with the call."""
        if compile_options not in (None, {}, {"math_mode": "safe"}):
            raise ValueError(f"compile_options {compile_options}: the harness computes in math mode safe only")
        if not output_names:
            raise ValueError("[metal_kernel] Must specify at least one output.")
        return HostKernel(
            self, name, list(input_names), list(output_names), source, header, ensure_row_contiguous, atomic_outputs
        )

    @contextlib.contextmanager
    def compiling_ahead(self) -> Iterator[None]:
        """Within, kernels are only compiled, two at a time, and give zeros. Errors come when they run."""
        self._ahead = []
        try:
            yield
        finally:
            waiting, self._ahead = self._ahead, None
            for future in waiting:
                future.exception()

    def _written_inputs(self, name: str) -> Sequence[str]:
        known = [key for key in self._in_place if name == key or name.startswith(key + "_")]
        return self._in_place[max(known, key=len)] if known else ()

    def _run(self, job: Job, dtypes: Sequence[Any]) -> list[Any]:
        path = _BUILDER.submit(job.signature, job.author)
        if self._ahead is not None:
            self._ahead.append(path)
            return [
                from_bytes(bytes(size), shape, dtype)
                for size, shape, dtype in zip(_output_sizes(job), job.output_shapes, dtypes, strict=True)
            ]
        module = build.load(path.result())
        first, record = launch.run(job, module, self._seeds[0], writes_back=len(self._seeds) == 1)
        for seed in self._seeds[1:]:
            again, _ = launch.run(job, module, seed, writes_back=seed == self._seeds[-1])
            if again != first:
                text = f"results under schedule {seed} differ from those under schedule {self._seeds[0]}"
                raise job.error(Finding("schedule-dependent", "", text))
        self.records.append(record)
        outputs = zip(first, job.output_shapes, dtypes, strict=False)  # what was written in place comes after them
        return [from_bytes(data, shape, dtype) for data, shape, dtype in outputs]


class HostKernel:
    """What `mx.fast.metal_kernel` returns."""

    def __init__(
        self,
        host: MslHost,
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
        header: str,
        ensure_row_contiguous: bool,
        atomic_outputs: bool,
    ) -> None:
        self._host, self._name = host, name
        self._input_names, self._output_names = input_names, output_names
        self._author = Author(header, source)
        self._ensure_row_contiguous, self._atomic_outputs = ensure_row_contiguous, atomic_outputs

    def __call__(
        self,
        *,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[Any]:
        """The outputs: mx.arrays where MLX's dtypes were given, NumPy arrays where NumPy's. Raises KernelError.

        `stream` is taken and ignored; inputs are evaluated at once.
        """
        job = self._job(inputs, output_shapes, output_dtypes, grid, threadgroup, template, init_value)
        if verbose:
            print(job.signature.mlx_text)
        return self._host._run(job, output_dtypes)

    def mlx_text(self, **call: Any) -> str:
        """What MLX would compile for this call."""
        call.setdefault("template", None)
        call.setdefault("init_value", None)
        return self._job(**call).signature.mlx_text

    def _job(
        self,
        inputs: Sequence[Any],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[Any],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, Any]] | None,
        init_value: float | None,
    ) -> Job:
        given = {"inputs": inputs, "output_shapes": output_shapes, "output_dtypes": output_dtypes}
        for what, values in given.items():
            names = self._input_names if what == "inputs" else self._output_names
            if len(values) != len(names):
                raise ValueError(
                    f"[metal_kernel] Expected `{what}` to have size {len(names)} but got size {len(values)}."
                )
        prepared = [Input(name, value) for name, value in zip(self._input_names, inputs, strict=True)]
        dtypes = [mlx_dtype(dtype) for dtype in output_dtypes]
        if self._ensure_row_contiguous:
            written = set(self._host._written_inputs(self._name))
            for value in prepared:
                if value.name not in written:
                    value.make_contiguous()
        author = self._author
        signature = write_signature(
            self._name,
            self._input_names,
            self._output_names,
            author.source,
            author.header,
            self._atomic_outputs,
            prepared,
            dtypes,
            list(template or ()),
        )
        job = Job(
            name=self._name,
            signature=signature,
            author=author,
            inputs=prepared,
            output_shapes=[tuple(shape) for shape in output_shapes],
            output_dtypes=dtypes,
            grid=tuple(grid),
            threadgroup=tuple(threadgroup),
            init_value=init_value,
            in_place=self._host._written_inputs(self._name),
            cpu_seconds=self._host._cpu_seconds,
            count_lines=self._host._count_lines,
        )
        findings = list(_launch_findings(job, self._ensure_row_contiguous))
        if findings:
            raise job.error(*findings)
        return job


def _output_sizes(job: Job) -> list[int]:
    counts = [int(np.prod(shape, dtype=np.int64)) for shape in job.output_shapes]
    return [count * itemsize(dtype) for count, dtype in zip(counts, job.output_dtypes, strict=True)]


def _launch_findings(job: Job, ensure_row_contiguous: bool) -> Iterator[Finding]:
    """What is wrong with a launch before anything runs."""

    def finding(text: str) -> Finding:
        return Finding("launch", "", text)

    for what, size in (("grid", job.grid), ("threadgroup", job.threadgroup)):
        if len(size) != 3 or min(size) < 1 or max(size) >= 2**32:
            yield finding(f"{what} {size}: three numbers from 1 to 2^32 - 1 are needed")
            return
    num_threads = int(np.prod(job.threadgroup, dtype=np.int64))
    if num_threads > _MAX_THREADS:
        yield finding(f"{num_threads} threads in a threadgroup: Metal allows {_MAX_THREADS}")
    parameters = job.signature.parameters
    if len(parameters) > launch.MAX_BUFFERS:
        yield finding(f"{len(parameters)} buffers, shapes and strides included: Metal allows {launch.MAX_BUFFERS}")
    if not job.signature.kernel_name.isidentifier():
        yield finding(
            f"'{job.signature.kernel_name}' is no name: letters and digits, and no negative template argument"
        )
    num_plain = sum(p.role in ("input", "output") for p in parameters)
    if "[[th" not in job.signature.mlx_text and len(job.output_shapes) > 1 and len(parameters) > num_plain:
        yield finding(
            "MLX writes a broken signature for several outputs and shapes without any thread attribute: use one"
        )
    yield from map(finding, _in_place_faults(job, ensure_row_contiguous))


def _in_place_faults(job: Job, ensure_row_contiguous: bool) -> Iterator[str]:
    """What is wrong with the inputs that the kernel writes."""
    unknown = set(job.in_place) - {value.name for value in job.inputs}
    if unknown:
        yield f"in_place.py lists inputs that the kernel does not have: {', '.join(sorted(unknown))}"
    for value in job.inputs:
        if value.name not in job.in_place:
            continue
        if ensure_row_contiguous:
            yield f"input '{value.name}' is written in place: ensure_row_contiguous must be False, or a copy is"
        if value.size < MAX_CONSTANT_ELEMENTS:
            yield f"input '{value.name}' is written in place but below 8 elements, so in address space constant"
        for other in job.inputs:
            if other is not value and value.shares_memory(other):
                yield f"input '{value.name}' is written in place and shares memory with '{other.name}'"


def engine_on_host(monkeypatch: Any, host: MslHost) -> None:
    """Until the test ends, `worker.metal.dispatch` sees a machine with Metal whose GPU is `host`.

    No test of an earlier start is remembered.
    """
    from worker.metal import dispatch, self_test

    monkeypatch.setattr(dispatch, "mx", _MlxWithMetal(host))
    monkeypatch.setattr(self_test, "ResultMemory", lambda needs: None)


class _MlxWithMetal:
    """mlx.core, but for the two names that the dispatch asks for a GPU by."""

    def __init__(self, host: Callable[..., Any]) -> None:
        self.metal = _Overlay(mx.metal, is_available=lambda: True)
        self.fast = _Overlay(mx.fast, metal_kernel=host)

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)


class _Overlay:
    def __init__(self, below: Any, **above: Any) -> None:
        self._below = below
        self.__dict__.update(above)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)
