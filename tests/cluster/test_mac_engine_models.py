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
    (tmp_path / "config.json").write_text(json.dumps(config_of(case)))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (tmp_path / "tokenizer.json").write_text("{}")
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
        engine.open(_open(engine, "again", prompt + expected[:10]), sink)
        await _until(lambda: "again" in sink.finished)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert sink.tokens["first"] == expected
    assert sink.tokens["again"][: _NEW_TOKENS - 10] == expected[10:]
    assert sink.cached["again"] >= 64
