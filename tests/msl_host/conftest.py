import pytest

from tests.msl_host.require import require_toolchain


@pytest.fixture(scope="session", autouse=True)
def _toolchain():
    require_toolchain()
