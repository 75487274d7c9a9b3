"""For tests that use the harness: they run, or say why not."""

import os
import platform

import pytest

from tests.msl_host import toolchain


def require_toolchain() -> None:
    """Skips the test where the harness can't run; fails it on CI's Linux, which must have all that it needs."""
    reason = toolchain.missing()
    if reason is None:
        return
    if os.environ.get("CI") and platform.system() == "Linux":
        pytest.fail(reason)
    pytest.skip(reason)
