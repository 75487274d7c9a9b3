"""The fast BLAS: found, renamed, loaded, and honest when it cannot be."""

import contextlib
import ctypes
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker import blas

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a Mac has its own BLAS")


def _wheel() -> bytes:
    return (Path(pytest.importorskip("scipy_openblas32").get_lib_dir()) / "libscipy_openblas.so").read_bytes()


def _elf(symbols: list[tuple[str, int]]) -> bytes:
    """The smallest shared library with these (name, section index) dynamic symbols."""
    names, table = b"\0", struct.pack("<IBBHQQ", 0, 0, 0, 0, 0, 0)
    for name, section in symbols:
        table += struct.pack("<IBBHQQ", len(names), 0x12, 0, section, 0, 0)
        names += name.encode() + b"\0"
    table_at, names_at = 64, 64 + len(table)
    sections_at = names_at + len(names)
    header = bytearray(b"\x7fELF\x02\x01".ljust(64, b"\0"))
    struct.pack_into("<Q", header, 0x28, sections_at)
    struct.pack_into("<HH", header, 0x3A, 64, 3)
    sections = bytes(64)
    sections += struct.pack("<IIQQQQIIQQ", 0, 11, 0, 0, table_at, len(table), 2, 1, 8, 24)
    sections += struct.pack("<IIQQQQIIQQ", 0, 3, 0, 0, names_at, len(names), 0, 0, 1, 0)
    return bytes(header) + table + names + sections


@given(st.lists(st.tuples(st.from_regex(r"[a-z_0-9]{1,20}", fullmatch=True), st.integers(0, 9)), max_size=20))
def test_exactly_the_defined_symbols_are_listed(symbols):
    """Section 0 marks what a library needs from others."""
    assert blas.defined_symbols(_elf(symbols)) == [name for name, section in symbols if section]


@settings(max_examples=200)
@given(st.data())
def test_damaged_library_raises_blas_error_and_nothing_else(data):
    library = bytearray(_elf([("scipy_cblas_sgemm", 1), ("malloc", 0)]))
    for _ in range(data.draw(st.integers(1, 6))):
        library[data.draw(st.integers(0, len(library) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(blas.BlasError):
        blas.defined_symbols(bytes(library[: data.draw(st.integers(0, len(library)))]))


def test_wheel_library_exports_what_mlx_calls():
    names = blas.defined_symbols(_wheel())
    assert {"scipy_cblas_sgemm", "scipy_cblas_dgemm", "scipy_cblas_cgemm", "scipy_ssyevd_"} <= set(names)


def test_renamed_library_defines_the_plain_names():
    """Beside the ones that never had the prefix; usable as LD_PRELOAD."""
    path = blas.library_path()
    names = blas.defined_symbols(path.read_bytes())
    assert "cblas_sgemm" in names
    assert not [name for name in names if name.startswith("scipy_")]
    assert ctypes.CDLL(str(path)).cblas_sgemm


@pytest.mark.parametrize("home", ["writable", "unset", "missing"])
def test_two_processes_prepare_the_library_at_once(tmp_path, home):
    """Atomically, into whatever directory can be written."""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    environment["TMPDIR"] = str(tmp_path)
    if home != "unset":
        environment["HOME"] = str(tmp_path) if home == "writable" else "/proc/no-such-home"
    code = "from worker import blas; print(blas.load())"
    command = [sys.executable, "-W", "error", "-c", code]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=60)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    (path,) = paths
    assert Path(path).is_relative_to(tmp_path)
    assert list(Path(path).parent.iterdir()) == [Path(path)]


def test_late_load_is_reported_and_a_second_one_is_not():
    """MLX binds its BLAS when it is imported; after that only a warning helps."""
    warn = "import logging; logging.basicConfig(); from worker import blas; "
    late = warn + "import mlx.core; print(blas.load())"
    twice = warn + "first = blas.load(); import mlx.core; print(blas.load(2) == first)"
    outputs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        for code in (late, twice)
    ]
    assert outputs[0].stdout.strip() == "None"
    assert "mlx was imported before" in outputs[0].stderr
    assert (outputs[1].stdout.strip(), outputs[1].stderr) == ("True", "")


def test_missing_package_is_named():
    """Without the wheel and a system library the error says what to install."""
    code = (
        "import sys; sys.modules['scipy_openblas32'] = None\n"
        "from worker import blas; blas._SYSTEM_LIBRARIES = ()\n"
        "try: blas.library_path()\n"
        "except blas.BlasError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "scipy-openblas32" in done.stdout
