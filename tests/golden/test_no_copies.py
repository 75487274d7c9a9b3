"""No step copies a pool, whatever kinds of layers a model has."""

import mlx.core as mx
import numpy as np
import pytest

from cluster.scheduling.request import LogitRules
from tests.golden import scenario
from tests.golden.cases import config_of, make_model
from tests.golden.in_process import InProcessMac
from tests.worker.families import VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("no_compile")


class WatchedMac(InProcessMac):
    """Notes where the pools lie, and how much more memory than before each step took."""

    is_watching = False

    def execute(self, plan):
        if not self.is_watching:
            super().execute(plan)
            return
        before, _ = mx.get_active_memory(), mx.reset_peak_memory()
        super().execute(plan)
        self.engine._tensors.finish()
        # What decode rows see is kept beside the pools.
        kept = self.engine._tensors.mirrors.num_bytes
        assert mx.get_peak_memory() - before - kept < min(self.pool_bytes())
        assert self.pointers() == self.first_pointers

    def arrays(self):
        return self.engine._tensors._arrays

    def buffers(self):
        return [array for _, array in sorted(self.arrays().writer._arrays.items())]

    def pool_bytes(self):
        return [array.nbytes for array in self.buffers()]

    def pointers(self):
        # The buffer protocol hands out MLX's own memory; the view is gone before the next step.
        return [np.asarray(memoryview(array)).ctypes.data for array in self.buffers()]

    def watch(self):
        """From here on, with all memory committed, so that no pool has a reason to grow."""
        for pool, num_blocks in enumerate(self.arrays().num_blocks):
            self.arrays().reserve(pool, num_blocks - 1)
        self.first_pointers = self.pointers()
        self.is_watching = True


_MORE = ("llama4", "deepseek_v32", "rwkv7", "falcon_h1")


@pytest.mark.parametrize(
    "case",
    ["gemma3_text", "deepseek_v3", "qwen3_next", *(pytest.param(case, marks=pytest.mark.matrix) for case in _MORE)],
)
def test_pools_stay_where_they_are_and_no_step_needs_another_one(case):
    """Prefill, decode, joins, prefix hits with copies, states kept on the way, a preemption, an abort."""
    model = make_model(case)
    prompts = scenario.prompts_of(VOCAB_SIZE)
    mac = WatchedMac(model, config_of(case), kv_budget_bytes=1 << 28)
    mac.watch()
    scenario.run(mac, prompts, scenario.follow_ups(prompts, VOCAB_SIZE))
    assert mac.num_copies > 0
    assert mac.num_resizes == 0


class AnyTable:
    """A grammar table that allows everything: what matters here is that a step is evaluated in two parts."""

    class State:
        failure = ""

        def take(self, token_id):
            pass

    def begin(self, grammar, answer):
        return self.State()

    def masks(self, states):
        return np.full((len(states), -(-VOCAB_SIZE // 32)), -1, np.int32)


class HeldMac(WatchedMac):
    def add(self, request_id, prompt, max_tokens, **fields):
        return super().add(request_id, prompt, max_tokens, rules=LogitRules(grammar="any"), **fields)


@pytest.mark.parametrize("case", ["gemma3_text", "qwen3_next"])
def test_nor_does_one_whose_masks_are_computed_while_it_runs(case):
    model = make_model(case)
    prompts = scenario.prompts_of(VOCAB_SIZE)
    mac = HeldMac(model, config_of(case), kv_budget_bytes=1 << 28, grammars=AnyTable())
    mac.watch()
    scenario.run(mac, prompts, scenario.follow_ups(prompts, VOCAB_SIZE))
    assert mac.num_copies > 0


@pytest.mark.parametrize("case", ["gemma3_text", "deepseek_v3", "qwen3_next"])
def test_nor_do_steps_that_nobody_looks_at_while_the_next_is_built(case):
    """`WatchedMac` waits for every step when it looks where its pools are; here each runs while the next is built."""
    model = make_model(case)
    prompts = scenario.prompts_of(VOCAB_SIZE)
    mac = WatchedMac(model, config_of(case), kv_budget_bytes=1 << 28)
    mac.watch()
    mac.is_watching = False
    before, _ = mx.get_active_memory(), mx.reset_peak_memory()
    scenario.run(mac, prompts, scenario.follow_ups(prompts, VOCAB_SIZE))
    assert mac.num_copies > 0
    assert mac.pointers() == mac.first_pointers
    assert mx.get_peak_memory() - before < min(mac.pool_bytes())
