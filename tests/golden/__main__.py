"""`python -m tests.golden [CASE ...]`: runs the sweep and writes the table of supported models."""

import sys

from worker import blas

if __name__ == "__main__":
    # Before MLX.
    blas.load()
    from tests.golden.support import main

    main(sys.argv[1:])
