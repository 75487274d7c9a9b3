"""For all tests: MLX gets its fast BLAS before anything imports it, and no test asks a hub for anything."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from worker import blas

blas.load()
