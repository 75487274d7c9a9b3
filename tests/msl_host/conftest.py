import os
import platform

import pytest

from tests.msl_host import toolchain


@pytest.fixture(scope="session", autouse=True)
def _toolchain():
    """Says why nothing runs; CI on Linux must have all it needs."""
    reason = toolchain.missing()
    if reason is None:
        return
    if os.environ.get("CI") and platform.system() == "Linux":
        pytest.fail(reason)
    pytest.skip(reason)
