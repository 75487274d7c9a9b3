"""One launch of a compiled kernel: buffers in, checks, buffers out, counters."""

import ctypes
import re
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from tests.msl_host import build
from tests.msl_host.arrays import Input, filled, itemsize
from tests.msl_host.errors import Finding, KernelError
from tests.msl_host.places import Author
from tests.msl_host.signature import Parameter, Signature

MAX_THREADGROUP_BYTES = 32 * 1024
MAX_BUFFERS = 31
# The runtime has one state, so one launch runs at a time.
_LOCK = threading.Lock()
_COUNTERS = [
    *("threadgroups", "threads", "threadgroup_barriers", "simdgroup_barriers", "simd_operations", "matrix_multiplies"),
    *("atomics", "threadgroup_bytes_read", "threadgroup_bytes_written", "switches"),
]


class _Request(ctypes.Structure):
    """`LaunchRequest` of launch.cpp."""

    _fields_ = (
        ("entry", ctypes.c_void_p),
        ("arguments", ctypes.c_void_p),
        *(
            (name, ctypes.c_uint64)
            for name in ("num_arguments", "group_low", "group_high", "module_low", "module_high", "seed")
        ),
        ("cpu_seconds", ctypes.c_double),
        ("grid", ctypes.c_uint32 * 3),
        ("threadgroup", ctypes.c_uint32 * 3),
        ("granule", ctypes.c_uint32),
        ("count_lines", ctypes.c_uint32),
        ("variables", ctypes.c_void_p),
        ("num_variables", ctypes.c_uint64),
    )


@dataclass(frozen=True, slots=True)
class BufferCounters:
    """Traffic of one buffer in one launch, in bytes.

    `load_requests`: load instructions executed by a simdgroup, all lanes together; `load_lines`: 64-byte lines that
    they touched; `least_load_lines`: lines that their bytes would fill. These three stay 0 unless lines are counted.
    """

    bytes_read: int
    bytes_written: int
    unique_bytes_read: int
    unique_bytes_written: int
    load_requests: int
    load_lines: int
    least_load_lines: int


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """What one launch did. Counts, not times. `threadgroup_barriers` are summed over threadgroups."""

    kernel: str
    template: str
    grid: tuple[int, ...]
    threadgroup: tuple[int, ...]
    threadgroup_memory: int
    threadgroups: int
    threads: int
    threadgroup_barriers: int
    simdgroup_barriers: int
    simd_operations: int
    matrix_multiplies: int
    atomics: int
    threadgroup_bytes_read: int
    threadgroup_bytes_written: int
    buffers: dict[str, BufferCounters] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Job:
    """A call, checked and with its types bound."""

    name: str
    signature: Signature
    author: Author
    inputs: Sequence[Input]
    output_shapes: Sequence[tuple[int, ...]]
    output_dtypes: Sequence[mx.Dtype]
    grid: tuple[int, ...]
    threadgroup: tuple[int, ...]
    init_value: float | None
    in_place: Collection[str]
    cpu_seconds: float
    count_lines: bool

    def error(self, *findings: Finding) -> KernelError:
        """The findings as an error that names the kernel."""
        return KernelError(self.signature.title, list(findings))


def run(job: Job, module: build.Module, seed: int, writes_back: bool) -> tuple[list[bytes], LaunchRecord]:
    """Bytes of the outputs and of what was written in place, and the counters.

    `writes_back`: inputs declared in place get what the kernel wrote.
    """
    if module.group_bytes > MAX_THREADGROUP_BYTES:
        text = f"{module.group_bytes} bytes of threadgroup memory; Metal has {MAX_THREADGROUP_BYTES}"
        raise job.error(Finding("threadgroup-memory", "", text))
    with _LOCK:
        while True:
            launch = _Launch(job, module)
            findings = launch.run(seed)
            if any(finding.kind == "granule" for finding in findings) and module.granule > 1:
                # Single bytes are accessed: each is tracked by itself from now on.
                module.granule = 1
                continue
            break
        if findings:
            raise job.error(*findings)
        launch.check_written()
        outputs = launch.outputs()
        if writes_back:
            launch.write_back()
        return outputs, launch.record()


