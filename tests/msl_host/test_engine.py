"""The whole engine with the harness as its GPU: the tokens of the path without one."""

import importlib

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map

from protos.cidery.v1.sampling_pb2 import SamplingParams
from tests.msl_host.host import MslHost, engine_on_host
from tests.worker.driver import Driver, Request, configure_of
from worker import models
from worker.engine import Engine
from worker.metal import dispatch

_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@pytest.fixture(autouse=True)
def _no_compile():
    """Fused CPU kernels cost seconds of compiler each."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def _engine() -> Engine:
    """As a worker starts one, kernels chosen by the dispatch."""
    module = importlib.import_module(f"mlx_lm.models.{_CONFIG['model_type']}")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict(_CONFIG))
    model.eval()
    model.set_dtype(mx.float32)
    model.update(tree_map(lambda weight: weight + 0.1 * mx.random.normal(weight.shape), model.parameters()))
    mx.eval(model.parameters())
    loaded = models.adapt(model, _CONFIG)
    engine = Engine(loaded, dispatch.choose_kernels(loaded.layers), memory_limit_bytes=1 << 30)
    engine.configure(configure_of(engine, num_blocks=64))
    return engine


def _answers(engine: Engine) -> list[list[int]]:
    """A token, a block and more together, in chunks, some steps mixing prefill and decode."""
    driver = Driver(engine, num_blocks=64)
    rng = np.random.RandomState(0)
    sampling = SamplingParams(temperature=0.0)
    requests = [Request(rng.randint(0, 320, size).tolist(), 6, sampling) for size in (1, 16, 37)]
    for request in requests:
        driver.add(request)
    driver.run()
    return [request.generated for request in requests]


def test_engine_on_the_harness_gives_the_tokens_of_plain_mlx(monkeypatch):
    expected = _answers(_engine())
    host = MslHost()
    engine_on_host(monkeypatch, host)
    engine = _engine()
    host.records.clear()  # of the self-test
    assert _answers(engine) == expected
    num_decodes = sum(record.kernel == "cidery_paged_decode_merge_f32" for record in host.records)
    assert num_decodes >= 2 * 5, "five decode steps at least, two layers"
