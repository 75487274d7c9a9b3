"""For all tests: MLX gets its fast BLAS before anything imports it, no test asks a hub for anything, none is timed."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import pytest
from hypothesis import settings

from worker import blas

# A test's time depends on what else the machine does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
blas.load()


@pytest.fixture
def no_compile():
    """MLX's fused CPU kernels cost seconds of a compiler each: not for models that run a few tokens."""
    import mlx.core as mx

    mx.disable_compile()
    yield
    mx.enable_compile()
    mx.clear_cache()
