"""Finds what compiles kernels and the runtime: clang, or the one in the `ziglang` wheel, and the system's C++."""

import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.msl_host.errors import NoToolchain

_HERE = Path(__file__).parent
INCLUDE = _HERE / "include"
_RUNTIME = _HERE / "runtime"
_UNUSED_DAYS = 14

# What Metal refuses and clang only warns of: float -> bfloat without a cast. And reads of variables that nothing set.
_STRICT = ["-Werror=implicit-float-conversion", "-Werror=return-type", "-Wuninitialized", "-Wsometimes-uninitialized"]
_SANITIZERS = (
    "alignment,signed-integer-overflow,integer-divide-by-zero,bounds,float-cast-overflow,"
    "implicit-signed-integer-truncation,implicit-unsigned-integer-truncation"
)
# As if each could be recovered from: calls that do not return would be merged, and their lines lost.
_SANITIZE = [f"-fsanitize={_SANITIZERS}", f"-fsanitize-recover={_SANITIZERS}", "-fsanitize-minimal-runtime"]
# Each operation on half and bfloat rounds.
_ROUND = ["-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"]
# A loop without end must stay one, a large frame must meet the guard page, and a call must tell its line.
_KEEP = ["-fno-finite-loops", "-fstack-clash-protection", "-fno-optimize-sibling-calls"]


@dataclass(frozen=True)
class Toolchain:
    """Commands and flags. `key` names all that a compiled kernel depends on but its own text."""

    clang: tuple[str, ...]
    front_end: tuple[str, ...]
    preamble: Path
    key: str


def cache_folder() -> Path:
    """Where compiled kernels are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "cidery" / "msl_host"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def content_hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:24]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Its result, whatever its exit code."""
    return subprocess.run(command, capture_output=True, text=True, check=False)


def missing() -> str | None:
    """Why this machine can't run the harness, or None."""
    try:
        find()
    except NoToolchain as error:
        return str(error)
    return None


@cache
def find() -> Toolchain:
    """The toolchain with its preamble compiled. Raises NoToolchain."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise NoToolchain(f"the harness runs on x86-64 Linux, not on {platform.system()} {platform.machine()}")
    if " f16c " not in Path("/proc/cpuinfo").read_text():
        raise NoToolchain("the processor has no half precision conversions (f16c)")
    for tool in ("c++", "ld", "addr2line", "nm"):
        if shutil.which(tool) is None:
            raise NoToolchain(f"no {tool} on PATH: install g++ and binutils")
    clang = _find_clang()
    mlx = importlib.util.find_spec("mlx")
    if mlx is None or mlx.submodule_search_locations is None:
        raise NoToolchain("mlx is not installed")
    mlx_include = Path(next(iter(mlx.submodule_search_locations))) / "include"
    front_end = [
        *("-x", "cl", "-cl-std=clc++2021", "-cl-no-stdinc", "-Xclang", "-cl-ext=-cl_khr_fp64,-__opencl_c_fp64"),
        *("-target", "x86_64-linux-gnu", "-fPIC", "-mf16c", "-ffp-contract=off", "-ftrivial-auto-var-init=pattern"),
        *(
            "-O1",
            "-fno-vectorize",
            "-gline-tables-only",
            "-gdwarf-4",
            "-fno-color-diagnostics",
            "-Wno-unused",
            *_STRICT,
            *_KEEP,
            *_ROUND,
        ),
        *(*_SANITIZE, "-Xclang", "-disable-llvm-passes", "-Xclang", "-fno-pch-timestamp"),
        *("-isystem", str(INCLUDE), "-isystem", str(mlx_include)),
    ]
    version = run([*clang, "--version"]).stdout
    headers = [path.read_bytes() for path in sorted(INCLUDE.rglob("*")) if path.is_file()]
    kernels = mlx_include / "mlx/backend/metal/kernels"
    headers += [(kernels / name).read_bytes() for name in ("utils.h", "bf16.h", "defines.h")]
    own = [(_HERE / name).read_bytes() for name in ("build.py", "lints.py")]
    key = content_hash(version, *front_end, *headers, *own)
    return Toolchain(clang, tuple(front_end), _preamble(clang, front_end, key), key)


def _find_clang() -> tuple[str, ...]:
    if shutil.which("clang-19"):
        return ("clang-19",)
    zig = importlib.util.find_spec("ziglang")
    if zig is None or zig.submodule_search_locations is None:
        raise NoToolchain("neither clang-19 nor the ziglang wheel is installed: pip install -e '.[dev]'")
    return (str(Path(next(iter(zig.submodule_search_locations))) / "zig"), "clang")


def _preamble(clang: tuple[str, ...], front_end: list[str], key: str) -> Path:
    """Metal's library and MLX's utilities, compiled once for all kernels."""
    target = cache_folder() / f"preamble_{key}.pch"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        header = INCLUDE / "preamble.h"
        result = run([*clang, *front_end, "-c", "-Xclang", "-emit-pch", str(header), "-o", str(partial)])
        if result.returncode:
            raise RuntimeError(f"the harness's own preamble does not compile:\n{result.stderr}")
        partial.replace(target)
    os.utime(target)
    return target


@cache
def runtime_library() -> Path:
    """The compiled runtime."""
    sources = sorted(_RUNTIME.glob("*.cpp"))
    key = content_hash(
        *(path.read_bytes() for path in [*sources, *_RUNTIME.glob("*.h")]), run(["c++", "--version"]).stdout
    )
    target = cache_folder() / f"runtime_{key}.so"
    if not target.exists():
        _drop_unused()
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        flags = ["-O2", "-g", "-std=c++17", "-fPIC", "-shared", "-U_FORTIFY_SOURCE"]
        result = run(["c++", *flags, *map(str, sources), "-o", str(partial)])
        if result.returncode:
            raise RuntimeError(f"the harness's own runtime does not compile:\n{result.stderr}")
        partial.replace(target)
    os.utime(target)
    return target


def _drop_unused() -> None:
    """Removes what no run has used for two weeks: each use touches its file."""
    oldest = time.time() - _UNUSED_DAYS * 86400
    for path in cache_folder().glob("*.*"):
        with contextlib.suppress(FileNotFoundError):  # another run drops it too
            if path.is_file() and path.stat().st_mtime < oldest:
                path.unlink()
