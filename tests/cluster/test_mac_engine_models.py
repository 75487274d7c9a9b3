"""A Mac with a real worker process: what the worker finds in its model becomes the layout that it is told to use."""

import asyncio
import json
import os
import signal

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from cluster import wire
from cluster.config import KVConfig, MacConfig, ModelConfig
from cluster.kv.hashing import hash_blocks
from cluster.mac_engine import MacEngine
from cluster.scheduling.request import Request, SamplingParams
from tests.golden import scenario
from tests.golden.cases import config_of, make_model
from tests.golden.test_quantized_kv import rounding_caches

_NEW_TOKENS = 40


class Sink:
    def __init__(self):
        self.tokens: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.cached: dict[str, int] = {}

    def deliver(self, updates):
        for update in updates:
            assert not update.HasField("failure"), update.failure
            self.tokens.setdefault(update.request_id, []).extend(update.token_ids)
            self.cached[update.request_id] = update.num_cached_tokens
            if update.finish_reason:
                self.finished.add(update.request_id)


def _open(engine, request_id, prompt):
    request = Request(
        request_id=request_id,
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        block_hashes=tuple(hash_blocks(engine.root, prompt, 16)),
        max_tokens=_NEW_TOKENS,
        sampling=SamplingParams(),
        stop_token_ids=(),
    )
    return wire.request_to_open(request, engine.root, ignore_eos=True).open


def _save(model, config, folder):
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "tokenizer.json").write_text("{}")


async def _until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("case", "num_groups", "enable_hybrid"),
    [("qwen3_next", 2, True), ("gemma3_text", 2, True), ("gemma3_text", 1, False)],
)
async def test_a_mac_serves_a_hybrid_model_and_goes_on_after_a_loss_of_its_worker(
    case, num_groups, enable_hybrid, tmp_path
):
    """Attention and states, or windows: tokens are those of mlx-lm before and after the worker is killed."""
    mx.disable_compile()
    model = make_model(case)
    _save(model, config_of(case), tmp_path)
    prompt = scenario.prompts_of(300)[2]
    expected = scenario.reference(model, prompt, _NEW_TOKENS).tokens
    mx.enable_compile()
    config = MacConfig(
        ModelConfig(str(tmp_path), "tiny"), KVConfig(cache_memory_bytes=1 << 24, enable_hybrid=enable_hybrid)
    )
    engine, sink = MacEngine("mac-1", config, tmp_path, tmp_path / "log", lambda: None), Sink()
    running = asyncio.create_task(engine.supervise())
    try:
        await _until(lambda: engine.is_ready or running.done())
        assert not running.done()
        assert len(engine.kv.layout.groups) == num_groups
        engine.open(_open(engine, "first", prompt), sink)
        await _until(lambda: len(sink.tokens.get("first", ())) >= 5)
        os.kill(engine.worker_pid, signal.SIGKILL)
        await _until(lambda: "first" in sink.finished)
        assert engine.num_worker_restarts == 1
        assert (tmp_path / "log").read_text().count("dry run rows=512") == 1
        engine.open(_open(engine, "again", prompt + expected[:10]), sink)
        await _until(lambda: "again" in sink.finished)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert sink.tokens["first"] == expected
    assert sink.tokens["again"][: _NEW_TOKENS - 10] == expected[10:]
    assert sink.cached["again"] >= 64


async def test_macs_of_other_kv_bits_have_other_roots_and_their_own_answers(tmp_path):
    """The option reaches the worker, its layers come back with it, and no block of one Mac is ever the other's."""
    mx.disable_compile()
    case = "gemma3_text"
    config = config_of(case) | {"head_dim": 64}
    model = make_model(case, config=config)
    _save(model, config, tmp_path)
    prompt = scenario.prompts_of(300)[2]
    caches = rounding_caches(model, 4, 32)
    expected = scenario.reference(model, prompt, _NEW_TOKENS, prompt_cache=caches).tokens
    mx.enable_compile()
    roots, answers = [], []
    for bits, group_size in ((None, None), (4, 32)):
        kv = KVConfig(cache_memory_bytes=1 << 24, kv_bits=bits, kv_group_size=group_size)
        mac = MacConfig(ModelConfig(str(tmp_path), "tiny"), kv)
        engine, sink = MacEngine("mac-1", mac, tmp_path, tmp_path / "log", lambda: None), Sink()
        running = asyncio.create_task(engine.supervise())
        try:
            await _until(lambda: engine.is_ready or running.done())  # noqa: B023
            assert {layer.kv_bits for layer in engine.described.layers} == {bits or 0}
            roots.append(engine.root)
            message = _open(engine, "first", prompt)
            engine.open(message, sink)
            await _until(lambda: "first" in sink.finished)  # noqa: B023
            answers.append(sink.tokens["first"])
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    assert roots[0] != roots[1]
    assert answers[0] != answers[1] == expected
