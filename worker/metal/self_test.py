"""Kernels against their twins on the machine's own GPU, before any of them serves a request.

What the kernels are is said in `self_test_cases.py`: one line a family. A family that fails gives way to its twin by
itself. What passed is remembered for the same chip, macOS, MLX, kernel sources and needs of the model, so that only a
first start pays for it; a family that ended the process twice is not tried again until one of these changes.
"""

import contextlib
import hashlib
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx

from worker.metal.factory import MetalKernel

logger = logging.getLogger(__name__)

# What a model needs: `AttentionNeeds`, or shapes that other families know. A family picks what concerns it.
Needs = Sequence[object]
# None if the family's kernels are right for all that concerns it, else what went wrong, for people.
Check = Callable[[MetalKernel, Needs], str | None]

_CACHE = Path.home() / ".cache" / "cidery" / "self_test"
_SOURCES = Path(__file__).parent
# One end of the process may have been somebody's kill.
_MAX_ENDS = 2


@dataclass(frozen=True, slots=True)
class Family:
    """Kernels that stand or fall together."""

    name: str
    check: Check


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """One kind of attention layer. `bits` 0: its pool is not quantised. `value_dim` 0: as `head_dim`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: mx.Dtype
    block_size: int = 16
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    bits: int = 0
    group_size: int = 32
    value_dim: int = 0

    def __post_init__(self) -> None:
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)

    def __str__(self) -> str:
        name = f"{self.num_heads} heads over {self.num_kv_heads} of {self.head_dim} {self.dtype}".replace(
            "mlx.core.", ""
        )
        return f"{name}, {self.bits} bits in groups of {self.group_size}" if self.bits else name


@dataclass(frozen=True, slots=True)
class RopeNeeds:
    """One kind of rotary embedding of packed rows."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: mx.Dtype
    dims: int
    is_traditional: bool
    has_freqs: bool


@dataclass(frozen=True, slots=True)
class Report:
    """Families that passed, now or (`remembered`) before; what each family that failed did wrong."""

    passed: frozenset[str]
    remembered: frozenset[str]
    failures: dict[str, str]
    seconds: float

    def works(self, name: str) -> bool:
        """Whether the family's kernels may run. A family that was not tested does not work."""
        return name in self.passed


def run(
    families: Sequence[Family], needs: Needs, metal_kernel: MetalKernel, memory: "ResultMemory | None" = None
) -> Report:
    """Check each family for what a model needs; a failure is logged once and reported. Without `memory` all are run."""
    started_s = time.monotonic()
    passed, remembered, failures = set(), set(), {}
    for family in families:
        if memory is not None and memory.has_passed(family.name):
            remembered.add(family.name)
            continue
        failure = _check(family, needs, metal_kernel, memory)
        if failure is None:
            passed.add(family.name)
        else:
            failures[family.name] = failure
            logger.warning("metal kernel %s is off, plain MLX runs in its place: %s", family.name, failure)
    seconds = time.monotonic() - started_s
    return Report(frozenset(passed | remembered), frozenset(remembered), failures, seconds)


def _check(family: Family, needs: Needs, metal_kernel: MetalKernel, memory: "ResultMemory | None") -> str | None:
    if memory is not None and memory.num_ends(family.name) >= _MAX_ENDS:
        return "its test ended the process; `cidery worker selftest` tries it again"
    with memory.trying(family.name) if memory is not None else contextlib.nullcontext():
        try:
            failure = family.check(metal_kernel, needs)
        except (RuntimeError, ValueError) as error:
            # How MLX reports a kernel that does not compile or cannot be launched.
            failure = str(error)
    if failure is None and memory is not None:
        memory.passed(family.name)
    return failure


class ResultMemory:
    """Remembers by empty files which families passed for such needs on such a machine, and which are being tried.

    Processes that start together share it without a lock: each has its own file for a trial, named by its pid.
    """

    def __init__(self, needs: Needs, machine: Sequence[str] | None = None, folder: Path = _CACHE) -> None:
        parts = [*(machine or this_machine()), kernel_hash(), *map(repr, needs)]
        self._key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def has_passed(self, name: str) -> bool:
        """Whether the family passed before."""
        return self._file(name, "passed").exists()

    def passed(self, name: str) -> None:
        """The family passes from now on."""
        self._file(name, "passed").touch()

    def num_ends(self, name: str) -> int:
        """How many processes ended while they tried the family."""
        trials = self._folder.glob(f"{self._key}.{name}.*.trial")
        return sum(not _is_alive(int(trial.name.split(".")[2])) for trial in trials)

    @contextlib.contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """Around a trial, so that its end by a crash is known afterwards."""
        trial = self._file(name, f"{os.getpid()}.trial")
        trial.touch()
        try:
            yield
        finally:
            trial.unlink(missing_ok=True)

    @staticmethod
    def forget_all(folder: Path = _CACHE) -> None:
        """Workers test everything again at their next start."""
        for path in folder.glob("*.*"):
            path.unlink(missing_ok=True)

    def _file(self, name: str, what: str) -> Path:
        return self._folder / f"{self._key}.{name}.{what}"


def this_machine() -> tuple[str, str, str]:
    """Chip, system with its build, and MLX."""
    chip = mx.device_info()
    return f"{chip['device_name']} {chip['architecture']}", platform.platform(), version("mlx")


def kernel_hash() -> str:
    """Of all sources beside this one."""
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
