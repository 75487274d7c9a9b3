"""What the environment turns on or off for a worker: 0 or 1, and nothing else."""

import argparse
import os

# Rows of a sequence that verify its guesses share each load of K and V.
SPEC_VERIFY_WINDOW = "CIDERY_SPEC_VERIFY_WINDOW"
# Layers with recurrent states run on kernels.
GDN_LAZY_KERNELS = "CIDERY_GDN_LAZY_KERNELS"
_DEFAULTS = {SPEC_VERIFY_WINDOW: "0", GDN_LAZY_KERNELS: "1"}


def is_on(name: str) -> bool:
    """Whether a switch is on. Raises ValueError if it is neither 0 nor 1."""
    value = os.environ.get(name, _DEFAULTS[name])
    if value not in ("0", "1"):
        raise ValueError(f"{name} is {value!r}; allowed are 0 and 1")
    return value == "1"


def check_all(parser: argparse.ArgumentParser) -> None:
    """End the process as for a wrong option, with one line, unless each is 0 or 1.

    At the start, because a machine on which nothing asks for a switch would take a wrong one for right.
    """
    for name in _DEFAULTS:
        try:
            is_on(name)
        except ValueError as error:
            parser.exit(2, f"{parser.prog}: error: {error}\n")
