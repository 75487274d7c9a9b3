"""Linear layers over strips of their weights."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.golden.cases import make_model
from worker import blas, cpu_math, inspection, strips
from worker.strips import Strips, install, width_of

pytestmark = pytest.mark.skipif(not cpu_math.is_available(), reason="for CPUs")


@pytest.fixture
def small_kernels(monkeypatch):
    monkeypatch.setattr(blas, "has_small_kernels", lambda: True)


@given(num_outputs=st.integers(1, 300), num_inputs=st.integers(1, 70), num_rows=st.integers(1, 20))
def test_strips_multiply_as_the_weights_do(num_outputs, num_inputs, num_rows):
    weights = mx.random.normal((num_outputs, num_inputs))
    if width_of(num_outputs, num_inputs) is None:
        assert num_outputs % 16
        with pytest.raises(ValueError, match=f"{num_outputs} outputs"):
            Strips(weights)
        return
    made = Strips(weights)
    x = mx.random.normal((num_rows, num_inputs))
    assert mx.allclose(made.product(x), x @ weights.T, rtol=1e-4, atol=1e-4)
    assert mx.allclose(made.product(x[:, None]), (x @ weights.T)[:, None], rtol=1e-4, atol=1e-4)
    assert made.product(x[0]).shape == (num_outputs,)


def test_strips_are_as_wide_as_small_kernels_allow():
    assert width_of(1536, 512) == 64
    assert width_of(512, 1536) == 32
    assert width_of(352, 128) == 32
    assert width_of(48, 128) == 16
    # None is small: the narrowest, which gains by its layout alone.
    assert width_of(128, 8192) == 16
    assert width_of(50, 128) is None


class Model(nn.Module):
    def __init__(self, *, tied):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.up = nn.Linear(32, 96)
        self.again = self.up
        self.odd = nn.Linear(32, 33)
        if not tied:
            self.head = nn.Linear(32, 64, bias=False)

    def __call__(self, x):
        return self.up(x), self.odd(x)


@pytest.mark.parametrize("tied", [True, False])
def test_layers_take_strips_for_few_rows_and_weights_for_many(small_kernels, tied, monkeypatch):
    model = Model(tied=tied)
    few, many = mx.random.normal((5, 1, 32)), mx.random.normal((700, 32))
    expected = [*model(few), *model(many), model.embed.as_linear(few)]
    names = [name for name, _ in nn.utils.tree_flatten(model.parameters())]
    # The embedding is a projection only where no layer is.
    num_bytes = 4 * 32 * (96 + 64)
    assert install(model, num_bytes - 1) == 0
    assert type(model.up) is nn.Linear
    assert install(model, num_bytes) == num_bytes
    assert install(model, 0) == num_bytes
    assert (type(model.embed) is nn.Embedding) != tied
    assert type(model.odd) is nn.Linear
    assert [name for name, _ in nn.utils.tree_flatten(model.parameters())] == names
    used = []
    product = Strips.product
    monkeypatch.setattr(Strips, "product", lambda self, x: used.append(x.shape) or product(self, x))
    found = [*model(few), *model(many), model.embed.as_linear(few)]
    assert used == [(5, 1, 32)] * (1 + tied)
    for ours, theirs in zip(found, expected, strict=True):
        assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    # Of another type, as a model may compute in.
    assert model.up(few.astype(mx.float16)).shape == (5, 1, 96)
    assert len(used) == 1 + tied


def test_other_types_and_other_cpus_have_none(small_kernels, monkeypatch):
    model = Model(tied=True)
    model.set_dtype(mx.float16)
    assert install(model, 1 << 30) == 0
    monkeypatch.setattr(blas, "has_small_kernels", lambda: False)
    assert install(Model(tied=True), 1 << 30) == 0


def test_a_real_model_computes_the_same(small_kernels):
    model = make_model("qwen3")
    tokens = mx.array([[1, 2, 3]])
    expected = model(tokens)
    assert install(model, 1 << 30) > 0
    assert not inspection.reads_values(model)
    assert any(type(module) in strips._CLASSES.values() for module in model.modules())
    assert mx.allclose(model(tokens), expected, rtol=1e-4, atol=1e-5)