class _Launch:
    """The buffers of one launch in the runtime."""

    def __init__(self, job: Job, module: build.Module) -> None:
        self._job, self._module = job, module
        self._runtime = _typed_runtime()
        self._addresses: list[int] = []
        if self._runtime.msl_reset_buffers():
            raise MemoryError("no address space for the harness's buffers: 256 GiB are reserved, not used")
        self._kept: list[np.ndarray] = []
        for parameter in job.signature.parameters:
            self._add(parameter)

    def _add(self, parameter: Parameter) -> None:
        if parameter.role == "output":
            self._add_output(parameter)
        elif parameter.role == "input":
            self._add_input(parameter)
        else:
            value = self._job.inputs[parameter.index]
            numbers, kind = {
                "shape": (value.shape, np.int32),
                "strides": (value.strides, np.int64),
                "ndim": ((value.ndim,), np.int32),
            }[parameter.role]
            data = np.array(numbers, kind)
            self._copy(self._allocate(parameter.name, data.nbytes, False, True, 1), data)

    def _add_input(self, parameter: Parameter) -> None:
        value = self._job.inputs[parameter.index]
        is_written = value.name in self._job.in_place
        size = itemsize(value.dtype) if self._module.granule > 1 else 1
        if value.pool is None:
            address = self._allocate(value.name, value.nbytes, is_written, True, size)
            ctypes.memmove(address, value.bits.ctypes.data, value.nbytes)
            return
        row_size = value.nbytes // value.shape[0]
        address = self._allocate(value.name, value.nbytes, is_written, False, size, row_size if is_written else 0)
        for row in value.pool.rows:
            if not 0 <= row < value.shape[0]:
                raise ValueError(f"pool '{value.name}' has no row {row}: it has {value.shape[0]}")
            self._copy(address + row * row_size, value.row_bytes(row))
            self._runtime.msl_mark_filled(len(self._addresses) - 1, row * row_size, row_size)

    def _add_output(self, parameter: Parameter) -> None:
        shape, dtype = self._job.output_shapes[parameter.index], self._job.output_dtypes[parameter.index]
        nbytes = int(np.prod(shape, dtype=np.int64)) * itemsize(dtype)
        size = itemsize(dtype) if self._module.granule > 1 else 1
        address = self._allocate(parameter.name, nbytes, True, self._job.init_value is not None, size)
        if self._job.init_value is None:
            ctypes.memset(address, 0xFF, nbytes)
        else:
            self._copy(address, filled(shape, dtype, self._job.init_value))

    def _allocate(
        self, name: str, nbytes: int, is_writable: bool, is_filled: bool, granule: int, row_bytes: int = 0
    ) -> int:
        address = self._runtime.msl_add_buffer(name.encode(), nbytes, is_writable, is_filled, granule, row_bytes)
        if not address:
            raise MemoryError(f"buffer '{name}' of {nbytes} bytes does not fit the harness's 256 GiB of addresses")
        self._addresses.append(address)
        return int(address)

    @staticmethod
    def _copy(address: int, data: np.ndarray) -> None:
        ctypes.memmove(address, data.ctypes.data, data.nbytes)

    def run(self, seed: int) -> list[Finding]:
        job, module = self._job, self._module
        arguments = (ctypes.c_uint64 * len(self._addresses))(*self._addresses)
        ranges = [number for low, size, _ in module.variables for number in (low, size)]
        variables = (ctypes.c_uint64 * len(ranges))(*ranges)
        triple = ctypes.c_uint32 * 3
        request = _Request(
            module.entry,
            ctypes.addressof(arguments),
            len(arguments),
            *module.group_bounds,
            *module.bounds,
            seed,
            job.cpu_seconds,
            triple(*job.grid),
            triple(*job.threadgroup),
            module.granule,
            job.count_lines,
            ctypes.addressof(variables),
            len(module.variables),
        )
        if not self._runtime.msl_launch(ctypes.byref(request)):
            return []
        lines = self._runtime.msl_errors().decode().splitlines()
        return [self._finding(*line.split("\t", 2)) for line in lines]

    def _finding(self, kind: str, pc: str, text: str) -> Finding:
        if kind == "granule":
            return Finding(kind, "", "")
        author = self._job.author
        where = author.of_pc(self._module.path, int(pc)) if int(pc) else ""
        return Finding(kind, where, author.with_places(self._in_words(text)))

    def _in_words(self, text: str) -> str:
        """The runtime's "@P12@", an offset in the kernel's code, and "@T12@", one into threadgroup memory."""
        author, module = self._job.author, self._module
        text = re.sub(r"@P(\d+)@", lambda m: author.of_pc(module.path, int(m[1])) or "a place in the preamble", text)
        text = re.sub(r"@T(\d+)@", lambda m: self._variable_text(int(m[1])), text)
        return re.sub(
            r"byte (-?\d+) of (?:buffer|input) '(\w+)'", lambda m: m[0] + self._element(m[2], int(m[1])), text
        )

    def _element(self, name: str, at: int) -> str:
        """Index of the element at a byte of a buffer, such as " (element [3, 0, 17])"."""
        parameter = next(p for p in self._job.signature.parameters if p.name == name)
        if parameter.role == "output":
            shape, dtype = self._job.output_shapes[parameter.index], self._job.output_dtypes[parameter.index]
        elif parameter.role == "input" and self._job.inputs[parameter.index].is_contiguous:
            shape, dtype = self._job.inputs[parameter.index].shape, self._job.inputs[parameter.index].dtype
        else:
            return ""
        element = at // itemsize(dtype)
        if not 0 <= element < int(np.prod(shape, dtype=np.int64)):
            return f" (element {element})"
        return f" (element {[int(index) for index in np.unravel_index(element, shape)]})"

    def _variable_text(self, at: int) -> str:
        before = [(at - low, size, name) for low, size, name in self._module.variables if low <= at]
        if not before:
            return "memory before all threadgroup variables"
        distance, size, name = min(before)
        return f"byte {distance} of threadgroup variable '{name}' ({size} bytes)"

    def check_written(self) -> None:
        """Every byte of every output, unless `init_value` gave it one."""
        if self._job.init_value is not None:
            return
        for number, parameter in enumerate(self._job.signature.parameters):
            if parameter.role != "output":
                continue
            size = self._output_bytes(parameter)
            written = self._counters(number).unique_bytes_written
            if written != size:
                first = int(self._runtime.msl_first_unwritten(number))
                text = f"{size - written} of {size} bytes of output '{parameter.name}' were never written, the first"
                text += f" is byte {first}{self._element(parameter.name, first)}"
                raise self._job.error(Finding("unwritten-output", "", text))

    def _output_bytes(self, parameter: Parameter) -> int:
        shape, dtype = self._job.output_shapes[parameter.index], self._job.output_dtypes[parameter.index]
        return int(np.prod(shape, dtype=np.int64)) * itemsize(dtype)

    def outputs(self) -> list[bytes]:
        """Bytes of each output, then of each array that was written in place."""
        parameters = list(enumerate(self._job.signature.parameters))
        sizes = [(number, self._output_bytes(p)) for number, p in parameters if p.role == "output"]
        for number, parameter in parameters:
            if parameter.role == "input" and parameter.name in self._job.in_place:
                value = self._job.inputs[parameter.index]
                sizes += [(number, value.nbytes)] if value.pool is None else []
        return [ctypes.string_at(self._addresses[number], size) for number, size in sizes]

    def write_back(self) -> None:
        for number, parameter in enumerate(self._job.signature.parameters):
            if parameter.role != "input" or parameter.name not in self._job.in_place:
                continue
            value, address = self._job.inputs[parameter.index], self._addresses[number]
            if value.pool is None:
                ctypes.memmove(value.bits.ctypes.data, address, value.nbytes)
            else:
                self._write_rows(number, value)

    def _write_rows(self, number: int, value: Input) -> None:
        assert value.pool is not None
        count = self._runtime.msl_written_rows(number, None, 0)
        rows = (ctypes.c_uint64 * count)()
        self._runtime.msl_written_rows(number, rows, count)
        size = value.nbytes // value.shape[0]
        for row in rows:
            bits = np.frombuffer(ctypes.string_at(self._addresses[number] + row * size, size), value.bits_type)
            value.set_row(int(row), bits.reshape(value.shape[1:]))

    def _counters(self, number: int) -> BufferCounters:
        values = (ctypes.c_uint64 * 7)()
        self._runtime.msl_buffer_counters(number, values)
        return BufferCounters(*values)

    def record(self) -> LaunchRecord:
        job = self._job
        counters = dict(zip(_COUNTERS, self._runtime.msl_counters().contents, strict=True))
        del counters["switches"]
        buffers = {p.name: self._counters(number) for number, p in enumerate(job.signature.parameters)}
        return LaunchRecord(
            kernel=job.name,
            template=job.signature.template,
            grid=job.grid,
            threadgroup=job.threadgroup,
            threadgroup_memory=self._module.group_bytes,
            buffers=buffers,
            **counters,
        )


def _typed_runtime() -> Any:
    library = build.runtime()
    if library.msl_add_buffer.restype is not ctypes.c_void_p:
        u32, u64, number = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int
        library.msl_add_buffer.restype = ctypes.c_void_p
        library.msl_add_buffer.argtypes = [ctypes.c_char_p, u64, number, number, u32, u64]
        library.msl_mark_filled.argtypes = [u32, u64, u64]
        library.msl_buffer_counters.argtypes = [u32, ctypes.c_void_p]
        library.msl_first_unwritten.restype = u64
        library.msl_written_rows.restype = u64
        library.msl_written_rows.argtypes = [u32, ctypes.c_void_p, u64]
        library.msl_errors.restype = ctypes.c_char_p
        library.msl_counters.restype = ctypes.POINTER(u64 * len(_COUNTERS))
    return library
