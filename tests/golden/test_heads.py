"""Prompts cost one row of logits, whatever a family calls its head, and whether or not that is its embedding."""

import pytest

from tests.golden.cases import CASES, config_of, make_model
from tests.golden.in_process import InProcessMac
from worker import models

# Heads in different places.
_DEFAULT = ("gpt2", "openelm", "phixtral", "llama4", "mamba", "recurrent_gemma", "gemma2")
# Multiplies by a bare array: there is no module to stand in for.
_WITHOUT_MODULE = ("talkie",)
# The same with their embedding's weights, if tied, or not to be tied at all.
_NOT_TIED = ("minicpm", "minicpm tied", "seed_oss", "llama4_text", "baichuan_m1")


@pytest.mark.parametrize(
    "case",
    [
        case if case in _DEFAULT else pytest.param(case, marks=pytest.mark.matrix)
        for case in CASES
        if case not in _WITHOUT_MODULE
    ],
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_only_the_last_token_of_a_prompt_is_projected_to_the_vocabulary(case, is_tied, monkeypatch):
    if case in _NOT_TIED and (is_tied or case.endswith("tied")):
        pytest.skip("multiplies by its embedding's weights past any module, or can't be tied")
    mac = InProcessMac(make_model(case, is_tied=is_tied), config_of(case))
    shapes = []
    sampled_logits = models.sampled_logits

    def watched(logits, batch):
        shapes.append(logits.shape)
        return sampled_logits(logits, batch)

    monkeypatch.setattr(models, "sampled_logits", watched)
    mac.add("one", list(range(1, 12)), 1)
    mac.run()
    assert [shape[0] * shape[1] for shape in shapes] == [1]
