"""What the harness says about a kernel that is wrong."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect: its `kind` (the README lists them), where it is, and what happened, thread included.

    `where` is such as "source line 7: `x = y[i];`"; lines count from 1 within `source` or `header`.
    """

    kind: str
    where: str
    text: str

    def __str__(self) -> str:
        at = f", {self.where}" if self.where else ""
        return f"{self.kind}{at}\n    {self.text}"


class KernelError(RuntimeError):
    """A kernel that does not do what Metal allows. A RuntimeError, as MLX raises for a kernel that can't be launched.

    `kind` is that of the first finding; `findings` has all.
    """

    def __init__(self, kernel: str, findings: list[Finding]) -> None:
        lines = "\n  ".join(str(finding) for finding in findings)
        super().__init__(f"kernel '{kernel}':\n  {lines}")
        self.kernel = kernel
        self.findings = findings

    @property
    def kind(self) -> str:
        return self.findings[0].kind


class NoToolchain(RuntimeError):
    """This machine can't run the harness; the text says what is missing."""
