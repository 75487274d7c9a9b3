"""What is found out about caches, and what is refused because it can't be run exactly."""

import importlib
import logging

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from protos.cidery.v1.sampling_pb2 import SamplingParams
from tests.golden import scenario
from tests.golden.cases import config_of, make_model
from tests.golden.in_process import InProcessMac
from worker import models, standalone, trial
from worker.engine import Engine
from worker.errors import UnsupportedModelError
from worker.kv_shapes import FULL_REACH, LayerShape, Reach, ReachKind, StateShape
from worker.metal.dispatch import twin_kernels
from worker.models import Layout


def _caches(case):
    return models.adapt(make_model(case), config_of(case)).caches


def test_a_config_that_names_a_window_is_run_as_the_model_attends():
    """mlx-lm's Mistral attends fully: its class decides, not the config."""
    config = {**config_of("llama"), "sliding_window": 8}
    llama = importlib.import_module("mlx_lm.models.llama")
    model = llama.Model(llama.ModelArgs.from_dict(config))
    assert {shape.reach for shape in models.adapt(model, config).caches} == {FULL_REACH}


def test_every_kind_is_told_from_the_caches():
    window = Reach(ReachKind.WINDOW, 22)
    assert [shape.reach for shape in _caches("gemma3_text")] == [window, FULL_REACH] * 2
    assert [shape.reach.kind for shape in _caches("llama4")] == [*[ReachKind.CHUNK] * 3, ReachKind.FULL]
    assert [type(shape) for shape in _caches("qwen3_next")] == [StateShape, LayerShape] * 2
    # Fewer caches than layers, more of them, nested ones, and one of the whole model's.
    assert len(_caches("gemma4_text with shared layers")) == 4
    assert len(_caches("nanbeige")) == 8
    assert [type(shape) for shape in _caches("falcon_h1")] == [StateShape, LayerShape] * 4
    assert _caches("longcat_flash_ngram")[0] == StateShape("state", ((3,),), (mx.int64,))


def test_latents_are_told_from_keys():
    """What DeepSeek V2's class would expand is kept as narrow as V3's."""
    for case in ("deepseek_v2", "deepseek_v3"):
        shapes = _caches(case)
        assert {(s.num_kv_heads, s.head_dim, s.value_head_dim, s.is_latent) for s in shapes} == {(1, 16, 4, True)}
    assert [(s.head_dim, s.value_head_dim) for s in _caches("deepseek_v32")[:2]] == [(16, 4), (8, 0)]


class _Toy(nn.Module):
    """A model of one attention layer, told how to cache and to mask."""

    def __init__(self, make_cache, window_size=None):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(16, 8)
        self.caches, self.window_size = make_cache, window_size

    def make_cache(self):
        return [self.caches()]

    def __call__(self, tokens, cache):
        h = self.model.embed_tokens(tokens)
        cache[0].make_mask(h.shape[1], return_array=False, window_size=self.window_size)
        cache[0].update_and_fetch(h[:, None], h[:, None])
        return self.model.embed_tokens.as_linear(h)


@pytest.mark.parametrize(
    ("toy", "reason"),
    [
        (_Toy(QuantizedKVCache), "its caches are QuantizedKVCache"),
        (_Toy(lambda: RotatingKVCache(max_size=8, keep=4)), "keeps the first 4 tokens beside its window"),
        (_Toy(lambda: RotatingKVCache(max_size=8), 9), "masked with a window of 9 tokens and keeps a window of 8"),
        (_Toy(KVCache, 9), "masked with a window of 9 tokens and keeps everything"),
    ],
)
def test_caches_that_cannot_be_run_exactly_are_refused_by_name(toy, reason):
    with pytest.raises(UnsupportedModelError, match=reason):
        models.adapt(toy, {})


def _disguise(model, call):
    """The model's attention as a class that is not in the registry."""
    llama = importlib.import_module("mlx_lm.models.llama")
    novel = type("Novel", (llama.Attention,), {"__call__": call, "__module__": llama.__name__})
    for layer in model.layers:
        layer.self_attn.__class__ = novel


