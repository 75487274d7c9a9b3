"""What the dry run says that steps take, against what they take; and that it ends in time."""

import mlx.core as mx
import numpy as np
import pytest

from tests.golden.cases import config_of, make_model
from tests.golden.in_process import MAX_MODEL_LEN, InProcessMac
from tests.worker.families import VOCAB_SIZE
from worker import models
from worker.dry_run import StepLimits, activation_bytes
from worker.engine import Engine
from worker.metal.dispatch import twin_kernels

_LIMITS = StepLimits(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN)


pytestmark = pytest.mark.usefixtures("no_compile")


def _engine(case: str, model=None) -> Engine:
    loaded = models.adapt(model or make_model(case), config_of(case))
    return Engine(loaded, twin_kernels(), memory_limit_bytes=1 << 30)


class SizedMac(InProcessMac):
    """Notes what steps take over pools that are all committed, states that wait outside of them included."""

    def commit(self):
        self.engine.commit_pools()
        self.before_bytes, self.peak_bytes = mx.get_active_memory(), 0

    def execute(self, plan):
        mx.reset_peak_memory()
        before = self.engine._tensors.mirrors.num_bytes
        super().execute(plan)
        self.drain()
        # What is kept of what decode rows see is counted by its limit, apart from this.
        kept = max(before, self.engine._tensors.mirrors.num_bytes)
        self.peak_bytes = max(self.peak_bytes, mx.get_peak_memory() - self.before_bytes - kept)


@pytest.mark.parametrize("case", ["llama tied", "gemma3_text", "deepseek_v3", "qwen3_next", "mamba2"])
def test_real_steps_take_no_more_than_was_measured(case):
    """A full batch of decode rows beside chunks of long prompts, drawn with everything that a row may ask for."""
    model = make_model(case)
    measured = activation_bytes(_engine(case, model), _LIMITS)
    mac = SizedMac(model, config_of(case), max_chunk_tokens=64)
    mac.commit()
    rng = np.random.RandomState(0)
    draws = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "seed": 1, "num_top_logprobs": 20}
    for number in range(24):
        prompt = rng.randint(1, VOCAB_SIZE, (5, 230, 40)[number % 3]).tolist()
        mac.add(f"{number}", prompt, 16, **draws)
    mac.run()
    # On a CPU decode rows copy the keys that they see, a layer at a time, which is not in it.
    assert mac.peak_bytes <= 1.5 * measured
    # Nor is it a number without a meaning.
    assert measured <= 8 * mac.peak_bytes


def test_states_that_wait_outside_of_the_pools_are_in_it():
    """Twice as many sequences, twice as many states."""
    engine = _engine("mamba2")
    (state_bytes,) = {shape.state_bytes for shape in engine._loaded.caches}
    few, many = (activation_bytes(engine, StepLimits(n, 256, 64)) for n in (64, 128))
    assert many - few >= 64 * state_bytes * len(engine._loaded.caches)


def test_more_sequences_than_memory_has_room_for_states_are_a_line_too():
    engine = _engine("mamba2")
    (state_bytes,) = {shape.state_bytes for shape in engine._loaded.caches}
    limits = StepLimits(64, 64, 64)
    whole = activation_bytes(engine, limits)
    engine._memory_limit_bytes = engine._loaded.weights_bytes + 16 * 8 * state_bytes * len(engine._loaded.caches)
    assert activation_bytes(engine, limits) == pytest.approx(whole, rel=0.5)


def test_contexts_stop_growing_in_time_and_the_rest_is_a_line():
    engine = _engine("llama tied")
    whole = activation_bytes(engine, StepLimits(2, 32, 512), time_s=1e9)
    now = iter(range(1000))
    cut = activation_bytes(engine, StepLimits(2, 32, 512), clock=lambda: 10.0 * next(now), time_s=55.0)
    # Contexts of 32, 64 and 128 were measured.
    assert next(now) == 6
    # What MLX holds at a moment depends on when its own thread lets go.
    assert cut == pytest.approx(whole, rel=0.6)


def test_it_leaves_the_engine_as_new():
    engine = _engine("qwen3_next")
    activation_bytes(engine, _LIMITS)
    assert engine._tensors is None
    assert not engine._sequences
    before = mx.get_active_memory()
    activation_bytes(engine, _LIMITS)
    assert mx.get_active_memory() <= before


def test_a_context_shorter_than_a_step_is_enough():
    assert activation_bytes(_engine("llama tied"), StepLimits(1, 512, 2)) > 0


@pytest.mark.parametrize("values", [(0, 1, 1), (1, 0, None), (1, 1, 0)])
def test_limits_of_nothing_are_refused(values):
    with pytest.raises(ValueError, match="is 0; it must be at least 1"):
        StepLimits(*values)
