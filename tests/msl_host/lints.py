"""Rules of Metal that neither clang's OpenCL C++ nor a run would notice."""

import re
from collections.abc import Iterator

from tests.msl_host.errors import Finding
from tests.msl_host.places import Author
from tests.msl_host.signature import HEADER_LINE, SOURCE_LINE

_TOKENS = [
    (r"\bgoto\b", "Metal has no goto"),
    (r"\bstatic\s+(?!.*\bconstant\b|inline\b)\w+[^;({]*[;=]", "no static variables but in constant"),
    (r"(?:[=(,]|\breturn)\s*\[[^\[\]]*\]\s*\(", "lambdas need Metal 3.2: write a function"),
    (r"\bdouble\b", "Metal has no double"),
    (r"\basm\b", "no assembly"),
    (r"\bstd::", "Metal's library is in namespace metal"),
]
_MAX_ACCESS_BITS = 128
_AST_WORDS = {"used", "referenced", "implicit", "invalid"}


def check_tokens(author: Author) -> Iterator[Finding]:
    """By the words alone."""
    for text, base in ((author.header, HEADER_LINE), (author.source, SOURCE_LINE)):
        for number, line in enumerate(_without_comments(text).splitlines(), 1):
            for pattern, message in _TOKENS:
                if re.search(pattern, line):
                    yield Finding("legality", author.where(base + number), message)


def check_warnings(stderr: str, author: Author) -> Iterator[Finding]:
    """Private variables that are read before they are set. Clang takes threadgroup variables for such too."""
    text = author.header + author.source
    for line, message, name in re.findall(r":(\d+):\d+: warning: (variable '(\w+)' is .*uninitialized.*) \[", stderr):
        if not re.search(rf"\bthreadgroup\b[^;]*\b{name}\b", text):
            yield Finding("compile", author.where(int(line)), message)


def _without_comments(text: str) -> str:
    """Same lines, no comments."""

    def blank(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.DOTALL)


def check_ast(dump: str, author: Author) -> Iterator[Finding]:
    """By clang's syntax tree: address spaces.

    Metal wants an address space on every pointer and reference, and program-scope variables in `constant`. OpenCL C++
    has defaults instead.
    """
    at = 0
    for line in dump.splitlines():
        node = re.search(r"\b(\w+Decl) 0x\w+ (?:(?:prev|parent) 0x\w+ )*<(.*?)> ?([^']*?)'(.*)$", line)
        at = _last_line(line, at)
        if node is None or not author.where(at):
            continue
        kind, kinds = node[1], node[4].split("'")[0]
        words = [word for word in node[3].split() if ":" not in word and word not in _AST_WORDS]
        if not words:
            continue  # a parameter without a name, such as those of copy constructors that the compiler adds
        name = words[-1]
        if kind in ("VarDecl", "ParmVarDecl", "FieldDecl") and re.search(r"__generic[^(]*[*&]", kinds):
            yield Finding("legality", author.where(at), f"pointer or reference '{name}' has no address space")
        elif kind == "FunctionDecl" and re.search(r"__generic[^(]*[*&]", kinds.split("(")[0]):
            yield Finding("legality", author.where(at), f"the result of '{name}' has no address space")
        elif kind == "VarDecl" and re.match(r"[|`]-VarDecl", line) and "__constant" not in kinds:
            yield Finding(
                "legality", author.where(at), f"program-scope variable '{name}' is not in address space constant"
            )


def _last_line(line: str, at: int) -> int:
    """The dump tells a line only where it changes. A declaration's own line comes last before its name."""
    end = line.find(" '")
    for name, number in re.findall(r"([^\s<>,]+):(\d+):\d+", line[: end if end >= 0 else None]):
        at = int(number) if name == "line" or name.endswith(".metal") else 0
    return at


def check_ir(ir: str) -> Iterator[Finding]:
    """By the unoptimised code: recursion, program-scope variables that can change, accesses that are not checked."""
    calls: dict[str, set[str]] = {}
    inside = None
    for line in ir.splitlines():
        start = re.match(r"define .*?@([\w.$]+)\(", line)
        if start:
            inside = start[1]
            calls[inside] = set()
        elif line == "}":
            inside = None
        elif inside is not None:
            calls[inside].update(re.findall(r"call [^@]*@([\w.$]+)\(", line))
    for function in calls:
        if _reaches(calls, function, function):
            yield Finding("legality", "", f"Metal has no recursion: {function}")
    for name in re.findall(r"^@([\w.$]+) = (?!extern)(?:[\w()]+ )*global (?!.*\bundef\b)", ir, re.MULTILINE):
        yield Finding("legality", "", f"program-scope variable {name} can be changed")
    for count, bits in re.findall(r"(?:load|store) <(\d+) x [a-z]+?(\d+)?>", ir):
        if int(count) * int(bits or 32) > _MAX_ACCESS_BITS:
            yield Finding(
                "legality", "", f"a vector of {count} x {bits or 32} bits: over 16 bytes no access is checked"
            )
            return


def _reaches(calls: dict[str, set[str]], start: str, goal: str) -> bool:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for callee in calls.get(waiting.pop(), ()):
            if callee == goal:
                return True
            if callee not in seen:
                seen.add(callee)
                waiting.append(callee)
    return False
