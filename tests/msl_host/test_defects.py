"""Every planted defect is found, under its kind, at its line, with the kernel and the thread named."""

import pytest

from tests.msl_host.defects.control import CONTROL
from tests.msl_host.defects.defect import Defect
from tests.msl_host.defects.legality import LEGALITY
from tests.msl_host.defects.memory import MEMORY
from tests.msl_host.defects.races import RACES
from tests.msl_host.errors import KernelError
from tests.msl_host.host import MslHost

ALL = [*RACES, *MEMORY, *CONTROL, *LEGALITY]


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    """All at once, on two cores."""
    host = MslHost()
    with host.compiling_ahead():
        for defect in ALL:
            try:
                defect.compile_in(host)
            except KernelError:
                continue


@pytest.mark.parametrize("defect", ALL, ids=lambda defect: defect.name.replace(" ", "-"))
def test_defect_is_found(defect: Defect):
    with pytest.raises(KernelError) as caught:
        defect.run()
    found = [finding for finding in caught.value.findings if finding.kind == defect.kind]
    assert found, str(caught.value)
    assert str(caught.value).startswith(("kernel 'defect'", "kernel 'defect<"))
    if defect.line is not None:
        assert any(f.where.startswith(f"{defect.part} line {defect.line}:") for f in found), str(caught.value)
    assert any(defect.says in str(finding) for finding in found), str(caught.value)


def test_list_is_long_and_names_are_unique():
    assert len({defect.name for defect in ALL}) == len(ALL) >= 40
    assert {defect.kind for defect in ALL} == {
        "compile", "divergent-barrier", "divergent-simd-op", "endless-loop", "inactive-lane",
        "integer-overflow", "launch", "legality", "misaligned", "out-of-bounds", "race-device", "race-threadgroup",
        "schedule-dependent", "stack-overflow", "threadgroup-memory", "undefined-behaviour", "uninitialised-read",
        "unwritten-output", "write-to-input",
    }  # fmt: skip
