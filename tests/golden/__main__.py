"""`python -m tests.golden`: runs the whole sweep and writes the table of supported models."""

from worker import blas

if __name__ == "__main__":
    # Before MLX.
    blas.load()
    from tests.golden.support import main

    main()
