"""The registry names classes that exist and are given caches."""

import importlib

import pytest

from worker import inspection
from worker.registry import TREATMENTS, Treatment


@pytest.mark.parametrize("name", TREATMENTS)
def test_registered_class_is_one_of_mlx_lm_and_takes_a_cache(name):
    module, cls_name = name.rsplit(".", 1)
    cls = getattr(importlib.import_module(f"mlx_lm.models.{module}"), cls_name)
    assert inspection.qualified_name(cls) == name
    assert inspection.takes_cache(cls)


def test_every_treatment_is_in_use():
    assert set(TREATMENTS.values()) == set(Treatment)
