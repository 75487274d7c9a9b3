"""The engine alone answers with any kind of model."""

import mlx.core as mx
import pytest

from protos.cidery.v1.sampling_pb2 import SamplingParams
from tests.golden import scenario
from tests.golden.cases import config_of, make_model
from tests.worker.families import VOCAB_SIZE
from worker import models, standalone
from worker.engine import Engine
from worker.metal.dispatch import twin_kernels


@pytest.mark.parametrize("case", ["llama tied", "gemma3_text", "qwen3_next", "mamba", "deepseek_v3"])
def test_one_prompt_is_answered_without_a_cluster(case):
    mx.disable_compile()
    model = make_model(case)
    prompt = scenario.prompts_of(VOCAB_SIZE)[1]
    expected = scenario.reference(model, prompt, 6).tokens
    engine = Engine(models.adapt(model, config_of(case)), twin_kernels(), memory_limit_bytes=1 << 30)
    answer = standalone.answer(engine, prompt, max_tokens=6, sampling=SamplingParams(temperature=0.0))
    mx.enable_compile()
    assert answer.token_ids == expected
