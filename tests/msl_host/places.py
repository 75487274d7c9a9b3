"""Positions in a kernel, from what the compiler and the runtime say to what its author wrote."""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.msl_host.signature import HEADER_LINE, SOURCE_LINE


@dataclass(frozen=True, slots=True)
class Author:
    """What the author wrote: `header` and `source` as they were handed in."""

    header: str
    source: str

    def where(self, line: int) -> str:
        """Such as "source line 7: `x = y[i];`" for a line as clang counts; empty if it is not the author's."""
        if line > SOURCE_LINE:
            part, text, number = "source", self.source, line - SOURCE_LINE
        elif line > HEADER_LINE:
            part, text, number = "header", self.header, line - HEADER_LINE
        else:
            return ""
        lines = text.splitlines()
        code = lines[number - 1].strip() if number <= len(lines) else "end"
        return f"{part} line {number}: `{code}`"

    def with_places(self, text: str) -> str:
        """The runtime's "@line:column" in words."""
        return re.sub(r"@(\d+):\d+", lambda m: f" at {self.where(int(m[1])) or 'a place in the preamble'}", text)

    def of_pc(self, module: Path, pc: int) -> str:
        """Where an instruction of the kernel comes from; innermost of the author's own lines first."""
        found = subprocess.run(
            ["addr2line", "-e", str(module), "-i", hex(pc)], capture_output=True, text=True, check=False
        ).stdout
        lines = [int(m) for m in re.findall(r":(\d+)(?: \(discriminator \d+\))?$", found, re.MULTILINE)]
        places = [place for place in dict.fromkeys(self.where(line) for line in lines) if place]
        return ", called from ".join(places)


def group_variables(module: Path) -> list[tuple[int, int, str]]:
    """Address in the file, size and name of the threadgroup variables of a module."""
    listing = subprocess.run(["nm", "-S", str(module)], capture_output=True, text=True, check=True).stdout
    found = re.findall(
        r"^(\w+) (\w+) [a-zA-Z] _ZZ.*?msl_kernel\S*?E\d+([A-Za-z_]\w*?)(?:_\d+)?$", listing, re.MULTILINE
    )
    return [(int(address, 16), int(size, 16), name) for address, size, name in found]
