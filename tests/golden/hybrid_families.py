"""Tiny configurations of all families but those that attend fully in the plain way."""

from typing import Any

from tests.golden.attention_families import ATTENTION_CASES
from tests.golden.family_parts import BASE
from tests.golden.recurrent_families import RECURRENT_CASES

HYBRID_CASES = ATTENTION_CASES | RECURRENT_CASES


def hybrid_config(case: str) -> dict[str, Any]:
    """The whole config of a case."""
    module, changes = HYBRID_CASES[case]
    return {**BASE, "model_type": module, **changes}
