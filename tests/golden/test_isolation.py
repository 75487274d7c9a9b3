"""Requests don't meet in memory: many at once, freed blocks full of NaN, pools that move, thousands of steps."""

import random

import mlx.core as mx
import numpy as np
import pytest

from cluster.kv.planner import plan_layout
from cluster.mac_memory import layer_specs
from cluster.scheduling.request import Finish
from tests.golden import scenario
from tests.golden.cases import config_of, make_model
from tests.golden.in_process import BLOCK_SIZE, InProcessMac
from tests.worker.families import VOCAB_SIZE
from worker import models
from worker.engine import Engine
from worker.metal.dispatch import twin_kernels

# Full attention and windows in one pool, chunks, latents and recurrent states in pools of their own.
_KINDS = ("gemma3_text", "llama4", "kimi_linear", "qwen3_next")
_OTHER_KINDS = (
    "llama tied",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v32",
    "nemotron_h",
    "lfm2",
    "rwkv7",
    "recurrent_gemma",
)
_MAX_MODEL_LEN = 128
_NEW_TOKENS = 8


def _kinds(*default):
    return [
        *default,
        *(pytest.param(case, marks=pytest.mark.matrix) for case in (*_KINDS, *_OTHER_KINDS) if case not in default),
    ]


pytestmark = pytest.mark.usefixtures("no_compile")


class PoisonedMac(InProcessMac):
    """Fills every block with NaN as soon as nobody has it, so that whoever reads it shows."""

    def execute(self, plan):
        super().execute(plan)
        pools = self.kv._coordinator.pools
        tensors = self.engine._tensors
        for group in self.layout.groups:
            empty = list(pools[group.pool_id]._returned)
            if empty:
                tensors.fill_blocks(group.group_id, empty, float("nan"))
        tensors.evaluate()


def _small_mac(kind, case, num_sequences, **limits):
    """Memory for so many of the longest sequences, so that blocks are taken away and boundaries move."""
    config = config_of(case)
    model = make_model(case)
    described = Engine(models.adapt(model, config), twin_kernels(), memory_limit_bytes=1).describe()
    layout = plan_layout(
        layer_specs(described),
        kv_budget_bytes=1 << 30,
        max_model_len=_MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        max_in_flight_tokens=128,
    )
    null_bytes = layout.budget_bytes - layout.usable_bytes
    budget = int(num_sequences * layout.bytes_for(_MAX_MODEL_LEN)) + null_bytes
    return kind(model, config, kv_budget_bytes=budget, max_model_len=_MAX_MODEL_LEN, **limits), model


def _soak(mac, model, *, num_steps, seed):
    """Random joins, aborts and preemptions; every finished answer is held against mlx-lm alone."""
    rng = random.Random(seed)
    common = [rng.randrange(1, VOCAB_SIZE) for _ in range(40)]
    lengths = (1, 5, 16, 33, 64, 90)
    prompts = [[rng.randrange(1, VOCAB_SIZE) for _ in range(size)] for size in lengths]
    prompts += [
        common[:cut] + [rng.randrange(1, VOCAB_SIZE) for _ in range(size)]
        for cut, size in ((40, 3), (32, 20), (40, 40))
    ]
    expected = [scenario.reference(model, prompt, _NEW_TOKENS) for prompt in prompts]
    live: dict[str, int] = {}
    num_checked = num_ended = 0
    memory = []
    for step in range(num_steps):
        if len(live) < 8 and rng.random() < 0.4:
            request_id, index = f"request-{step}", rng.randrange(len(prompts))
            live[request_id] = index
            mac.add(request_id, prompts[index], _NEW_TOKENS)
        if live and rng.random() < 0.02:
            gone = rng.choice(list(live))
            mac.abort(gone)
            del live[gone], mac.answers[gone]
            num_ended += 1
        if live and rng.random() < 0.02:
            mac.preempt(rng.choice(list(live)))
        mac.step()
        for request_id in [each for each in live if mac.answers[each].finish is not None]:
            answer = mac.answers.pop(request_id)
            assert answer.finish is Finish.LENGTH
            assert not scenario.problems(answer, expected[live.pop(request_id)], scenario.LOGPROB_TOLERANCE)
            num_checked += 1
        if step % 100 == 99:
            # What a running step holds depends on how far it is.
            mac.drain()
            memory.append(mx.get_active_memory())
    assert num_checked > num_steps / 20
    return memory


@pytest.mark.parametrize("case", _kinds("gemma3_text", "qwen3_next"))
def test_freed_blocks_full_of_nan_are_read_by_nobody(case):
    """Under memory pressure: blocks, windows and states change hands, and boundaries between pools move."""
    mac, model = _small_mac(PoisonedMac, case, 2.5)
    _soak(mac, model, num_steps=250, seed=5)
    assert mac.num_resizes > 0 or len(mac.layout.pools) == 1
    assert mac.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize("case", _kinds("llama4", "qwen3_next"))
def test_sixty_four_secrets_at_once_are_kept(case):
    """Prompts that differ in a few tokens only, all in one batch: each answer is the one that its own prompt has."""
    rng = np.random.RandomState(7)
    common = rng.randint(1, VOCAB_SIZE, 37).tolist()
    prompts = [common[: 37 - i % 3] + rng.randint(1, VOCAB_SIZE, 1 + i % 5).tolist() for i in range(64)]
    model = make_model(case)
    expected = [scenario.reference(model, prompt, 4) for prompt in prompts]
    mac = InProcessMac(model, config_of(case), max_num_seqs=64, max_num_batched_tokens=256, kv_budget_bytes=1 << 26)
    answers = [mac.add(f"{i}", prompt, 4) for i, prompt in enumerate(prompts)]
    mac.run()
    found = [
        problem
        for answer, reference in zip(answers, expected, strict=True)
        for problem in scenario.problems(answer, reference, scenario.LOGPROB_TOLERANCE)
    ]
    assert not found
    assert len({tuple(answer.tokens) for answer in answers}) > 16, (
        "answers that don't depend on the prompt prove nothing"
    )


@pytest.mark.matrix
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", ["gemma3_text", "qwen3_next"])
def test_ten_thousand_steps_leave_memory_flat(case):
    mac, model = _small_mac(InProcessMac, case, 4)
    memory = _soak(mac, model, num_steps=10_000, seed=11)
    settled, last = memory[len(memory) // 5 : len(memory) // 5 * 2], memory[-len(memory) // 5 :]
    assert max(last) <= 1.02 * max(settled)
    mac.run()
    assert mac.kv.used_bytes == 0