def _forgetful(self, x, mask=None, cache=None):
    """Attends to its own rows alone if the cache is not the one it knows."""
    llama = importlib.import_module("mlx_lm.models.llama")
    known = isinstance(cache, KVCache)
    return llama.Attention.__call__(self, x, mask if known else None, cache if known else None)


def _curious(self, x, mask=None, cache=None):
    """Asks its cache for what only mlx-lm's has."""
    llama = importlib.import_module("mlx_lm.models.llama")
    cache.trim(0)
    return llama.Attention.__call__(self, x, mask, cache)


@pytest.mark.parametrize(
    ("call", "reason"),
    [(_forgetful, "log-probability of .* it can't be run exactly"), (_curious, "has no attribute 'trim'")],
)
def test_a_class_that_nobody_has_reviewed_and_that_cannot_be_run_is_refused_before_it_serves(call, reason):
    model = make_model("llama")
    _disguise(model, call)
    loaded = models.adapt(model, config_of("llama"))
    engine = Engine(loaded, twin_kernels(), memory_limit_bytes=1 << 30)
    with pytest.raises(UnsupportedModelError, match=reason):
        trial.verify(engine, loaded)


def test_a_trial_of_a_model_that_can_be_run_leaves_the_engine_as_it_was():
    model = make_model("gemma3_text")
    loaded = models.adapt(model, config_of("gemma3_text"))
    engine = Engine(loaded, twin_kernels(), memory_limit_bytes=1 << 30)
    trial.verify(engine, loaded)
    answer = standalone.answer(engine, [1, 2, 3], max_tokens=2, sampling=SamplingParams(temperature=0.0))
    assert len(answer.token_ids) == 2


def test_a_class_that_nobody_has_reviewed_runs_one_sequence_at_a_time_and_says_so(caplog):
    """Right, slow, and with a warning that names it."""
    llama = importlib.import_module("mlx_lm.models.llama")

    model = make_model("llama")
    expected = InProcessMac(make_model("llama"), config_of("llama"))
    answers = [expected.add(f"{i}", list(range(1, 20 + i)), 5) for i in range(3)]
    expected.run()
    _disguise(model, lambda self, x, mask=None, cache=None: llama.Attention.__call__(self, x, mask, cache))
    with caplog.at_level(logging.WARNING):
        mac = InProcessMac(model, config_of("llama"))
    assert "llama.Novel not reviewed" in caplog.text
    assert mac.engine._loaded.layout is Layout.DENSE
    ours = [mac.add(f"{i}", list(range(1, 20 + i)), 5) for i in range(3)]
    mac.run()
    assert [answer.tokens for answer in ours] == [answer.tokens for answer in answers]


_AFFINE = {"group_size": 32, "bits": 4}


@pytest.mark.parametrize(
    ("case", "how"),
    [
        *((case, _AFFINE) for case in ("deepseek_v2", "deepseek_v3", "llama", "qwen3_next", "gpt_oss")),
        ("llama", {"group_size": 64, "bits": 8}),
        ("gpt_oss", {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    ],
)
def test_quantised_weights_give_the_answers_of_mlx_lm(case, how):
    """The folded products of latents too, which are not rounded a second time."""
    changes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "kv_lora_rank": 32}
    changes |= {"q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32, "head_dim": 32}
    config = {**config_of(case), **changes}
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(mx.float32)

    def is_wide(_, layer):
        return hasattr(layer, "to_quantized") and layer.weight.shape[-1] % how["group_size"] == 0

    nn.quantize(model, class_predicate=is_wide, **how)
    mx.eval(model.parameters())
    prompts = scenario.prompts_of(300)
    expected = [scenario.reference(model, prompt, 5) for prompt in prompts]
    mac = InProcessMac(model, config)
    answers = [mac.add(f"{i}", prompt, 5) for i, prompt in enumerate(prompts)]
    mac.run()
    assert not [p for a, e in zip(answers, expected, strict=True) for p in scenario.problems(a, e, 1e-4)]
