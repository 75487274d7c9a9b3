"""Compiles a kernel to a library whose every access to memory calls the runtime, and loads it."""

import ctypes
import os
import re
import shutil
import subprocess
import tempfile
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.msl_host import lints, toolchain
from tests.msl_host.errors import Finding, KernelError
from tests.msl_host.places import Author, group_variables
from tests.msl_host.signature import HEADER_LINE, SOURCE_LINE, Signature

_BACK_END = [
    *("-x", "ir", "-target", "x86_64-linux-gnu", "-fPIC", "-O1", "-fsanitize=thread", "-c", "-Wno-override-module"),
    # The pass skips accesses wider than 16 bytes, so nothing may be vectorised.
    *("-fno-vectorize", "-fno-slp-vectorize"),
    *("-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-instrument-read-before-write"),
    # A loop that asks to be unrolled asks for registers of a GPU; here it would only cost the compiler's time.
    *("-mllvm", "-pragma-unroll-threshold=0", "-mllvm", "-pragma-unroll-full-max-iterations=0", "-Wno-pass-failed"),
]
_GAP_BYTES = 64
# A kernel written as a template is only here no kernel, and threadgroup variables belong to kernels.
_TEMPLATE_ALLOWED = "cannot be declared in local address space"


@dataclass
class Module:
    """A loaded kernel.

    `bounds`: its addresses; `group_bounds`: those of its threadgroup variables and the gaps between them. `variables`:
    offset from there, size and name. `granule`: bytes of threadgroup memory that are tracked as one.
    """

    path: Path
    entry: int
    group_bounds: tuple[int, int]
    bounds: tuple[int, int]
    variables: list[tuple[int, int, str]]
    granule: int = 2

    @property
    def group_bytes(self) -> int:
        """What Metal would need, with each variable on a multiple of 16 bytes."""
        return sum(-(-size // 16) * 16 for _, size, _ in self.variables)


class Builder:
    """Compiles each text once, two at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="msl-build")
        self._lock = threading.Lock()
        self._builds: dict[str, Future[Path]] = {}

    def submit(self, signature: Signature, author: Author) -> Future[Path]:
        """The library's path, or KernelError of kind "compile" or "legality"."""
        key = toolchain.content_hash(signature.host_text, signature.mlx_text, toolchain.find().key)
        with self._lock:
            if key not in self._builds:
                self._builds[key] = self._pool.submit(_compile, key, signature, author)
            return self._builds[key]


def _compile(key: str, signature: Signature, author: Author) -> Path:
    target = toolchain.cache_folder() / f"kernel_{key}.so"
    if target.exists():
        os.utime(target)
        return target
    with tempfile.TemporaryDirectory(dir=toolchain.cache_folder()) as folder:
        work = Path(folder)
        ir, warnings = _front_end(work, signature, author)
        findings = [
            *lints.check_warnings(warnings, author),
            *lints.check_tokens(author),
            *_ast_findings(work, author),
            *lints.check_ir(ir),
            *_template_findings(work, signature, author),
        ]
        if findings:
            raise KernelError(signature.title, list(dict.fromkeys(findings)))
        (work / "kernel.ll").write_text(_make_visible(ir))
        own = toolchain.find()
        _must([*own.clang, *_BACK_END, str(work / "kernel.ll"), "-o", str(work / "kernel.o")])
        _must(["ld", "-shared", str(work / "kernel.o"), "-o", str(work / "kernel.so")])
        shutil.move(work / "kernel.so", target)
    return target


def _must(command: list[str]) -> None:
    result = toolchain.run(command)
    if result.returncode:
        raise RuntimeError(f"{command[0]} fails on a kernel that compiles:\n{result.stderr}")


def _front_end(work: Path, signature: Signature, author: Author) -> tuple[str, str]:
    """LLVM's text form of the kernel, not optimised, and the warnings; all rules of the language hold from here on."""
    (work / "kernel.metal").write_text(signature.host_text)
    result = _clang("-S", "-emit-llvm", str(work / "kernel.metal"), "-o", str(work / "kernel.ll"))
    if result.returncode:
        raise KernelError(signature.title, _compiler_findings(result.stderr, author))
    return (work / "kernel.ll").read_text(), result.stderr


def _clang(*arguments: str) -> subprocess.CompletedProcess[str]:
    own = toolchain.find()
    return toolchain.run([*own.clang, *own.front_end, "-include-pch", str(own.preamble), *arguments])


def _compiler_findings(stderr: str, author: Author) -> list[Finding]:
    findings = []
    for line, message in re.findall(r":(\d+):\d+: (?:fatal )?error: (.*)", stderr):
        findings.append(Finding("compile", author.where(int(line)), message))
    return findings or [Finding("compile", "", stderr.strip())]


def _ast_findings(work: Path, author: Author) -> list[Finding]:
    result = _clang("-fsyntax-only", "-Xclang", "-ast-dump", str(work / "kernel.metal"))
    if result.returncode:
        raise RuntimeError(f"no syntax tree of a kernel that compiles:\n{result.stderr}")
    return list(lints.check_ast(result.stdout, author))


def _template_findings(work: Path, signature: Signature, author: Author) -> list[Finding]:
    """Errors of MLX's own text, where the kernel is a template: a forgotten `typename`, a name looked up too early."""
    if not signature.template:
        return []
    text = re.sub(
        r"template \[\[host_name\([^)]*\)\]\] \[\[kernel\]\] decltype", "template decltype", signature.mlx_text
    )
    # Lines get the numbers that they have in the other text, so that positions mean the same.
    header, rest = text[: len(author.header)], text[len(author.header) :]
    start = rest.index(") {\n") + len(") {\n")
    parts = [
        f'#line {HEADER_LINE + 1} "header.metal"\n{header}',
        f'#line 1 "generated"\n{rest[:start]}#line {SOURCE_LINE + 1} "source.metal"\n{rest[start:]}',
    ]
    (work / "template.metal").write_text("\n".join(parts))
    result = _clang("-fsyntax-only", "-ferror-limit=0", "-Wno-unknown-attributes", str(work / "template.metal"))
    if not result.returncode:
        return []
    return [finding for finding in _compiler_findings(result.stderr, author) if _TEMPLATE_ALLOWED not in finding.text]


def _make_visible(ir: str) -> str:
    """Threadgroup variables in one section, with gaps between them that no access may meet, and visible from outside.

    Else the optimiser turns a variable that each thread writes before it reads into a private one, and a race is gone.
    """
    gap = f'hidden global [{_GAP_BYTES} x i8] undef, section "msl_group", align 16'

    def in_section(match: re.Match[str]) -> str:
        number = match.start()
        return f'@msl_gap_{number} = {gap}\n{match[1]}hidden global {match[2]}, section "msl_group", align'

    variable = r"^(@\S+ = )internal (?:unnamed_addr )?global (.+ (?:undef|poison))(?:, comdat[^,\n]*)?, align"
    ir = re.sub(variable, in_section, ir, flags=re.MULTILINE)
    ir = re.sub(r"\bnorecurse\b", "", ir)
    return re.sub(r"^(attributes #\d+ = \{)", r"\1 sanitize_thread", ir, flags=re.MULTILINE)


@cache
def load(path: Path) -> Module:
    """The library in this process; once loaded it stays."""
    runtime()
    library = ctypes.CDLL(str(path))
    bound = library.msl_group_bound
    bound.restype, bound.argtypes = ctypes.c_uint64, [ctypes.c_int]
    ranges = [
        [int(end, 16) for end in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(path))
    ]
    entry = ctypes.cast(library.msl_entry, ctypes.c_void_p).value
    assert entry is not None
    bounds = min(low for low, _ in ranges), max(high for _, high in ranges)
    group = bound(0), bound(1)
    variables = (
        [(bounds[0] + at - group[0], size, name) for at, size, name in group_variables(path)] if group[0] else []
    )
    return Module(path, entry, group, bounds, variables)


@cache
def runtime() -> ctypes.CDLL:
    """The runtime, with its symbols for all kernels to find."""
    return ctypes.CDLL(str(toolchain.runtime_library()), mode=ctypes.RTLD_GLOBAL)
