"""For all tests: MLX gets its fast BLAS before anything imports it, no test asks a hub for anything, none is timed."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from hypothesis import settings

from worker import blas

# A test's time depends on what else the machine does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
blas.load()
